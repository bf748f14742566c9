/* The update rules of the optimizers. */
#include "loops.h"

#define REAL float
#define NAME(function) function##_float
#define SQRT sqrtf
#include "rules_of_type.h"
#undef REAL
#undef NAME
#undef SQRT
#define REAL double
#define NAME(function) function##_double
#define SQRT sqrt
#include "rules_of_type.h"
#undef REAL
#undef NAME
#undef SQRT

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

PyMethodDef rules_methods[] = {METHOD(adam), METHOD(sgd), METHOD(adagrad), METHOD(rmsprop), {NULL, NULL, 0, NULL}};
