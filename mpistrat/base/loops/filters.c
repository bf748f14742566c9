/* Filters of HDF5 undone. Whatever the bytes are, nothing outside the two buffers is read or written. */
#include "loops.h"

/* ---- shuffle: bytes put back behind each other */

CLONES static void unshuffle_2(char *restrict out, const char *restrict in, long count) {
    for (long i = 0; i < count; i++)
        for (long byte = 0; byte < 2; byte++) out[2 * i + byte] = in[byte * count + i];
}

CLONES static void unshuffle_4(char *restrict out, const char *restrict in, long count) {
    for (long i = 0; i < count; i++)
        for (long byte = 0; byte < 4; byte++) out[4 * i + byte] = in[byte * count + i];
}

CLONES static void unshuffle_8(char *restrict out, const char *restrict in, long count) {
    for (long i = 0; i < count; i++)
        for (long byte = 0; byte < 8; byte++) out[8 * i + byte] = in[byte * count + i];
}

static void unshuffle_any(char *restrict out, const char *restrict in, long count, long size) {
    enum { SOME = 1024 }; /* elements at a time, which stay in the cache while byte after byte is put into them */
    for (long first = 0; first < count; first += SOME) {
        long end = first + SOME < count ? first + SOME : count;
        for (long byte = 0; byte < size; byte++)
            for (long i = first; i < end; i++) out[i * size + byte] = in[byte * count + i];
    }
}

static PyObject *unshuffle(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 3) return PyErr_Format(PyExc_TypeError, "unshuffle(out, encoded, size)");
    Py_ssize_t size = PyLong_AsSsize_t(args[2]);
    if (size == -1 && PyErr_Occurred()) return NULL;
    Py_buffer views[2];
    Py_ssize_t got = get(args, 2, 1, views);
    int able = got == 2 && size > 0 && views[0].len == views[1].len && !overlap(&views[0], &views[1]);
    if (able) {
        char *out = views[0].buf;
        const char *in = views[1].buf;
        long count = (long)(views[0].len / size), whole = count * (long)size;
        PyThreadState *state = PyEval_SaveThread();
        if (size == 2) unshuffle_2(out, in, count);
        else if (size == 4) unshuffle_4(out, in, count);
        else if (size == 8) unshuffle_8(out, in, count);
        else unshuffle_any(out, in, count, (long)size);
        memcpy(out + whole, in + whole, (size_t)(views[0].len - whole));
        PyEval_RestoreThread(state);
    }
    release(views, got);
    return PyBool_FromLong(able);
}

/* ---- lzf, as h5py writes it: runs of bytes, and matches at most 8 KB back */

enum { WORD = 8 }; /* bytes that are copied at a time, which may be so many too many where there is room */

/* Write `length` bytes that stand `distance` in front of `out`, of which the first are among them where they overlap; `room`, at
least `length`, may be written. */
static ALWAYS_INLINE void copy_match(uint8_t *out, size_t distance, size_t length, size_t room) {
    const uint8_t *from = out - distance;
    size_t done = 0, step = distance;
    if (__builtin_expect(room < length + WORD, 0)) {
        for (; done < length; done++) out[done] = from[done];
        return;
    }
    if (__builtin_expect(distance < WORD, 0)) { /* the bytes repeat: a multiple of their number is as good, and long enough */
        while (step < WORD) step += distance;
        for (; done < step && done < length; done++) out[done] = from[done];
    }
    for (; done < length; done += WORD) memcpy(out + done, out + done - step, WORD);
}

/* Fill `out`; return how many bytes that were, -1 if the stream is damaged or has more. */
static Py_ssize_t undo_lzf(uint8_t *out, size_t room, const uint8_t *in, size_t left) {
    enum { RUN = 32 };
    uint8_t *const begin = out;
    while (left) {
        size_t control = *in++;
        left--;
        if (control < RUN) {
            size_t length = control + 1;
            if (length > left || length > room) return -1;
            if (left >= RUN && room >= RUN) memcpy(out, in, RUN); /* of known size, which is quicker */
            else memcpy(out, in, length);
            in += length, left -= length, out += length, room -= length;
            continue;
        }
        size_t length = control >> 5, more = length == 7;
        if (left < 1 + more) return -1;
        length += 2 + (more ? *in++ : 0);
        size_t back = ((control & 31) << 8 | *in++) + 1;
        left -= 1 + more;
        if (back > (size_t)(out - begin) || length > room) return -1;
        copy_match(out, back, length, room);
        out += length, room -= length;
    }
    return out - begin;
}

static PyObject *lzf(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "lzf(out, encoded)");
    Py_buffer views[2];
    Py_ssize_t got = get(args, 2, 1, views), filled = -1;
    if (got == 2 && !overlap(&views[0], &views[1])) {
        PyThreadState *state = PyEval_SaveThread();
        filled = undo_lzf(views[0].buf, (size_t)views[0].len, views[1].buf, (size_t)views[1].len);
        PyEval_RestoreThread(state);
    }
    release(views, got);
    return PyLong_FromSsize_t(filled);
}

PyMethodDef filters_methods[] = {METHOD(lzf), METHOD(unshuffle), {NULL, NULL, 0, NULL}};
