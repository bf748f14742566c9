/* Sums of arrays, as cross_device/arithmetic.py forms them, and numbers rounded to 16 bits. */
#include "half.h"

/* out = first + second; either may be `out` itself. */
CLONES static void add_float(long n, float *out, const float *first, const float *second) {
    INDEPENDENT
    for (long i = 0; i < n; i++) out[i] = first[i] + second[i];
}

CLONES static void add_double(long n, double *out, const double *first, const double *second) {
    INDEPENDENT
    for (long i = 0; i < n; i++) out[i] = first[i] + second[i];
}

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

PyMethodDef sums_methods[] = {METHOD(add), METHOD(narrow), {NULL, NULL, 0, NULL}};
