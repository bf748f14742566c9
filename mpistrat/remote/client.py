"""The client: `ms.connect` to a job that serves, functions that its ranks run, and what stands for the values that stay there."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from types import TracebackType
from typing import Any, NoReturn, final

from ..base import nest
from ..base.errors import ClosedError, ClusterError, ContextError, explain
from ..base.text import encoded
from .closures import ClosureCancelledError, RemoteValueStatus
from .registry import Reduced, dumps, loads, loads_error, token
from .session import COORDINATOR
from .zmq import ClientSocket, Kind, Message

__all__ = ["RemoteCluster", "RemoteObject", "connect"]

_PATIENCE = 0.05  # seconds that a waiting thread keeps the connection from others
_PAUSE = 0.001  # seconds that it leaves it to them then


def connect(file: str | os.PathLike[str], *, timeout: float = 60.0) -> RemoteCluster:
    """Return the ranks of a job in which `mpistrat serve FILE` runs; use it in a `with` statement. This process is no rank.

    Its functions are the coordinator's: workers run what is scheduled, the chief makes variables. The connection is encrypted;
    only who can read the file may speak to the job. Who can speak to it can run anything in it, as you.

    Args:
        file: that the job writes, on a file system that both see, or a copy of it, readable by you alone.
        timeout: seconds that the job may take to be there.

    Raises:
        TimeoutError: no job serves by that file, or cannot be reached: see "A job that serves" in the documentation.
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
class RemoteCluster:
    """The ranks of a job that serves. `ms.connect` makes it.

    Attributes:
        num_workers: how many workers run functions.
        coordinator: stands for the job's ClusterCoordinator, in functions that `call` has the chief call.
    """

    def __init__(self, path: Path, timeout: float) -> None:
        end = monotonic() + timeout
        self._lock, self._numbers = threading.RLock(), COORDINATOR
        self._objects: weakref.WeakValueDictionary[int, RemoteObject] = weakref.WeakValueDictionary()
        self._dropped: deque[int] = deque()  # numbers that nobody has any more
        self._pending: set[int] = set()
        self._error: BaseException | None = None
        self._scheduled = self._ended = 0
        self._asked: set[int] = set()  # numbers of the fetches under way
        self._values: dict[int, bytes | BaseException] = {}  # their answers, or why there are none
        self._socket: ClientSocket | None = ClientSocket(path, timeout)
        self.num_workers = 0
        self.coordinator = RemoteObject(self, COORDINATOR)
        self.coordinator.status = RemoteValueStatus.READY
        try:
            self._socket.send(
                Kind.HELLO, 0, encoded(f"{getpass.getuser()}@{socket.gethostname()}, process {os.getpid()}")
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

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        worker: int | None = None,
        priority: float = 0,
    ) -> RemoteObject:
        """Have a worker of the job call a function, and return at once what stands for the value.

        Args:
            fn: the function, which travels with all that it refers to; of your own modules only the names travel.
            args, kwargs: its arguments. A RemoteObject arrives as what it stands for, also where the function refers to it.
            worker, priority: as for `ClusterCoordinator.schedule`.

        Raises:
            Exception: what a function scheduled before raised, once; those that waited were cancelled then.
            TypeError: the function, or what it refers to, cannot be pickled.
            ClosedError: the job has ended, or `close()` was called.
        """
        self._raise_error()
        with self._lock:
            made = self._send(Kind.SCHEDULE, (fn, tuple(args), dict(kwargs or {}), worker, priority))
            self._scheduled += 1
        return made

    def call(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> RemoteObject:
        """Have the chief call a function in the scope of the job's strategy; wait for it, and return what stands for the value.

        Variables, optimizers and whatever else all ranks make together are made so; `fn` may also save and restore.

        Raises:
            Exception: what the function raised.
            TypeError, ClosedError: as for `schedule`.

        Example:
            >>> w = cluster.call(lambda: ms.Variable([0.0, 0.0]))  # doctest: +SKIP
            >>> cluster.schedule(lambda: w.assign_add([1.0, 1.0])).get()  # doctest: +SKIP
        """
        with self._lock:
            made = self._send(Kind.CALL, (fn, tuple(args), dict(kwargs or {})))
        made._wait(None)
        return made

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any]) -> RemoteObject:
        """Return a dataset of its own on each worker: see `ClusterCoordinator.create_per_worker_dataset`."""
        return self.call(_per_worker_dataset, (self.coordinator, dataset_fn))

    def create_per_worker_resource(self, fn: Callable[[], Any]) -> RemoteObject:
        """Return what a function makes on each worker, and which stays there."""
        return self.call(_per_worker_resource, (self.coordinator, fn))

    def join(self) -> None:
        """Wait until all scheduled functions have run. Ctrl-C cancels those that wait.

        Raises:
            Exception: what the first function that failed raised, once, with its traceback in the job as the cause.
        """
        self._wait(lambda: not self._pending or self._error is not None)
        self._raise_error()

    def done(self) -> bool:
        """Return whether all scheduled functions have run."""
        self._take(0)
        return not self._pending

    def progress(self) -> tuple[int, int]:
        """Return how many scheduled functions have ended, and how many were scheduled."""
        self._take(0)
        return self._ended, self._scheduled

    def fetch(self, values: Any) -> Any:
        """Return a structure with the values of the RemoteObjects in it. Of a variable it is an array."""
        return nest.map_structure(lambda value: value.get() if isinstance(value, RemoteObject) else value, values)

    def cancel(self) -> None:
        """Cancel the functions that wait; those that run end. Their `get` raises ClosureCancelledError."""
        with self._lock:
            self._open().send(Kind.CANCEL)

    def shutdown(self) -> None:
        """End the job's `mpistrat serve`, on all its ranks."""
        self._leave(Kind.END)

    def close(self) -> None:
        """Leave the job, which waits for the next client. What waits is cancelled; variables stay. Later calls do nothing."""
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
                    ending.send(kind)
                ending.close()

    def _open(self) -> ClientSocket:
        if self._socket is None:
            raise ClosedError("RemoteCluster: the connection was closed")
        return self._socket

    def _send(self, kind: Kind, what: Any) -> RemoteObject:
        """Send a function with a new number, and return what stands for its value."""
        socket = self._open()
        if self._dropped:
            numbers = [self._dropped.popleft() for _ in range(len(self._dropped))]
            socket.send(Kind.FORGET, 0, dumps(numbers, _nothing))
        data = dumps(what, self._reduce, getattr(what[0], "__qualname__", "a function"))
        self._numbers += 1
        made = RemoteObject(self, self._numbers)
        socket.send(kind, made._number, data)
        self._objects[made._number] = made
        if kind == Kind.SCHEDULE:
            self._pending.add(made._number)
        weakref.finalize(made, self._dropped.append, made._number).atexit = False
        return made

    def _reduce(self, thing: Any) -> Reduced | None:
        if not isinstance(thing, RemoteObject):
            return None
        if thing._cluster is not self:
            raise TypeError("a RemoteObject of another connection")
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
        """Take all messages that are there; wait for the first for so many seconds."""
        with self._lock:
            message = self._open().receive(seconds)
            while message is not None:
                self._note(message)
                message = self._open().receive(0)

    def _note(self, message: Message) -> None:
        if message.kind == Kind.WELCOME:
            self.num_workers = message.number
        elif message.kind == Kind.REFUSED:
            got = message.payload.decode(errors="replace")
            raise ClusterError(explain("connect", "", expected="a job that is free", got=got))
        elif message.kind == Kind.VALUE and message.number in self._asked:
            self._values[message.number] = message.payload
        elif message.kind in (Kind.DONE, Kind.FAILED):
            self._settle(message)

    def _settle(self, message: Message) -> None:
        error = loads_error(message.payload, lambda data: loads(data, _stays)) if message.kind == Kind.FAILED else None
        scheduled = message.number in self._pending
        if scheduled:
            self._pending.discard(message.number)
            self._ended += 1
            if error is not None and self._error is None and not isinstance(error, ClosureCancelledError):
                self._error = error
        thing = self._objects.get(message.number)
        if message.number in self._asked and error is not None:
            self._values[message.number] = error
        elif thing is not None:
            thing._error = error
            thing.status = RemoteValueStatus.READY if error is None else RemoteValueStatus.ABORTED

    def _raise_error(self) -> None:
        self._take(0)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _fetch(self, thing: RemoteObject, timeout: float | None) -> Any:
        with self._lock:
            socket = self._open()
            self._numbers += 1
            number = self._numbers  # of its own: the answer to a fetch that was given up may be an older value
            self._asked.add(number)
            socket.send(Kind.FETCH, number, dumps(thing._number, _nothing))
        try:
            self._wait(lambda: number in self._values, timeout, "RemoteObject.get")
        finally:
            self._asked.discard(number)
            value = self._values.pop(number, b"")
        if isinstance(value, BaseException):
            raise value
        return loads(value, _stays)


@final
class RemoteObject:
    """Stands for a value in the job: what a function returned, a variable, a dataset on each worker.

    Among the arguments of a function, or where it refers to one, the value itself appears in its place.
    `iter()` of what stands for a dataset on each worker stands for the iterators.

    Attributes:
        status: NOT_READY, READY, or ABORTED if the function failed or was cancelled.
    """

    def __init__(self, cluster: RemoteCluster, number: int) -> None:
        """`RemoteCluster` makes it."""
        self.status = RemoteValueStatus.NOT_READY
        self._cluster, self._number = cluster, number
        self._error: BaseException | None = None

    def get(self, timeout: float | None = None) -> Any:
        """Return the value, after waiting for it; of a variable an array. Ctrl-C cancels the functions that wait.

        Args:
            timeout: seconds to wait at most; default without limit.

        Raises:
            Exception: what the function raised, with its traceback in the job as the cause.
            ClosureCancelledError: it was cancelled.
            TimeoutError: it takes longer.
            TypeError: it cannot be sent.
        """
        self._wait(timeout)
        return self._cluster._fetch(self, timeout)

    def fetch(self) -> Any:
        """Return the value, after waiting for it. The same as `get()`."""
        return self.get()

    def _wait(self, timeout: float | None) -> None:
        self._cluster._wait(lambda: self.status is not RemoteValueStatus.NOT_READY, timeout, "RemoteObject.get")
        if self._error is not None:
            self._cluster._error = None if self._cluster._error is self._error else self._cluster._error
            raise self._error

    def __iter__(self) -> RemoteObject:
        return self._cluster.call(iter, (self,))

    def __next__(self) -> NoReturn:
        remedy = "Give the iterator to schedule(), and call next() in the function"
        expected, got = "next() in a scheduled function", "one in the client"
        raise ContextError(explain("RemoteObject", "", expected=expected, got=got, remedy=remedy))

    def __repr__(self) -> str:
        return f"RemoteObject({self._number}, {self.status.name})"


def _nothing(thing: Any) -> None:
    return None


def _stays(kind: str, key: int) -> NoReturn:
    remedy = "Return an array or plain data"
    raise TypeError(
        explain("RemoteObject.get", "", expected="what can be sent", got=f"a {kind} of the job", remedy=remedy)
    )


# what the chief calls; by reference, for this module is there


def _per_worker_dataset(coordinator: Any, fn: Callable[[], Any]) -> Any:
    return coordinator.create_per_worker_dataset(fn)


def _per_worker_resource(coordinator: Any, fn: Callable[[], Any]) -> Any:
    return coordinator.create_per_worker_resource(fn)
