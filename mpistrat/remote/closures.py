"""A scheduled function on the chief, what stands for the value it will return, and the queue of those that wait."""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any, NoReturn, final

from ..base.errors import ContextError, MpistratError, explain

__all__ = [
    "Closure",
    "ClosureCancelledError",
    "ClosureQueue",
    "PerWorkerValues",
    "RemoteError",
    "RemoteTraceback",
    "RemoteValue",
    "RemoteValueStatus",
]


_numbers = itertools.count(1)  # of RemoteValues


class RemoteValueStatus(enum.Enum):
    """How far a RemoteValue is."""

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


@final
class RemoteValue:
    """What a scheduled function returns, once it has run (TF: tf.distribute.coordinator.RemoteValue).

    It may be an argument of another scheduled function, on any worker: that one waits for it, and gets the value.

    Attributes:
        status: NOT_READY, READY, or ABORTED if the function failed or was cancelled.
    """

    def __init__(self, coordinator: Any) -> None:
        """`ClusterCoordinator.schedule` makes it."""
        self.status = RemoteValueStatus.NOT_READY
        self._coordinator, self._number = coordinator, next(_numbers)
        self._data: bytes | None = None
        self._error: BaseException | None = None
        self._value: Any = None

    def get(self, timeout: float | None = None) -> Any:
        """Return the value, after waiting for it. For the chief.

        Args:
            timeout: seconds to wait at most; default without limit.

        Raises:
            Exception: what the function raised, with its traceback on the worker as the cause.
            ClosureCancelledError: it was cancelled.
            TimeoutError: it takes longer.
        """
        return self._coordinator.wait_for(self, timeout)

    def fetch(self) -> Any:
        """Return the value, after waiting for it. For the chief. The same as `get()`."""
        return self.get()

    def __repr__(self) -> str:
        return f"RemoteValue({self.status.name})"

    def _result(self, unpack: Callable[[bytes], Any]) -> Any:
        """Return the value, or raise what the function raised, once it is there."""
        if self._error is not None:
            raise self._error
        if self._value is None and self._data is not None:
            self._value = unpack(self._data)
        return self._value

    def _finish(self, data: bytes) -> None:
        self._data, self.status = data, RemoteValueStatus.READY

    def _abort(self, error: BaseException) -> None:
        self._error, self.status = error, RemoteValueStatus.ABORTED


@final
@dataclass
class Closure:
    """One scheduled function.

    Attributes:
        what: its name, for errors.
        data: function and arguments as bytes.
        value: what it will return.
        inputs: the RemoteValues among what it refers to.
        worker: the only worker that may run it, or None.
        priority: larger ones go first.
        isolated: whether its error is its caller's alone, instead of the next join's.
        kept: what must not be freed before it has run.
        start: called before it is sent the first time; returns whether it shall be.
        callback: called with the value once it is there, or aborted.
        number: counted from 1 over all closures that were submitted.
        missing: how many of its inputs are not ready.
    """

    what: str
    data: bytes
    value: RemoteValue
    inputs: Sequence[RemoteValue] = ()
    worker: int | None = None
    priority: float = 0
    isolated: bool = False
    kept: Sequence[Any] = ()
    start: Callable[[], bool] | None = None
    callback: Callable[[RemoteValue], None] | None = None
    number: int = 0
    missing: int = 0

    @property
    def rank(self) -> tuple[float, int]:
        """The order in the queue."""
        return -self.priority, self.number


Heap = list[tuple[tuple[float, int], Closure]]


@final
class ClosureQueue:
    """Closures for any worker, and closures for one.

    Example:
        >>> queue = ClosureQueue(2)
        >>> len(queue), queue.pop(0)
        (0, None)
    """

    def __init__(self, workers: int) -> None:
        self._any: Heap = []
        self._own: list[Heap] = [[] for _ in range(workers)]

    def __len__(self) -> int:
        return len(self._any) + sum(map(len, self._own))

    def push(self, closure: Closure) -> None:
        """Add a closure."""
        heap = self._any if closure.worker is None else self._own[closure.worker]
        heapq.heappush(heap, (closure.rank, closure))

    def pop(self, worker: int) -> Closure | None:
        """Take the next closure for a worker; None if there is none."""
        heaps = [heap for heap in (self._own[worker], self._any) if heap]
        return heapq.heappop(min(heaps, key=lambda heap: heap[0][0]))[1] if heaps else None

    def take(self, worker: int | None = None) -> list[Closure]:
        """Take all closures, or all that only one worker may run."""
        heaps = [self._any, *self._own] if worker is None else [self._own[worker]]
        taken = sorted(entry for heap in heaps for entry in heap)
        for heap in heaps:
            heap.clear()
        return [closure for _, closure in taken]


@final
class PerWorkerValues:
    """One value on each worker (TF: tf.distribute.coordinator.PerWorkerValues).

    `ClusterCoordinator.create_per_worker_dataset` and `create_per_worker_resource` make it. The chief has no value: in a
    scheduled function that it is an argument of, or that refers to it, the worker's own appears in its place. On the chief
    `iter()` of it gives a PerWorkerValues of iterators, one on each worker.

    Example:
        >>> iterator = iter(coordinator.create_per_worker_dataset(make))        # doctest: +SKIP
        >>> coordinator.schedule(lambda batches: step(next(batches)), (iterator,))    # doctest: +SKIP
    """

    def __init__(self, coordinator: Any, number: int, iterate: Callable[[Any], PerWorkerValues]) -> None:
        """`ClusterCoordinator` makes it."""
        self._coordinator, self._number, self._iterate = coordinator, number, iterate

    def __iter__(self) -> PerWorkerValues:
        return self._iterate(self)

    def __next__(self) -> NoReturn:
        remedy = "Give the iterator to schedule(), and call next() in the function"
        expected, got = "next() in a scheduled function", "one on the chief"
        raise ContextError(explain("PerWorkerValues", "", expected=expected, got=got, remedy=remedy))

    def __repr__(self) -> str:
        return f"PerWorkerValues({self._number})"


class ClosureCancelledError(MpistratError, CancelledError):
    """A scheduled function was not run, because another one failed before, or the coordinator was closed."""


class RemoteError(MpistratError, RuntimeError):
    """A scheduled function failed with an exception that cannot be sent; the text has its traceback."""


class RemoteTraceback(Exception):
    """The cause of an exception that came from a worker: which worker, and its traceback there."""
