"""MPI's start under a launcher, bounded in time; and how a process that has not started MPI ends the job.

MPI_Init waits for the other ranks, and mpi4py holds Python's lock meanwhile. So where this package is the one that starts
MPI, it calls MPI_Init_thread through ctypes, which lets go of the lock, and a thread tells and ends what takes too long.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import stat
import sys
import threading
from time import monotonic
from typing import Any

from ..environment import Environment
from .launcher_variables import launched_rank, launched_size

__all__ = ["end_before_mpi", "import_mpi", "running"]

_LEVELS = {"single": 0, "funneled": 1, "serialized": 2, "multiple": 3}  # as MPI numbers them: in this order
_PMI = "PMI_FD"


def running() -> Any:
    """Return the module mpi4py.MPI where MPI runs, None where it has not begun or has ended. Starts nothing."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    active = hasattr(mpi, "Is_finalized") and mpi.Is_initialized() and not mpi.Is_finalized()
    return mpi if active else None


def import_mpi() -> Any:
    """Return the module mpi4py.MPI; importing it starts MPI as mpi4py.rc says. Collective over the job where it does.

    With several ranks a start that takes longer than MPISTRAT_ABORT_AFTER ends the job.
    """
    import mpi4py

    rc: Any = mpi4py.rc
    launched = launched_size()
    here = sys.modules.get("mpi4py.MPI")
    told = any(name.startswith("MPI4PY_RC_") for name in os.environ)
    level = _LEVELS.get(rc.thread_level) if rc.threads in (True, "yes") else 0
    ours = here is None and not told and rc.initialize in (True, "yes") and rc.errors == "exception"
    if not ours or level is None or launched is None or launched[0] == 1:
        return importlib.import_module("mpi4py.MPI")
    before = rc.initialize, rc.finalize
    rc.initialize, rc.finalize = False, rc.finalize is not False
    try:
        mpi = importlib.import_module("mpi4py.MPI")
    finally:
        rc.initialize, rc.finalize = before
    if not mpi.Is_initialized():
        with _Limit(launched[0]):
            _init(mpi, level)
        for comm in (mpi.COMM_SELF, mpi.COMM_WORLD):
            comm.Set_errhandler(mpi.ERRORS_RETURN)
    return mpi


def _init(mpi: Any, level: int) -> None:
    granted = ctypes.c_int()
    error = ctypes.CDLL(mpi.__file__).MPI_Init_thread(None, None, ctypes.c_int(level), ctypes.byref(granted))
    if error:
        raise RuntimeError(f"MPI_Init_thread() failed [error code: {error}]")


class _Limit:
    """Tells, and then ends the job, where what is done inside takes too long."""

    def __init__(self, size: int) -> None:
        self._done, self._size, self._environment = threading.Event(), size, Environment.read()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, name="mpistrat-start", daemon=True).start()

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        environment, start = self._environment, monotonic()
        if environment.warn_after < environment.abort_after:
            if self._done.wait(environment.warn_after):
                return
            if launched_rank() in (0, self._size - 1):  # two speak for all: one of them may be the one that is missing
                self._say(f"mpistrat WARNING: {self._where(environment.warn_after)}")
        if self._done.wait(max(0.0, environment.abort_after - (monotonic() - start))):
            return
        self._say(
            f"CollectiveTimeoutError: {self._where(environment.abort_after)}, and the job ends. Look in the program for an exit,"
            " an `if` or long work that keeps ranks from making the strategy, or for ranks that run another program"
        )
        end_before_mpi(1)
        os._exit(1)

    def _where(self, seconds: float) -> str:
        who = f"rank {launched_rank()} of {self._size}"
        return f"{who} has been in MPI_Init for {seconds:g} s, where it waits for ranks that have not started MPI"

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def end_before_mpi(status: int) -> None:
    """Have the launcher end the job, by a process that has not started MPI; the caller then exits.

    Most launchers do so when a process exits with an error. MPICH's lets the others wait in MPI_Init for ever. It is told
    over the connection on which MPI_Init would talk to it (PMI 1). A child of the rank has no such connection, and ends nothing.
    """
    number = os.environ.get(_PMI, "")
    if number.isdigit() and "HYDI_CONTROL_FD" in os.environ:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                os.write(int(number), f"cmd=abort exitcode={status}\n".encode())
