"""One rank's exception ends the job: its traceback is printed with its rank, then MPI ends all ranks."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["end_job", "install"]

_FORWARDING = 0.2  # seconds that launchers get to pass on what was printed
_installed: Callable[..., Any] | None = None
ending = False  # this process is about to end the job, as opposed to leaving the program


def end_job(text: str, code: int = 1) -> None:
    """Print a text on stderr and end every rank of the job. Not collective; does not return while MPI runs."""
    global ending
    from mpi4py import MPI

    ending = True
    try:
        sys.stderr.write(text if text.endswith("\n") else text + "\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError, AttributeError):  # closed or missing streams keep nobody alive
        pass
    if MPI.Is_initialized() and not MPI.Is_finalized():
        time.sleep(_FORWARDING)
        if _launched_by_open_mpi_over_hosts():
            os._exit(code)
        MPI.COMM_WORLD.Abort(code)


def _launched_by_open_mpi_over_hosts() -> bool:
    """Tell whether Abort would end the ranks and leave mpirun behind for ever.

    Open MPI's launcher (PRRTE 3) does so over several hosts. It ends the job as it should when a rank exits without
    having finalised. These variables are its own, srun sets none of them.
    """
    here, everywhere = os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE"), os.environ.get("OMPI_COMM_WORLD_SIZE")
    return here is not None and here != everywhere


def install(rank: int, size: int) -> None:
    """From now on an exception that nobody catches ends the job. Not collective; later calls do nothing.

    The main thread's and other threads' exceptions are printed as Python or an earlier hook prints them, under a line
    that tells the rank; then the job ends with status 1 (130 for KeyboardInterrupt). With one rank nothing is changed,
    nor in a process that this one forks, whose end is its parent's affair.
    """
    global _installed
    if size == 1 or _installed is not None:
        return
    _installed = sys.excepthook
    before, threads_before = sys.excepthook, threading.excepthook
    process = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process:
            before(kind, error, trace)
            return
        if before is sys.__excepthook__:
            text = "".join(traceback.format_exception(kind, error, trace))
        else:
            text = f"{kind.__name__}: {error}"
            before(kind, error, trace)
        end_job(
            f"rank {rank} of {size}: the job ends on this exception\n{text}", 130 if kind is KeyboardInterrupt else 1
        )

    def thread_hook(args: Any) -> None:
        if os.getpid() != process:
            threads_before(args)
            return
        if args.exc_type is SystemExit:  # as Python: it ends the thread only
            return
        name = args.thread.name if args.thread is not None else "a thread"
        if threads_before is threading.__excepthook__:
            text = "".join(traceback.format_exception(args.exc_type, args.exc_value, args.exc_traceback))
        else:
            text = f"{args.exc_type.__name__}: {args.exc_value}"
            threads_before(args)
        end_job(f"rank {rank} of {size}: the job ends on this exception in {name}\n{text}")

    sys.excepthook = hook
    threading.excepthook = thread_hook
