/* Memory that processes of a node share: words by which one tells others what it has written, and waits for them.

A word is an aligned int64 at a byte offset. Waits are short: they give way to other processes, and end after some time, so that the
caller can look after what may have gone wrong. The Python code that stands for each is in comm/window.py and parameter_server/. */
#include "loops.h"
#include <sched.h>
#include <time.h>

enum { WAITING = 50000 };            /* ns of a wait; a process that does its work meanwhile takes some µs */
enum { TURNS = 16, LOOKS = 20 };     /* turns between two looks at the clock; looks in each, before it gives way */
enum { LARGE_BYTES = 64 << 10 };     /* from which on other threads run while bytes are copied */

#if defined(__x86_64__)
#define RELAX __builtin_ia32_pause()
#else
#define RELAX ((void)0)
#endif

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The word at a byte offset of a buffer; NULL, with an error, where there is none. */
static int64_t *word_at(const Py_buffer *view, PyObject *offset) {
    Py_ssize_t at = PyLong_AsSsize_t(offset);
    if (at == -1 && PyErr_Occurred()) return NULL;
    if (at < 0 || at % 8 || at > view->len - 8) return PyErr_Format(PyExc_ValueError, "no word at byte %zd", at), NULL;
    return (int64_t *)((char *)view->buf + at);
}

static int64_t load(const int64_t *word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

/* Wait until `done(data)`, without the interpreter's lock. Return whether it is. */
static int wait_until(int (*done)(const void *), const void *data) {
    if (done(data)) return 1;
    PyThreadState *state = PyEval_SaveThread();
    int64_t end = now_ns() + WAITING;
    int found = 0;
    do {
        for (int turn = 0; turn < TURNS && !found; turn++) {
            for (int look = 0; look < LOOKS && !(found = done(data)); look++) RELAX;
            if (!found) sched_yield();
        }
    } while (!found && now_ns() < end);
    PyEval_RestoreThread(state);
    return found;
}

/* ---- one word */

typedef struct {
    const int64_t *word;
    int64_t least;
} Least;

static int has_come(const void *data) {
    const Least *wanted = data;
    return load(wanted->word) >= wanted->least;
}

static PyObject *await_word(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "await_word(memory, offset, least)");
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0) return NULL;
    Least wanted = {word_at(&view, args[1]), PyLong_AsLongLong(args[2])};
    int found = PyErr_Occurred() ? -1 : wait_until(has_come, &wanted);
    PyBuffer_Release(&view);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

/* ---- pairs of words */

enum { MOST_WORDS = 1024 }; /* of more, only the first are looked at: the wait ends soon, and the caller looks at all */

typedef struct {
    const int64_t *word[MOST_WORDS];
    Py_ssize_t count;
} Words;

static int some_differ(const void *data) {
    const Words *words = data;
    for (Py_ssize_t i = 0; i + 1 < words->count; i += 2)
        if (load(words->word[i]) != load(words->word[i + 1])) return 1;
    return 0;
}

static PyObject *await_difference(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !PyTuple_Check(args[1])) return PyErr_Format(PyExc_TypeError, "await_difference(memory, tuple of offsets)");
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_SIMPLE) < 0) return NULL;
    Words words;
    Py_ssize_t given = PyTuple_Size(args[1]), most = given < MOST_WORDS ? given : MOST_WORDS;
    int found = -1;
    for (words.count = 0; words.count < most; words.count++)
        if ((words.word[words.count] = word_at(&view, PyTuple_GetItem(args[1], words.count))) == NULL) break;
    if (!PyErr_Occurred()) found = wait_until(some_differ, &words);
    PyBuffer_Release(&view);
    return found < 0 ? NULL : PyBool_FromLong(found);
}

/* ---- bytes, and the word that tells of them */

static void copy_bytes(char *out, const char *in, Py_ssize_t bytes) {
    if (bytes < LARGE_BYTES) {
        memcpy(out, in, (size_t)bytes);
        return;
    }
    PyThreadState *state = PyEval_SaveThread();
    memcpy(out, in, (size_t)bytes);
    PyEval_RestoreThread(state);
}

/* Copy a buffer to a byte offset of another one. Return whether it could. */
static int put_bytes(const Py_buffer *view, PyObject *part) {
    Py_buffer data;
    if (!PyTuple_Check(part) || PyTuple_Size(part) != 2)
        return PyErr_Format(PyExc_TypeError, "a part is an offset and bytes, not %R", part), 0;
    Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GetItem(part, 0));
    if (PyErr_Occurred() || PyObject_GetBuffer(PyTuple_GetItem(part, 1), &data, PyBUF_SIMPLE) < 0) return 0;
    int fits = at >= 0 && data.len <= view->len && at <= view->len - data.len;
    if (fits) copy_bytes((char *)view->buf + at, data.buf, data.len);
    else PyErr_Format(PyExc_ValueError, "no room for %zd bytes at byte %zd", data.len, at);
    PyBuffer_Release(&data);
    return fits;
}

static PyObject *publish(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 4 || !PyList_Check(args[1])) return PyErr_Format(PyExc_TypeError, "publish(memory, parts, offset, value)");
    Py_buffer view;
    if (PyObject_GetBuffer(args[0], &view, PyBUF_WRITABLE) < 0) return NULL;
    int64_t *word = word_at(&view, args[2]), value = PyLong_AsLongLong(args[3]);
    int fits = !PyErr_Occurred();
    for (Py_ssize_t i = 0; fits && i < PyList_Size(args[1]); i++) fits = put_bytes(&view, PyList_GetItem(args[1], i));
    if (fits) __atomic_store_n(word, value, __ATOMIC_RELEASE);
    PyBuffer_Release(&view);
    return fits ? Py_NewRef(Py_True) : NULL;
}

/* ---- a read between two writes */

/* Copy bytes, announced to their writer meanwhile; return their version, -1 where they were being written. */
static int64_t read_between(char *out, const char *in, Py_ssize_t bytes, const int64_t *version, int64_t *announced, int64_t value) {
    __atomic_store_n(announced, value, __ATOMIC_SEQ_CST);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    int64_t before = load(version);
    if (!(before & 1)) {
        copy_bytes(out, in, bytes);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
    }
    int whole = !(before & 1) && load(version) == before;
    __atomic_store_n(announced, 0, __ATOMIC_RELEASE);
    return whole ? before >> 1 : -1;
}

static PyObject *read_version(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 7) return PyErr_Format(PyExc_TypeError, "read_version(out, memory, offset, version, mailbox, announced, value)");
    PyObject *buffers[] = {args[0], args[4], args[1]}; /* those that are written first */
    Py_buffer views[3];
    Py_ssize_t got = 0;
    while (got < 3 && PyObject_GetBuffer(buffers[got], &views[got], got < 2 ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0) got++;
    int64_t found = -1;
    if (got == 3) {
        const int64_t *version = word_at(&views[2], args[3]);
        int64_t *announced = version ? word_at(&views[1], args[5]) : NULL, value = PyLong_AsLongLong(args[6]);
        Py_ssize_t at = PyLong_AsSsize_t(args[2]), bytes = views[0].len;
        if (!PyErr_Occurred() && (at < 0 || bytes > views[2].len || at > views[2].len - bytes))
            PyErr_Format(PyExc_ValueError, "no %zd bytes at byte %zd", bytes, at);
        if (!PyErr_Occurred()) found = read_between(views[0].buf, (char *)views[2].buf + at, bytes, version, announced, value);
    }
    release(views, got);
    return PyErr_Occurred() ? NULL : PyLong_FromLongLong(found);
}

PyMethodDef shared_methods[] = {
    METHOD(await_difference), METHOD(await_word), METHOD(publish), METHOD(read_version), {NULL, NULL, 0, NULL},
};
