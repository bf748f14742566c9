/* Rows of input: gathered out of an array, and the order of a shuffle (data/permutation.py). */
#include "loops.h"

/* A copy in registers: memcpy of some KB is left to microcode, which is half as fast on some processors. */
typedef uint64_t line __attribute__((vector_size(64), aligned(1), may_alias));

static ALWAYS_INLINE void copy(char *to, const char *from, size_t bytes) {
    size_t done = 0;
    for (; done + sizeof(line) <= bytes; done += sizeof(line)) *(line *)(to + done) = *(const line *)(from + done);
    if (done < bytes) memcpy(to + done, from + done, bytes - done);
}

/* Copy one row, and have another one brought into the second cache meanwhile: it waits for more lines at a time than the first. */
static ALWAYS_INLINE void copy_before(char *to, const char *from, size_t bytes, const char *next) {
    size_t done = 0;
    for (; done + 4 * sizeof(line) <= bytes; done += 4 * sizeof(line))
        for (size_t at = done; at < done + 4 * sizeof(line); at += sizeof(line)) {
            __builtin_prefetch(next + at, 0, 2);
            *(line *)(to + at) = *(const line *)(from + at);
        }
    for (size_t at = done; at < bytes; at += sizeof(line)) __builtin_prefetch(next + at, 0, 2);
    copy(to + done, from + done, bytes - done);
}

/* Bytes of a row that is worth a loop; how many small rows ahead one is called for, and how many bytes ahead a large one. */
enum { LARGE = 256, AHEAD = 16, BYTES_AHEAD = 4096 };

/* Where the run of neighbours ends that begins with a row. */
static ALWAYS_INLINE long run_end(const int64_t *rows, long first, long count) {
    long end = first + 1;
    while (end < count && rows[end] == rows[end - 1] + 1) end++;
    return end;
}

CLONES static void gather_large(char *out, const char *array, const int64_t *rows, long count, size_t bytes) {
    long ahead = BYTES_AHEAD / (long)bytes;
    for (long first = 0, end; first < count; first = end) {
        end = run_end(rows, first, count);
        long next = end + ahead < count ? end + ahead : end;
        size_t before = (size_t)(end - first - 1) * bytes; /* of all rows of the run but the last */
        const char *from = array + (size_t)rows[first] * bytes;
        copy(out, from, before);
        copy_before(out + before, from + before, bytes, next < count ? array + (size_t)rows[next] * bytes : from);
        out += before + bytes;
    }
}

static ALWAYS_INLINE void gather_small(char *out, const char *array, const int64_t *rows, long count, size_t bytes) {
    for (long first = 0, end; first < count; first = end) {
        end = run_end(rows, first, count);
        if (first + AHEAD < count) __builtin_prefetch(array + (size_t)rows[first + AHEAD] * bytes);
        const char *from = array + (size_t)rows[first] * bytes;
        if (end == first + 1) memcpy(out, from, bytes);
        else copy(out, from, (size_t)(end - first) * bytes);
        out += (size_t)(end - first) * bytes;
    }
}

CLONES static void gather_rows(char *out, const char *array, const int64_t *rows, long count, size_t bytes) {
    switch (bytes) { /* a copy of known size is a few instructions */
    case 1: gather_small(out, array, rows, count, 1); break;
    case 4: gather_small(out, array, rows, count, 4); break;
    case 8: gather_small(out, array, rows, count, 8); break;
    case 64: gather_small(out, array, rows, count, 64); break;
    default: gather_small(out, array, rows, count, bytes);
    }
}

CLONES static uint64_t largest(const int64_t *values, long count) {
    uint64_t most = 0;
    for (long i = 0; i < count; i++) most = (uint64_t)values[i] > most ? (uint64_t)values[i] : most;
    return most; /* negative ones are huge */
}

static int is_int64(const Py_buffer *view) {
    return view->ndim == 1 && view->itemsize == 8 && view->format && strchr("lq", view->format[0]) && !view->format[1];
}

/* Whether rows of views[1] can be copied, at views[2], to views[0] as bytes. */
static int gatherable(const Py_buffer *views) {
    const Py_buffer *out = &views[0], *array = &views[1], *rows = &views[2];
    if (!is_int64(rows) || array->ndim < 1 || array->shape[0] < 1 || array->len < 1 || rows->len < 8) return 0;
    if (out->itemsize != array->itemsize || !out->format || !array->format || strcmp(out->format, array->format)) return 0;
    if (strchr(array->format, 'O') || overlap(out, array) || overlap(out, rows)) return 0;
    if (out->len != rows->shape[0] * (array->len / array->shape[0])) return 0;
    return largest(rows->buf, (long)rows->shape[0]) < (uint64_t)array->shape[0];
}

static PyObject *gather(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "gather(out, array, rows)");
    Py_buffer views[3];
    Py_ssize_t got = get(args, 3, 1, views);
    int able = got == 3 && gatherable(views);
    if (able) {
        size_t bytes = (size_t)(views[1].len / views[1].shape[0]);
        PyThreadState *state = PyEval_SaveThread();
        (bytes < LARGE ? gather_rows : gather_large)(views[0].buf, views[1].buf, views[2].buf, (long)views[2].shape[0], bytes);
        PyEval_RestoreThread(state);
    }
    release(views, got);
    return PyBool_FromLong(able);
}

/* ---- the order of a shuffle */

enum { ROUNDS = 12, GROUP = 512 }; /* numbers that go through a round together, in the fastest cache */

static ALWAYS_INLINE uint64_t mixed(uint64_t half, uint64_t key, int bits) {
    const uint64_t first = 0xBF58476D1CE4E5B9u, second = 0x94D049BB133111EBu;
    half = (half + key) * first;
    half = (half ^ half >> 29) * second;
    half = (half ^ half >> 32) * first;
    return half >> (64 - bits);
}

static ALWAYS_INLINE void scramble(uint64_t *values, long count, int bits, const uint64_t *keys) {
    uint64_t low[GROUP], high[GROUP];
    int low_bits = (bits + 1) / 2, high_bits = bits - low_bits;
    for (long i = 0; i < count; i++) {
        low[i] = values[i] & (((uint64_t)1 << low_bits) - 1);
        high[i] = values[i] >> low_bits;
    }
    for (int round = 0; round < ROUNDS; round += 2) {
        for (long i = 0; i < count; i++) low[i] ^= mixed(high[i], keys[round], low_bits);
        for (long i = 0; i < count; i++) high[i] ^= mixed(low[i], keys[round + 1], high_bits);
    }
    for (long i = 0; i < count; i++) values[i] = high[i] << low_bits | low[i];
}

CLONES static void permute_all(uint64_t *values, long count, uint64_t limit, const uint64_t *keys) {
    int bits = 64 - __builtin_clzll(limit - 1);
    for (long start = 0; start < count; start += GROUP) {
        long size = count - start < GROUP ? count - start : GROUP;
        uint64_t *group = values + start, outside[GROUP];
        short places[GROUP];
        scramble(group, size, bits, keys);
        for (;;) { /* those that fell behind the limit go on until they do not */
            long number = 0;
            for (long i = 0; i < size; i++)
                if (group[i] >= limit) {
                    places[number] = (short)i;
                    outside[number++] = group[i];
                }
            if (!number) break;
            scramble(outside, number, bits, keys);
            for (long i = 0; i < number; i++) group[places[i]] = outside[i];
        }
    }
}

static PyObject *permute(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "permute(positions, keys, count)");
    long long limit = PyLong_AsLongLong(args[2]);
    if (limit == -1 && PyErr_Occurred()) return NULL;
    Py_buffer views[2];
    Py_ssize_t got = get(args, 2, 1, views);
    int able = got == 2 && is_int64(&views[0]) && views[1].itemsize == 8 && views[1].len == ROUNDS * 8 && limit > 4 &&
               limit < (long long)1 << 62 && largest(views[0].buf, (long)views[0].shape[0]) < (uint64_t)limit;
    if (able) {
        PyThreadState *state = PyEval_SaveThread();
        permute_all(views[0].buf, (long)views[0].shape[0], (uint64_t)limit, views[1].buf);
        PyEval_RestoreThread(state);
    }
    release(views, got);
    return PyBool_FromLong(able);
}

PyMethodDef rows_methods[] = {METHOD(gather), METHOD(permute), {NULL, NULL, 0, NULL}};
