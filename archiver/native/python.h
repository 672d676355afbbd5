/* Python's C API as every part of the extension sees it. */
#ifndef ARCHIVER_PYTHON_H
#define ARCHIVER_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#endif
