/* Forms of float32 that travel between nodes, as arena/wire.py describes them. What is not finite is no error here. */
#include "half.h"

enum { BLOCK = 4096, FRAME = BLOCK + 4 }; /* numbers that share a scale; their bytes, with it */

static int32_t largest_bits(long n, const float *values) {
    int32_t largest = 0;
    for (long i = 0; i < n; i++) {
        int32_t bits = (int32_t)(bits_of(values[i]) & 0x7fffffff);
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* The nearest multiples of `scale`; an addition rounds to an integer, of two to the even one. */
static void quantize(long n, int8_t *restrict out, const float *restrict values, float scale) {
    for (long i = 0; i < n; i++) {
        float number = (values[i] / scale + 0x1.8p23f) - 0x1.8p23f;
        number = number > 127.0f ? 127.0f : number < -127.0f ? -127.0f : number;
        out[i] = (int8_t)(int32_t)number;
    }
}

CLONES static void encode_blocks(long n, char *restrict out, const float *restrict values) {
    for (long low = 0; low < n; low += BLOCK, out += FRAME) {
        long size = n - low < BLOCK ? n - low : BLOCK;
        int32_t largest = largest_bits(size, values + low);
        float scale = largest < 0x7f800000 ? float_of((uint32_t)largest) / 127.0f : float_of(0x7fc00000);
        memcpy(out, &scale, sizeof scale);
        if (scale > 0.0f) quantize(size, (int8_t *)out + sizeof scale, values + low, scale);
        else memset(out + sizeof scale, 0, (size_t)size);
    }
}

CLONES static void decode_blocks(long n, float *restrict out, const char *restrict in) {
    for (long low = 0; low < n; low += BLOCK, in += FRAME) {
        long size = n - low < BLOCK ? n - low : BLOCK;
        float scale;
        memcpy(&scale, in, sizeof scale);
        const int8_t *numbers = (const int8_t *)in + sizeof scale;
        for (long i = 0; i < size; i++) out[low + i] = (float)numbers[i] * scale;
    }
}

CLONES static void add_decoded_blocks(long n, float *restrict out, const char *restrict in) {
    for (long low = 0; low < n; low += BLOCK, in += FRAME) {
        long size = n - low < BLOCK ? n - low : BLOCK;
        float scale;
        memcpy(&scale, in, sizeof scale);
        const int8_t *numbers = (const int8_t *)in + sizeof scale;
        for (long i = 0; i < size; i++) out[low + i] += (float)numbers[i] * scale;
    }
}

CLONES static void subtract_finite(long n, float *restrict out, const float *restrict first, const float *restrict second) {
    for (long i = 0; i < n; i++) {
        uint32_t bits = bits_of(first[i] - second[i]);
        out[i] = float_of(bits & -(uint32_t)((bits & 0x7fffffff) < 0x7f800000));
    }
}

/* ---- */

static int is_bytes(const Py_buffer *view) { return view->ndim == 1 && view->format != NULL && strcmp(view->format, "B") == 0; }

/* Whether these are flat float32 and the bytes of as many of them, apart from each other. */
static int fit(const Py_buffer *numbers, const Py_buffer *bytes) {
    if (kind(numbers) != 'f' || !is_bytes(bytes) || overlap(numbers, bytes)) return 0;
    long n = length(numbers);
    return bytes->len == n + (long)sizeof(float) * ((n + BLOCK - 1) / BLOCK);
}

static PyObject *encode_int8(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "encode_int8(out, values)");
    Py_buffer views[2];
    Py_ssize_t got = get(args, 2, 1, views);
    int done = got == 2 && fit(&views[1], &views[0]);
    if (done) {
        PyThreadState *state = PyEval_SaveThread();
        encode_blocks(length(&views[1]), views[0].buf, views[1].buf);
        PyEval_RestoreThread(state);
    }
    release(views, got);
    return PyBool_FromLong(done);
}

static PyObject *decode_int8(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "decode_int8(out, message, add)");
    int adds = PyObject_IsTrue(args[2]);
    if (adds < 0) return NULL;
    Py_buffer views[2];
    Py_ssize_t got = get(args, 2, 1, views);
    int done = got == 2 && fit(&views[0], &views[1]);
    if (done) {
        PyThreadState *state = PyEval_SaveThread();
        if (adds) add_decoded_blocks(length(&views[0]), views[0].buf, views[1].buf);
        else decode_blocks(length(&views[0]), views[0].buf, views[1].buf);
        PyEval_RestoreThread(state);
    }
    release(views, got);
    return PyBool_FromLong(done);
}

static PyObject *rest(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "rest(out, first, second)");
    Py_buffer views[3];
    Py_ssize_t got = get(args, 3, 1, views);
    int done = got == 3;
    for (Py_ssize_t i = 0; done && i < 3; i++)
        done = kind(&views[i]) == 'f' && views[i].len == views[0].len && (i == 0 || !overlap(&views[0], &views[i]));
    if (done) {
        PyThreadState *state = PyEval_SaveThread();
        subtract_finite(length(&views[0]), views[0].buf, views[1].buf, views[2].buf);
        PyEval_RestoreThread(state);
    }
    release(views, got);
    return PyBool_FromLong(done);
}

PyMethodDef codecs_methods[] = {METHOD(encode_int8), METHOD(decode_int8), METHOD(rest), {NULL, NULL, 0, NULL}};
