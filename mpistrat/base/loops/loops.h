/* What all compiled loops share: which processor they are for, arrays, floating-point errors.

A loop is one pass over its arrays. A function takes objects with Python's buffer protocol and returns whether it did the work: True, or False where an array is not a
flat one, of a type it knows, as long as the others and apart from them. The caller then uses NumPy, which takes or refuses it.
The results have the same bits as NumPy's, which needs every operation rounded once, to its own type: no fused multiply-add
(-ffp-contract=off, in setup.py), no wider registers. Only which NaN comes out of two may differ.

Python's limited API from 3.11 on, which has the buffer protocol since then. No NumPy headers. */
#ifndef MPISTRAT_LOOPS_H
#define MPISTRAT_LOOPS_H
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <fenv.h>
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || FLT_EVAL_METHOD != 0
#error "these loops need IEEE arithmetic, each result rounded to its type; without them mpistrat uses NumPy"
#endif

/* The fastest version for the processor is chosen when the module is loaded, which takes glibc. */
#if defined(__x86_64__) && defined(__GLIBC__) && (defined(__clang__) ? __clang_major__ >= 14 : __GNUC__ >= 8)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#define INSTRUCTIONS (__builtin_cpu_supports("avx512f") ? "AVX-512" : __builtin_cpu_supports("avx2") ? "AVX2" : "SSE2")
#else
#define CLONES
#define INSTRUCTIONS "the compiler's default instructions"
#endif
#define ALWAYS_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

/* ---- arrays */

/* Get flat arrays of `items`, `written` of which, the first ones, are to be written. Return how many were got before one that is
not to be had; `views` of those must be released. */
static inline Py_ssize_t get(PyObject *const *items, Py_ssize_t count, Py_ssize_t written, Py_buffer *views) {
    for (Py_ssize_t i = 0; i < count; i++) {
        int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (i < written ? PyBUF_WRITABLE : 0);
        if (!PyObject_CheckBuffer(items[i]) || PyObject_GetBuffer(items[i], &views[i], flags) < 0) {
            PyErr_Clear();
            return i;
        }
    }
    return count;
}

static inline void release(Py_buffer *views, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) PyBuffer_Release(&views[i]);
}

/* 'f' float, 'd' double, 'e' float16, 'H' uint16: bits of a bfloat16; 0 for what is none of them, or not flat, or not aligned. */
static inline char kind(const Py_buffer *view) {
    if (view->ndim != 1 || view->format == NULL || view->format[0] == 0 || view->format[1] != 0) return 0;
    if ((uintptr_t)view->buf % (uintptr_t)view->itemsize) return 0;
    return strchr("fdeH", view->format[0]) ? view->format[0] : 0;
}

static inline long length(const Py_buffer *view) { return (long)(view->len / view->itemsize); }

static inline int overlap(const Py_buffer *first, const Py_buffer *second) {
    const char *a = first->buf, *b = second->buf;
    return a < b + second->len && b < a + first->len;
}

/* ---- floating-point errors */

#define ERRORS (FE_DIVBYZERO | FE_OVERFLOW | FE_INVALID)

/* Begin a loop: without the interpreter's lock, and with none of the errors that are reported after it. */
static inline PyThreadState *begin(void) {
    PyThreadState *state = PyEval_SaveThread();
    feclearexcept(ERRORS);
    return state;
}

/* End a loop: report its floating-point errors as NumPy does. Return True, or NULL if that raises. */
static inline PyObject *end(PyThreadState *state) {
    int raised = fetestexcept(ERRORS);
    PyEval_RestoreThread(state);
    if (raised) {
        PyObject *loops = PyImport_ImportModule("mpistrat.base.loops"), *done = NULL;
        if (loops != NULL)
            done = PyObject_CallMethod(loops, "report", "iii", !!(raised & FE_DIVBYZERO), !!(raised & FE_OVERFLOW),
                                       !!(raised & FE_INVALID));
        Py_XDECREF(loops);
        if (done == NULL) return NULL;
        Py_DECREF(done);
    }
    Py_RETURN_TRUE;
}

/* ---- threads */

/* Do a loop on elements [low, high). Elements do not depend on each other, so results are the same however they are cut. */
typedef void (*Work)(const void *data, long low, long high);

enum { UNIT = 64 }; /* elements: no two threads write one cache line */

/* Do all of [0, n), on the threads that `set_threads` allows, each on multiples of `unit`; their errors are this thread's then. */
void in_parts(long n, long unit, Work work, const void *data);

/* ---- sums */

/* Write the sum of elements [low, high) of the parts, which are of the kinds that `is_part` allows, from out[0] on. */
void sum_float(float *out, const Py_buffer *parts, Py_ssize_t count, long low, long high);
void sum_double(double *out, const Py_buffer *parts, Py_ssize_t count, long low, long high);

static inline int is_part(char part, char sum) { return part == sum || (sum == 'f' && (part == 'e' || part == 'H')); }

/* Round to 16 bits, raising overflow where a finite number becomes infinite; and widen. */
void narrow_to(char type, long n, uint16_t *restrict out, const float *restrict in);
void widen_from(char type, long n, float *restrict out, const uint16_t *restrict in);

/* ---- update rules */

enum { MOST_SLOTS = 3, MOST_NUMBERS = 5 };

/* Update n weights and their slots by a gradient, which is only read; NULL for a slot that is not there. */
typedef void (*FloatRule)(long n, float *w, const float *gradient, float *const *slots, const double *number);
typedef void (*DoubleRule)(long n, double *w, const double *gradient, double *const *slots, const double *number);

typedef struct {
    const char *name;
    int slots, numbers;
    int needed; /* so many slots, the first ones, are always there */
    int writes_weights;
    FloatRule of_float;
    DoubleRule of_double;
} Rule;

extern const Rule rules[]; /* the last one has no name */

/* ---- the module */

#define METHOD(NAME) {#NAME, (PyCFunction)(void (*)(void))NAME, METH_FASTCALL, NULL}

/* The functions of each file, for the module. */
extern PyMethodDef barrier_methods[], codecs_methods[], copies_methods[], filters_methods[], rows_methods[];
extern PyMethodDef shared_methods[], squares_methods[], sums_methods[], threads_methods[], update_methods[];

#endif
