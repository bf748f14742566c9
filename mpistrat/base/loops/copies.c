/* Copies of large arrays by all threads: one does not fill the memory's channels of a processor with many cores.

Without stores past the cache, because what is copied is read soon: measured, they are slower up to some MB. */
#include "loops.h"

enum { LINE = 32 }; /* bytes, which count as an element: a thread copies 256 KB at least */

typedef struct {
    char *out;
    const char *in;
    long bytes;
} Copy;

static void copy_range(const void *data, long low, long high) {
    const Copy *c = data;
    long begin = low * LINE, end = high * LINE < c->bytes ? high * LINE : c->bytes;
    memcpy(c->out + begin, c->in + begin, (size_t)(end - begin));
}

/* Whether the bytes of one array are the other's numbers: references to objects are counted, and not copied so. */
static int copyable(const Py_buffer *out, const Py_buffer *values) {
    if (out->len != values->len || !out->format || !values->format || strcmp(out->format, values->format)) return 0;
    return !strchr(out->format, 'O') && !overlap(out, values);
}

static PyObject *copy(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 2) return PyErr_Format(PyExc_TypeError, "copy(out, values)");
    Py_buffer views[2];
    PyObject *done = NULL;
    Py_ssize_t got = get(args, 2, 1, views);
    if (got == 2 && copyable(&views[0], &views[1])) {
        Copy c = {views[0].buf, views[1].buf, (long)views[0].len};
        PyThreadState *state = begin();
        in_parts((c.bytes + LINE - 1) / LINE, UNIT, copy_range, &c);
        done = end(state);
    } else {
        done = Py_NewRef(Py_False);
    }
    release(views, got);
    return done;
}

PyMethodDef copies_methods[] = {METHOD(copy), {NULL, NULL, 0, NULL}};
