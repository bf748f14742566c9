"""MPI's start under a launcher, with a time limit; and how a process that has not started MPI ends the job.

MPI_Init waits for the other ranks while mpi4py holds Python's lock. So if this package starts MPI, it calls MPI_Init_thread
through ctypes, which releases the lock, and a thread reports and ends a start that takes too long.

A rank that has finished its program will never arrive. Before MPI runs, the operating system shows that on the same node: the
ranks are children of one launcher process (possibly through a user's shell), with their numbers in their environment. A rank has
finished if its process is gone, or has the name that it sets while it waits in MPI_Finalize.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any
from zlib import crc32

from ..base.environment import STARTED, Environment
from ..base.errors import ContextError
from ..base.text import named
from .launcher_variables import RANK_VARIABLES, launched_rank, launched_size
from .no_rank import VARIABLES

__all__ = ["end_before_mpi", "import_mpi", "mark_finished", "mark_started", "ranks_of_launcher", "running"]

_LEVELS = {"single": 0, "funneled": 1, "serialized": 2, "multiple": 3}  # MPI's numbers, in this order
_PMI = "PMI_FD"
_LOOK = 0.5  # seconds between two checks of the other ranks of the node
_STARTING = 2.0  # seconds in which the launcher starts processes
_PRINTING = 1.0  # seconds in which one rank of the node prints why the job ends
_LOCAL_SIZES = "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE"
# Variables that differ between launches.
_LAUNCHES = "PMIX_NAMESPACE", "PMI_PORT", "PMI_JOBID", "SLURM_JOB_ID", "SLURM_STEP_ID", "FLUX_JOB_ID"
_FINISHED = "mpistrat: left"  # a process's name has at most 15 characters
_seen: set[int] = set()  # ranks of this node that have lived


def running() -> Any:
    """Return the module mpi4py.MPI while MPI runs, None before and after. Starts nothing."""
    mpi: Any = sys.modules.get("mpi4py.MPI")
    active = hasattr(mpi, "Is_finalized") and mpi.Is_initialized() and not mpi.Is_finalized()
    return mpi if active else None


def import_mpi() -> Any:
    """Return the module mpi4py.MPI, starting MPI by mpi4py.rc's settings if needed. Collective over the job if it starts MPI.

    With several ranks a start that takes longer than MPISTRAT_ABORT_AFTER ends the job.

    Raises:
        ContextError: a rank has started this process, which has the rank's place at the launcher.
    """
    import mpi4py

    if running() is None:
        _refuse_in_subprocess()
    rc: Any = mpi4py.rc
    launched = launched_size()
    here = sys.modules.get("mpi4py.MPI")
    configured = any(name.startswith("MPI4PY_RC_") for name in os.environ)
    level = _LEVELS.get(rc.thread_level) if rc.threads in (True, "yes") else 0
    ours = here is None and not configured and rc.initialize in (True, "yes") and rc.errors == "exception"
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


def mark_started() -> None:
    """Mark this process as a rank that runs MPI, in the environment of its children."""
    if _taken()[0] != str(os.getpid()):
        os.environ[STARTED] = f"{os.getpid()} {_place()} {_connection()}"


def _taken() -> tuple[str, str, str]:
    """Return process, place and connection of the rank that started this process, or is it; "" if unknown."""
    process, place, connection = (*os.environ.get(STARTED, "").split(), "", "", "")[:3]
    return process, place, connection


def _place() -> str:
    """Return a digest of the launcher's variables, which differs between ranks and launches."""
    told = [os.environ.get(name, "") for name in (*RANK_VARIABLES, *RANK_VARIABLES.values(), *_LAUNCHES)]
    return f"{crc32(repr(told).encode(errors='surrogateescape')):08x}"


def _refuse_in_subprocess() -> None:
    """Raise ContextError if a rank has started this process, which would fail or hang in MPI_Init in its place."""
    process, place, connection = _taken()
    if process in ("", str(os.getpid())) or place != _place() or _connection() not in ("", connection):
        return
    who = "a rank" if launched_rank() is None else f"rank {launched_rank()}"
    found = [start for start in VARIABLES if any(name.startswith(start) for name in os.environ)]
    raise ContextError(
        f"MPI cannot start in process {os.getpid()}, which {who} (process {process}) has started: it would take "
        "the rank's place. To run alone, the process needs an environment without the launcher's variables, which begin with "
        f"{', '.join(found)}"
    )


def _connection() -> str:
    """Return the number of the connection to MPICH's launcher, "" without one: most ways to start a process close it."""
    try:
        found = os.fstat(int(os.environ[_PMI]))
        return str(found.st_ino) if stat.S_ISSOCK(found.st_mode) else ""
    except (KeyError, ValueError, OSError):
        return ""


class _Limit:
    """A context manager that warns, and then ends the job, if its block takes too long."""

    def __init__(self, size: int) -> None:
        self._done, self._size, self._environment = threading.Event(), size, Environment.read()

    def __enter__(self) -> None:
        threading.Thread(target=self._watch, name="mpistrat-start", daemon=True).start()

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        environment, start = self._environment, monotonic()
        warned, finished = environment.warn_after >= environment.abort_after, set[int]()
        while not self._done.wait(min(_LOOK, max(0.0, environment.abort_after - (monotonic() - start)))):
            waited = monotonic() - start
            if waited > _STARTING:
                before, (finished, living) = finished, ranks_of_launcher()
                if before & finished:
                    who = named("rank", sorted(finished))
                    first = launched_rank() == min(living, default=None)
                    where = self._where(waited)
                    self._end(f"PeerExitError: {where}: {who} ended without starting it, and the job ends", first)
            if waited >= environment.abort_after:
                self._end(
                    f"CollectiveTimeoutError: {self._where(environment.abort_after)}, and the job ends. Look in the program"
                    " for an exit, an `if` or long work that keeps ranks from making the strategy, or for ranks that run another"
                    " program"
                )
            if not warned and waited >= environment.warn_after:
                warned = True
                if launched_rank() in (0, self._size - 1):  # two ranks print for all, because one may be missing
                    self._say(f"mpistrat WARNING: {self._where(environment.warn_after)}")

    def _end(self, text: str, first: bool = True) -> None:
        if not first and self._done.wait(_PRINTING):
            return
        self._say(text)
        end_before_mpi(1)
        os._exit(1)

    def _where(self, seconds: float) -> str:
        who = f"rank {launched_rank()} of {self._size}"
        return f"{who} has been in MPI_Init for {seconds:.3g} s, where it waits for ranks that have not started MPI"

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text + "\n")
            sys.stderr.flush()


def end_before_mpi(status: int) -> None:
    """Make the launcher end the job, from a process that has not started MPI; the caller then exits.

    Most launchers do so when a process exits with an error. MPICH's lets the others wait in MPI_Init forever. It gets a message
    over the connection that MPI_Init would use (PMI 1). A child of the rank has no such connection, and ends nothing.
    """
    number = os.environ.get(_PMI, "")
    if number.isdigit() and "HYDI_CONTROL_FD" in os.environ:
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(int(number)).st_mode):
                os.write(int(number), f"cmd=abort exitcode={status}\n".encode())


def mark_finished() -> None:
    """Show the other ranks of this node that this one has finished its program."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(_FINISHED)


def ranks_of_launcher() -> tuple[set[int], set[int]]:
    """Return the ranks of this node, by the launcher's numbers, that have finished their program, and those that have not.

    A rank that was gone before the first call is only seen if all ranks are on this node. The launcher may still be starting
    processes, so check twice before acting on the result. Both are empty if the system does not show it.
    """
    launched, rank = launched_size(), launched_rank()
    if launched is None or rank is None:
        return set(), set()
    variable, process = RANK_VARIABLES[launched[1]], os.getpid()
    while _rank_of(parent := _parent(process), variable) == rank:
        process = parent
    living = {number: child for child in _children(parent) if (number := _rank_of(child, variable)) is not None}
    if living.get(rank) != process:
        return set(), set()
    _seen.update(living)
    if any(os.environ.get(name) == str(launched[0]) for name in _LOCAL_SIZES):
        _seen.update(range(launched[0]))
    here = {number for number, child in living.items() if not _has_finished(child)}
    return _seen - here, here


def _rank_of(process: int, variable: str) -> int | None:
    """Return the rank in a process's environment; None without one, and for an ended or another user's process."""
    with contextlib.suppress(OSError):
        for setting in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            name, _, value = setting.partition(b"=")
            if name == variable.encode() and value.isdigit():
                return int(value)
    return None


def _parent(process: int) -> int:
    with contextlib.suppress(OSError, IndexError, ValueError):
        return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def _children(process: int) -> Iterator[int]:
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            yield from map(int, path.read_text().split())


def _has_finished(process: int) -> bool:
    """Return True if a rank's process, or the Python that its shell has started, is marked as finished."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{process}/comm").read_text().rstrip("\n") == _FINISHED:
            return True
        if not os.path.basename(os.readlink(f"/proc/{process}/exe")).startswith("python"):
            return any(map(_has_finished, _children(process)))
    return False
