/* Sorts a batch of values by route, and joins each route's values to one run of lines.
 *
 * One grouper serves one topic. It keeps a table from the JSON texts of the routing fields to the route; what
 * the table does not know, and every record that the scan is unsure of, it asks of `resolve` in Python.
 */
#ifndef ARCHIVER_GROUPER_H
#define ARCHIVER_GROUPER_H

#include "python.h"
#include "messages.h"
#include "scan.h"

typedef struct {
    PyObject *name;   /* str: the route */
    uint64_t batch;   /* in which batch it last had records */
    Py_ssize_t slot;  /* its place among that batch's slices */
} route_entry;

typedef struct {
    uint64_t hash;
    char *text; /* the key, owned; NULL where nothing is kept */
    size_t length;
    route_entry *route;
    PyObject *reason; /* str, or NULL: why a default stands in the route */
} table_entry;

typedef struct {
    route_entry *route;
    char *out; /* where the next value goes */
    Py_ssize_t bytes, records, first, last; /* `first` and `last` are indices */
    PyObject *lines;
} slice_entry;

typedef struct {
    PyObject_HEAD
    PyObject *fields;     /* tuple of bytes, which `paths` points into; empty: every record has the same route */
    scan_paths paths;
    PyObject *resolve;    /* (tuple of the fields' JSON texts or None, value) -> (route, reason or None) */
    PyObject *slice_type; /* a subclass of tuple with five items */
    PyObject *routes;     /* dict: route -> capsule of its route_entry */
    table_entry *table;
    size_t table_size, table_used;
    size_t kept, kept_bytes; /* texts and routes together: what the caller bounds */
    uint64_t seed, batch;
    slice_entry *slices;
    Py_ssize_t slices_size;
    uint32_t *slot_of; /* per value of the batch */
    Py_ssize_t slot_of_size;
} Grouper;

#define NO_SLOT UINT32_MAX /* a tombstone */
#define TABLE_SIZE_MIN 64
#define KEY_MAX 1024 /* bytes of the key of several fields: longer ones are not kept, and Python is asked each time */

/* --- the table --- */

static uint64_t hash_text(uint64_t seed, const unsigned char *text, size_t length) {
    uint64_t hash = seed ^ length;
    while (length >= 8) {
        uint64_t word;
        memcpy(&word, text, 8);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15ULL;
        hash ^= hash >> 32;
        text += 8, length -= 8;
    }
    uint64_t rest = 0;
    memcpy(&rest, text, length);
    hash = (hash ^ rest) * 0x9E3779B97F4A7C15ULL;
    return hash ^ hash >> 29;
}

static table_entry *table_place(Grouper *self, uint64_t hash, const unsigned char *text, size_t length) {
    size_t at = hash & (self->table_size - 1);
    for (;; at = (at + 1) & (self->table_size - 1)) {
        table_entry *entry = &self->table[at];
        if (!entry->text) return entry;
        if (entry->hash == hash && entry->length == length && memcmp(entry->text, text, length) == 0) return entry;
    }
}

static int table_grow(Grouper *self) {
    size_t old_size = self->table_size;
    table_entry *old = self->table, *grown;
    size_t size = old_size ? 2 * old_size : TABLE_SIZE_MIN;
    if (!(grown = PyMem_Calloc(size, sizeof *grown))) {
        PyErr_NoMemory();
        return -1;
    }
    self->table = grown, self->table_size = size;
    for (size_t i = 0; i < old_size; i++)
        if (old[i].text)
            *table_place(self, old[i].hash, (unsigned char *)old[i].text, old[i].length) = old[i];
    PyMem_Free(old);
    return 0;
}

static void free_route(PyObject *capsule) {
    route_entry *route = PyCapsule_GetPointer(capsule, NULL);
    Py_DECREF(route->name);
    PyMem_Free(route);
}

/* The one entry of a route, made if there is none. Borrowed from `routes`. */
static route_entry *route_of_name(Grouper *self, PyObject *name) {
    PyObject *capsule = PyDict_GetItemWithError(self->routes, name);
    if (capsule) return PyCapsule_GetPointer(capsule, NULL);
    if (PyErr_Occurred()) return NULL;
    route_entry *route = PyMem_Calloc(1, sizeof *route);
    if (!route) return (route_entry *)PyErr_NoMemory();
    route->name = Py_NewRef(name);
    if (!(capsule = PyCapsule_New(route, NULL, free_route))) {
        Py_DECREF(name);
        PyMem_Free(route);
        return NULL;
    }
    int failed = PyDict_SetItem(self->routes, name, capsule);
    Py_DECREF(capsule);
    self->kept++, self->kept_bytes += (size_t)PyUnicode_GET_LENGTH(name);
    return failed ? NULL : route;
}

static int count_reason(PyObject *reasons, PyObject *reason) {
    PyObject *held = PyDict_GetItemWithError(reasons, reason);
    if (!held && PyErr_Occurred()) return -1;
    PyObject *count = PyLong_FromSsize_t(held ? PyLong_AsSsize_t(held) + 1 : 1);
    if (!count) return -1;
    int failed = PyDict_SetItem(reasons, reason, count);
    Py_DECREF(count);
    return failed;
}

/* Ask Python. `*reason` is a new reference, or NULL. */
static route_entry *ask(Grouper *self, PyObject *texts, const char *value, Py_ssize_t length, PyObject **reason) {
    route_entry *route = NULL;
    PyObject *bytes = PyBytes_FromStringAndSize(value, length);
    PyObject *told = bytes ? PyObject_CallFunctionObjArgs(self->resolve, texts, bytes, NULL) : NULL;
    Py_XDECREF(bytes);
    if (!told) return NULL;
    if (!PyTuple_Check(told) || PyTuple_GET_SIZE(told) != 2 || !PyUnicode_Check(PyTuple_GET_ITEM(told, 0))) {
        PyErr_SetString(PyExc_TypeError, "resolve must return (route, reason or None)");
    } else if ((route = route_of_name(self, PyTuple_GET_ITEM(told, 0)))) {
        PyObject *why = PyTuple_GET_ITEM(told, 1);
        *reason = why == Py_None ? NULL : Py_NewRef(why);
    }
    Py_DECREF(told);
    return route;
}

static PyObject *tuple_of_texts(const scan_text *texts, int count) {
    PyObject *tuple = PyTuple_New(count);
    for (int i = 0; tuple && i < count; i++) {
        PyObject *text = PyBytes_FromStringAndSize((const char *)texts[i].bytes, (Py_ssize_t)texts[i].length);
        if (text) PyTuple_SET_ITEM(tuple, i, text);
        else Py_CLEAR(tuple);
    }
    return tuple;
}

/* The texts of several fields as one that no other texts make: each behind its length, in `room` of KEY_MAX bytes.
 * False where they are longer. */
static int key_of_texts(const scan_text *texts, int count, unsigned char *room, scan_text *key) {
    size_t used = 0;
    for (int i = 0; i < count; i++) {
        uint16_t length = (uint16_t)texts[i].length;
        if (texts[i].length > KEY_MAX || used + sizeof length + length > KEY_MAX) return 0;
        memcpy(room + used, &length, sizeof length);
        memcpy(room + used + sizeof length, texts[i].bytes, length);
        used += sizeof length + length;
    }
    *key = (scan_text){room, used};
    return 1;
}

/* A new entry, its route asked of Python. */
static table_entry *table_add(
    Grouper *self, uint64_t hash, scan_text key, const scan_text *texts, const char *value, Py_ssize_t length) {
    PyObject *reason = NULL, *tuple = tuple_of_texts(texts, self->paths.count);
    route_entry *route = tuple ? ask(self, tuple, value, length, &reason) : NULL;
    Py_XDECREF(tuple);
    if (!route) return NULL;
    char *copy = PyMem_Malloc(key.length ? key.length : 1);
    if (!copy || ((self->table_used + 1) * 2 > self->table_size && table_grow(self) < 0)) {
        PyMem_Free(copy);
        Py_XDECREF(reason);
        return (table_entry *)PyErr_NoMemory();
    }
    memcpy(copy, key.bytes, key.length);
    table_entry *entry = table_place(self, hash, key.bytes, key.length);
    *entry = (table_entry){hash, copy, key.length, route, reason};
    self->table_used++, self->kept++, self->kept_bytes += key.length;
    return entry;
}

/* --- a batch --- */

/* Of a record that the scan is unsure of, or whose texts are too long. */
static route_entry *route_of_odd_value(Grouper *self, const char *value, Py_ssize_t length, PyObject *reasons) {
    PyObject *reason = NULL;
    route_entry *route = ask(self, Py_None, value, length, &reason);
    int failed = route && reason && count_reason(reasons, reason) < 0;
    Py_XDECREF(reason);
    return failed ? NULL : route;
}

ALWAYS_INLINE route_entry *route_of_value(
    Grouper *self, const char *value, Py_ssize_t length, PyObject *reasons) {
    scan_text texts[FIELDS_MAX], joined, *key = texts;
    unsigned char room[KEY_MAX];
    int count = self->paths.count;
    if (count && scan_fields((const unsigned char *)value, (size_t)length, &self->paths, texts) == SCAN_UNSURE)
        return route_of_odd_value(self, value, length, reasons);
    if (count != 1 && !key_of_texts(texts, count, room, key = &joined))
        return route_of_odd_value(self, value, length, reasons);

    uint64_t hash = hash_text(self->seed, key->bytes, key->length);
    table_entry *entry = table_place(self, hash, key->bytes, key->length);
    if (!entry->text && !(entry = table_add(self, hash, *key, texts, value, length))) return NULL;
    if (entry->reason && count_reason(reasons, entry->reason) < 0) return NULL;
    return entry->route;
}

static int slice_grow(Grouper *self) {
    Py_ssize_t size = self->slices_size ? 2 * self->slices_size : 64;
    slice_entry *grown = PyMem_Realloc(self->slices, (size_t)size * sizeof *grown);
    if (!grown) {
        PyErr_NoMemory();
        return -1;
    }
    self->slices = grown, self->slices_size = size;
    return 0;
}

/* First pass: the slice of every value, and how long each slice's lines are. The number of slices, or -1. */
static Py_ssize_t sort_values(
    Grouper *self, const batch_view *view, PyObject *reasons, Py_ssize_t *tombstones, Py_ssize_t *multiline) {
    Py_ssize_t slices = 0;
    int look = view_may_be_multiline(view);
    self->batch++;
    for (Py_ssize_t i = 0; i < view->count; i++) {
        const char *value;
        Py_ssize_t length;
        if (view_value(view, i, &value, &length) < 0) return -1;
        if (!value) {
            self->slot_of[i] = NO_SLOT;
            ++*tombstones;
            continue;
        }
        if (look && memchr(value, '\n', (size_t)length)) ++*multiline;
        route_entry *route = route_of_value(self, value, length, reasons);
        if (!route) return -1;
        if (route->batch != self->batch) {
            if (slices == self->slices_size && slice_grow(self) < 0) return -1;
            route->batch = self->batch, route->slot = slices++;
            self->slices[route->slot] = (slice_entry){.route = route, .bytes = -1, .first = i};
        }
        slice_entry *slice = &self->slices[route->slot];
        slice->bytes += length + 1, slice->records++, slice->last = i;
        self->slot_of[i] = (uint32_t)route->slot;
    }
    return slices;
}

/* Second pass: each value behind the one before it of its route, a newline between them. */
static int join_values(Grouper *self, const batch_view *view, Py_ssize_t slices) {
    for (Py_ssize_t s = 0; s < slices; s++) {
        slice_entry *slice = &self->slices[s];
        if (!(slice->lines = PyBytes_FromStringAndSize(NULL, slice->bytes))) {
            while (s--) Py_DECREF(self->slices[s].lines);
            return -1;
        }
        slice->out = PyBytes_AS_STRING(slice->lines);
    }
    for (Py_ssize_t i = 0; i < view->count; i++) {
        if (self->slot_of[i] == NO_SLOT) continue;
        const char *value = NULL;
        Py_ssize_t length = 0;
        view_value(view, i, &value, &length);
        slice_entry *slice = &self->slices[self->slot_of[i]];
        memcpy(slice->out, value, (size_t)length);
        slice->out += length;
        if (i != slice->last) *slice->out++ = '\n';
    }
    return 0;
}

/* `Slice(route, lines, first, last, records)`; takes over the reference to the lines. */
static PyObject *made_slice(Grouper *self, const batch_view *view, slice_entry *slice) {
    PyObject *items[5] = {
        Py_NewRef(slice->route->name), slice->lines, view_offset(view, slice->first),
        view_offset(view, slice->last), PyLong_FromSsize_t(slice->records)};
    PyTypeObject *type = (PyTypeObject *)self->slice_type;
    PyObject *made = items[2] && items[3] && items[4] ? type->tp_alloc(type, 5) : NULL;
    for (int i = 0; i < 5; i++) {
        if (made) PyTuple_SET_ITEM(made, i, items[i]);
        else Py_XDECREF(items[i]);
    }
    return made;
}

static PyObject *made_slices(Grouper *self, const batch_view *view, Py_ssize_t slices) {
    PyObject *list = PyList_New(slices);
    if (!list) {
        for (Py_ssize_t s = 0; s < slices; s++) Py_DECREF(self->slices[s].lines);
        return NULL;
    }
    for (Py_ssize_t s = 0; s < slices; s++) {
        PyObject *slice = made_slice(self, view, &self->slices[s]);
        if (!slice) {
            while (++s < slices) Py_DECREF(self->slices[s].lines);
            Py_DECREF(list);
            return NULL;
        }
        PyList_SET_ITEM(list, s, slice);
    }
    return list;
}

static PyObject *Grouper_group(Grouper *self, PyObject *args) {
    PyObject *values, *offsets;
    batch_view view;
    if (!PyArg_ParseTuple(args, "OO", &values, &offsets) || view_of(&view, values, offsets) < 0) return NULL;
    if (view.count > self->slot_of_size) {
        uint32_t *grown = PyMem_Realloc(self->slot_of, (size_t)view.count * sizeof *grown);
        if (!grown) return PyErr_NoMemory();
        self->slot_of = grown, self->slot_of_size = view.count;
    }
    Py_ssize_t tombstones = 0, multiline = 0, slices;
    PyObject *list = NULL, *reasons = PyDict_New();
    if (reasons && (slices = sort_values(self, &view, reasons, &tombstones, &multiline)) >= 0 &&
        join_values(self, &view, slices) == 0)
        list = made_slices(self, &view, slices);
    if (!list) {
        Py_XDECREF(reasons);
        return NULL;
    }
    return Py_BuildValue("NnnN", list, tombstones, multiline, reasons);
}

/* --- the type --- */

/* `fields` is a tuple of bytes, and has to outlive the paths. */
static int paths_of(scan_paths *paths, PyObject *fields) {
    *paths = (scan_paths){0};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(fields); i++) {
        char *path;
        Py_ssize_t length;
        if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(fields, i), &path, &length) < 0) return -1;
        if (!add_path(paths, path, (size_t)length)) {
            PyErr_SetString(PyExc_ValueError, "too many fields, or no path, or a path of too many names");
            return -1;
        }
    }
    return 0;
}

static int Grouper_init(Grouper *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"fields", "resolve", "slice_type", "seed", NULL};
    PyObject *fields, *resolve, *type;
    unsigned long long seed;
    if (self->routes) {
        PyErr_SetString(PyExc_RuntimeError, "a grouper is made once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!OO!K", names, &PyTuple_Type, &fields, &resolve, &PyType_Type, &type, &seed) ||
        paths_of(&self->paths, fields) < 0)
        return -1;
    if (!PyType_IsSubtype((PyTypeObject *)type, &PyTuple_Type)) {
        PyErr_SetString(PyExc_TypeError, "slice_type must be a tuple type");
        return -1;
    }
    self->fields = Py_NewRef(fields);
    self->resolve = Py_NewRef(resolve);
    self->slice_type = Py_NewRef(type);
    self->seed = seed;
    if (!(self->routes = PyDict_New())) return -1;
    return table_grow(self);
}

static int Grouper_traverse(Grouper *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->fields);
    Py_VISIT(self->resolve);
    Py_VISIT(self->slice_type);
    Py_VISIT(self->routes);
    return 0;
}

static int Grouper_clear(Grouper *self) {
    Py_CLEAR(self->resolve);
    return 0;
}

static void Grouper_dealloc(Grouper *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    for (size_t i = 0; i < self->table_size; i++) {
        PyMem_Free(self->table[i].text);
        Py_XDECREF(self->table[i].reason);
    }
    PyMem_Free(self->table);
    PyMem_Free(self->slices);
    PyMem_Free(self->slot_of);
    Py_CLEAR(self->fields);
    Py_CLEAR(self->resolve);
    Py_CLEAR(self->slice_type);
    Py_CLEAR(self->routes);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMemberDef Grouper_members[] = {
    {"kept", T_PYSSIZET, offsetof(Grouper, kept), READONLY, "field values and routes it knows"},
    {"kept_bytes", T_PYSSIZET, offsetof(Grouper, kept_bytes), READONLY, "bytes of their texts"},
    {NULL}};

static PyMethodDef Grouper_methods[] = {
    {"group", (PyCFunction)Grouper_group, METH_VARARGS,
     "group(values, offsets) -> (slices, tombstones, multiline, {reason: records})"},
    {NULL}};

static PyType_Slot Grouper_slots[] = {
    {Py_tp_doc, "Sorts batches of one topic's values by the route that their fields lead to."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, Grouper_init},
    {Py_tp_dealloc, Grouper_dealloc},
    {Py_tp_traverse, Grouper_traverse},
    {Py_tp_clear, Grouper_clear},
    {Py_tp_methods, Grouper_methods},
    {Py_tp_members, Grouper_members},
    {0, NULL}};

static PyType_Spec Grouper_spec = {
    "archiver.native._native.Grouper", sizeof(Grouper), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, Grouper_slots};

#endif
