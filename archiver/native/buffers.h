/* Adds a batch's slices to the buffers of open files, as `ArchiveFile.add` does, where nothing is to be decided.
 *
 * Whatever needs the loop (a route without a file, an empty buffer, a partition that the file does not hold back yet,
 * a buffer that is full with it) is left alone and given back.
 */
#ifndef ARCHIVER_BUFFERS_H
#define ARCHIVER_BUFFERS_H

#include "python.h"

/* Where the objects of a class keep an attribute of `__slots__`: reading it by its name costs ten times as much. */
typedef struct {
    const char *name;
    Py_ssize_t offset;
} slot;

static struct {
    PyTypeObject *type; /* owned; NULL before the first file is seen */
    slot lines, buffered_records, buffered_bytes, buffered_spans, held;
} file_slots = {
    NULL, {"lines", 0}, {"buffered_records", 0}, {"buffered_bytes", 0}, {"buffered_spans", 0}, {"held", 0}};

static struct {
    PyTypeObject *type;
    slot last, count;
} span_slots = {NULL, {"last", 0}, {"count", 0}};

/* Whether what a class has under a name is a slot of its objects, not one that it has borrowed of another class. */
static int is_slot_of(PyTypeObject *type, PyObject *found) {
    return Py_IS_TYPE(found, &PyMemberDescr_Type) && PyType_IsSubtype(type, PyDescr_TYPE(found)) &&
           ((PyMemberDescrObject *)found)->d_member->type == T_OBJECT_EX;
}

/* Finds the slots and keeps them for the class; -1 with an exception where one of them is none. */
static int find_slots(PyTypeObject **known, PyTypeObject *type, slot *slots, size_t count) {
    Py_CLEAR(*known); /* its slots are written over, also where the new class turns out to lack one */
    for (size_t i = 0; i < count; i++) {
        PyObject *found = PyObject_GetAttrString((PyObject *)type, slots[i].name);
        if (!found) return -1;
        int is_slot = is_slot_of(type, found);
        if (is_slot) slots[i].offset = ((PyMemberDescrObject *)found)->d_member->offset;
        else PyErr_Format(PyExc_TypeError, "%s.%s must be a slot", type->tp_name, slots[i].name);
        Py_DECREF(found);
        if (!is_slot) return -1;
    }
    *known = (PyTypeObject *)Py_NewRef(type);
    return 0;
}

static int know_file(PyObject *file) {
    if (Py_TYPE(file) == file_slots.type) return 0;
    return find_slots(&file_slots.type, Py_TYPE(file), &file_slots.lines, 5);
}

static int know_span(PyObject *span) {
    if (Py_TYPE(span) == span_slots.type) return 0;
    return find_slots(&span_slots.type, Py_TYPE(span), &span_slots.last, 2);
}

static PyObject **place_of(PyObject *object, slot slot) { return (PyObject **)((char *)object + slot.offset); }

/* A slot that holds a number; -1 with an exception where it does not. */
static Py_ssize_t number_of(PyObject *object, slot slot) {
    PyObject *value = *place_of(object, slot);
    if (value) return PyLong_AsSsize_t(value);
    PyErr_SetString(PyExc_AttributeError, slot.name);
    return -1;
}

static int set_number(PyObject *object, slot slot, Py_ssize_t number) {
    PyObject *value = PyLong_FromSsize_t(number);
    if (!value) return -1;
    Py_XSETREF(*place_of(object, slot), value);
    return 0;
}

/* A slot that holds a list, a dict or a set: borrowed, or NULL with an exception. */
static PyObject *container_of(PyObject *file, slot slot, PyTypeObject *type) {
    PyObject *found = *place_of(file, slot);
    if (found && Py_IS_TYPE(found, type)) return found;
    PyErr_Format(PyExc_TypeError, "%s must be a %s", slot.name, type->tp_name);
    return NULL;
}

typedef struct {
    PyObject *route, *lines, *first, *last, *count; /* borrowed */
    Py_ssize_t bytes, records;
} slice_view;

static int view_of_slice(slice_view *view, PyObject *slice) {
    if (!PyTuple_Check(slice) || PyTuple_GET_SIZE(slice) != 5 || !PyBytes_Check(PyTuple_GET_ITEM(slice, 1))) {
        PyErr_SetString(PyExc_TypeError, "a slice is (route, lines, first, last, records)");
        return -1;
    }
    view->route = PyTuple_GET_ITEM(slice, 0), view->lines = PyTuple_GET_ITEM(slice, 1);
    view->first = PyTuple_GET_ITEM(slice, 2), view->last = PyTuple_GET_ITEM(slice, 3);
    view->count = PyTuple_GET_ITEM(slice, 4), view->bytes = PyBytes_GET_SIZE(view->lines);
    view->records = PyLong_AsSsize_t(view->count);
    return view->records == -1 && PyErr_Occurred() ? -1 : 0;
}

typedef struct {
    PyObject *open, *partition, *span_type; /* borrowed */
    Py_ssize_t bytes_max, records_max;
} buffering;

/* The buffer's span of the partition goes on to the slice's end, or begins with it: 1; 0 where that is Python's to do. */
static int extend_span(const buffering *to, const slice_view *slice, PyObject *file, PyObject *spans) {
    PyObject *span = PyDict_GetItemWithError(spans, to->partition);
    if (span) {
        if (know_span(span) < 0) return -1;
        Py_ssize_t count = number_of(span, span_slots.count);
        if ((count < 0 && PyErr_Occurred()) || set_number(span, span_slots.count, count + slice->records) < 0) return -1;
        Py_XSETREF(*place_of(span, span_slots.last), Py_NewRef(slice->last));
        return 1;
    }
    PyObject *held = PyErr_Occurred() ? NULL : container_of(file, file_slots.held, &PySet_Type);
    int held_back = held ? PySet_Contains(held, to->partition) : -1;
    if (held_back <= 0) return held_back;
    if (!(span = PyObject_CallFunctionObjArgs(to->span_type, slice->first, slice->last, slice->count, NULL))) return -1;
    int failed = PyDict_SetItem(spans, to->partition, span);
    Py_DECREF(span);
    return failed ? -1 : 1;
}

/* 1 where the slice has been added, 0 where it is left to Python, -1 with an exception. */
static int add_to(const buffering *to, const slice_view *slice, PyObject *file) {
    if (know_file(file) < 0) return -1;
    PyObject *lines = container_of(file, file_slots.lines, &PyList_Type);
    PyObject *spans = lines ? container_of(file, file_slots.buffered_spans, &PyDict_Type) : NULL;
    if (!spans) return -1;
    Py_ssize_t bytes = number_of(file, file_slots.buffered_bytes);
    Py_ssize_t records = number_of(file, file_slots.buffered_records);
    if ((bytes < 0 || records < 0) && PyErr_Occurred()) return -1;
    bytes += slice->bytes + 1, records += slice->records;
    if (PyList_GET_SIZE(lines) == 0 || bytes >= to->bytes_max || records >= to->records_max) return 0;
    int added = extend_span(to, slice, file, spans);
    if (added > 0 &&
        (PyList_Append(lines, slice->lines) < 0 || set_number(file, file_slots.buffered_bytes, bytes) < 0 ||
         set_number(file, file_slots.buffered_records, records) < 0))
        return -1;
    return added;
}

static int add_slice(const buffering *to, const slice_view *slice) {
    PyObject *file = PyDict_GetItemWithError(to->open, slice->route);
    if (!file) return PyErr_Occurred() ? -1 : 0;
    Py_INCREF(file);
    int added = add_to(to, slice, file);
    Py_DECREF(file);
    return added;
}

static PyObject *add_slices(PyObject *module, PyObject *args) {
    (void)module;
    buffering to;
    PyObject *slices;
    if (!PyArg_ParseTuple(
            args, "O!OO!Onn", &PyDict_Type, &to.open, &to.partition, &PyList_Type, &slices, &to.span_type, &to.bytes_max,
            &to.records_max))
        return NULL;
    PyObject *left = PyList_New(0);
    Py_ssize_t bytes = 0;
    for (Py_ssize_t i = 0; left && i < PyList_GET_SIZE(slices); i++) {
        slice_view slice;
        PyObject *item = PyList_GET_ITEM(slices, i);
        int added = view_of_slice(&slice, item) < 0 ? -1 : add_slice(&to, &slice);
        if (added < 0 || (added == 0 && PyList_Append(left, item) < 0)) Py_CLEAR(left);
        else if (added) bytes += slice.bytes;
    }
    return left ? Py_BuildValue("Nn", left, bytes) : NULL;
}

#endif
