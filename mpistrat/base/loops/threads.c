/* The threads of a rank that has several cores: each takes a part of a loop's elements.

A loop is cut into as many regions as there are threads, and each region into chunks. A thread first takes the chunks of its own
region, always the same of an array (so that its pages are near it, where it was the first to touch them), and then what others have
left: no thread waits for one that does not run. Threads are made when a loop first uses them, and look for the next loop a short
while before they sleep. In a forked child there are none. */
#include "loops.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>

enum {
    MOST_THREADS = 256,
    LEAST_CHUNK = 16384, /* elements, some microseconds of work */
    CHUNKS = 4,         /* of a region */
    LOOKS = 2000,       /* for the next loop, before a thread sleeps: some 30 microseconds */
};

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() ((void)0)
#endif

/* The loop that is under way. */
static struct {
    Work work;
    const void *data;
    long chunk;
    int threads;
    fenv_t environment; /* of the caller: how results are rounded */
} job;

static struct {
    _Alignas(64) atomic_long next; /* element that nobody has taken yet */
    long end;
} regions[MOST_THREADS];

static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER; /* held by the thread whose loop it is */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* with `wake`, for those that sleep */
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static atomic_ulong loops_begun;
static atomic_int sleeping, inside, raised, wanted = 1;
static atomic_int open_to_all; /* whether others may enter the loop; the caller waits until none is inside */
static int started;            /* threads, besides callers; under `busy` */

static void take_chunks(int me) {
    for (int i = 0; i < job.threads; i++) {
        int region = (me + i) % job.threads;
        long end = regions[region].end, low;
        while ((low = atomic_fetch_add(&regions[region].next, job.chunk)) < end)
            job.work(job.data, low, low + job.chunk < end ? low + job.chunk : end);
    }
}

static void wait_for_loop(unsigned long seen) {
    for (int i = 0; i < LOOKS; i++) {
        if (atomic_load(&loops_begun) != seen) return;
        PAUSE();
    }
    pthread_mutex_lock(&lock);
    atomic_fetch_add(&sleeping, 1);
    while (atomic_load(&loops_begun) == seen) pthread_cond_wait(&wake, &lock);
    atomic_fetch_sub(&sleeping, 1);
    pthread_mutex_unlock(&lock);
}

static void *serve(void *number) {
    int me = (int)(intptr_t)number;
    for (unsigned long seen = 0;;) {
        wait_for_loop(seen);
        seen = atomic_load(&loops_begun);
        atomic_fetch_add(&inside, 1);
        if (atomic_load(&open_to_all) && me < job.threads) {
            fesetenv(&job.environment);
            take_chunks(me);
            atomic_fetch_or(&raised, fetestexcept(ERRORS));
        }
        atomic_fetch_sub(&inside, 1);
    }
    return NULL;
}

/* Have threads 1 to count - 1 running, which signals do not interrupt but for those of a thread's own faults, whose handlers say
where; return how many there are, with the caller. */
static int have_threads(int count) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    if (started >= count - 1) return count;
    sigset_t all, before;
    pthread_t thread;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) sigdelset(&all, faults[i]);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (started < count - 1 && pthread_create(&thread, NULL, serve, (void *)(intptr_t)(started + 1)) == 0) {
        pthread_detach(thread);
        started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started + 1 < count ? started + 1 : count;
}

/* Cut [0, n) into regions and chunks, of whole units but for the last. */
static void share(long n, long unit, int threads) {
    long units = (n + unit - 1) / unit, chunk = n / threads / CHUNKS;
    if (chunk < LEAST_CHUNK) chunk = LEAST_CHUNK;
    job.chunk = (chunk + unit - 1) / unit * unit;
    job.threads = threads;
    for (int i = 0; i < threads; i++) {
        long low = units * i / threads * unit, high = units * (i + 1) / threads * unit;
        regions[i].end = high < n ? high : n;
        atomic_store(&regions[i].next, low);
    }
}

void in_parts(long n, long unit, Work work, const void *data) {
    int threads = atomic_load(&wanted);
    if (threads > n / LEAST_CHUNK) threads = (int)(n / LEAST_CHUNK);
    if (threads < 2 || pthread_mutex_trylock(&busy) != 0) { /* another loop has the threads */
        work(data, 0, n);
        return;
    }
    threads = have_threads(threads);
    share(n, unit, threads);
    job.work = work;
    job.data = data;
    fegetenv(&job.environment);
    atomic_store(&raised, 0);
    atomic_store(&open_to_all, 1);
    atomic_fetch_add(&loops_begun, 1);
    if (atomic_load(&sleeping)) {
        pthread_mutex_lock(&lock);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&lock);
    }
    take_chunks(0);
    atomic_store(&open_to_all, 0);
    for (int i = 0; atomic_load(&inside); i++) {
        if (i < LOOKS) PAUSE();
        else sched_yield();
    }
    int errors = atomic_load(&raised);
    pthread_mutex_unlock(&busy);
    if (errors) feraiseexcept(errors);
}

static void forget_threads(void) {
    pthread_mutex_init(&busy, NULL);
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&wake, NULL);
    atomic_store(&sleeping, 0);
    atomic_store(&inside, 0);
    atomic_store(&open_to_all, 0);
    atomic_store(&wanted, 1);
    started = 0;
}

static PyObject *set_threads(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs) {
    static atomic_flag known = ATOMIC_FLAG_INIT;
    long count = nargs == 1 ? PyLong_AsLong(args[0]) : 0;
    if (count == -1 && PyErr_Occurred()) return NULL;
    if (nargs != 1 || count < 1) return PyErr_Format(PyExc_ValueError, "set_threads(a number of at least 1)");
    if (!atomic_flag_test_and_set(&known) && pthread_atfork(NULL, NULL, forget_threads) != 0) return PyErr_NoMemory();
    atomic_store(&wanted, count < MOST_THREADS ? (int)count : MOST_THREADS);
    Py_RETURN_NONE;
}

static PyObject *threads(PyObject *Py_UNUSED(module), PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs)) {
    return PyLong_FromLong(atomic_load(&wanted));
}

PyMethodDef threads_methods[] = {METHOD(set_threads), METHOD(threads), {NULL, NULL, 0, NULL}};
