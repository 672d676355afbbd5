/* Messages as librdkafka hands them out, without a Python object for each.
 *
 * `Values` and `Offsets` are the two columns of a run of messages of one partition; `Feed` takes such runs
 * from a queue of the client's. librdkafka is the library that confluent-kafka has loaded: its functions are
 * looked up in it at run time, so that there is one client and nothing to link.
 */
#ifndef ARCHIVER_MESSAGES_H
#define ARCHIVER_MESSAGES_H

#include "python.h"
#include "lines.h"

#include <dlfcn.h>
#include <pthread.h>

/* --- librdkafka: the part of its public interface that is used here (rdkafka.h, since 1.0) --- */

typedef struct rd_kafka_s rd_kafka_t;
typedef struct rd_kafka_conf_s rd_kafka_conf_t;
typedef struct rd_kafka_topic_s rd_kafka_topic_t;
typedef struct rd_kafka_queue_s rd_kafka_queue_t;
typedef struct {
    int err;
    rd_kafka_topic_t *rkt;
    int32_t partition;
    void *payload;
    size_t len;
    void *key;
    size_t key_len;
    int64_t offset;
    void *_private;
} rd_kafka_message_t;
typedef void error_f(rd_kafka_t *rk, int err, const char *reason, void *opaque);
typedef int on_new_f(rd_kafka_t *rk, const rd_kafka_conf_t *conf, void *opaque, char *errstr, size_t errstr_size);

static struct {
    int loaded;
    int (*conf_interceptor_add_on_new)(rd_kafka_conf_t *, const char *, on_new_f *, void *);
    void (*conf_set_error_cb)(rd_kafka_conf_t *, error_f *);
    int (*fatal_error)(rd_kafka_t *, char *, size_t);
    rd_kafka_queue_t *(*queue_new)(rd_kafka_t *);
    rd_kafka_queue_t *(*queue_get_partition)(rd_kafka_t *, const char *, int32_t);
    void (*queue_forward)(rd_kafka_queue_t *, rd_kafka_queue_t *);
    void (*queue_destroy)(rd_kafka_queue_t *);
    ssize_t (*consume_batch_queue)(rd_kafka_queue_t *, int, rd_kafka_message_t **, size_t);
    void (*message_destroy)(rd_kafka_message_t *);
    const char *(*message_errstr)(const rd_kafka_message_t *);
    const char *(*topic_name)(const rd_kafka_topic_t *);
} client;

static const struct {
    const char *name;
    void *place;
} client_functions[] = {
    {"rd_kafka_conf_interceptor_add_on_new", &client.conf_interceptor_add_on_new},
    {"rd_kafka_conf_set_error_cb", &client.conf_set_error_cb},
    {"rd_kafka_fatal_error", &client.fatal_error},
    {"rd_kafka_queue_new", &client.queue_new},
    {"rd_kafka_queue_get_partition", &client.queue_get_partition},
    {"rd_kafka_queue_forward", &client.queue_forward},
    {"rd_kafka_queue_destroy", &client.queue_destroy},
    {"rd_kafka_consume_batch_queue", &client.consume_batch_queue},
    {"rd_kafka_message_destroy", &client.message_destroy},
    {"rd_kafka_message_errstr", &client.message_errstr},
    {"rd_kafka_topic_name", &client.topic_name},
};

/* The client that this thread has just made with this library as a plugin, until a feed takes it. */
static _Thread_local rd_kafka_t *newest;

/* Errors of whole clients. A queue of a partition brings them as calls of the error callback, and confluent-kafka's own
 * must not be called outside of its `consume`: it ends the process there. So they gather here until `take`. */
#define ERROR_FATAL (-150)
#define ERRORS_MAX 64 /* an outage tells the same again and again: the oldest may go */
static struct {
    rd_kafka_t *rk;
    int code;
    char text[300];
} errors[ERRORS_MAX];
static int errors_count;
static pthread_mutex_t errors_lock = PTHREAD_MUTEX_INITIALIZER;

static void on_error(rd_kafka_t *rk, int err, const char *reason, void *opaque) {
    (void)opaque;
    if (err == ERROR_FATAL) return; /* the client remembers it: `told_errors` asks */
    pthread_mutex_lock(&errors_lock);
    if (errors_count == ERRORS_MAX) memmove(&errors[0], &errors[1], (size_t)(--errors_count) * sizeof *errors);
    errors[errors_count].rk = rk, errors[errors_count].code = err;
    snprintf(errors[errors_count++].text, sizeof errors->text, "%s", reason ? reason : "");
    pthread_mutex_unlock(&errors_lock);
}

static int on_new(rd_kafka_t *rk, const rd_kafka_conf_t *conf, void *opaque, char *errstr, size_t errstr_size) {
    (void)opaque, (void)errstr, (void)errstr_size;
    /* confluent-kafka has set its own behind the plugin's back; this is the client's copy, and nothing runs yet */
    client.conf_set_error_cb((rd_kafka_conf_t *)conf, on_error);
    newest = rk;
    return 0;
}

/* Moves one client's first error out; 0 where it has none. */
static int next_error(rd_kafka_t *rk, int *code, char *text, size_t size) {
    int found = 0;
    pthread_mutex_lock(&errors_lock);
    for (int i = 0; i < errors_count && !found; i++)
        if (errors[i].rk == rk) {
            found = 1, *code = errors[i].code;
            snprintf(text, size, "%s", errors[i].text);
            memmove(&errors[i], &errors[i + 1], (size_t)(--errors_count - i) * sizeof *errors);
        }
    pthread_mutex_unlock(&errors_lock);
    return found;
}

/* librdkafka calls this where `plugin.library.paths` names this file: its documented way to be told of a client
 * that somebody else makes. */
__attribute__((visibility("default"))) int conf_init(
    rd_kafka_conf_t *conf, void **opaque, char *errstr, size_t errstr_size) {
    (void)opaque;
    if (!client.loaded) {
        snprintf(errstr, errstr_size, "librdkafka has not been loaded into the archiver's extension");
        return -1;
    }
    return client.conf_interceptor_add_on_new(conf, "archiver", on_new, NULL);
}

static PyObject *load_client(PyObject *module, PyObject *path) {
    (void)module;
    const char *name = PyUnicode_AsUTF8(path);
    if (!name) return NULL;
    void *library = dlopen(name, RTLD_NOW | RTLD_NOLOAD);
    if (!library) return PyErr_Format(PyExc_ImportError, "%s is not loaded", name);
    for (size_t i = 0; i < sizeof client_functions / sizeof *client_functions; i++) {
        void *function = dlsym(library, client_functions[i].name);
        if (!function)
            return PyErr_Format(PyExc_ImportError, "%s has no %s", name, client_functions[i].name);
        memcpy(client_functions[i].place, &function, sizeof function);
    }
    client.loaded = 1;
    Py_RETURN_NONE;
}

/* --- the columns --- */

typedef struct {
    PyObject_VAR_HEAD
    PyObject *consumer; /* must not go before its messages */
    rd_kafka_message_t *messages[];
} Values;

typedef struct {
    PyObject_VAR_HEAD
    int64_t offsets[];
} Offsets;

static PyTypeObject *values_type, *offsets_type;

static PyObject *Values_item(Values *self, Py_ssize_t i) {
    if (i < 0 || i >= Py_SIZE(self)) {
        PyErr_SetString(PyExc_IndexError, "no such message");
        return NULL;
    }
    const rd_kafka_message_t *message = self->messages[i];
    if (!message->payload) Py_RETURN_NONE;
    return PyBytes_FromStringAndSize(message->payload, (Py_ssize_t)message->len);
}

static PyObject *Offsets_item(Offsets *self, Py_ssize_t i) {
    if (i < 0 || i >= Py_SIZE(self)) {
        PyErr_SetString(PyExc_IndexError, "no such message");
        return NULL;
    }
    return PyLong_FromLongLong(self->offsets[i]);
}

static Py_ssize_t column_length(PyObject *self) { return Py_SIZE(self); }

static void Values_dealloc(Values *self) {
    PyTypeObject *type = Py_TYPE(self);
    for (Py_ssize_t i = 0; i < Py_SIZE(self); i++) client.message_destroy(self->messages[i]);
    Py_XDECREF(self->consumer);
    type->tp_free(self);
    Py_DECREF(type);
}

static void Offsets_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyType_Slot Values_slots[] = {
    {Py_tp_doc, "Values of a run of messages of one partition: bytes, or None for a tombstone."},
    {Py_tp_dealloc, Values_dealloc},
    {Py_sq_length, column_length},
    {Py_sq_item, Values_item},
    {0, NULL}};

static PyType_Slot Offsets_slots[] = {
    {Py_tp_doc, "Offsets of a run of messages of one partition."},
    {Py_tp_dealloc, Offsets_dealloc},
    {Py_sq_length, column_length},
    {Py_sq_item, Offsets_item},
    {0, NULL}};

static PyType_Spec Values_spec = {
    "archiver.native._native.Values", offsetof(Values, messages), sizeof(rd_kafka_message_t *),
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, Values_slots};

static PyType_Spec Offsets_spec = {
    "archiver.native._native.Offsets", offsetof(Offsets, offsets), sizeof(int64_t),
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, Offsets_slots};

/* --- a batch, from any kind of column --- */

typedef struct {
    Py_ssize_t count;
    PyObject *values, *offsets; /* borrowed */
} batch_view;

static int view_of(batch_view *view, PyObject *values, PyObject *offsets) {
    Py_ssize_t count;
    if (Py_TYPE(values) == lines_type) count = ((Lines *)values)->count;
    else if (PyList_Check(values) || Py_TYPE(values) == values_type) count = Py_SIZE(values);
    else {
        PyErr_SetString(PyExc_TypeError, "values must be a list, Lines or Values");
        return -1;
    }
    *view = (batch_view){count, values, offsets};
    Py_ssize_t length = PySequence_Size(offsets);
    if (length < 0) return -1;
    if (length != view->count) {
        PyErr_SetString(PyExc_ValueError, "as many offsets as values are needed");
        return -1;
    }
    return 0;
}

/* `*value` is NULL for a tombstone. */
static inline int view_value(const batch_view *view, Py_ssize_t i, const char **value, Py_ssize_t *length) {
    if (Py_TYPE(view->values) == values_type) {
        const rd_kafka_message_t *message = ((Values *)view->values)->messages[i];
        *value = message->payload, *length = (Py_ssize_t)message->len;
        return 0;
    }
    if (Py_TYPE(view->values) == lines_type) {
        const line *found = &((Lines *)view->values)->lines[i];
        *value = found->start, *length = found->length;
        return 0;
    }
    PyObject *item = PyList_GET_ITEM(view->values, i);
    *value = NULL, *length = 0;
    if (item == Py_None) return 0;
    return PyBytes_AsStringAndSize(item, (char **)value, length);
}

/* Whether a value may hold a newline: none does that was cut at them. */
static inline int view_may_be_multiline(const batch_view *view) {
    return Py_TYPE(view->values) != lines_type || ((Lines *)view->values)->whole;
}

static inline PyObject *view_offset(const batch_view *view, Py_ssize_t i) {
    return PySequence_GetItem(view->offsets, i);
}

/* --- the feed --- */

typedef struct {
    PyObject_HEAD
    PyObject *consumer; /* NULL before `open` and after `close`, as are the next two */
    rd_kafka_t *rk;
    rd_kafka_queue_t *queue;
    rd_kafka_message_t **taken;
    Py_ssize_t taken_size;
} Feed;

static int Feed_init(Feed *self, PyObject *args, PyObject *kwargs) {
    static char *names[] = {NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "", names)) return -1;
    if (!client.loaded || self->queue) {
        PyErr_SetString(PyExc_RuntimeError, client.loaded ? "the feed is open" : "load_client comes first");
        return -1;
    }
    newest = NULL;
    return 0;
}

static PyObject *Feed_open(Feed *self, PyObject *consumer) {
    if (!newest || self->queue) {
        PyErr_SetString(PyExc_RuntimeError, self->queue ? "the feed is open" : "no client was made with the plugin");
        return NULL;
    }
    self->rk = newest, newest = NULL;
    self->consumer = Py_NewRef(consumer);
    self->queue = client.queue_new(self->rk);
    Py_RETURN_NONE;
}

static int feed_is_open(Feed *self) {
    if (!self->queue) PyErr_SetString(PyExc_RuntimeError, "the feed is not open");
    return self->queue != NULL;
}

static PyObject *Feed_attach(Feed *self, PyObject *args) {
    const char *topic;
    int partition;
    if (!PyArg_ParseTuple(args, "si", &topic, &partition) || !feed_is_open(self)) return NULL;
    rd_kafka_queue_t *queue = client.queue_get_partition(self->rk, topic, partition);
    if (!queue) return PyErr_Format(PyExc_LookupError, "the client has no queue for %s/%d", topic, partition);
    client.queue_forward(queue, self->queue);
    client.queue_destroy(queue); /* our reference to it */
    Py_RETURN_NONE;
}

static int same_partition(const rd_kafka_message_t *a, const rd_kafka_message_t *b) {
    return a->rkt == b->rkt && a->partition == b->partition && !a->err && !b->err;
}

/* (topic, partition, Values, Offsets); the run's messages belong to the values from now on. */
static PyObject *made_run(PyObject *consumer, rd_kafka_message_t **messages, Py_ssize_t count) {
    Values *values = (Values *)values_type->tp_alloc(values_type, count);
    Offsets *offsets = (Offsets *)offsets_type->tp_alloc(offsets_type, count);
    if (!values || !offsets) {
        if (values) Py_SET_SIZE(values, 0);
        Py_XDECREF(values);
        Py_XDECREF(offsets);
        return NULL;
    }
    values->consumer = Py_NewRef(consumer);
    for (Py_ssize_t i = 0; i < count; i++) {
        values->messages[i] = messages[i];
        offsets->offsets[i] = messages[i]->offset;
        messages[i] = NULL;
    }
    const rd_kafka_message_t *first = values->messages[0];
    return Py_BuildValue("siNN", client.topic_name(first->rkt), (int)first->partition, values, offsets);
}

/* (code, text, topic or None, partition, offset) */
static PyObject *made_event(const rd_kafka_message_t *message) {
    return Py_BuildValue(
        "iszin", message->err, client.message_errstr(message), message->rkt ? client.topic_name(message->rkt) : NULL,
        (int)message->partition, (Py_ssize_t)message->offset);
}

static int split_taken(Feed *self, Py_ssize_t count, PyObject *runs, PyObject *events) {
    for (Py_ssize_t start = 0, stop; start < count; start = stop) {
        rd_kafka_message_t **first = &self->taken[start];
        PyObject *made, *list;
        stop = start + 1;
        if ((*first)->err) {
            made = made_event(*first), list = events;
        } else {
            while (stop < count && same_partition(*first, self->taken[stop])) stop++;
            made = made_run(self->consumer, first, stop - start), list = runs;
        }
        if (!made || PyList_Append(list, made) < 0) {
            Py_XDECREF(made);
            return -1;
        }
        Py_DECREF(made);
    }
    return 0;
}

static PyObject *told_errors(Feed *self) {
    PyObject *list = PyList_New(0);
    char text[sizeof errors->text];
    for (int code, fatal = 0; list && !fatal;) {
        if (!next_error(self->rk, &code, text, sizeof text)) {
            if (!(code = client.fatal_error(self->rk, text, sizeof text))) break;
            fatal = 1;
        }
        PyObject *made = Py_BuildValue("isO", code, text, fatal ? Py_True : Py_False);
        if (!made || PyList_Append(list, made) < 0) Py_CLEAR(list);
        Py_XDECREF(made);
    }
    return list;
}

/* Up to `most` messages into `taken`, a thousand at a time: each thousand waits until it is full, so only the first is
 * waited for, and what they hold can be bounded between them. */
#define TAKE_AT_ONCE 1000
static ssize_t taken_messages(Feed *self, size_t most, size_t bytes_max, int timeout_ms) {
    size_t count = 0, bytes = 0;
    while (count < most && bytes < bytes_max) {
        size_t wanted = most - count < TAKE_AT_ONCE ? most - count : TAKE_AT_ONCE;
        ssize_t got = client.consume_batch_queue(self->queue, count ? 0 : timeout_ms, self->taken + count, wanted);
        if (got <= 0) break;
        for (ssize_t i = 0; i < got; i++) bytes += self->taken[count + (size_t)i]->len;
        count += (size_t)got;
        if ((size_t)got < wanted) break;
    }
    return (ssize_t)count;
}

static PyObject *Feed_take(Feed *self, PyObject *args) {
    Py_ssize_t most, bytes_max;
    int timeout_ms;
    if (!PyArg_ParseTuple(args, "nni", &most, &bytes_max, &timeout_ms) || !feed_is_open(self)) return NULL;
    if (most < 0 || bytes_max < 0) {
        PyErr_SetString(PyExc_ValueError, "records and bytes must not be negative");
        return NULL;
    }
    if (most > self->taken_size) {
        rd_kafka_message_t **grown = PyMem_Realloc(self->taken, (size_t)most * sizeof *grown);
        if (!grown) return PyErr_NoMemory();
        self->taken = grown, self->taken_size = most;
    }
    ssize_t count;
    Py_BEGIN_ALLOW_THREADS
    count = taken_messages(self, (size_t)most, (size_t)bytes_max, timeout_ms);
    Py_END_ALLOW_THREADS
    PyObject *runs = PyList_New(0), *events = PyList_New(0), *told = told_errors(self);
    int failed = !runs || !events || !told || split_taken(self, count, runs, events) < 0;
    for (ssize_t i = 0; i < count; i++) /* events, and what no run took over */
        if (self->taken[i]) client.message_destroy(self->taken[i]);
    if (failed) {
        Py_XDECREF(runs);
        Py_XDECREF(events);
        Py_XDECREF(told);
        return NULL;
    }
    return Py_BuildValue("NNN", runs, events, told);
}

static void feed_let_go(Feed *self) {
    rd_kafka_queue_t *queue = self->queue;
    char text[1];
    for (int code; queue && next_error(self->rk, &code, text, sizeof text););
    self->queue = NULL, self->rk = NULL;
    if (queue) client.queue_destroy(queue);
    Py_CLEAR(self->consumer);
}

static PyObject *Feed_close(Feed *self, PyObject *unused) {
    (void)unused;
    feed_let_go(self);
    Py_RETURN_NONE;
}

static void Feed_dealloc(Feed *self) {
    PyTypeObject *type = Py_TYPE(self);
    feed_let_go(self);
    PyMem_Free(self->taken);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyMethodDef Feed_methods[] = {
    {"open", (PyCFunction)Feed_open, METH_O,
     "open(consumer): the client that this thread has just made, with this library as `plugin.library.paths`"},
    {"attach", (PyCFunction)Feed_attach, METH_VARARGS,
     "attach(topic, partition): what the client fetches of it comes here; call it before it is assigned"},
    {"take", (PyCFunction)Feed_take, METH_VARARGS,
     "take(most, bytes_max, timeout_ms) -> ([(topic, partition, values, offsets)], [(code, text, topic, partition, offset)], "
     "[(code, text, fatal)])"},
    {"close", (PyCFunction)Feed_close, METH_NOARGS, "Let go of the queue; before the client is closed."},
    {NULL}};

static PyType_Slot Feed_slots[] = {
    {Py_tp_doc, "A queue of a client's from which runs of messages are taken. Make it, then the client, then `open` it."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, Feed_init},
    {Py_tp_dealloc, Feed_dealloc},
    {Py_tp_methods, Feed_methods},
    {0, NULL}};

static PyType_Spec Feed_spec = {"archiver.native._native.Feed", sizeof(Feed), 0, Py_TPFLAGS_DEFAULT, Feed_slots};

#endif
