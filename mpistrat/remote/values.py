"""The values of scheduled functions, as the program that schedules them holds them; the errors of those functions."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any, NoReturn, final

from ..base.errors import ContextError, MpistratError, explain

__all__ = [
    "ClosureCancelledError",
    "PerWorkerValues",
    "RemoteError",
    "RemoteTraceback",
    "RemoteValue",
    "RemoteValueStatus",
    "Stub",
]


class RemoteValueStatus(enum.Enum):
    """The state of a RemoteValue."""

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


class Stub(ABC):
    """A value that is on other ranks. A function that refers to it gets the value itself.

    Args:
        scheduler: the `FunctionScheduler` that made it.
        number: its number there.
    """

    def __init__(self, scheduler: Any, number: int) -> None:
        self._scheduler, self._number = scheduler, number

    @abstractmethod
    def __repr__(self) -> str: ...

    def __iter__(self) -> Any:
        return self._scheduler.iterate(self)

    def __next__(self) -> NoReturn:
        remedy = "Give the iterator to schedule(), and call next() in the function"
        expected, got = "next() in a scheduled function", "one in the program that schedules"
        raise ContextError(explain(type(self).__name__, "", expected=expected, got=got, remedy=remedy))


@final
class RemoteValue(Stub):
    """The value that a scheduled function returns (TF: tf.distribute.coordinator.RemoteValue).

    It may be an argument of another scheduled function, on any worker: that one waits for it, and gets the value. For a client,
    which calls it `RemoteObject` too, it also stands for what `RemoteCluster.call` returns: a variable, or a dataset on each
    worker, whose `iter()` stands for the iterators.

    Attributes:
        status: NOT_READY, READY, or ABORTED if the function failed or was cancelled.
    """

    def __init__(self, scheduler: Any, number: int) -> None:
        """`schedule` makes it."""
        super().__init__(scheduler, number)
        self.status = RemoteValueStatus.NOT_READY
        self._data: bytes | None = None
        self._error: BaseException | None = None
        self._value: Any = None

    def get(self, timeout: float | None = None) -> Any:
        """Return the value, after waiting for it; of a variable an array. For the chief or a client.

        In a client Ctrl-C cancels the functions that wait.

        Args:
            timeout: seconds to wait at most; default without limit.

        Raises:
            Exception: what the function raised, with its traceback on the other rank as the cause.
            ClosureCancelledError: it was cancelled.
            TimeoutError: it takes longer.
            TypeError: it cannot be sent to the client.
        """
        return self._scheduler.wait_for(self, timeout)

    def fetch(self) -> Any:
        """Return the value, after waiting for it. The same as `get()`."""
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

    def _finish(self, data: bytes | None = None) -> None:
        self._data, self.status = data, RemoteValueStatus.READY

    def _abort(self, error: BaseException) -> None:
        self._error, self.status = error, RemoteValueStatus.ABORTED


@final
class PerWorkerValues(Stub):
    """One value on each worker (TF: tf.distribute.coordinator.PerWorkerValues).

    `ClusterCoordinator.create_per_worker_dataset` and `create_per_worker_resource` make it. The chief has no value: in a
    scheduled function that it is an argument of, or that refers to it, the worker's own appears in its place. On the chief
    `iter()` of it gives a PerWorkerValues of iterators, one on each worker.

    Example:
        >>> iterator = iter(coordinator.create_per_worker_dataset(make))        # doctest: +SKIP
        >>> coordinator.schedule(lambda batches: step(next(batches)), (iterator,))    # doctest: +SKIP
    """

    def __repr__(self) -> str:
        return f"PerWorkerValues({self._number})"


class ClosureCancelledError(MpistratError, CancelledError):
    """A scheduled function was not run, because another one failed before, or the coordinator was closed."""


class RemoteError(MpistratError, RuntimeError):
    """A scheduled function failed with an exception that cannot be sent; the text has its traceback."""


class RemoteTraceback(Exception):
    """The cause of an exception that came from a worker: which worker, and its traceback there."""
