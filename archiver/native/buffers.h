/* Adds a batch's slices to the buffers of open files, as `ArchiveFile.add` does, where nothing is to be decided.
 *
 * Whatever needs the loop (a route without a file, an empty buffer, a partition that the file does not hold back yet,
 * a buffer that is full with it) is left alone and given back.
 */
#ifndef ARCHIVER_BUFFERS_H
#define ARCHIVER_BUFFERS_H

#include "python.h"

static struct {
    PyObject *lines, *buffered_records, *buffered_bytes, *buffered_spans, *held, *last, *count;
} names;

static int intern_names(void) {
    return (names.lines = PyUnicode_InternFromString("lines")) &&
           (names.buffered_records = PyUnicode_InternFromString("buffered_records")) &&
           (names.buffered_bytes = PyUnicode_InternFromString("buffered_bytes")) &&
           (names.buffered_spans = PyUnicode_InternFromString("buffered_spans")) &&
           (names.held = PyUnicode_InternFromString("held")) &&
           (names.last = PyUnicode_InternFromString("last")) && (names.count = PyUnicode_InternFromString("count"));
}

/* An attribute that is a number; -1 with an exception where it is none. */
static Py_ssize_t number_of(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value) return -1;
    Py_ssize_t number = PyLong_AsSsize_t(value);
    Py_DECREF(value);
    return number;
}

static int set_number(PyObject *object, PyObject *name, Py_ssize_t number) {
    PyObject *value = PyLong_FromSsize_t(number);
    if (!value) return -1;
    int failed = PyObject_SetAttr(object, name, value);
    Py_DECREF(value);
    return failed;
}

/* An attribute that is a list, a dict or a set: a new reference, or NULL with an exception. */
static PyObject *container_of(PyObject *file, PyObject *name, PyTypeObject *type) {
    PyObject *found = PyObject_GetAttr(file, name);
    if (found && Py_TYPE(found) != type) {
        PyErr_Format(PyExc_TypeError, "%U must be a %s", name, type->tp_name);
        Py_CLEAR(found);
    }
    return found;
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

/* Whether the file holds the partition back already: -1 with an exception. */
static int holds_back(PyObject *file, PyObject *partition) {
    PyObject *held = container_of(file, names.held, &PySet_Type);
    if (!held) return -1;
    int found = PySet_Contains(held, partition);
    Py_DECREF(held);
    return found;
}

/* The buffer's span of the partition goes on to the slice's end, or begins with it: 1; 0 where that is Python's to do. */
static int extend_span(const buffering *to, const slice_view *slice, PyObject *file, PyObject *spans) {
    PyObject *span = PyDict_GetItemWithError(spans, to->partition);
    if (span) {
        Py_ssize_t count = number_of(span, names.count);
        int failed = count < 0 || set_number(span, names.count, count + slice->records) < 0 ||
                     PyObject_SetAttr(span, names.last, slice->last) < 0;
        return failed ? -1 : 1;
    }
    if (PyErr_Occurred()) return -1;
    int held = holds_back(file, to->partition);
    if (held <= 0) return held;
    if (!(span = PyObject_CallFunctionObjArgs(to->span_type, slice->first, slice->last, slice->count, NULL))) return -1;
    int failed = PyDict_SetItem(spans, to->partition, span);
    Py_DECREF(span);
    return failed ? -1 : 1;
}

/* 1 where the slice has been added, 0 where it is left to Python, -1 with an exception. */
static int add_slice(const buffering *to, const slice_view *slice) {
    PyObject *file = PyDict_GetItemWithError(to->open, slice->route), *lines = NULL, *spans = NULL;
    if (!file) return PyErr_Occurred() ? -1 : 0;
    int added = -1;
    Py_INCREF(file);
    if (!(lines = container_of(file, names.lines, &PyList_Type)) ||
        !(spans = container_of(file, names.buffered_spans, &PyDict_Type)))
        goto done;
    Py_ssize_t bytes = number_of(file, names.buffered_bytes), records = number_of(file, names.buffered_records);
    if ((bytes < 0 || records < 0) && PyErr_Occurred()) goto done;
    bytes += slice->bytes + 1, records += slice->records;
    if (PyList_GET_SIZE(lines) == 0 || bytes >= to->bytes_max || records >= to->records_max) {
        added = 0;
        goto done;
    }
    added = extend_span(to, slice, file, spans);
    if (added > 0 &&
        (PyList_Append(lines, slice->lines) < 0 || set_number(file, names.buffered_bytes, bytes) < 0 ||
         set_number(file, names.buffered_records, records) < 0))
        added = -1;
done:
    Py_XDECREF(lines);
    Py_XDECREF(spans);
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
