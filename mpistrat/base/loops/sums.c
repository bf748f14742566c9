/* Sums of arrays, as arena/arithmetic.py forms them, and numbers rounded to 16 bits. */
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

/* ---- eight numbers at a time, by the processor's own conversions of float16, which all with AVX2 have but for some virtual ones */

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define F16C __attribute__((target("avx2,f16c"))) static

static int has_f16c(void) {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

/* A signalling NaN would be an error of the conversion: it becomes a quiet one. */
F16C __m256 widened_8(const uint16_t *in) {
    __m128i half = _mm_loadu_si128((const __m128i *)in), rest = _mm_and_si128(half, _mm_set1_epi16(0x7fff));
    __m128i is_nan = _mm_cmpgt_epi16(rest, _mm_set1_epi16(0x7c00));
    return _mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(0x200))));
}

F16C void copy_float16_by_8(long n, float *restrict out, const uint16_t *restrict in) {
    for (long i = 0; i < n; i += 8) _mm256_storeu_ps(out + i, widened_8(in + i));
}

F16C void add_float16_by_8(long n, float *restrict out, const uint16_t *restrict in) {
    for (long i = 0; i < n; i += 8) _mm256_storeu_ps(out + i, _mm256_add_ps(_mm256_loadu_ps(out + i), widened_8(in + i)));
}

/* The conversion raises an overflow itself. */
F16C void narrow_float16_by_8(long n, uint16_t *restrict out, const float *restrict in) {
    for (long i = 0; i < n; i += 8) {
        __m256i bits = _mm256_loadu_si256((const __m256i *)(in + i));
        __m256i rest = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
        __m256i is_nan = _mm256_cmpgt_epi32(rest, _mm256_set1_epi32(0x7f800000));
        bits = _mm256_or_si256(bits, _mm256_and_si256(is_nan, _mm256_set1_epi32(0x400000)));
        _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(_mm256_castsi256_ps(bits), _MM_FROUND_TO_NEAREST_INT));
    }
}

F16C void narrow_bfloat16_by_8(long n, uint16_t *restrict out, const float *restrict in) {
    for (long i = 0; i < n; i += 8) {
        __m256i bits = _mm256_loadu_si256((const __m256i *)(in + i));
        __m256i rest = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
        __m256i is_nan = _mm256_cmpgt_epi32(rest, _mm256_set1_epi32(0x7f800000));
        __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
        __m256i top = _mm256_srli_epi32(_mm256_blendv_epi8(_mm256_add_epi32(bits, up), quiet, is_nan), 16);
        __m128i low = _mm256_castsi256_si128(top), high = _mm256_extracti128_si256(top, 1);
        _mm_storeu_si128((__m128i *)(out + i), _mm_packus_epi32(low, high));
    }
}
#else
#define has_f16c() 0
#define copy_float16_by_8(N, OUT, IN) ((void)0)
#define add_float16_by_8(N, OUT, IN) ((void)0)
#define narrow_float16_by_8(N, OUT, IN) ((void)0)
#define narrow_bfloat16_by_8(N, OUT, IN) ((void)0)
#endif

/* Return how many of n numbers are converted by eights. */
static long by_8(long n) {
    static int known; /* 1 without, 2 with; threads that come at once find the same */
    if (known == 0) known = 1 + has_f16c();
    return known == 2 ? n / 8 * 8 : 0;
}

static void copy_halves(long n, float *restrict out, const uint16_t *restrict in) {
    long done = by_8(n);
    if (done) copy_float16_by_8(done, out, in);
    if (done < n) copy_float16(n - done, out + done, in + done);
}

static void add_halves(long n, float *restrict out, const uint16_t *restrict in) {
    long done = by_8(n);
    if (done) add_float16_by_8(done, out, in);
    if (done < n) add_float16(n - done, out + done, in + done);
}

static void narrow_to_halves(long n, uint16_t *restrict out, const float *restrict in) {
    long done = by_8(n);
    if (done) narrow_float16_by_8(done, out, in);
    if (done < n && narrow_float16(n - done, out + done, in + done)) feraiseexcept(FE_OVERFLOW);
}

static void narrow_to_bfloats(long n, uint16_t *restrict out, const float *restrict in) {
    long done = by_8(n);
    if (done) narrow_bfloat16_by_8(done, out, in);
    if (done < n) narrow_bfloat16(n - done, out + done, in + done);
}

void narrow_to(char type, long n, uint16_t *restrict out, const float *restrict in) {
    if (type == 'H') narrow_to_bfloats(n, out, in);
    else narrow_to_halves(n, out, in);
}

void widen_from(char type, long n, float *restrict out, const uint16_t *restrict in) {
    if (type == 'H') copy_bfloat16(n, out, in);
    else copy_halves(n, out, in);
}

/* ---- sums */

/* Numbers of a sum that stay in the fastest cache while part after part is added to them; few, so that the processor reads the next
ones ahead meanwhile. */
enum { PIECE = 256 };

/* Add part `i`, or write the first one; where the first two are float32, both at once. Return how many parts were taken. */
static Py_ssize_t add_part(long n, float *to, const Py_buffer *parts, Py_ssize_t count, Py_ssize_t i, long low) {
    const uint16_t *half = (const uint16_t *)parts[i].buf + low;
    const float *part = (const float *)parts[i].buf + low;
    switch (parts[i].format[0]) {
    case 'e':
        if (i) add_halves(n, to, half);
        else copy_halves(n, to, half);
        return 1;
    case 'H':
        if (i) add_bfloat16(n, to, half);
        else copy_bfloat16(n, to, half);
        return 1;
    default:
        if (i == 0 && count > 1 && parts[1].format[0] == 'f') {
            add_float(n, to, part, (const float *)parts[1].buf + low);
            return 2;
        }
        if (i) add_float(n, to, to, part);
        else if (to != part) memmove(to, part, (size_t)n * sizeof *to);
        return 1;
    }
}

void sum_float(float *out, const Py_buffer *parts, Py_ssize_t count, long low, long high) {
    if (count == 1) {
        add_part(high - low, out, parts, count, 0, low);
        return;
    }
    for (; low < high; low += PIECE, out += PIECE) {
        long size = high - low < PIECE ? high - low : PIECE;
        for (Py_ssize_t i = 0; i < count;) i += add_part(size, out, parts, count, i, low);
    }
}

void sum_double(double *out, const Py_buffer *parts, Py_ssize_t count, long low, long high) {
    if (count == 1) {
        memmove(out, (const double *)parts[0].buf + low, (size_t)(high - low) * sizeof *out);
        return;
    }
    for (; low < high; low += PIECE, out += PIECE) {
        long size = high - low < PIECE ? high - low : PIECE;
        const double *first = (const double *)parts[0].buf + low;
        for (Py_ssize_t i = 1; i < count; i++) add_double(size, out, i == 1 ? first : out, (const double *)parts[i].buf + low);
    }
}

/* The arrays of a call. */
typedef struct {
    Py_buffer *out, *parts;
    Py_ssize_t count;
} Arrays;

static void sum_range(const void *data, long low, long high) {
    const Arrays *a = data;
    if (a->out->format[0] == 'f') sum_float((float *)a->out->buf + low, a->parts, a->count, low, high);
    else sum_double((double *)a->out->buf + low, a->parts, a->count, low, high);
}

static void narrow_range(const void *data, long low, long high) {
    const Arrays *a = data;
    narrow_to(a->out->format[0], high - low, (uint16_t *)a->out->buf + low, (const float *)a->parts->buf + low);
}

/* Whether the sum of views[1:] can be formed in views[0]: a part may be it, exactly, but not lie across it. */
static int summable(const Py_buffer *views, Py_ssize_t count) {
    char type = kind(&views[0]);
    if (type != 'f' && type != 'd') return 0;
    for (Py_ssize_t i = 1; i < count; i++) {
        char part = kind(&views[i]);
        if (!is_part(part, type)) return 0;
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
            Arrays arrays = {views, views + 1, count - 1};
            PyThreadState *state = begin();
            in_parts(length(views), UNIT, sum_range, &arrays);
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
        Arrays arrays = {views, views + 1, 1};
        PyThreadState *state = begin();
        in_parts(length(views), UNIT, narrow_range, &arrays);
        done = end(state);
    } else {
        done = Py_NewRef(Py_False);
    }
    release(views, got);
    return done;
}

PyMethodDef sums_methods[] = {METHOD(add), METHOD(narrow), {NULL, NULL, 0, NULL}};
