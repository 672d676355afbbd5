/* archiver.native._native: the parts of the hot path that Python is too slow for. `docs/decisions/` says why, and
 * `archiver/native/_native.pyi` what it offers. Without it the archiver does the same in Python. */

#include "python.h"
#include "lines.h"
#include "messages.h"
#include "scan.h"
#include "grouper.h"
#include "buffers.h"
#include "appends.h"

static PyObject *scan(PyObject *module, PyObject *args) {
    (void)module;
    const char *value;
    Py_ssize_t length;
    PyObject *fields;
    scan_paths paths;
    scan_text texts[FIELDS_MAX];
    if (!PyArg_ParseTuple(args, "y#O!", &value, &length, &PyTuple_Type, &fields) || paths_of(&paths, fields) < 0)
        return NULL;
    if (scan_fields((const unsigned char *)value, (size_t)length, &paths, texts) == SCAN_UNSURE) Py_RETURN_NONE;
    return tuple_of_texts(texts, paths.count);
}

static PyMethodDef module_methods[] = {
    {"scan", scan, METH_VARARGS, "scan(value, fields) -> the fields' JSON texts, b'' where missing, None if unsure"},
    {"add_slices", add_slices, METH_VARARGS,
     "add_slices(open, partition, slices, span_type, bytes_max, records_max) -> (slices left to Python, bytes added)"},
    {"append_frames", append_frames, METH_VARARGS,
     "append_frames(((path, is new, size, frame), …), mode) -> (files tried, what the last came to, errno)"},
    {"count_lines", count_lines, METH_VARARGS, "count_lines(buffer, start, stop) -> how many lines that part has"},
    {"load_client", load_client, METH_O, "load_client(path): look up librdkafka in a library that is loaded"},
    {NULL}};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "The parts of the hot path that Python is too slow for.", -1, module_methods};

static PyTypeObject *add_type(PyObject *into, PyType_Spec *spec, const char *name) {
    PyObject *type = PyType_FromSpec(spec);
    if (type && PyModule_AddObjectRef(into, name, type) < 0) Py_CLEAR(type);
    return (PyTypeObject *)type;
}

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *made = PyModule_Create(&module);
    if (!made) return NULL;
    if (!(lines_type = add_type(made, &Lines_spec, "Lines")) ||
        !(values_type = add_type(made, &Values_spec, "Values")) ||
        !(offsets_type = add_type(made, &Offsets_spec, "Offsets")) || !add_type(made, &Feed_spec, "Feed") ||
        !add_type(made, &Grouper_spec, "Grouper") || PyModule_AddIntMacro(made, FIELDS_MAX) < 0 ||
        PyModule_AddIntMacro(made, NAMES_MAX) < 0)
        Py_CLEAR(made);
    return made;
}
