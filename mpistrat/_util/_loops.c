/* The loops that take most of a step's time: sums of gradients and update rules, each one pass over its arrays.

A function takes objects with Python's buffer protocol and returns whether it did the work: True, or False where an array is not a
flat one, of a type it knows, as long as the others and apart from them. The caller then uses NumPy, which takes or refuses it.
The results have the same bits as NumPy's, which needs every operation rounded once, to its own type: no fused multiply-add
(-ffp-contract=off, in setup.py), no wider registers. Only which NaN comes out of two may differ.

Python's limited API from 3.11 on, which has the buffer protocol since then. No NumPy headers. */
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

#define REAL float
#define NAME(function) function##_float
#define SQRT sqrtf
#include "_loops_rules.h"
#undef REAL
#undef NAME
#undef SQRT
#define REAL double
#define NAME(function) function##_double
#define SQRT sqrt
#include "_loops_rules.h"
#undef REAL
#undef NAME
#undef SQRT

static ALWAYS_INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static ALWAYS_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* float16: fraction and exponent move to float32's place; a subnormal number is an integer times 2^-24, exactly. One of the two is
taken by a mask: with a choice between floats the loop would not be done in vectors. */
static ALWAYS_INLINE float from_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t shifted = (rest << 13) + (rest >= 0x7c00 ? (255u - 31u) << 23 : (127u - 15u) << 23);
    uint32_t is_subnormal = -(uint32_t)(rest < 0x0400);
    uint32_t subnormal = bits_of((float)(int32_t)rest * 0x1p-24f);
    return float_of(sign | (subnormal & is_subnormal) | (shifted & ~is_subnormal));
}

static ALWAYS_INLINE float from_bfloat16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

CLONES static void copy_float16(long n, float *restrict out, const uint16_t *restrict in) {
    for (long i = 0; i < n; i++) out[i] = from_float16(in[i]);
}

CLONES static void copy_bfloat16(long n, float *restrict out, const uint16_t *restrict in) {
    for (long i = 0; i < n; i++) out[i] = from_bfloat16(in[i]);
}

CLONES static void add_float16(long n, float *restrict out, const uint16_t *restrict in) {
    for (long i = 0; i < n; i++) out[i] += from_float16(in[i]);
}

CLONES static void add_bfloat16(long n, float *restrict out, const uint16_t *restrict in) {
    for (long i = 0; i < n; i++) out[i] += from_bfloat16(in[i]);
}

/* To the nearest float16, of two the even one: a subnormal one by what an addition to 1/2 rounds off, by masks as above. Return
whether a finite number became infinite. */
CLONES static int narrow_float16(long n, uint16_t *restrict out, const float *restrict in) {
    uint32_t overflown = 0;
    for (long i = 0; i < n; i++) {
        uint32_t bits = bits_of(in[i]), rest = bits & 0x7fffffff;
        uint32_t normal = (rest - ((127u - 15u) << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
        uint32_t is_subnormal = -(uint32_t)(rest < (127u - 14u) << 23);
        uint32_t subnormal = bits_of(float_of(rest & is_subnormal) + 0.5f) - bits_of(0.5f);
        uint32_t is_large = -(uint32_t)(rest >= (127u + 16u) << 23);
        uint32_t large = 0x7c00 | (-(uint32_t)(rest > 0x7f800000) & 0x200);
        uint32_t half = (is_subnormal & subnormal) | (is_large & large) | (~is_subnormal & ~is_large & normal);
        overflown |= (uint32_t)(half == 0x7c00) & (uint32_t)(rest < 0x7f800000);
        out[i] = (uint16_t)(half | (bits >> 16 & 0x8000));
    }
    return (int)overflown;
}

/* To the nearest bfloat16, of two the even one; a NaN stays one. */
CLONES static void narrow_bfloat16(long n, uint16_t *restrict out, const float *restrict in) {
    for (long i = 0; i < n; i++) {
        uint32_t bits = bits_of(in[i]), is_nan = -(uint32_t)((bits & 0x7fffffff) > 0x7f800000);
        uint32_t nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        out[i] = (uint16_t)((is_nan & (bits >> 16 | 0x40)) | (~is_nan & nearest));
    }
}

/* ---- arrays */

/* Get flat arrays of `items`, `written` of which, the first ones, are to be written. Return how many were got before one that is
not to be had; `views` of those must be released. */
static Py_ssize_t get(PyObject *const *items, Py_ssize_t count, Py_ssize_t written, Py_buffer *views) {
    for (Py_ssize_t i = 0; i < count; i++) {
        int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (i < written ? PyBUF_WRITABLE : 0);
        if (!PyObject_CheckBuffer(items[i]) || PyObject_GetBuffer(items[i], &views[i], flags) < 0) {
            PyErr_Clear();
            return i;
        }
    }
    return count;
}

static void release(Py_buffer *views, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++) PyBuffer_Release(&views[i]);
}

/* 'f' float, 'd' double, 'e' float16, 'H' uint16: bits of a bfloat16; 0 for what is none of them, or not flat, or not aligned. */
static char kind(const Py_buffer *view) {
    if (view->ndim != 1 || view->format == NULL || view->format[0] == 0 || view->format[1] != 0) return 0;
    if ((uintptr_t)view->buf % (uintptr_t)view->itemsize) return 0;
    return strchr("fdeH", view->format[0]) ? view->format[0] : 0;
}

static long length(const Py_buffer *view) { return (long)(view->len / view->itemsize); }

static int overlap(const Py_buffer *first, const Py_buffer *second) {
    const char *a = first->buf, *b = second->buf;
    return a < b + second->len && b < a + first->len;
}

/* Begin a loop: without the interpreter's lock, and with none of the errors that are reported after it. */
static PyThreadState *begin(void) {
    PyThreadState *state = PyEval_SaveThread();
    feclearexcept(FE_DIVBYZERO | FE_OVERFLOW | FE_INVALID);
    return state;
}

/* End a loop: report its floating-point errors as NumPy does. Return True, or NULL if that raises. */
static PyObject *end(PyThreadState *state) {
    int raised = fetestexcept(FE_DIVBYZERO | FE_OVERFLOW | FE_INVALID);
    PyEval_RestoreThread(state);
    if (raised) {
        PyObject *loops = PyImport_ImportModule("mpistrat._util.loops"), *done = NULL;
        if (loops != NULL)
            done = PyObject_CallMethod(loops, "report", "iii", !!(raised & FE_DIVBYZERO), !!(raised & FE_OVERFLOW),
                                       !!(raised & FE_INVALID));
        Py_XDECREF(loops);
        if (done == NULL) return NULL;
        Py_DECREF(done);
    }
    Py_RETURN_TRUE;
}

/* ---- sums */

enum { PIECE = 2048 }; /* numbers of a sum that stay in the fastest cache while part after part is added to them */

static void sum_float(long n, float *out, Py_buffer *parts, Py_ssize_t count) {
    for (long low = 0; low < n; low += PIECE) {
        long size = n - low < PIECE ? n - low : PIECE;
        float *to = out + low;
        for (Py_ssize_t i = 0; i < count; i++) {
            const uint16_t *half = (const uint16_t *)parts[i].buf + low;
            const float *part = (const float *)parts[i].buf + low;
            switch (parts[i].format[0]) {
            case 'e':
                if (i) add_float16(size, to, half);
                else copy_float16(size, to, half);
                break;
            case 'H':
                if (i) add_bfloat16(size, to, half);
                else copy_bfloat16(size, to, half);
                break;
            default:
                if (i == 0 && count > 1 && parts[1].format[0] == 'f') {
                    add_float(size, to, part, (const float *)parts[1].buf + low);
                    i = 1;
                } else if (i) add_float(size, to, to, part);
                else memmove(to, part, (size_t)size * sizeof *to);
            }
        }
    }
}

static void sum_double(long n, double *out, Py_buffer *parts, Py_ssize_t count) {
    for (long low = 0; low < n; low += PIECE) {
        long size = n - low < PIECE ? n - low : PIECE;
        const double *first = (const double *)parts[0].buf + low;
        if (count == 1) memmove(out + low, first, (size_t)size * sizeof *out);
        for (Py_ssize_t i = 1; i < count; i++)
            add_double(size, out + low, i == 1 ? first : out + low, (const double *)parts[i].buf + low);
    }
}

/* Whether the sum of views[1:] can be formed in views[0]: a part may be it, exactly, but not lie across it. */
static int summable(const Py_buffer *views, Py_ssize_t count) {
    char type = kind(&views[0]);
    if (type != 'f' && type != 'd') return 0;
    for (Py_ssize_t i = 1; i < count; i++) {
        char part = kind(&views[i]);
        if (part != type && !(type == 'f' && (part == 'e' || part == 'H'))) return 0;
        if (length(&views[i]) != length(&views[0])) return 0;
        if (overlap(&views[0], &views[i]) && !(part == type && views[i].buf == views[0].buf)) return 0;
    }
    return 1;
}

static PyObject *add(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2 || !PyList_Check(args[1])) return PyErr_Format(PyExc_TypeError, "add(out, list of parts)");
    Py_ssize_t count = 1 + PyList_Size(args[1]);
    if (count == 1) Py_RETURN_FALSE;
    Py_buffer *views = PyMem_Malloc((size_t)count * sizeof *views);
    PyObject **items = PyMem_Malloc((size_t)count * sizeof *items);
    PyObject *done = NULL;
    if (views == NULL || items == NULL) {
        PyErr_NoMemory();
    } else {
        items[0] = args[0];
        for (Py_ssize_t i = 1; i < count; i++) items[i] = PyList_GetItem(args[1], i - 1);
        Py_ssize_t got = get(items, count, 1, views);
        if (got == count && summable(views, count)) {
            PyThreadState *state = begin();
            if (views[0].format[0] == 'f') sum_float(length(views), views[0].buf, views + 1, count - 1);
            else sum_double(length(views), views[0].buf, views + 1, count - 1);
            done = end(state);
        } else {
            done = Py_NewRef(Py_False);
        }
        release(views, got);
    }
    PyMem_Free(views);
    PyMem_Free(items);
    return done;
}

static PyObject *narrow(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "narrow(out, values)");
    Py_buffer views[2];
    PyObject *done = NULL;
    Py_ssize_t got = get(args, 2, 1, views);
    char to = got == 2 ? kind(&views[0]) : 0;
    if ((to == 'e' || to == 'H') && kind(&views[1]) == 'f' && length(&views[0]) == length(&views[1]) &&
        !overlap(&views[0], &views[1])) {
        PyThreadState *state = begin();
        if (to == 'H') narrow_bfloat16(length(&views[0]), views[0].buf, views[1].buf);
        else if (narrow_float16(length(&views[0]), views[0].buf, views[1].buf)) feraiseexcept(FE_OVERFLOW);
        done = end(state);
    } else {
        done = Py_NewRef(Py_False);
    }
    release(views, got);
    return done;
}

/* ---- update rules */

enum { MOST_ARRAYS = 5, MOST_NUMBERS = 5 };

/* The arguments of a rule: its arrays, of which the gradient is not written, and its numbers. */
typedef struct {
    Py_buffer views[MOST_ARRAYS];
    void *array[MOST_ARRAYS]; /* in the order of the arguments; NULL for None */
    double number[MOST_NUMBERS];
    Py_ssize_t got;
    long n;
    char type;
} Arguments;

/* Read `arrays` and then `numbers`. Return 1; 0 if the arrays are not for these loops; -1 with an exception. `release` the views. */
static int read_arguments(const char *name, PyObject *const *args, Py_ssize_t nargs, int arrays, int numbers, Arguments *to) {
    PyObject *items[MOST_ARRAYS];
    Py_ssize_t count = 0;
    to->got = 0;
    if (nargs != arrays + numbers) {
        PyErr_Format(PyExc_TypeError, "%s takes %d arrays and %d numbers", name, arrays, numbers);
        return -1;
    }
    for (int i = 0; i < numbers; i++) {
        to->number[i] = PyFloat_AsDouble(args[arrays + i]);
        if (to->number[i] == -1.0 && PyErr_Occurred()) return -1;
    }
    /* The gradient, which comes first, is only read, and so it is got by itself. */
    for (int i = 1; i < arrays; i++)
        if (args[i] != Py_None) items[count++] = args[i];
    to->got = get(items, count, count, to->views);
    if (to->got < count || get(args, 1, 0, to->views + count) == 0) return 0;
    to->got++;
    to->type = kind(&to->views[0]);
    to->n = length(&to->views[0]);
    if (to->type != 'f' && to->type != 'd') return 0;
    for (Py_ssize_t i = 0; i <= count; i++) {
        if (kind(&to->views[i]) != to->type || length(&to->views[i]) != to->n) return 0;
        for (Py_ssize_t j = 0; j < i; j++)
            if (overlap(&to->views[i], &to->views[j])) return 0;
    }
    to->array[0] = to->views[count].buf;
    count = 0;
    for (int i = 1; i < arrays; i++) to->array[i] = args[i] == Py_None ? NULL : to->views[count++].buf;
    return 1;
}

/* A rule as a method: NAME(gradient, array, ..., number, ...), whose loop is CALL(float) or CALL(double). */
#define RULE(NAME, ARRAYS, NUMBERS, CALL)                                                               \
    static PyObject *NAME(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {       \
        Arguments a;                                                                                    \
        PyObject *done = NULL;                                                                          \
        int taken = read_arguments(#NAME, args, nargs, ARRAYS, NUMBERS, &a);                            \
        if (taken > 0) {                                                                                \
            PyThreadState *state = begin();                                                             \
            if (a.type == 'f') CALL(float)                                                              \
            else CALL(double)                                                                           \
            done = end(state);                                                                          \
        } else if (taken == 0) {                                                                        \
            done = Py_NewRef(Py_False);                                                                 \
        }                                                                                               \
        release(a.views, a.got);                                                                        \
        return done;                                                                                    \
    }

/* gradient, weights, momentum, velocity, velocity_hat; alpha, 1 - beta_1, 1 - beta_2, epsilon */
#define ADAM(T)                                                                                                    \
    {                                                                                                              \
        T alpha = (T)a.number[0], rest_1 = (T)a.number[1], rest_2 = (T)a.number[2], epsilon = (T)a.number[3];      \
        if (a.array[4])                                                                                            \
            amsgrad_##T(a.n, a.array[1], a.array[0], a.array[2], a.array[3], a.array[4], alpha, rest_1, rest_2, epsilon); \
        else adam_##T(a.n, a.array[1], a.array[0], a.array[2], a.array[3], alpha, rest_1, rest_2, epsilon);        \
    }
RULE(adam, 5, 4, ADAM)

/* gradient, weights, momentum; rate, momentum, nesterov */
#define SGD(T)                                                                                \
    {                                                                                         \
        T rate = (T)a.number[0], kept = (T)a.number[1];                                       \
        if (!a.array[2]) sgd_##T(a.n, a.array[1], a.array[0], rate);                          \
        else if (a.number[2]) nesterov_##T(a.n, a.array[1], a.array[0], a.array[2], rate, kept); \
        else momentum_##T(a.n, a.array[1], a.array[0], a.array[2], rate, kept);               \
    }
RULE(sgd, 3, 3, SGD)

/* gradient, weights, accumulator; rate, epsilon */
#define ADAGRAD(T) { adagrad_##T(a.n, a.array[1], a.array[0], a.array[2], (T)a.number[0], (T)a.number[1]); }
RULE(adagrad, 3, 2, ADAGRAD)

/* gradient, weights, velocity, average_gradient, momentum; rate, rho, 1 - rho, momentum, epsilon */
#define RMSPROP(T)                                                                                                \
    {                                                                                                             \
        rmsprop_##T(a.n, a.array[1], a.array[0], a.array[2], a.array[3], a.array[4], (T)a.number[0], (T)a.number[1], \
                    (T)a.number[2], (T)a.number[3], (T)a.number[4]);                                              \
    }
RULE(rmsprop, 5, 5, RMSPROP)

/* ---- the module; _loops.pyi says what its functions take */

#define METHOD(NAME) {#NAME, (PyCFunction)(void (*)(void))NAME, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {METHOD(add), METHOD(narrow), METHOD(adam), METHOD(sgd), METHOD(adagrad),
                                METHOD(rmsprop), {NULL, NULL, 0, NULL}};

static int set_up(PyObject *module) { return PyModule_AddStringConstant(module, "INSTRUCTIONS", INSTRUCTIONS); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)set_up},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_loops", .m_methods = methods, .m_slots = slots,
};

PyMODINIT_FUNC PyInit__loops(void) { return PyModuleDef_Init(&definition); }
