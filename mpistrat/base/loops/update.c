/* A block of a step in one pass: the sum of its gradients, all that is done to it and to the weights, the rule, the averages.

Piece by piece, each of which stays in the fastest cache meanwhile: memory is read and written once. Pieces are so short that the
processor reads the next one ahead while it computes with one: with 2,048 elements it takes up to 1.8 times as long. */
#include "loops.h"

enum { PIECE = 256 }; /* elements */

/* Elements that are multiplied by something. */
typedef struct {
    long low, high;
    double factor;
} Span;

/* In their order, apart from each other. */
typedef struct {
    Span *span;
    Py_ssize_t count;
} Spans;

typedef struct {
    const Rule *rule;
    double number[MOST_NUMBERS];
    void *weights, *slots[MOST_SLOTS];
    char type; /* of the weights; sums and slots are of `wide` */
    char wide;
    const Py_buffer *parts;
    Py_ssize_t count;
    Spans scales, decays;
    int clips, overwrites;
    double limit, calls, kept, rest, factor;
    void *sum, *averages; /* NULL for none */
} Update;

/* Return the first span that does not end at or before an element. */
static long first_span(const Spans *spans, long element) {
    long low = 0, high = (long)spans->count;
    while (low < high) {
        long middle = (low + high) / 2;
        if (spans->span[middle].high <= element) low = middle + 1;
        else high = middle;
    }
    return low;
}

static float *widened(const Update *u, float *wide, long low, long n) {
    if (u->type == 'f') return (float *)u->weights + low;
    if (u->rule->writes_weights || u->averages) widen_from(u->type, n, wide, (const uint16_t *)u->weights + low);
    return wide;
}

static void narrowed(const Update *u, const float *wide, long low, long n) {
    if (u->type != 'f') narrow_to(u->type, n, (uint16_t *)u->weights + low, wide);
}

#define REAL float
#define NAME(function) function##_float
#define APPLY of_float
#define WIDEN(U, TO, LOW, N) widened(U, TO, LOW, N)
#define NARROW(U, FROM, LOW, N) narrowed(U, FROM, LOW, N)
#include "update_of_type.h"
#undef REAL
#undef NAME
#undef APPLY
#undef WIDEN
#undef NARROW
#define REAL double
#define NAME(function) function##_double
#define APPLY of_double
#define WIDEN(U, TO, LOW, N) ((void)(TO), (double *)(U)->weights + (LOW))
#define NARROW(U, FROM, LOW, N) ((void)0)
#include "update_of_type.h"

static void update_range(const void *data, long low, long high) {
    const Update *u = data;
    for (; low < high; low += PIECE) {
        long end = low + PIECE < high ? low + PIECE : high;
        if (u->wide == 'f') update_piece_float(u, low, end);
        else update_piece_double(u, low, end);
    }
}

/* ---- the arguments */

static const Rule *rule_named(PyObject *name) {
    for (const Rule *rule = rules; rule->name; rule++)
        if (PyUnicode_CompareWithASCIIString(name, rule->name) == 0) return rule;
    PyErr_Format(PyExc_TypeError, "update: no rule is %R", name);
    return NULL;
}

/* Read a tuple (or a list) of numbers; return whether it is one, with `count` of them. */
static int read_numbers(PyObject *numbers, Py_ssize_t count, double *to) {
    if (!PyTuple_Check(numbers) || PyTuple_Size(numbers) != count) {
        PyErr_Format(PyExc_TypeError, "update: %zd numbers, not %R", count, numbers);
        return 0;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        to[i] = PyFloat_AsDouble(PyTuple_GetItem(numbers, i));
        if (to[i] == -1.0 && PyErr_Occurred()) return 0;
    }
    return 1;
}

/* Return whether a number is an index of an element that a long can hold, and a double exactly: not NaN or infinite. */
static int is_index(double number) {
    if (fabs(number) < 9007199254740992.0) return 1;
    PyErr_SetString(PyExc_ValueError, "update: a span has a border that is not an index");
    return 0;
}

/* Read a list of (low, high, factor); `to->span` must be freed. */
static int read_spans(PyObject *list, Spans *to) {
    if (!PyList_Check(list)) return PyErr_Format(PyExc_TypeError, "update: a list of spans, not %R", list), 0;
    Py_ssize_t count = PyList_Size(list);
    if (count == 0) return 1;
    to->span = PyMem_Malloc((size_t)count * sizeof *to->span);
    if (to->span == NULL) return PyErr_NoMemory(), 0;
    for (; to->count < count; to->count++) {
        double number[3];
        if (!read_numbers(PyList_GetItem(list, to->count), 3, number)) return 0;
        if (!is_index(number[0]) || !is_index(number[1])) return 0;
        to->span[to->count] = (Span){(long)number[0], (long)number[1], number[2]};
    }
    return 1;
}

/* What else happens: (limit or None, scales, decays, sum or None, calls, averages or None, momentum, whether they overwrite, factor). */
enum { LIMIT, SCALES, DECAYS, SUM, CALLS, AVERAGES, MOMENTUM, OVERWRITES, FACTOR, AROUND };

static int read_around(PyObject *around, Update *u) {
    double number[5] = {0};
    const int which[5] = {LIMIT, CALLS, MOMENTUM, OVERWRITES, FACTOR};
    if (!PyTuple_Check(around) || PyTuple_Size(around) != AROUND)
        return PyErr_Format(PyExc_TypeError, "update: what else happens is a tuple of %d, not %R", AROUND, around), 0;
    for (int i = 0; i < 5; i++) {
        PyObject *item = PyTuple_GetItem(around, which[i]);
        if (item != Py_None) number[i] = PyFloat_AsDouble(item);
        if (number[i] == -1.0 && PyErr_Occurred()) return 0;
    }
    u->clips = PyTuple_GetItem(around, LIMIT) != Py_None;
    u->limit = number[0];
    u->calls = number[1];
    u->kept = number[2];
    u->rest = 1 - number[2];
    u->overwrites = number[3] != 0;
    u->factor = number[4];
    return read_spans(PyTuple_GetItem(around, SCALES), &u->scales) && read_spans(PyTuple_GetItem(around, DECAYS), &u->decays);
}

/* The arrays of a call: first those that are written, None left out; then the parts. */
typedef struct {
    PyObject **items;
    void ***to; /* where the address of each that is written belongs */
    Py_buffer *views;
    Py_ssize_t written, count, got;
} Arrays;

static void add_written(Arrays *a, PyObject *item, void **to) {
    if (item == Py_None) return;
    a->items[a->written] = item;
    a->to[a->written++] = to;
}

/* Get the arrays; return whether they are for this loop: flat, of one length, of types that fit, and apart. */
static int get_arrays(Arrays *a, Update *u) {
    a->got = get(a->items, a->written, a->written, a->views);
    if (a->got < a->written) return 0;
    a->got += get(a->items + a->written, a->count - a->written, 0, a->views + a->written);
    if (a->got < a->count) return 0;
    u->type = kind(&a->views[0]);
    u->wide = u->type == 'd' ? 'd' : 'f';
    if (u->type == 0) return 0;
    for (Py_ssize_t i = 0; i < a->count; i++) {
        char type = kind(&a->views[i]);
        if (length(&a->views[i]) != length(&a->views[0])) return 0;
        if (i && !(i < a->written ? type == u->wide : is_part(type, u->wide))) return 0;
        for (Py_ssize_t j = 0; j < i && j < a->written; j++)
            if (overlap(&a->views[i], &a->views[j])) return 0;
        if (i < a->written) *a->to[i] = a->views[i].buf;
    }
    u->parts = a->views + a->written;
    u->count = a->count - a->written;
    return 1;
}

/* List the arrays of the arguments; memory of `a` must be freed. */
static int list_arrays(PyObject *const *args, Arrays *a, Update *u) {
    Py_ssize_t parts = PyList_Size(args[2]), most = parts + MOST_SLOTS + 3;
    a->items = PyMem_Malloc((size_t)most * sizeof *a->items);
    a->to = PyMem_Malloc((size_t)most * sizeof *a->to);
    a->views = PyMem_Malloc((size_t)most * sizeof *a->views);
    if (a->items == NULL || a->to == NULL || a->views == NULL) return PyErr_NoMemory(), 0;
    a->items[a->written] = args[3];
    a->to[a->written++] = &u->weights;
    for (int i = 0; i < u->rule->slots; i++) add_written(a, PyTuple_GetItem(args[4], i), &u->slots[i]);
    add_written(a, PyTuple_GetItem(args[5], SUM), &u->sum);
    add_written(a, PyTuple_GetItem(args[5], AVERAGES), &u->averages);
    for (a->count = a->written; a->count < a->written + parts; a->count++)
        a->items[a->count] = PyList_GetItem(args[2], a->count - a->written);
    return 1;
}

static int read_arguments(PyObject *const *args, Py_ssize_t nargs, Arrays *a, Update *u) {
    if (nargs != 6 || !PyUnicode_Check(args[0]) || !PyList_Check(args[2]) || PyList_Size(args[2]) == 0)
        return PyErr_Format(PyExc_TypeError, "update(rule, numbers, list of parts, weights, slots, what else happens)"), 0;
    u->rule = rule_named(args[0]);
    if (u->rule == NULL || !read_numbers(args[1], u->rule->numbers, u->number)) return 0;
    if (!PyTuple_Check(args[4]) || PyTuple_Size(args[4]) != u->rule->slots)
        return PyErr_Format(PyExc_TypeError, "update: %s has %d slots, not %R", u->rule->name, u->rule->slots, args[4]), 0;
    for (int i = 0; i < u->rule->needed; i++)
        if (PyTuple_GetItem(args[4], i) == Py_None)
            return PyErr_Format(PyExc_TypeError, "update: %s needs its slot %d, got None", u->rule->name, i), 0;
    return read_around(args[5], u) && list_arrays(args, a, u);
}

static PyObject *update(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    Update u = {0};
    Arrays a = {0};
    PyObject *done = NULL;
    if (read_arguments(args, nargs, &a, &u)) {
        if (get_arrays(&a, &u)) {
            PyThreadState *state = begin();
            in_parts(length(a.views), UNIT, update_range, &u);
            done = end(state);
        } else {
            done = Py_NewRef(Py_False);
        }
        release(a.views, a.got);
    }
    PyMem_Free(a.items);
    PyMem_Free(a.to);
    PyMem_Free(a.views);
    PyMem_Free(u.scales.span);
    PyMem_Free(u.decays.span);
    return done;
}

PyMethodDef update_methods[] = {METHOD(update), {NULL, NULL, 0, NULL}};
