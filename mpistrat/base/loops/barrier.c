/* The barrier of the ranks of a node. comm/node.py describes it, and has it in Python, too: both kinds of rank meet in one. */
#include "loops.h"
#include <sched.h>
#include <time.h>

enum { PAGE_WORDS = 512, SEQUENCE = 0, TAG = 1 }; /* of the control page of a rank, in words of 8 bytes */
enum { YIELDING = 1000000 };                      /* ns; who has not come by then may be long in coming */

static int64_t clock_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* The first of the ranks, from `from` on, that has not come. */
static Py_ssize_t missing(const int64_t *words, Py_ssize_t ranks, Py_ssize_t from, int64_t sequence) {
    while (from < ranks && __atomic_load_n(&words[from * PAGE_WORDS + SEQUENCE], __ATOMIC_ACQUIRE) >= sequence) from++;
    return from;
}

/* Wait for the others, at first for `spin` ns without a pause or letting other threads of this process run. Return whether all
came. */
static int wait_for(const int64_t *words, Py_ssize_t ranks, int64_t sequence, int64_t spin, int64_t *waited) {
    Py_ssize_t first = missing(words, ranks, 0, sequence);
    *waited = 0;
    if (first == ranks) return 1;
    int64_t began = clock_ns();
    while (first < ranks && *waited < spin) {
        *waited = clock_ns() - began;
        first = missing(words, ranks, first, sequence);
    }
    if (first < ranks) {
        PyThreadState *state = PyEval_SaveThread();
        while (first < ranks && *waited < YIELDING) {
            sched_yield();
            *waited = clock_ns() - began;
            first = missing(words, ranks, first, sequence);
        }
        PyEval_RestoreThread(state);
    }
    return first == ranks;
}

static PyObject *meet(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5) return PyErr_Format(PyExc_TypeError, "meet(pages, rank, sequence, tag, spin)");
    long long rank = PyLong_AsLongLong(args[1]), sequence = PyLong_AsLongLong(args[2]);
    long long tag = PyLong_AsLongLong(args[3]), spin = PyLong_AsLongLong(args[4]);
    Py_buffer view;
    if (PyErr_Occurred() || PyObject_GetBuffer(args[0], &view, PyBUF_WRITABLE) < 0) return NULL;
    int64_t *words = view.buf, waited;
    Py_ssize_t ranks = view.len / (PAGE_WORDS * (Py_ssize_t)sizeof *words), at = TAG + (sequence & 1);
    if (rank < 0 || rank >= ranks) {
        PyBuffer_Release(&view);
        return PyErr_Format(PyExc_ValueError, "meet: no page of rank %lld", rank);
    }
    __atomic_store_n(&words[rank * PAGE_WORDS + at], tag, __ATOMIC_RELAXED);
    __atomic_store_n(&words[rank * PAGE_WORDS + SEQUENCE], sequence, __ATOMIC_RELEASE);
    int64_t result = -1;
    if (!wait_for(words, ranks, sequence, spin, &waited)) {
        result = -2 - waited;
    } else {
        Py_ssize_t alike = 0;
        while (alike < ranks && __atomic_load_n(&words[alike * PAGE_WORDS + at], __ATOMIC_RELAXED) == tag) alike++;
        if (alike == ranks) result = waited;
    }
    PyBuffer_Release(&view);
    return PyLong_FromLongLong(result);
}

PyMethodDef barrier_methods[] = {METHOD(meet), {NULL, NULL, 0, NULL}};
