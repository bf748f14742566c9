"""Values that each worker has one of its own of."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, final

from ..errors import ContextError, explain

if TYPE_CHECKING:
    from .cluster_coordinator import ClusterCoordinator

__all__ = ["PerWorkerValues"]


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

    def __init__(self, coordinator: ClusterCoordinator, number: int) -> None:
        """`ClusterCoordinator` makes it."""
        self._coordinator, self._number = coordinator, number

    def __iter__(self) -> PerWorkerValues:
        return self._coordinator._make_on_workers(iter, (self,), "iter")

    def __next__(self) -> NoReturn:
        remedy = "Give the iterator to schedule(), and call next() in the function"
        expected, got = "next() in a scheduled function", "one on the chief"
        raise ContextError(explain("PerWorkerValues", "", expected=expected, got=got, remedy=remedy))

    def __repr__(self) -> str:
        return f"PerWorkerValues({self._number})"
