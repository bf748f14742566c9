"""One rank's exception ends the job: its traceback is printed with its rank, the others print what it was, all end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from ..options import Environment
from . import obituary

__all__ = ["end_job", "format_exception", "install", "is_user_code", "print_text"]

_FORWARDING = 0.2  # seconds that launchers get to pass on what was printed
_ABORT_DELAY = 4  # seconds that a launcher gets to end the other ranks after one has exited
_installed: Callable[..., Any] | None = None
ending = False  # this process is about to end the job, as opposed to leaving the program
tell_others: Callable[[str], None] | None = None  # makes the other ranks print a text; the watchdog's

_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep
_EXAMPLES = _PACKAGE + "examples" + os.sep  # programs as a user would write them
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def end_job(text: str, code: int = 1, reason: str = "") -> None:
    """Print a text on stderr and end every rank of the job. Not collective; does not return while MPI runs.

    Args:
        text: printed by this rank.
        code: exit status of the job.
        reason: printed by the other ranks that the watchdog can reach; default the whole text.
    """
    global ending
    from mpi4py import MPI

    ending = True
    obituary.tell("told")
    print_text(text)
    if MPI.Is_initialized() and not MPI.Is_finalized():
        if tell_others is not None:
            tell_others(reason or text)
        time.sleep(_FORWARDING)
        if _exit_ends_the_job():
            os._exit(code)
        MPI.COMM_WORLD.Abort(code)


def print_text(text: str) -> None:
    """Print a text on stderr at once. Not collective."""
    try:
        sys.stderr.write(text if text.endswith("\n") else text + "\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (OSError, ValueError, AttributeError):  # closed or missing streams keep nobody alive
        pass


def is_user_code(filename: str) -> bool:
    """Return whether a file is the user's: neither of this package nor of an installed one or the standard library."""
    return filename.startswith(_EXAMPLES) or not filename.startswith((_PACKAGE, *_LIBRARIES, "<frozen"))


def format_exception(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> str:
    """Return an exception with its traceback, as Python prints it, without the frames of this package that tell a user nothing.

    They stay where the package did not raise the error on purpose, or the user's own code below it, and with
    MPISTRAT_TRACEBACK=full.
    """
    whole = traceback.TracebackException(kind, error, trace, compact=True)  # type: ignore[arg-type]
    try:
        full = Environment.read().traceback == "full"
    except ValueError:  # a setting that is wrong: perhaps what the exception is about
        full = False
    folded = [] if full else [_fold(part) for part in _chain(whole)]
    note = "(lines inside mpistrat are left out: MPISTRAT_TRACEBACK=full shows them)\n" if any(folded) else ""
    return "".join(whole.format()) + note


def _chain(error: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    """An exception, and those that it names as its causes."""
    if error is not None:
        yield error
        yield from _chain(error.__cause__)
        yield from _chain(error.__context__)


def _fold(error: traceback.TracebackException) -> bool:
    """Take the package's frames out of one traceback, and return whether there were any to take."""
    frames = list(error.stack)
    ours = [i for i, f in enumerate(frames) if f.filename.startswith(_PACKAGE) and not is_user_code(f.filename)]
    if not ours or len(ours) == len(frames):
        return False
    below = frames[ours[-1] + 1 :]
    on_purpose = not below and (frames[-1].line or "").startswith("raise ")
    if not on_purpose and not any(is_user_code(frame.filename) for frame in below):
        return False
    kept = [frame for i, frame in enumerate(frames) if i not in set(ours)]
    error.stack = traceback.StackSummary.from_list(kept)
    return True


def _exit_ends_the_job() -> bool:
    """Tell whether the launcher is Open MPI 5's (PRRTE, also as prun): there a rank ends the job by exiting.

    MPI's Abort, by a rank on another host than mpirun's, ends all ranks but not mpirun (seen with 5.0.11), which waits
    for ever for word of the ranks beside the aborting one. A rank that exits with an error before MPI is finalised makes
    PRRTE end the others, and itself, wherever they are; see also `_let_exits_win`. So there is one way for one host and
    for many. srun, which starts ranks itself, sets no such variable.
    """
    return os.environ.get("PRTE_LAUNCHED") == "1"


def _let_exits_win() -> None:
    """Make Open MPI wait before it aborts by itself.

    It does where a rank of another host closes its connection, also one that has just exited as above, and would leave
    mpirun behind. Before the wait is over, the launcher has ended this rank. This is Open MPI's own setting
    `opal_abort_delay`; MPI may have read it from the environment long ago, so it is written where MPI keeps it.
    """
    from mpi4py import MPI

    if _exit_ends_the_job():
        with contextlib.suppress(OSError, ValueError):  # another MPI, or one that keeps it elsewhere
            delay = ctypes.c_int.in_dll(ctypes.CDLL(MPI.__file__), "opal_abort_delay")
            delay.value = delay.value or _ABORT_DELAY


def install(rank: int, size: int) -> None:
    """From now on an exception that nobody catches ends the job. Not collective; later calls do nothing.

    The main thread's and other threads' exceptions are printed as Python or an earlier hook prints them, under a line
    that tells the rank; the other ranks print the exception without its traceback; then the job ends with status 1 (130
    for KeyboardInterrupt). With one rank nothing is changed, nor in a process that this one forks, whose end is its
    parent's affair.
    """
    global _installed
    if size == 1 or _installed is not None:
        return
    _let_exits_win()
    _installed = sys.excepthook
    before, threads_before = sys.excepthook, threading.excepthook
    process = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != process:
            before(kind, error, trace)
            return
        if before is sys.__excepthook__:
            text = format_exception(kind, error, trace)
        else:
            text = f"{kind.__name__}: {error}"
            before(kind, error, trace)
        end_job(
            f"rank {rank} of {size}: the job ends on this exception\n{text}",
            130 if kind is KeyboardInterrupt else 1,
            "".join(traceback.format_exception_only(kind, error)),
        )

    def thread_hook(args: Any) -> None:
        if os.getpid() != process:
            threads_before(args)
            return
        if args.exc_type is SystemExit:  # as Python: it ends the thread only
            return
        name = args.thread.name if args.thread is not None else "a thread"
        if threads_before is threading.__excepthook__:
            text = format_exception(args.exc_type, args.exc_value, args.exc_traceback)
        else:
            text = f"{args.exc_type.__name__}: {args.exc_value}"
            threads_before(args)
        end_job(
            f"rank {rank} of {size}: the job ends on this exception in {name}\n{text}",
            reason="".join(traceback.format_exception_only(args.exc_type, args.exc_value)),
        )

    sys.excepthook = hook
    threading.excepthook = thread_hook
