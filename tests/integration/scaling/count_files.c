// Counts how often a process opens files, and asks what they are, whose paths begin with the variable COUNTED: to be preloaded (LD_PRELOAD).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

static long opens, stats;

long count_opens(void) { return opens; }
long count_stats(void) { return stats; }

static void note(long *count, const char *path) {
  const char *counted = getenv("COUNTED");
  size_t length = path ? strlen(path) : 0;
  if (counted && path && !strncmp(path, counted, strlen(counted)) && length > 3 && !strcmp(path + length - 3, ".h5"))
    __atomic_add_fetch(count, 1, __ATOMIC_RELAXED);
}

#define NEXT(function) static __typeof__(function) *next; if (!next) next = dlsym(RTLD_NEXT, #function)
#define OPEN(function)                                            \
  int function(const char *path, int flags, ...) {                \
    NEXT(function);                                               \
    va_list rest;                                                 \
    va_start(rest, flags);                                        \
    int mode = va_arg(rest, int);                                 \
    va_end(rest);                                                 \
    note(&opens, path);                                           \
    return next(path, flags, mode);                               \
  }
#define OPENAT(function)                                          \
  int function(int folder, const char *path, int flags, ...) {    \
    NEXT(function);                                               \
    va_list rest;                                                 \
    va_start(rest, flags);                                        \
    int mode = va_arg(rest, int);                                 \
    va_end(rest);                                                 \
    note(&opens, path);                                           \
    return next(folder, path, flags, mode);                       \
  }
#define STAT(function, type) \
  int function(const char *path, struct type *out) { NEXT(function); note(&stats, path); return next(path, out); }
#define STATAT(function, type)                                                \
  int function(int folder, const char *path, struct type *out, int flags) {   \
    NEXT(function);                                                           \
    note(&stats, path);                                                       \
    return next(folder, path, out, flags);                                    \
  }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)
STATAT(fstatat, stat)
STATAT(fstatat64, stat64)

#define XSTAT(function, type)                                        \
  int function(int version, const char *path, struct type *out) {    \
    NEXT(function);                                                  \
    note(&stats, path);                                              \
    return next(version, path, out);                                 \
  }

// Of a libc before 2.33, as wheels are built for.
XSTAT(__xstat, stat)
XSTAT(__xstat64, stat64)
XSTAT(__lxstat, stat)
XSTAT(__lxstat64, stat64)
