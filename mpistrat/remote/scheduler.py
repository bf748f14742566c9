"""The calls that a coordinator and a client have in common: functions for workers, and the values of these functions."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..base import nest
from .values import RemoteValue

__all__ = ["Call", "FunctionScheduler", "same"]

Call = tuple[Callable[..., Any], Sequence[Any], "Mapping[str, Any] | None"]  # a function, args, kwargs


class FunctionScheduler(ABC):
    """Has workers run functions: a ClusterCoordinator on the chief of a job, a RemoteCluster outside of the job."""

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
        """Have a worker call a function, and return at once; on the chief, when the queue has room. For the chief or a client.

        Args:
            fn: the function. A function of the main program travels by value, one of a module by its name.
            args, kwargs: its arguments. A RemoteValue among them, or that the function refers to, is waited for and arrives as
                its value; a PerWorkerValues arrives as the worker's own.
            worker: the index of the only worker that may run it; default any.
            priority: functions with a larger one are sent first, equal ones in the order of scheduling.

        Raises:
            Exception: what a function scheduled before raised, once; then the functions that waited are cancelled, and this
                one is not scheduled.
            TypeError: the function, or what it refers to, cannot be pickled.
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
            Exception: what the first function that failed raised, once.
        """

    @abstractmethod
    def done(self) -> bool:
        """Return True if all scheduled functions have run."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the functions that wait; those that run end. The values of cancelled ones raise ClosureCancelledError."""

    def fetch(self, values: Any) -> Any:
        """Return a structure with the values of the RemoteValues in it; everything else is returned as it is.

        Raises:
            Exception: what the functions raised.
        """
        return nest.map_structure(lambda value: value.get() if isinstance(value, RemoteValue) else value, values)

    def create_per_worker_dataset(self, dataset_fn: Any) -> Any:
        """Return a PerWorkerValues of one dataset on each worker; for a client, the RemoteValue of that.

        Args:
            dataset_fn: makes the dataset, or anything that can be iterated over, on each worker; there
                `get_current_worker_index()` returns the worker's index. Or a dataset, if it can be pickled. Each worker reads
                all of it unless the function makes a shard, and in an order of its own only if the function shuffles with
                another seed.

        Example:
            >>> def make():                                               # doctest: +SKIP
            ...     data = ms.data.from_arrays(x, y).shuffle(seed=ms.coordinator.get_current_worker_index())
            ...     return data.repeat().batch(32)
            >>> iterator = iter(coordinator.create_per_worker_dataset(make))    # doctest: +SKIP
        """
        fn, args = (dataset_fn, ()) if callable(dataset_fn) else (same, (dataset_fn,))
        return self._make_on_workers(fn, args, "create_per_worker_dataset")

    def create_per_worker_resource(self, fn: Callable[[], Any]) -> Any:
        """Return a PerWorkerValues of what a function makes on each worker, where it stays; for a client, its RemoteValue."""
        return self._make_on_workers(fn, (), "create_per_worker_resource")

    @abstractmethod
    def wait_for(self, value: RemoteValue, timeout: float | None) -> Any:
        """Return a value: `RemoteValue.get`."""

    @abstractmethod
    def iterate(self, stub: Any) -> Any:
        """Return the stub of the iterators of a stub."""

    @abstractmethod
    def _raise_error(self) -> None:
        """Raise what a scheduled function raised, once."""

    @abstractmethod
    def _schedule(self, call: Call, worker: int | None, priority: float) -> RemoteValue: ...

    @abstractmethod
    def _make_on_workers(self, fn: Callable[..., Any], args: tuple[Any, ...], function: str) -> Any:
        """Have each worker make a value that stays there; return its stub. `function` is named in errors."""


def same(value: Any) -> Any:
    """Return the argument. Workers find it by its name, for this module is there."""
    return value
