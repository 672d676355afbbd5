/* Appends one frame to each of several files while other threads go on.
 *
 * A small frame costs less to write than it costs a thread to get the interpreter's lock back, which Python lets go of in
 * each of open, fstat, write and close. Here it is let go of once for all of them.
 */
#ifndef ARCHIVER_APPENDS_H
#define ARCHIVER_APPENDS_H

#include "python.h"
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

/* What a file came to; what was not written leaves the file as it was. */
enum { APPENDED, NOT_OPENED, SIZE_DIFFERS, NOT_WRITTEN, TORN, NOT_CLOSED };

typedef struct {
    const char *path;
    int is_new, mode;
    Py_ssize_t size; /* of the file so far */
    Py_buffer frame;
} frame_append;

static int write_whole(int fd, const char *at, Py_ssize_t left) {
    while (left > 0) {
        ssize_t written = write(fd, at, (size_t)left);
        if (written < 0 && errno == EINTR) continue;
        if (written <= 0) return -1;
        at += written, left -= written;
    }
    return 0;
}

static int append_one(const frame_append *append) {
    int fd, flags = O_WRONLY | O_APPEND | O_CLOEXEC | (append->is_new ? O_CREAT | O_EXCL : 0);
    struct stat found;
    do fd = open(append->path, flags, append->mode);
    while (fd < 0 && errno == EINTR);
    if (fd < 0) return NOT_OPENED;
    if (fstat(fd, &found) < 0 || found.st_size != append->size) {
        close(fd);
        return SIZE_DIFFERS;
    }
    if (write_whole(fd, append->frame.buf, append->frame.len) < 0) {
        int outcome = ftruncate(fd, append->size) < 0 ? TORN : NOT_WRITTEN;
        close(fd);
        return outcome;
    }
    return close(fd) < 0 ? NOT_CLOSED : APPENDED;
}

static Py_ssize_t append_each(const frame_append *appends, Py_ssize_t count, int *outcome, int *number) {
    Py_ssize_t i = 0;
    *outcome = APPENDED, *number = 0;
    for (; i < count && *outcome == APPENDED; i++)
        if ((*outcome = append_one(&appends[i])) != APPENDED) *number = errno;
    return i;
}

static void let_go(frame_append *appends, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) PyBuffer_Release(&appends[i].frame);
    PyMem_Free(appends);
}

static PyObject *append_frames(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *orders;
    int mode, outcome, number;
    if (!PyArg_ParseTuple(args, "O!i", &PyTuple_Type, &orders, &mode)) return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(orders), tried;
    frame_append *appends = PyMem_Calloc((size_t)(count ? count : 1), sizeof *appends);
    if (!appends) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < count; i++) {
        frame_append *append = &appends[i];
        if (PyTuple_Check(PyTuple_GET_ITEM(orders, i)) &&
            PyArg_ParseTuple(
                PyTuple_GET_ITEM(orders, i), "ypny*", &append->path, &append->is_new, &append->size, &append->frame)) {
            append->mode = mode;
            continue;
        }
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "an append is (path, is new, size, frame)");
        let_go(appends, i);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    tried = append_each(appends, count, &outcome, &number);
    Py_END_ALLOW_THREADS
    let_go(appends, count);
    return Py_BuildValue("nii", tried, outcome, number);
}

#endif
