/* Values that lie in buffers of others: records of pushes, without a Python object for each. */
#ifndef ARCHIVER_LINES_H
#define ARCHIVER_LINES_H

#include "python.h"

typedef struct {
    const char *start;
    Py_ssize_t length;
} line;

typedef struct {
    PyObject_HEAD
    PyObject *buffers; /* list: keeps alive what the lines lie in */
    line *lines;
    Py_ssize_t count, size;
    int whole; /* some came by `extend`, and may hold newlines */
} Lines;

static PyTypeObject *lines_type;

/* Checks `buffer[start:stop]`; its first byte, or NULL with an error set. */
static const char *part_of(PyObject *buffer, Py_ssize_t start, Py_ssize_t stop) {
    if (start >= 0 && start <= stop && stop <= PyBytes_GET_SIZE(buffer)) return PyBytes_AS_STRING(buffer) + start;
    PyErr_SetString(PyExc_ValueError, "no such part of the buffer");
    return NULL;
}

static PyObject *count_lines(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *buffer;
    Py_ssize_t start, stop, count = 0;
    const char *at;
    if (!PyArg_ParseTuple(args, "O!nn", &PyBytes_Type, &buffer, &start, &stop)) return NULL;
    if (!(at = part_of(buffer, start, stop))) return NULL;
    for (const char *end = at + (stop - start); at < end; count++) {
        const char *newline = memchr(at, '\n', (size_t)(end - at));
        at = newline ? newline + 1 : end;
    }
    return PyLong_FromSsize_t(count);
}

static int lines_reserve(Lines *self, Py_ssize_t more) {
    if (more <= self->size - self->count) return 0;
    Py_ssize_t size = self->count + (more > self->count ? more : self->count);
    line *grown = PyMem_Realloc(self->lines, (size_t)size * sizeof *grown);
    if (!grown) {
        PyErr_NoMemory();
        return -1;
    }
    self->lines = grown, self->size = size;
    return 0;
}

static PyObject *Lines_cut(Lines *self, PyObject *args) {
    PyObject *buffer;
    Py_ssize_t start, stop, most;
    const char *first;
    if (!PyArg_ParseTuple(args, "O!nnn", &PyBytes_Type, &buffer, &start, &stop, &most)) return NULL;
    if (!(first = part_of(buffer, start, stop))) return NULL;
    /* each line takes a byte at least, if only its newline */
    if (most > stop - start) most = stop - start;
    if (most <= 0) return PyLong_FromSsize_t(start);
    if (lines_reserve(self, most) < 0 || PyList_Append(self->buffers, buffer) < 0) return NULL;
    const char *at = first, *end = first + (stop - start);
    while (most-- && at < end) {
        const char *newline = memchr(at, '\n', (size_t)(end - at));
        self->lines[self->count++] = (line){at, (newline ? newline : end) - at};
        at = newline ? newline + 1 : end;
    }
    return PyLong_FromSsize_t(start + (at - first));
}

static PyObject *Lines_extend(Lines *self, PyObject *values) {
    if (!PyList_Check(values)) {
        PyErr_SetString(PyExc_TypeError, "values must be a list");
        return NULL;
    }
    PyObject *kept = PyList_GetSlice(values, 0, PyList_GET_SIZE(values)); /* the caller may change theirs */
    if (!kept) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(kept);
    for (Py_ssize_t i = 0; i < count; i++)
        if (!PyBytes_Check(PyList_GET_ITEM(kept, i))) {
            PyErr_SetString(PyExc_TypeError, "values must be bytes");
            Py_DECREF(kept);
            return NULL;
        }
    self->whole = 1;
    int failed = lines_reserve(self, count) < 0 || PyList_Append(self->buffers, kept) < 0;
    Py_DECREF(kept);
    if (failed) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *value = PyList_GET_ITEM(kept, i);
        self->lines[self->count++] = (line){PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value)};
    }
    Py_RETURN_NONE;
}

static PyObject *Lines_item(Lines *self, Py_ssize_t i) {
    if (i < 0 || i >= self->count) {
        PyErr_SetString(PyExc_IndexError, "no such value");
        return NULL;
    }
    return PyBytes_FromStringAndSize(self->lines[i].start, self->lines[i].length);
}

static Py_ssize_t Lines_length(Lines *self) { return self->count; }

static PyObject *Lines_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "", names)) return NULL;
    Lines *self = (Lines *)type->tp_alloc(type, 0);
    if (self && !(self->buffers = PyList_New(0))) Py_CLEAR(self);
    return (PyObject *)self;
}

static void Lines_dealloc(Lines *self) {
    PyTypeObject *type = Py_TYPE(self);
    Py_XDECREF(self->buffers);
    PyMem_Free(self->lines);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef Lines_methods[] = {
    {"cut", (PyCFunction)Lines_cut, METH_VARARGS, "cut(buffer, start, stop, most) -> where the next line starts"},
    {"extend", (PyCFunction)Lines_extend, METH_O, "extend(values)"},
    {NULL}};

static PyType_Slot Lines_slots[] = {
    {Py_tp_doc, "Values that lie in buffers of others."},
    {Py_tp_new, Lines_new},
    {Py_tp_dealloc, Lines_dealloc},
    {Py_tp_methods, Lines_methods},
    {Py_sq_length, Lines_length},
    {Py_sq_item, Lines_item},
    {0, NULL}};

static PyType_Spec Lines_spec = {
    "archiver.native._native.Lines", sizeof(Lines), 0, Py_TPFLAGS_DEFAULT, Lines_slots};

#endif
