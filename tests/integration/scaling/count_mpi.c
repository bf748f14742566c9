// Counts a process's MPI calls by function and size of the communicator, with the bytes that the process gives or gets: to be
// preloaded (LD_PRELOAD), with MPI_LIBRARY the path of libmpi. Arguments are passed on as words of a register, in which handles,
// addresses and numbers of both MPIs fit (x86-64, AArch64), so no mpi.h is needed. LARGE_COUNTS: for an MPI that has them (MPI 4).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

typedef long Word;
typedef int (*Call)(Word, Word, Word, Word, Word, Word, Word, Word, Word);

enum { MOST = 1024 };
static struct { const char *name; long size, calls, bytes; } counts[MOST];
static int used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *symbol(const char *name) {
  static void *library;
  if (!library) library = dlopen(getenv("MPI_LIBRARY"), RTLD_LAZY | RTLD_GLOBAL);
  void *found = library ? dlsym(library, name) : NULL;
  if (!found) { fprintf(stderr, "count_mpi: no %s: %s\n", name, dlerror()); abort(); }
  return found;
}

static long size_of(Word comm) {
  static int (*call)(Word, int *);
  int size = 0;
  if (!call) call = symbol("PMPI_Comm_size");
  call(comm, &size);
  return size;
}

static long bytes_of(Word count, Word type) {
  static int (*call)(Word, int *);
  int size = 0;
  if (!call) call = symbol("PMPI_Type_size");
  call(type, &size);
  return (int)count * (long)size;
}

static void note(const char *name, Word comm, long bytes) {
  long size = size_of(comm);
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < used && (counts[i].name != name || counts[i].size != size)) i++;
  if (i < MOST) {
    if (i == used) { counts[i].name = name; counts[i].size = size; used++; }
    counts[i].calls++;
    counts[i].bytes += bytes;
  }
  pthread_mutex_unlock(&lock);
}

void count_mpi_begin(void) { for (int i = 0; i < used; i++) counts[i].calls = counts[i].bytes = 0; }

void count_mpi_write(char *out, long room) {
  long at = 0;
  out[0] = 0;
  for (int i = 0; i < used && at < room - 128; i++)
    if (counts[i].calls) at += snprintf(out + at, room - at, "%s %ld %ld %ld\n", counts[i].name, counts[i].size, counts[i].calls, counts[i].bytes);
}

// The arguments are a to i; a communicator and a number of bytes are made of them.
#define COUNT(function, name, comm, bytes)                                                            \
  int function(Word a, Word b, Word c, Word d, Word e, Word f, Word g, Word h, Word i) {              \
    static Call call;                                                                                 \
    if (!call) call = symbol("P" #function);                                                          \
    note(name, comm, bytes);                                                                          \
    return call(a, b, c, d, e, f, g, h, i);                                                           \
  }
#ifdef LARGE_COUNTS  // mpi4py takes what is there: a function that the library does not have must not be here
#define COUNT_BOTH(name, comm, bytes) COUNT(MPI_##name, #name, comm, bytes) COUNT(MPI_##name##_c, #name, comm, bytes)
#else
#define COUNT_BOTH(name, comm, bytes) COUNT(MPI_##name, #name, comm, bytes)
#endif

COUNT_BOTH(Allreduce, f, bytes_of(c, d))
COUNT_BOTH(Iallreduce, f, bytes_of(c, d))
COUNT_BOTH(Reduce, g, bytes_of(c, d))
COUNT_BOTH(Bcast, e, bytes_of(b, c))
COUNT_BOTH(Allgather, g, size_of(g) * bytes_of(e, f))
COUNT_BOTH(Allgatherv, h, bytes_of(b, c))
COUNT_BOTH(Gather, h, bytes_of(b, c))
COUNT_BOTH(Alltoall, g, size_of(g) * bytes_of(e, f))
COUNT_BOTH(Reduce_scatter_block, f, size_of(f) * bytes_of(c, d))
COUNT_BOTH(Send, f, bytes_of(b, c))
COUNT_BOTH(Isend, f, bytes_of(b, c))
COUNT(MPI_Barrier, "Barrier", a, 0)
COUNT(MPI_Ibarrier, "Ibarrier", a, 0)
COUNT(MPI_Comm_dup, "Comm_dup", a, 0)
COUNT(MPI_Comm_split, "Comm_split", a, 0)
COUNT(MPI_Comm_split_type, "Comm_split_type", a, 0)
