"""A watched program that starts MPI alone and tries what a strategy needs of it."""

from __future__ import annotations

import contextlib
import ctypes
from time import perf_counter
from typing import Any

import numpy as np

from .watched import say, step

__all__ = ["LEVELS", "gpu_support", "main"]

LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_NBYTES = 1 << 16


def main() -> None:
    """Start MPI, try one-sided calls and shared memory, end MPI; say what came of it."""
    step("import mpi4py.MPI")
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    step("MPI_Init_thread")
    start = perf_counter()
    level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
    say(seconds=perf_counter() - start, level=level, standard=".".join(map(str, MPI.Get_version())))
    step("asking about GPUs")
    say(gpu=gpu_support())
    for name, attempt in (("one-sided calls", _try_one_sided), ("shared memory", _try_shared_memory)):
        step(name)
        failed = ""
        try:
            attempt(MPI)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        say(tried=[name, failed])
    step("MPI_Finalize")
    MPI.Finalize()


def gpu_support() -> bool | None:
    """Return whether the MPI library says that it takes memory of CUDA devices; None where it cannot be asked.

    MPI is running: MPICH ends a program that asks earlier.
    """
    call = getattr(ctypes.CDLL(_library_file()), "MPIX_Query_cuda_support", None)
    return None if call is None else bool(call())


def _library_file() -> str | None:
    """The file of the loaded MPI library; None stands for the whole program."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if path.rpartition("/")[2].startswith("libmpi"):
                return path
    return None


def _try_one_sided(mpi: Any) -> None:
    from ..comm.window import RemoteWindow

    window = RemoteWindow.allocate(mpi.COMM_WORLD, _NBYTES, "the doctor's trial")
    window.put(0, [(8, np.full(16, 7, np.uint8))])
    found = np.zeros(16, np.uint8)
    window.get(0, 8, found)
    before = window.fetch_and_add(0, 0, 5), window.fetch_and_add(0, 0, 4)
    right = bool((found == 7).all()) and before == (0, 5) and window.get_word(0, 0) == 9
    window.close()
    if not right:
        raise RuntimeError("what was put is not what was read")


def _try_shared_memory(mpi: Any) -> None:
    from ..comm.window import SharedWindow

    window = SharedWindow(mpi.COMM_WORLD, mpi.COMM_WORLD, [_NBYTES], "the doctor's trial")
    window.put_word(0, 8, 3)
    right = window.populate(0, _NBYTES) and window.get_word(0, 8) == 3
    window.close()
    if not right:
        raise RuntimeError("what was stored is not what was read")


if __name__ == "__main__":
    main()
