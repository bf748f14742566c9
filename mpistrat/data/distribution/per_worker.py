"""Each worker's own iterable as one distributed dataset: distribute_datasets_from_function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import nest
from ...context import set_global_batch_size
from ...errors import explain
from ..dataset import Dataset
from ..prefetch import Prefetcher
from ..spec import ArraySpec, empty_rows, nest_bytes, row_count, spec_of_rows
from .distribute import PREFETCH, InputStats, ToDevice, deliver

__all__ = ["InputContext", "PerReplicaDataset"]

SumOverRanks = Callable[[NDArray[np.int64]], NDArray[np.int64]]


@dataclass(frozen=True)
class InputContext:
    """What a dataset function is told of its place (TF: tf.distribute.InputContext).

    Args:
        num_input_pipelines: how many workers read, each with a pipeline of its own.
        input_pipeline_id: which one this is.
        num_replicas_in_sync: replicas in all.

    Raises:
        ValueError: for impossible numbers.

    Example:
        >>> InputContext(2, 0, 8).get_per_replica_batch_size(32)
        4
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        if self.num_input_pipelines < 1 or self.num_replicas_in_sync < 1:
            raise ValueError(
                explain("InputContext", "", expected="at least one pipeline and one replica", got=repr(self))
            )
        if not 0 <= self.input_pipeline_id < self.num_input_pipelines:
            expected = f"0 <= input_pipeline_id < {self.num_input_pipelines}"
            raise ValueError(explain("InputContext", "", expected=expected, got=self.input_pipeline_id))

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the rows that one replica gets of a global batch. Not collective.

        Raises:
            ValueError: when the batch cannot be divided evenly.
        """
        if global_batch_size % self.num_replicas_in_sync:
            expected = f"a multiple of the {self.num_replicas_in_sync} replicas"
            raise ValueError(
                explain("get_per_replica_batch_size", "global_batch_size", expected=expected, got=global_batch_size)
            )
        return global_batch_size // self.num_replicas_in_sync


def _alone(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return counts


class PerReplicaDataset:
    """This worker's iterable of per-replica batches, in step with those of all other workers.

    Each step takes one element for every local replica. Workers may have different numbers of elements: a replica
    whose worker has none left gets zero rows until no worker has any. One sum over the ranks at every step finds that
    end, and the true number of rows in the step.

    Args:
        iterable: elements are nests of arrays whose first axes count rows; each `iter()` of it is an epoch.
        num_local_replicas: elements a step, at least 1.
        sum_over_ranks: returns the elementwise sum of a small int64 array over all ranks. Collective; called by the
            thread that iterates. Without it this worker is alone.
        to_device: as for DistributedDataset.
        prefetch: how many elements a thread reads ahead; 0 reads in the iterating thread.

    Raises:
        ValueError: when iterating a worker that has never had an element and no element_spec to make empty ones of.

    Example:
        >>> dataset = PerReplicaDataset([np.ones(2), np.ones(3), np.ones(1)], num_local_replicas=2)
        >>> [[len(rows) for rows in step.values] for step in dataset]
        [[2, 3], [1, 0]]
    """

    def __init__(
        self,
        iterable: Iterable[Any],
        *,
        num_local_replicas: int = 1,
        sum_over_ranks: SumOverRanks = _alone,
        to_device: ToDevice | None = None,
        prefetch: int = PREFETCH,
    ) -> None:
        given: object = iterable
        if not isinstance(given, Iterable):
            expected = "an iterable of batches from the dataset function"
            got = type(given).__name__
            raise TypeError(explain("distribute_datasets_from_function", "dataset_fn", expected=expected, got=got))
        if isinstance(iterable, Dataset) and iterable.batching is None:
            remedy = "Add .batch(context.get_per_replica_batch_size(global_batch_size))."
            raise ValueError(
                explain(
                    "distribute_datasets_from_function", "dataset_fn", expected="batches", got="rows", remedy=remedy
                )
            )
        if num_local_replicas < 1 or prefetch < 0:
            expected = "at least one local replica and a prefetch of at least 0"
            got = f"{num_local_replicas} and {prefetch}"
            raise ValueError(explain("distribute_datasets_from_function", "", expected=expected, got=got))
        self._iterable = iterable
        self._num_local_replicas = num_local_replicas
        self._sum_over_ranks = sum_over_ranks
        self._to_device = to_device
        self._prefetch = prefetch
        self._stats = InputStats()
        self._row_spec: Any = iterable.row_spec if isinstance(iterable, Dataset) else None

    @property
    def element_spec(self) -> Any:
        """The spec of one replica's arrays, once known: from a Dataset at once, else from the first element."""
        if self._row_spec is None:
            return None
        return nest.map_structure(lambda leaf: ArraySpec((None, *leaf.shape), leaf.dtype), self._row_spec)

    def stats(self) -> InputStats:
        """Return what this rank's input has done so far, over all epochs. Not collective."""
        return replace(self._stats)

    def __iter__(self) -> Iterator[Any]:
        """Iterate. Collective: all ranks take their steps together, to the same end."""
        elements = iter(self._iterable)
        prefetcher = Prefetcher(lambda: next(elements), self._prefetch) if self._prefetch else None
        produce = prefetcher.get if prefetcher is not None else lambda: next(elements)
        try:
            ended = False
            while True:
                started = time.perf_counter()
                blocks: list[Any] = []
                while not ended and len(blocks) < self._num_local_replicas:
                    try:
                        blocks.append(nest.map_structure(np.asarray, produce()))
                    except StopIteration:
                        ended = True
                examples = sum(row_count(block) for block in blocks)
                having, total = (int(n) for n in self._sum_over_ranks(np.array([bool(blocks), examples], np.int64)))
                if not having:
                    set_global_batch_size(None)
                    return
                yield self._step(blocks, total, started)
        finally:
            if prefetcher is not None:
                prefetcher.close()

    def _step(self, blocks: list[Any], total: int, started: float) -> Any:
        if blocks and self._row_spec is None:
            self._row_spec = spec_of_rows(blocks[0])
        if self._row_spec is None:
            expected = "at least one batch on every worker, or a Dataset, to know what zero rows look like"
            raise ValueError(explain("distribute_datasets_from_function", "dataset_fn", expected=expected, got="none"))
        stats = self._stats
        stats.samples += sum(row_count(block) for block in blocks)
        stats.bytes += sum(nest_bytes(block) for block in blocks)
        blocks += [empty_rows(self._row_spec) for _ in range(self._num_local_replicas - len(blocks))]
        element = deliver(blocks, self._to_device)
        stats.steps += 1
        stats.wait_seconds += time.perf_counter() - started
        set_global_batch_size(total)
        return element
