"""Clients: `ms.connect` to a serving job. `service.py` has the job's side."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any, NoReturn, TypeVar, final

from ..base.errors import ClosedError, ClusterError, explain
from ..base.text import encoded
from .channel import Kind, Message
from .program import LIMIT, pack_program
from .registry import Reduced, dumps, loads, loads_error, token
from .scheduler import Call, ClosureCancelledError, FunctionScheduler, RemoteValue, RemoteValueStatus, Stub
from .service import COORDINATOR
from .zmq import JOB, ClientSocket

__all__ = [
    "RemoteCluster",
    "connect",
]


T = TypeVar("T")
_ANSWER = 5.0  # seconds in which the job reports that a stopped program has ended
_PATIENCE = 0.05  # seconds for which a waiting thread holds the connection
_PAUSE = 0.001  # seconds for which it then leaves it to others


def connect(file: str | os.PathLike[str], *, timeout: float = 60.0) -> RemoteCluster:
    """Return the ranks of a job in which `mpistrat serve FILE` runs; use it in a `with` statement. This process is not a rank.

    Its methods are the coordinator's: workers run scheduled functions, the chief creates variables. The connection is encrypted;
    only users who can read the file can connect. They can run any code in the job, as you.

    Args:
        file: the file that the job writes, on a shared file system, or a copy of it, readable by you alone.
        timeout: seconds to wait for the job.

    Raises:
        TimeoutError: no job serves by that file, or it is unreachable: see "A job that serves" in the documentation.
        ClusterError: the file is not yours alone; or the job serves another client.
        MissingDependencyError: pyzmq or cloudpickle is not installed.

    Source: the standalone client mode of TensorFlow's distribute coordinator.

    Example:
        >>> with ms.connect("serve.json") as cluster:  # doctest: +SKIP
        ...     cluster.schedule(lambda x: x + 1, (1,)).get()
        2
    """
    return RemoteCluster(Path(file), timeout)


@final
class RemoteCluster(FunctionScheduler):
    """The ranks of a serving job. `ms.connect` creates it.

    Attributes:
        num_workers: the number of workers that run functions.
        coordinator: a reference to the job's ClusterCoordinator, for functions that `call` runs on the chief.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__()
        end = monotonic() + timeout
        self._lock = threading.RLock()
        self._values: weakref.WeakValueDictionary[int, RemoteValue] = weakref.WeakValueDictionary()
        self._dropped: deque[int] = deque()  # numbers of values that are no longer used
        self._pending: set[int] = set()
        self._error: BaseException | None = None
        self._scheduled = self._failures = 0
        self._socket: ClientSocket | None = ClientSocket(path, timeout)
        self.num_workers = 0
        self.coordinator = RemoteValue(self, COORDINATOR)
        self.coordinator._finish()
        try:
            self._socket.send(
                JOB, Kind.HELLO, 0, encoded(f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}")
            )
            self._wait(lambda: self.num_workers > 0, end - monotonic(), "the answer of the job")
        except TimeoutError:
            self._socket.close()
            remedy = "Its address must be reachable from here: give `mpistrat serve` --host, or use an SSH tunnel"
            expected, got = "a job that answers", f"none within {timeout:g} s"
            raise TimeoutError(explain("connect", str(path), expected=expected, got=got, remedy=remedy)) from None
        except BaseException:
            self._socket.close()
            raise

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Call a function on the chief, in the scope of the job's strategy; wait for it, and return a reference to its value.

        It can create variables, optimizers and all other objects that all ranks create together, and it may save and restore.

        Raises:
            Exception: raised by the function.
            TypeError, ClosedError: as for `schedule`.

        Example:
            >>> w = cluster.call(lambda: ms.Variable([0.0, 0.0]))  # doctest: +SKIP
            >>> cluster.schedule(lambda: w.assign_add([1.0, 1.0])).get()  # doctest: +SKIP
        """
        with self._lock:
            made = self._send(Kind.CALL, fn, args, kwargs)
        self._settled(made, None)
        return made

    def run(
        self,
        program: Callable[..., T],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        strategy: Callable[[], Any] | None = None,
    ) -> list[T]:
        """Call a function on all ranks of the job together, as a launcher would start it there; return the results by rank.

        So it can train synchronously: all ranks are in it, the chief and the servers too. It creates its own strategy, variables
        and datasets. What the ranks print and log is printed here meanwhile. Ctrl-C stops it on all ranks, and so does an error
        of one rank; then the ranks wait for the next call. If it does not stop within 10 s, as in a blocking call of MPI, the
        job ends. Functions that were scheduled before are finished first.

        Args:
            program: the function. One of the main program is sent by value, one of a module by its name.
            args, kwargs: its arguments, without RemoteValues.
            strategy: creates the strategy in whose scope the function is called, such as `ms.MultiWorkerMirroredStrategy`; it is
                closed afterwards. Default none: the function creates its own, or none.

        Raises:
            Exception: that of the first rank that failed; its cause names the rank, and has its traceback there.
            ClosedError: the job has ended, as when one of its ranks dies.
            TypeError: the function, an argument or a result cannot be pickled.

        Source: the standalone client mode of TensorFlow's distribute coordinator, with a synchronous strategy.

        Example:
            >>> def train():  # doctest: +SKIP
            ...     return float(ms.get_strategy().reduce("SUM", 1.0))
            >>> cluster.run(train, strategy=ms.MultiWorkerMirroredStrategy)  # doctest: +SKIP
            [4.0, 4.0, 4.0, 4.0]
        """
        given: object = strategy
        if given is not None and not callable(given):
            remedy = "Pass its class, or a function without arguments"
            expected, got = "a function that creates the strategy on each rank", f"a {type(given).__name__}"
            raise TypeError(explain("run", "strategy", expected=expected, got=got, remedy=remedy))
        self.join()
        shown = [stream is not None and stream.isatty() for stream in (sys.stdout, sys.stderr)]
        payload = pack_program(program, args, kwargs, strategy, shown)
        with self._lock:
            made = self._request(Kind.PROGRAM, payload)
        try:
            self._settled(made, None)
        except KeyboardInterrupt:
            with self._lock:
                self._open().send(JOB, Kind.STOP)
            try:
                self._settled(made, LIMIT + _ANSWER)
            except ClosureCancelledError:
                pass
            except Exception as error:  # it failed before, or continues
                raise KeyboardInterrupt from error
            raise
        results = made._result(lambda data: loads(data, _stays))
        return [loads(data, _stays) for data in results]

    def join(self) -> None:
        """Wait until all scheduled functions have run. Ctrl-C cancels the waiting ones.

        Raises:
            Exception: that of the first function that failed, once, with its traceback in the job as the cause.
        """
        self._wait(lambda: not self._pending or self._error is not None)
        self._raise_error()

    def done(self) -> bool:
        """Return True if all scheduled functions have run."""
        self._take(0)
        return not self._pending

    def progress(self) -> tuple[int, int]:
        """Return the number of scheduled functions that have ended, and of all scheduled ones."""
        self._take(0)
        with self._lock:
            return self._scheduled - len(self._pending), self._scheduled

    def cancel(self) -> None:
        """Cancel waiting functions; running ones end. The `get` of cancelled ones raises ClosureCancelledError."""
        with self._lock:
            self._open().send(JOB, Kind.CANCEL)

    def shutdown(self) -> None:
        """End the job's `mpistrat serve`, on all its ranks."""
        self._leave(Kind.END)

    def close(self) -> None:
        """Leave the job, which waits for the next client; cancel waiting functions. Variables stay. Later calls do nothing."""
        self._leave(Kind.LEAVE)

    def __enter__(self) -> RemoteCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # inside

    def _leave(self, kind: Kind) -> None:
        with self._lock:
            ending, self._socket = self._socket, None
            if ending is not None:
                with contextlib.suppress(ClosedError):
                    ending.send(JOB, kind)
                ending.close()

    def _open(self) -> ClientSocket:
        if self._socket is None:
            raise ClosedError("RemoteCluster: the connection was closed")
        return self._socket

    def _schedule(self, call: Call, worker: int | None, priority: float) -> RemoteValue:
        with self._lock:
            made = self._send(Kind.SCHEDULE, *call, worker, priority, self._failures)
            self._pending.add(made._number)
            self._scheduled += 1
        return made

    def _make_on_workers(self, fn: Callable[..., Any], args: tuple[Any, ...], function: str) -> RemoteValue:
        return self.call(_make_on_workers, (self.coordinator, fn, args, function))

    def _send(
        self, kind: Kind, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None, *more: Any
    ) -> RemoteValue:
        """Send a function with a new number, and return its value."""
        socket = self._open()
        if self._dropped:
            numbers = [self._dropped.popleft() for _ in range(len(self._dropped))]
            socket.send(JOB, Kind.FORGET, 0, dumps(numbers, _nothing))
        call = (fn, tuple(args), dict(kwargs or {}), *more)
        data = dumps(call, self._reduce, getattr(fn, "__qualname__", "a function"))
        made = self._request(kind, data)
        weakref.finalize(made, self._dropped.append, made._number).atexit = False
        return made

    def _request(self, kind: Kind, data: bytes) -> RemoteValue:
        """Send a message, and return the value that its answer will complete."""
        made = RemoteValue(self, next(self._numbers))
        self._open().send(JOB, kind, made._number, data)
        self._values[made._number] = made
        return made

    def _reduce(self, thing: Any) -> Reduced | None:
        if not isinstance(thing, RemoteValue):
            return None
        if thing._scheduler is not self:
            raise TypeError("a RemoteValue of another connection")
        return token("object", thing._number)

    def _wait(self, until: Callable[[], bool], timeout: float | None = None, what: str = "") -> None:
        end = None if timeout is None else monotonic() + timeout
        try:
            while not until():
                left = _PATIENCE if end is None else end - monotonic()
                if left <= 0:
                    raise TimeoutError(f"{what}: not ready after {timeout:g} s")
                self._take(min(left, _PATIENCE))
                if not until():
                    sleep(_PAUSE)
        except KeyboardInterrupt:
            with contextlib.suppress(ClosedError):
                self.cancel()
            raise

    def _take(self, seconds: float) -> None:
        """Handle all available messages; wait at most `seconds` for the first."""
        with self._lock:
            while messages := self._open().poll(seconds):
                for message in messages:
                    self._note(message)
                seconds = 0.0

    def _note(self, message: Message) -> None:
        if message.kind == Kind.WELCOME:
            self.num_workers = message.number
        elif message.kind == Kind.REFUSED:
            got = message.payload.decode(errors="replace")
            raise ClusterError(explain("connect", "", expected="a job that is free", got=got))
        elif message.kind == Kind.OUTPUT:
            stream = sys.stderr if message.number == 2 else sys.stdout
            print(message.payload.decode(errors="replace"), end="", file=stream, flush=True)
        elif message.kind in (Kind.DONE, Kind.RESULT, Kind.FAILED):
            self._finish(message)

    def _finish(self, message: Message) -> None:
        error = loads_error(message.payload, lambda data: loads(data, _stays)) if message.kind == Kind.FAILED else None
        if message.number in self._pending:
            self._pending.discard(message.number)
            if error is not None and not isinstance(error, ClosureCancelledError):
                self._failures += 1
                self._error = self._error or error
        value = self._values.get(message.number)
        if value is None:  # no longer used, or a fetch that timed out
            return
        if error is None:
            value._finish(message.payload)
        else:
            value._abort(error)

    def _raise_error(self) -> None:
        self._take(0)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait_for(self, value: RemoteValue, timeout: float | None) -> Any:
        """Return a value: implements `RemoteValue.get`."""
        self._settled(value, timeout)
        with self._lock:
            answer = self._request(Kind.FETCH, dumps(value._number, _nothing))
        self._settled(answer, timeout)
        return answer._result(lambda data: loads(data, _stays))

    def iterate(self, stub: Stub) -> RemoteValue:
        """Return the value of `iter` on the chief: implements `iter` of a RemoteValue."""
        return self.call(iter, (stub,))

    def _settled(self, value: RemoteValue, timeout: float | None) -> None:
        """Wait until a function has ended; raise its exception."""
        self._wait(lambda: value.status is not RemoteValueStatus.NOT_READY, timeout, "RemoteValue.get")
        if value._error is not None:
            self._error = None if self._error is value._error else self._error
            raise value._error


def _nothing(thing: Any) -> None:
    return None


def _stays(kind: str, key: int) -> NoReturn:
    remedy = "Return an array or plain data"
    raise TypeError(
        explain("RemoteValue.get", "", expected="data that can be sent", got=f"a {kind} of the job", remedy=remedy)
    )


def _make_on_workers(coordinator: Any, fn: Callable[..., Any], args: tuple[Any, ...], function: str) -> Any:
    """Call the coordinator. The chief finds this function by its name, because it has this module."""
    return coordinator._make_on_workers(fn, args, function)
