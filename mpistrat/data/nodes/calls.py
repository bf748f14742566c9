"""Calls of a user's function on elements: in the reading thread, in a pool of threads, or in processes.

Python's forkserver starts the processes, which are not ranks (`cluster/no_rank.py`).
"""

from __future__ import annotations

import contextlib
import copyreg
import io
import itertools
import os
import queue
import signal
import sys
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, final

from ...base import partition
from ...base.cores import usable_cores
from ...base.errors import explain
from ...cluster import no_rank
from ..options import AUTOTUNE
from ..stats import StageStats

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess

__all__ = [
    "CallError",
    "Calls",
    "Processes",
    "SeveralAtOnce",
    "call",
    "call_each",
    "check_callable",
    "name_of",
    "start_server",
]


class CallError(Exception):
    """An error of a function on one of several elements; internal to this package.

    Attributes:
        index: the index of the element.
        error: the error.
    """

    def __init__(self, index: int, error: BaseException) -> None:
        super().__init__(index, error)
        self.index = index
        self.error = error


def check_callable(function: str, argument: str, value: Any) -> None:
    """Raise TypeError, naming the function of Dataset and its argument, unless the value is callable."""
    if not callable(value):
        raise TypeError(explain(function, argument, expected="a callable", got=repr(value)))


def call(function: Callable[..., Any], element: Any) -> Any:
    """Call a function on an element; a plain tuple is passed as several arguments."""
    if type(element) is tuple:
        return function(*element)
    return function(element)


class SeveralAtOnce(ABC):
    """A function of one element that can also process several at once."""

    @abstractmethod
    def __call__(self, element: Any) -> Any:
        """Return the result for one element."""

    @abstractmethod
    def together(self, elements: Sequence[Any]) -> list[Any]:
        """Return the results for several elements."""


def call_each(function: Callable[..., Any], elements: Sequence[Any]) -> list[Any]:
    """Return the function of each element. Raises CallError.

    If the function of several elements at once raises an error, it is called on each element to find the failing one.
    """
    if isinstance(function, SeveralAtOnce) and len(elements) > 1:
        with contextlib.suppress(Exception):
            return function.together(elements)
    results: list[Any] = []
    try:
        for element in elements:
            results.append(function(*element) if type(element) is tuple else function(element))
    except Exception as error:
        raise CallError(len(results), error) from None
    return results


def name_of(function: Callable[..., Any]) -> str:
    """Return a function's name for texts."""
    return str(getattr(function, "__name__", None) or type(function).__name__)


_BY_US = "mpistrat:"  # prefix of the forkserver's PYTHONSAFEPATH (any text works), before the original PYTHONPATH
_ROOT = os.path.dirname(os.path.abspath(__file__ + "/../../.."))
_starting = threading.Lock()


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank gets Ctrl-C, and ends this process
    if (said := os.environ.get("PYTHONSAFEPATH", "")).startswith(
        _BY_US
    ):  # not for programs started by the user's function
        _set({"PYTHONSAFEPATH": None, "PYTHONPATH": said.removeprefix(_BY_US)})


def start_server(context: Any) -> None:
    """Start the forkserver, unless it runs: it imports this module, not the main program.

    It is a `python -c`, which would first search modules in the working directory, and run a `json.py` from there. Python
    3.11 and later are configured not to; Python 3.10 has no such setting that preserves PYTHONPATH.
    """
    from multiprocessing import forkserver

    no_rank.install()
    server = getattr(forkserver, "_forkserver", None)
    others = [name for name in getattr(server, "_preload_modules", []) if name not in ("__main__", __name__)]
    context.set_forkserver_preload([__name__, *others])
    with _starting:
        before = {name: os.environ.get(name) for name in ("PYTHONSAFEPATH", "PYTHONPATH")}
        if not before["PYTHONSAFEPATH"]:
            os.environ["PYTHONSAFEPATH"] = _BY_US + (before["PYTHONPATH"] or "")
            if sys.path[:1] == [_ROOT]:  # the program is next to the package, which need not be installed
                os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, before["PYTHONPATH"]]))
        try:
            forkserver.ensure_running()
        finally:
            _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


START_SECONDS = 120.0  # to import what the function needs
END_SECONDS = 2.0  # for a process to end on request


class ProcessTraceback(Exception):
    """The cause of an error from a process: its traceback as text."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


def _pickled(value: Any) -> bytes:
    """Return a value as bytes from which any number of processes can load it.

    Without the reducers that libraries register at ForkingPickler: PyTorch's send a tensor to one process only.
    """
    from multiprocessing.reduction import ForkingPickler

    buffer = io.BytesIO()
    pickler: Any = ForkingPickler(buffer)
    pickler.dispatch_table = copyreg.dispatch_table
    pickler.dump(value)
    return buffer.getvalue()


def _serve(connection: Connection, function_bytes: bytes) -> None:
    """Answer requests in a process until the other side closes the connection."""
    no_rank.become_no_rank()  # again, in case another package's server runs
    _begin()
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    from multiprocessing.reduction import ForkingPickler

    try:
        try:
            function = ForkingPickler.loads(function_bytes)
        except Exception as error:
            connection.send(("start", *_described(error)))
            return
        connection.send(("ready",))
        while True:
            _answer(connection, function, connection.recv())
    except (EOFError, OSError):
        return  # the other side has ended


def _answer(connection: Connection, function: Callable[..., Any], elements: Sequence[Any]) -> None:
    try:
        answer: tuple[Any, ...] = ("results", call_each(function, elements))
    except CallError as failed:
        answer = ("error", failed.index, _sendable(failed.error), *_described(failed.error))
    try:
        connection.send(answer)
    except OSError:
        raise
    except Exception as error:  # not picklable; raised before anything is sent
        connection.send(("error", 0, None, *_described(error)))


def _sendable(error: BaseException) -> BaseException | None:
    """Return the error if it survives pickling; many cannot be rebuilt from their arguments."""
    from multiprocessing.reduction import ForkingPickler

    try:
        ForkingPickler.loads(_pickled(error))
    except Exception:
        return None
    return error


def _described(error: BaseException) -> tuple[str, str]:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    return f"{type(error).__name__}: {error}", text


class _MapProcess:
    """One process and the connection to it."""

    def __init__(self, number: int, caller: str, name: str, function_bytes: bytes) -> None:
        import multiprocessing

        context = multiprocessing.get_context("forkserver")
        self.connection, theirs = context.Pipe()
        self._name = f"{caller}: process {number} of {name}"
        self.process: ForkServerProcess = context.Process(
            target=_serve, args=(theirs, function_bytes), name=f"mpistrat-map-{number}", daemon=True
        )
        # A signal to stop the job may reach its whole process group: these processes ignore it, as does Python's server.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        try:
            start_server(context)
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # else the end of the process would go unnoticed
        self._started = False

    def call_each(self, elements: Sequence[Any]) -> list[Any]:
        try:
            if not self._started:
                self._wait_for_start()
            answer = self._ask(elements)
        except (EOFError, OSError):
            raise RuntimeError(self._ended()) from None
        if answer[0] == "results":
            return answer[1]
        _, index, error, said, text = answer
        if error is None:
            error = RuntimeError(f"{self._name}: {said}")
        error.__cause__ = ProcessTraceback(text)
        raise CallError(index, error)

    def _ask(self, elements: Sequence[Any]) -> tuple[Any, ...]:
        try:
            self.connection.send(elements)
            return self.connection.recv()
        except (EOFError, OSError):
            raise
        except Exception as error:  # from pickle: the elements or the answer
            raise RuntimeError(f"{self._name}: an element could not be sent: {error}") from error

    def _wait_for_start(self) -> None:
        if not self.connection.poll(START_SECONDS):
            raise RuntimeError(f"{self._name} (pid {self.process.pid}) has not started within {START_SECONDS:.0f} s")
        answer = self.connection.recv()
        if answer[0] != "ready":
            error = RuntimeError(f"{self._name}: the function could not be loaded there: {answer[1]}")
            raise error from ProcessTraceback(answer[2])
        self._started = True

    def _ended(self) -> str:
        self.process.join(END_SECONDS)
        code = self.process.exitcode
        how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
        text = f"{self._name} (pid {self.process.pid}) {how}"
        if self._started:
            return text
        return (
            f"{text} before it had started, and wrote the reason to stderr. It imports the main program: "
            'put its code, also MPI calls, under `if __name__ == "__main__":`'
        )


def _end(workers: list[_MapProcess]) -> None:
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        worker.process.join(END_SECONDS)
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join(END_SECONDS)
    workers.clear()


@final
class Processes:
    """Processes that call one function. They start at the first call and end with this object.

    Args:
        caller: the user's call and its argument that gave the function, for errors.

    Raises:
        TypeError: for a function that cannot be sent to a process.
    """

    def __init__(self, function: Callable[..., Any], count: int, caller: tuple[str, str]) -> None:
        self._caller, argument = caller
        try:
            self._function = _pickled(function)
        except Exception as error:
            noun = "a function" if argument == "function" else "an object"
            expected = f"{noun} that can be pickled, such as one defined at the top of a module"
            got = f"{function!r:.80} ({error})"
            remedy = "Lambdas and functions inside functions work in threads: leave processes=True out."
            raise TypeError(explain(self._caller, argument, expected=expected, got=got, remedy=remedy)) from None
        self._name = name_of(function)
        self._count = count
        self._workers: list[_MapProcess] = []
        self._free: queue.SimpleQueue[_MapProcess] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def call_each(self, elements: Sequence[Any]) -> list[Any]:
        """Return the function's results for these elements, computed in one process. Raises CallError."""
        with self._lock:
            if not self._workers:
                weakref.finalize(self, _end, self._workers)
                for number in range(self._count):
                    self._workers.append(_MapProcess(number, self._caller, self._name, self._function))
                    self._free.put(self._workers[-1])
        worker = self._free.get()
        try:
            return worker.call_each(elements)
        finally:
            self._free.put(worker)


_MOST_AUTOTUNED = 8  # per rank: other ranks of the node may count the same cores


@final
class Calls:
    """The calls of `map`'s function. Threads and processes start at the first call and end with the dataset.

    Args:
        function: gets an element; a plain tuple is passed as several arguments.
        parallel: the number of parallel calls; None for one, in the calling thread; AUTOTUNE for one per core.
        deterministic: whether results of a stream have the order of their elements.
        processes: whether to use processes instead of threads.
        caller: the user's call and its argument that gave the function, for errors.

    Attributes:
        told: `parallel` as given, as a text that is equal on every rank.
        counters: calls, and the seconds spent in them, over all threads or processes.
    """

    def __init__(
        self, function: Callable[..., Any], parallel: int | None, deterministic: bool, processes: bool,
        caller: tuple[str, str] = ("Dataset.map", "function"),
    ) -> None:  # fmt: skip
        self.function = function
        self.told = "AUTOTUNE" if parallel == AUTOTUNE else str(parallel or 1)
        if parallel == AUTOTUNE:
            parallel = min(usable_cores(), _MOST_AUTOTUNED)
        self.parallel = parallel if parallel is not None or not processes else 1
        self.deterministic = deterministic
        self.processes = processes
        self.counters = StageStats()
        self._pool: ThreadPoolExecutor | None = None
        self._processes: Processes | None = None
        if processes:
            self._processes = Processes(function, self.parallel or 1, caller)

    def _submit(self, elements: Sequence[Any]) -> Future[list[Any]]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.parallel, "mpistrat-map")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True).atexit = False
        return self._pool.submit(self._call, elements)

    def _call(self, elements: Sequence[Any]) -> list[Any]:
        started = time.perf_counter()
        try:
            if self._processes is not None:
                return self._processes.call_each(elements)
            return call_each(self.function, elements)
        finally:
            self.counters.add(calls=len(elements), seconds=time.perf_counter() - started)

    def each(self, elements: Sequence[Any]) -> list[Any]:
        """Return the function's results for these elements, in their order. Raises CallError with the index."""
        if self.parallel is None or (len(elements) < 2 and not self.processes):
            return self._call(elements)
        shares = [(low, high) for low, high in partition.bounds(len(elements), self.parallel) if low < high]
        futures = [self._submit(elements[low:high]) for low, high in shares]
        results: list[Any] = []
        try:
            for future in futures:
                results += future.result()
        except CallError as error:
            raise CallError(len(results) + error.index, error.error) from None
        finally:
            for future in futures:
                future.cancel()
        return results

    def stream(self, elements: Iterator[Any], start: int) -> Iterator[tuple[int, Any]]:
        """Yield the positions of elements, counted from start, and the function's results, made ahead.

        As many elements are read ahead as calls run in parallel.
        """
        if self.parallel is None:
            for position, element in enumerate(elements, start):
                yield position, _only(position, self.each, [element])
            return
        numbered = enumerate(elements, start)
        waiting: deque[tuple[int, Future[list[Any]]]] = deque()
        try:
            while True:
                for position, element in itertools.islice(numbered, self.parallel - len(waiting)):
                    waiting.append((position, self._submit([element])))
                if not waiting:
                    return
                if not self.deterministic:
                    done, _ = wait([future for _, future in waiting], return_when=FIRST_COMPLETED)
                    while waiting[0][1] not in done:
                        waiting.rotate(-1)
                position, future = waiting.popleft()
                yield position, _only(position, future.result)
        finally:
            for _, future in waiting:
                future.cancel()


def _only(position: int, results: Callable[..., list[Any]], *arguments: Any) -> Any:
    """Return the only result; a CallError then has the position in the stream."""
    try:
        return results(*arguments)[0]
    except CallError as error:
        raise CallError(position, error.error) from None
