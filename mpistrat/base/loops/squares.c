/* Sums of squares, for norms.

In an order that does not depend on the processor, on libraries or on threads, the same as in NumPy (`squares` in __init__.py): of each
4,096 numbers, lane by lane, the lanes by halves; these sums one after the other, in double. */
#include "loops.h"

enum { LANES = 64, TOGETHER = 4096 };

typedef struct {
    const Py_buffer *values;
    double *sums; /* of each 4,096 */
} Squares;

#define SQUARES(T)                                                                                             \
    CLONES static T squares_##T(long n, const T *restrict values) {                                            \
        T lanes[LANES] = {0};                                                                                  \
        long low = 0;                                                                                          \
        for (; low + LANES <= n; low += LANES)                                                                 \
            for (int i = 0; i < LANES; i++) lanes[i] += values[low + i] * values[low + i];                     \
        for (long i = low; i < n; i++) lanes[i - low] += values[i] * values[i];                                \
        for (int half = LANES / 2; half; half /= 2)                                                            \
            for (int i = 0; i < half; i++) lanes[i] += lanes[i + half];                                        \
        return lanes[0];                                                                                       \
    }
SQUARES(float)
SQUARES(double)

static void square_range(const void *data, long low, long high) {
    const Squares *s = data;
    for (; low < high; low += TOGETHER) {
        long n = high - low < TOGETHER ? high - low : TOGETHER;
        s->sums[low / TOGETHER] = s->values->format[0] == 'f' ? (double)squares_float(n, (const float *)s->values->buf + low)
                                                              : squares_double(n, (const double *)s->values->buf + low);
    }
}

static PyObject *squares(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 1) return PyErr_Format(PyExc_TypeError, "squares(values)");
    Py_buffer view;
    Py_ssize_t got = get(args, 1, 0, &view);
    char type = got ? kind(&view) : 0;
    PyObject *done = NULL;
    if (type == 'f' || type == 'd') {
        long n = length(&view), count = (n + TOGETHER - 1) / TOGETHER;
        Squares s = {&view, PyMem_Malloc((size_t)(count ? count : 1) * sizeof(double))};
        if (s.sums == NULL) {
            PyErr_NoMemory();
        } else {
            double total = 0;
            PyThreadState *state = begin();
            in_parts(n, TOGETHER, square_range, &s);
            for (long i = 0; i < count; i++) total += s.sums[i];
            done = end(state);
            if (done != NULL) {
                Py_DECREF(done);
                done = PyFloat_FromDouble(total);
            }
        }
        PyMem_Free(s.sums);
    } else {
        done = Py_NewRef(Py_None);
    }
    release(&view, got);
    return done;
}

PyMethodDef squares_methods[] = {METHOD(squares), {NULL, NULL, 0, NULL}};
