// A faulty MPI: to be preloaded (LD_PRELOAD), with MPI_LIBRARY the path of libmpi. In MPI_Alltoall the rank with the number 1
// gets a wrong bit, hangs, or crashes, as FAULT says. Arguments are passed on as words of a register (x86-64, AArch64).
// LARGE_COUNTS: for an MPI that has them (MPI 4).
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef long Word;
typedef int (*Call)(Word, Word, Word, Word, Word, Word, Word);

static int is_the_one(void) {
  const char *rank = getenv("PMI_RANK");
  if (!rank) rank = getenv("OMPI_COMM_WORLD_RANK");
  return rank && !strcmp(rank, "1");
}

static int call(const char *name, Word a, Word b, Word c, char *out, Word e, Word f, Word comm) {
  const char *fault = getenv("FAULT");
  if (is_the_one() && !strcmp(fault, "hang")) for (;;) pause();
  if (is_the_one() && !strcmp(fault, "crash")) kill(getpid(), SIGSEGV);
  void *library = dlopen(getenv("MPI_LIBRARY"), RTLD_LAZY | RTLD_GLOBAL);
  Call real = (Call)dlsym(library, name);
  if (!real) { fprintf(stderr, "fault_mpi: no %s\n", name); abort(); }
  int status = real(a, b, c, (Word)out, e, f, comm);
  if (is_the_one() && !strcmp(fault, "wrong") && out) out[2] ^= 1;
  return status;
}

int MPI_Alltoall(Word a, Word b, Word c, char *out, Word e, Word f, Word comm) {
  return call("PMPI_Alltoall", a, b, c, out, e, f, comm);
}

#ifdef LARGE_COUNTS
int MPI_Alltoall_c(Word a, Word b, Word c, char *out, Word e, Word f, Word comm) {
  return call("PMPI_Alltoall_c", a, b, c, out, e, f, comm);
}
#endif
