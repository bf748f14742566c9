"""The end of the job after one rank's exception: it prints the traceback, the first rank of each node the exception.

Ranks that fail with equal errors print it once, with the numbers of the others.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import hashlib
import io
import logging
import os
import re
import signal
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, MemberDescriptorType, TracebackType
from typing import Any, NoReturn, cast, final

from ...base.environment import RANK_PROCESS, RESTART_EXIT_CODE, Environment
from ...base.errors import PeerExitError
from ...base.frames import frame_of
from ...base.text import class_name, displayable, encoded, error_text, plural, printable, ranges
from ...cluster import no_rank, start
from ...cluster.launcher_variables import launched_rank, launched_size
from ...cluster.world import is_loss, loses_ranks, survives
from . import exit_report, leftovers

__all__ = [
    "KEY_BYTES",
    "Failures",
    "end_job",
    "end_where_nobody_does",
    "exit_status",
    "failure_key",
    "format_exception",
    "install",
    "install_under_launcher",
    "is_user_code",
    "leave_without_mpi",
    "print_text",
    "ranges",
    "record_exit",
    "renumber",
]

_FORWARDING = 0.2  # seconds that launchers get to forward printed text
_PRINTING = 3.0  # seconds that another rank gets to print this one's text, and to end the job
_ABORT_DELAY = 4  # seconds that a launcher gets to end the other ranks after one has exited
KEY_BYTES = 16
_GATHER = 0.25  # seconds in which failures count as simultaneous
ending = False  # this process is about to end the job, rather than to leave the program
# Given a text and its reason in short: makes the other ranks print the reason, and returns the ranks with equal errors,
# or None if one of these prints the text. Set by the watchdog.
agree_who_prints: Callable[[str, str], str | None] | None = None

_rank: tuple[int, int] | None = None  # this rank and the number of ranks, once there is a strategy
_process: int | None = None  # in which the hooks apply
_program: CodeType | None = None  # of the main thread's outermost frame
_status = 0  # of the SystemExit that has left the program
_CODE = cast(MemberDescriptorType, vars(SystemExit)["code"])
_wait_at_end: Callable[[], object] | None = None  # then leave without MPI_Finalize

# Both paths if the package is behind a symbolic link: a frame has the path by which Python found the file.
_FOLDERS = {path.parents[2] for path in (Path(__file__), Path(__file__).resolve())}
_PACKAGE = tuple(text for path in _FOLDERS for text in (f"{path}{os.sep}", str(path.parent / "_mpistrat_torch.py")))
_EXAMPLES = tuple(f"{path}{os.sep}examples{os.sep}" for path in _FOLDERS)  # programs as a user would write them
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_INSTALLED = re.compile(
    r"[\\/](site|dist)-packages[\\/]"
)  # of the user, of a module of the site, of a parent environment


def end_job(text: str, code: int = 1, reason: str = "") -> None:
    """Print a text on stderr and end every rank of the job. Does not return while MPI runs.

    Of ranks with equal texts at the same moment the lowest prints it, with the numbers of the others. The first rank of each node
    that the watchdog can reach prints `reason`; default the whole text.

    Args:
        code: the job's exit status. An invalid one, or 0, becomes 1.
    """
    global ending
    ending = True
    code = code if 0 < code < 256 else 1
    mpi = start.running()
    try:
        printed = _report_end(text, reason or text, mpi is not None)
        time.sleep(_FORWARDING if printed else _PRINTING)
    finally:  # also after a second Ctrl-C
        if mpi is not None:
            if _exit_ends_the_job():
                os._exit(code)
            mpi.COMM_WORLD.Abort(code)
        elif "mpi4py.MPI" not in sys.modules or not sys.modules["mpi4py.MPI"].Is_finalized():
            start.end_before_mpi(code)


def _report_end(text: str, reason: str, others: bool) -> bool:
    """Report on all ranks why the job ends. Return True if this rank printed the text, or has no others that could."""
    text, alike = text.rstrip("\n") + "\n", None
    try:
        exit_report.report_exit()
        alike = agree_who_prints(text, reason) if others and agree_who_prints is not None else ""
    except BaseException as error:
        alike = f"(the reason could not be sent to the other ranks: {error_text(error)})\n"
    if alike is not None:
        print_text(text + alike, _lasting_stderr())
    return alike is not None


def _lasting_stderr() -> Any:
    """Return sys.stderr, or the process's own if that is memory: torch.distributed's hook collects printed text there."""
    return sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr


def end_where_nobody_does() -> None:
    """End this rank, after the job's end was reported, if MPI continues when ranks exit."""
    if loses_ranks():
        time.sleep(_FORWARDING)
        os._exit(1)


def print_text(text: str, stream: Any = None) -> None:
    """Print a text immediately on a stream, default stderr; a missing or broken stream does not keep the job alive."""
    stream = sys.stderr if stream is None else stream
    with contextlib.suppress(BaseException):
        text = printable(text if text.endswith("\n") else text + "\n", keep="\n\t")
        stream.write(displayable(text, stream))
    for each in (sys.stdout, stream):
        with contextlib.suppress(BaseException):
            each.flush()


@functools.cache
def is_user_code(filename: str) -> bool:
    """Return True if a file is the user's: not of this package, an installed one or the standard library."""
    if filename.startswith(_EXAMPLES):
        return True
    if filename.startswith((*_PACKAGE, *_LIBRARIES, "<frozen")) or _INSTALLED.search(filename) is not None:
        return False
    return not _is_in_packages(filename)


@functools.lru_cache(4096)
def _is_in_packages(filename: str) -> bool:
    """Return True if a file lies in a folder of sys.path with packages of pip, as `pip install --target` makes one."""
    folders = (each for each in map(str, sys.path) if filename.startswith(each.rstrip(os.sep) + os.sep))
    folder = max(folders, key=len, default="")
    return bool(folder) and any(Path(folder).glob("*.dist-info"))


def format_exception(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> str:
    """Return an exception with its traceback, as Python prints it, without frames of this package that do not help a user.

    They stay unless the package raised the error on purpose, or the user's own code below it did, and with
    MPISTRAT_TRACEBACK=full.
    """
    whole = traceback.TracebackException(kind, error, trace, compact=True)  # type: ignore[arg-type]
    try:
        full = Environment.read().traceback == "full"
    except ValueError:  # a wrong setting, possibly the cause of the exception
        full = False
    folded = [] if full else [_fold(part) for part in _chain(whole)]
    note = "(lines inside mpistrat are left out: MPISTRAT_TRACEBACK=full shows them)\n" if any(folded) else ""
    return "".join(whole.format()).rstrip("\n") + _suggestion(kind, error, trace) + "\n" + note


def _suggestion(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> str:
    """Return the "Did you mean" that an interpreter before 3.12 adds only when it prints an exception itself."""
    if sys.version_info < (3, 12) and issubclass(kind, (AttributeError, NameError)) and error is not None:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            sys.__excepthook__(kind, error, trace)
        found = re.search(r"\. Did you mean: .*\?$", printed.getvalue().rstrip("\n"))
        return found[0] if found else ""
    return ""


def _chain(error: traceback.TracebackException | None) -> Iterator[traceback.TracebackException]:
    """Yield an exception and its causes."""
    if error is not None:
        yield error
        yield from _chain(error.__cause__)
        yield from _chain(error.__context__)


def _fold(error: traceback.TracebackException) -> bool:
    """Remove the package's frames from one traceback, and return True if there were any."""
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
    """Return True if the launcher is Open MPI 5's (PRRTE, also as prun): there a rank ends the job by exiting.

    MPI's Abort, by a rank on another host than mpirun's, ends all ranks but not mpirun (seen with 5.0.11), which waits forever
    for messages of the ranks on the aborting one's host. If a rank exits with an error before MPI is finalised, PRRTE ends the
    others and itself on all hosts; see also `_let_exits_win`. srun, which starts ranks itself, sets no such variable.

    If ranks may die, PRRTE does not end the job after an exit with an error, and Abort may hang. Then each rank exits once it
    receives the job's end; see `end_where_nobody_does`.
    """
    return os.environ.get("PRTE_LAUNCHED") == "1"


def _let_exits_win() -> None:
    """Make Open MPI wait before it aborts by itself.

    It aborts if a rank of another host closes its connection, even by an exit, and mpirun would continue to run. During the
    wait the launcher ends this rank. The setting is Open MPI's `opal_abort_delay`. MPI may have read it from the environment
    already, so it is written into MPI's variable.
    """
    mpi = start.running()
    if mpi is not None and _exit_ends_the_job():
        with contextlib.suppress(OSError, ValueError):  # another MPI, or one that stores it elsewhere
            delay = ctypes.c_int.in_dll(ctypes.CDLL(mpi.__file__), "opal_abort_delay")
            delay.value = delay.value or _ABORT_DELAY


def install_under_launcher() -> None:
    """Call `install` early if a launcher has started this process as one of several. `import mpistrat` calls it.

    Before MPI has started, the others may already wait for this rank in it.
    """
    launched = launched_size()
    several = launched is not None and launched[0] > 1
    if launched is not None:  # also of one rank: its children would wait for the launcher
        no_rank.install()
    if not several and "MPISTRAT_JOB" not in os.environ:
        return
    process = str(os.getpid())
    if os.environ.setdefault(RANK_PROCESS, process) == process and several:
        start.ranks_of_launcher()  # record which ranks live now
        _hook()


def install(rank: int, size: int) -> None:
    """Make uncaught exceptions end the job, from now on. Later calls do nothing.

    Exceptions of any thread are printed as Python or an earlier hook prints them, under a line that names the rank. The other
    ranks print the exception without its traceback; then the job ends with status 1 (130 for KeyboardInterrupt). Nothing changes
    with one rank, nor in a forked process, whose end its parent handles.
    """
    global _rank
    if size == 1:
        return
    _rank = _rank or (rank, size)
    _let_exits_win()
    _hook()


def leave_without_mpi(wait: Callable[[], object]) -> None:
    """End this process without MPI_Finalize, which would wait for a rank that dies in it; `wait` waits for the living ones."""
    global _wait_at_end
    _wait_at_end = wait


def renumber() -> None:
    """Clear this rank's number: the next `install` sets it. For `ms.survive`."""
    global _rank
    _rank = None


def _hook() -> None:
    """Replace the exception hooks, also those that the program has set since."""
    global _process
    first, _process = _process is None, os.getpid()
    record_exit()
    if not isinstance(sys.excepthook, _Hook):
        sys.excepthook = _Hook(sys.excepthook)
    if not isinstance(threading.excepthook, _ThreadHook):
        threading.excepthook = _ThreadHook(threading.excepthook)
    if first:
        no_rank.install()
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_in_child)


def _at_exit() -> None:
    """End the job if this rank ends with an error before MPI has started, in which the others may wait for it."""
    if os.getpid() != _process:
        return
    mpi = sys.modules.get("mpi4py.MPI")
    end_on_uncaught()
    start.mark_finished()
    status = exit_status()
    if status and not ending and (mpi is None or not mpi.Is_initialized()):
        end_job(f"{_who()}: the job ends: it called sys.exit({status}) before MPI was started", status)
    if status not in (0, RESTART_EXIT_CODE):  # if ranks survive, no launcher reports it
        with contextlib.suppress(ValueError):  # a wrong setting, possibly the reason
            environment = Environment.read()
            if environment.job:
                leftovers.set_word(environment.job, leftovers.ENDED, environment.generation + 1)
    if _wait_at_end is not None and not ending:
        _wait_at_end()
        logging.shutdown()
        _flush()
        _end_as_python()


def end_on_uncaught() -> None:
    """End the job if the program has ended on an exception that a hook of the program received."""
    error = _uncaught()
    if not ending and error is not None:
        _end_on(type(error), error, error.__traceback__, lambda: None)


def _in_child() -> None:
    """Make a forked child end without MPI_Finalize, which mpi4py would call at exit, and which belongs to the parent."""
    process = os.getpid()

    def leave() -> None:
        if os.getpid() == process:
            _flush()
            _end_as_python()

    _forget_exit()
    if start.running() is not None:
        atexit.register(leave)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _who() -> str:
    """Return this rank's name: by the strategy's number, else MPI's, else the launcher's."""
    rank, mpi = _rank, start.running()
    if rank is None and mpi is not None:
        rank = mpi.COMM_WORLD.rank, mpi.COMM_WORLD.size
    launched = launched_size()
    if rank is None and launched is not None:
        number = launched_rank()
        return f"a rank of {launched[0]}" if number is None else f"rank {number} of {launched[0]}"
    return "a rank" if rank is None else f"rank {rank[0]} of {rank[1]}"


def _end_on(
    kind: type[BaseException],
    error: BaseException | None,
    trace: TracebackType | None,
    before: Callable[[], object] | None,
    thread: threading.Thread | None = None,
) -> None:
    """End the job on an uncaught exception, whatever its own methods and the program's earlier hook raise.

    Args:
        before: calls the earlier hook; None if that was Python's own.
        thread: the thread, unless it is the main one.
    """
    sys.setrecursionlimit(sys.getrecursionlimit() + 1000)  # the program may have left no room
    more = ""
    if before is not None:
        try:
            before()
        except BaseException as failed:
            more = f"\n(the program's own hook failed: {error_text(failed)})"
    short = class_name(kind) if error is None else error_text(error)
    text = short
    if before is None or more:
        text = _said(
            lambda: format_exception(kind, error, trace),
            lambda: "".join(["Traceback (most recent call last):\n", *traceback.format_tb(trace), short]),
            lambda: short,
        )
    reason = _said(lambda: "".join(traceback.format_exception_only(kind, error)), lambda: short)
    head = _said(_who, lambda: "a rank") + ": the job ends on this exception"  # a launcher's variables may be wrong
    head += "" if thread is None else _said(lambda: f" in {thread.name}", lambda: " in a thread")
    status = error.status if issubclass(kind, PeerExitError) and error is not None else 1  # type: ignore[attr-defined]
    end_job(f"{head}\n{text}{more}", 130 if kind is KeyboardInterrupt else status, reason)


def _said(*ways: Callable[[], str]) -> str:
    """Return the first text that can be created. Errors in the program's own classes must not keep the job alive."""
    for way in ways:
        with contextlib.suppress(BaseException):
            return way()
    return ""


def _ends_the_program(trace: TracebackType | None) -> bool:
    """Return True if an exception passed to sys.excepthook is uncaught. Called by a function that the hook calls.

    The interpreter also passes exceptions that compiled code cannot raise (PyErr_Print, as Cython calls it for `noexcept`
    functions), and then continues. In that case the program's outermost frame still runs, and the exception is of none of the
    running frames. A program may also pass an exception that it has caught.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if trace is not None and frame is trace.tb_frame:
            return True
        outermost, frame = frame.f_code, frame.f_back
    main = threading.current_thread() is threading.main_thread()
    return main and outermost is not _program and outermost.co_name != "<module>"


class _Hook:
    """A replacement of sys.excepthook, which calls the program's own earlier hook."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before, self._busy = before, False

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != _process:
            self._before(kind, error, trace)
            return
        if self._busy:  # a hook of the program that calls ours
            sys.__excepthook__(kind, error, trace)
            return
        if not _ends_the_program(trace):
            self._before(kind, error, trace)
            return
        self._busy = True
        before = self._before
        _end_on(kind, error, trace, None if before is sys.__excepthook__ else lambda: before(kind, error, trace))


class _ThreadHook:
    """A replacement of threading.excepthook."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before = before

    def __call__(self, args: Any) -> None:
        if os.getpid() != _process:
            self._before(args)
            return
        if args.exc_type is SystemExit:  # like Python: it ends only the thread
            return
        if survives() and is_loss(args.exc_value):  # the program's own calls will raise it too
            return
        before = None if self._before is threading.__excepthook__ else lambda: self._before(args)
        _end_on(args.exc_type, args.exc_value, args.exc_traceback, before, args.thread)


# Equal failures of several ranks: rank 0 of a group collects them, and the lowest rank of each text prints it.


def failure_key(text: str) -> bytes:
    """Return a hash that is equal for texts that differ only in ranks and memory addresses."""
    alike = re.sub(r"\brank \d+(?: of \d+)?|\b0x[0-9a-f]+", "", text)
    return hashlib.blake2b(encoded(alike), digest_size=KEY_BYTES).digest()


@final
class Failures:
    """Rank 0's record of the failures of a group of ranks.

    Attributes:
        reason: of the first one; empty without any.
    """

    def __init__(self, size: int) -> None:
        self.reason = b""
        self._size, self._first = size, 0.0
        self._waiting: dict[int, bytes] = {}  # rank: key
        self._printed: set[bytes] = set()

    def note(self, rank: int, key: bytes, reason: bytes, now: float) -> None:
        """Record that a rank fails."""
        self.reason = self.reason or reason
        self._first = self._first or now
        self._waiting[rank] = key

    def verdicts(self, now: float) -> dict[int, str | None]:
        """Return, once all failures may have arrived, a text for each waiting rank that prints: the other ranks with equal
        errors, in words.

        None for a rank that does not print.
        """
        if not self._waiting or (len(self._waiting) < self._size and now - self._first < _GATHER):
            return {}
        found: dict[int, str | None] = dict.fromkeys(self._waiting)
        groups: dict[bytes, list[int]] = {}
        for rank in sorted(self._waiting):
            groups.setdefault(self._waiting[rank], []).append(rank)
        for text, ranks in groups.items():
            if text not in self._printed:
                others = ", ".join(ranges(ranks[1:]))
                found[ranks[0]] = f"(the same on {plural(len(ranks) - 1, 'rank')} {others})\n" if others else ""
        self._printed.update(groups)
        self._waiting.clear()
        return found


# The status with which Python ends this process, for functions that run at its end. Python does not pass it to atexit
# functions, and sys.exit is not the only way to set it: `raise SystemExit(3)` and `quit(3)` do too, and a program may
# catch the exception. So it is recorded when the interpreter itself reads it: an attribute of an exception that leaves
# the program, read without Python code.


def record_exit() -> None:
    """Record the exit status of this process from now on. Later calls determine the program again."""
    global _program
    outermost = frame_of(threading.main_thread().ident or 0)
    while outermost is not None and outermost.f_back is not None:
        outermost = outermost.f_back
    _program = None if outermost is None else outermost.f_code
    names = gc.get_referents(vars(SystemExit))[0]  # the dict of the type, which Python shows without write access
    if names["code"] is _CODE:
        names["code"] = property(_read_code, _CODE.__set__, _CODE.__delete__, _CODE.__doc__)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(SystemExit))  # the interpreter caches attributes
        if sys.version_info < (3, 12):  # there sys.exit creates no exception until a handler needs one
            sys.exit = exit


def exit(status: Any = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status), as sys.exit, which it replaces. It can be pickled, as sys.exit can."""
    raise SystemExit(status)


def _read_code(error: SystemExit) -> Any:
    """Return the `code` of an exception, and record it if the interpreter reads it to end the process."""
    global _status
    code = _CODE.__get__(error, type(error))
    if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
        _status = code & 0xFF if isinstance(code, int) else int(code is not None)
    return code


def _forget_exit() -> None:
    """Clear the parent's status, in a forked child."""
    global _status
    _status = 0


def _uncaught() -> BaseException | None:
    """Return the exception on which the program has ended, if any, other than SystemExit, from the interpreter's record."""
    trace, error = getattr(sys, "last_traceback", None), getattr(sys, "last_value", None)
    return error if error is not None and trace is not None and trace.tb_frame.f_code is _program else None


def exit_status() -> int:
    """Return the exit status of this process: the argument of sys.exit, 1 on an exception; else 0."""
    return _status or int(_uncaught() is not None)


def _end_as_python() -> NoReturn:
    """End this process immediately, with Python's status; Ctrl-C is a signal."""
    if isinstance(_uncaught(), KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(exit_status())
