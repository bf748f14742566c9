"""The common methods of a coordinator and a client, the values of scheduled functions, and their errors."""

from __future__ import annotations

import enum
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, NoReturn, final

from ..base import nest
from ..base.errors import ContextError, MpistratError, explain

__all__ = [
    "Call",
    "ClosureCancelledError",
    "FunctionScheduler",
    "PerWorkerValues",
    "RemoteError",
    "RemoteTraceback",
    "RemoteValue",
    "RemoteValueStatus",
    "Stub",
    "same",
]


class RemoteValueStatus(enum.Enum):
    """The state of a RemoteValue."""

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


class Stub(ABC):
    """A reference to a value on other ranks. A function that refers to it gets the value itself.

    Args:
        scheduler: the `FunctionScheduler` that created it.
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

    It may be an argument of another scheduled function, on any worker, which waits for it and gets the value. In a client, where
    it is also called `RemoteObject`, it can also refer to the result of `RemoteCluster.call`: a variable, or a dataset on each
    worker, whose `iter()` refers to the iterators.

    Attributes:
        status: NOT_READY, READY, or ABORTED if the function failed or was cancelled.
    """

    def __init__(self, scheduler: Any, number: int) -> None:
        """Called by `schedule`."""
        super().__init__(scheduler, number)
        self.status = RemoteValueStatus.NOT_READY
        self._data: bytes | None = None
        self._error: BaseException | None = None
        self._value: Any = None

    def get(self, timeout: float | None = None) -> Any:
        """Wait for the value and return it; a variable's as an array. For the chief or a client.

        In a client Ctrl-C cancels waiting functions.

        Args:
            timeout: the most seconds to wait; default without limit.

        Raises:
            Exception: that of the function, with its traceback on the other rank as the cause.
            ClosureCancelledError: it was cancelled.
            TimeoutError: it takes longer.
            TypeError: it cannot be sent to the client.
        """
        return self._scheduler.wait_for(self, timeout)

    def fetch(self) -> Any:
        """Wait for the value and return it. The same as `get()`."""
        return self.get()

    def __repr__(self) -> str:
        return f"RemoteValue({self.status.name})"

    def _result(self, unpack: Callable[[bytes], Any]) -> Any:
        """Return the value once it is ready, or raise the function's exception."""
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

    `ClusterCoordinator.create_per_worker_dataset` and `create_per_worker_resource` create it. The chief has no value. In a
    scheduled function that takes it as an argument or refers to it, it is the worker's own value. On the chief its `iter()` is a
    PerWorkerValues of iterators, one on each worker.

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
    """The cause of a worker's exception: the worker, and the traceback there."""


Call = tuple[Callable[..., Any], Sequence[Any], "Mapping[str, Any] | None"]  # a function, args, kwargs


class FunctionScheduler(ABC):
    """A scheduler of functions on workers: a ClusterCoordinator on the chief of a job, a RemoteCluster outside of the job."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)  # of values

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        worker: int | None = None,
        priority: float = 0,
    ) -> RemoteValue:
        """Schedule a function on a worker and return at once; on the chief, when the queue has room. For the chief or a client.

        Args:
            fn: the function. A function of the main program is sent by value, one of a module by its name.
            args, kwargs: its arguments. The function waits for each RemoteValue that it takes or refers to, and gets its value; a
                PerWorkerValues becomes the worker's own.
            worker: the index of the only worker that may run it; default any.
            priority: functions with a larger one are sent first, equal ones in the order of scheduling.

        Raises:
            Exception: that of an earlier function, once; then waiting functions are cancelled, and this one is not scheduled.
            TypeError: the function, or an object that it refers to, cannot be pickled.
            ContextError: on another rank than the chief, or in a scheduled function.
            ClosedError: after `close()`; for a client also if the job has ended.

        Example:
            >>> coordinator.schedule(lambda x: x + 1, args=(1,)).get()    # doctest: +SKIP
            2
        """
        self._raise_error()
        return self._schedule((fn, args, kwargs), worker, priority)

    @abstractmethod
    def join(self) -> None:
        """Wait until all scheduled functions have run.

        Raises:
            Exception: that of the first function that failed, once.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return True if all scheduled functions have run."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel waiting functions; running ones end. The values of cancelled ones raise ClosureCancelledError."""

    def fetch(self, values: Any) -> Any:
        """Return a structure with the values of the RemoteValues in it; other leaves are unchanged.

        Raises:
            Exception: that of a function.
        """
        return nest.map_structure(lambda value: value.get() if isinstance(value, RemoteValue) else value, values)

    def create_per_worker_dataset(self, dataset_fn: Any) -> Any:
        """Return a PerWorkerValues of one dataset on each worker; for a client, its RemoteValue.

        Args:
            dataset_fn: creates the dataset, or any iterable, on each worker; there `get_current_worker_index()` returns the
                worker's index. Or a dataset, if it can be pickled. Each worker reads all of it unless the function creates a
                shard, and in another order only if the function shuffles with another seed.

        Example:
            >>> def make():                                               # doctest: +SKIP
            ...     seed = ms.coordinator.get_current_worker_index()
            ...     data = ms.data.from_arrays((x, y)).shuffle(seed=seed)
            ...     return data.repeat().batch(32)
            >>> iterator = iter(coordinator.create_per_worker_dataset(make))    # doctest: +SKIP
        """
        fn, args = (dataset_fn, ()) if callable(dataset_fn) else (same, (dataset_fn,))
        return self._make_on_workers(fn, args, "create_per_worker_dataset")

    def create_per_worker_resource(self, fn: Callable[[], Any]) -> Any:
        """Return a PerWorkerValues of a function's results, which stay on each worker; for a client, its RemoteValue."""
        return self._make_on_workers(fn, (), "create_per_worker_resource")

    @abstractmethod
    def wait_for(self, value: RemoteValue, timeout: float | None) -> Any:
        """Return a value: implements `RemoteValue.get`."""

    @abstractmethod
    def iterate(self, stub: Any) -> Any:
        """Return the stub of the iterators of a stub."""

    @abstractmethod
    def _raise_error(self) -> None:
        """Raise a scheduled function's exception, once."""

    @abstractmethod
    def _schedule(self, call: Call, worker: int | None, priority: float) -> RemoteValue: ...

    @abstractmethod
    def _make_on_workers(self, fn: Callable[..., Any], args: tuple[Any, ...], function: str) -> Any:
        """Create a value on each worker, which stays there; return its stub. Errors name `function`."""


def same(value: Any) -> Any:
    """Return the argument. Workers find this function by its name, because they have this module."""
    return value
