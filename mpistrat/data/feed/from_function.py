"""Input that each worker or replica makes itself: `distribute_datasets_from_function`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.errors import explain
from ...base.masks import plain_array
from ..dataset import Dataset
from ..nodes.node import INFINITE, UNKNOWN
from ..options import InputReplicationMode
from ..spec import empty_rows, row_count, spec_of_rows
from .distributed import SumOverRanks
from .plan import Plan, Step, Workers, has_element, rows_in

__all__ = ["FunctionPlan", "InputContext", "call_dataset_fn"]

FUNCTION = "distribute_datasets_from_function"
_TOGETHER = 64  # steps in one exchange of rows, if known


@dataclass(frozen=True)
class InputContext:
    """A dataset function's information on its worker (TF: tf.distribute.InputContext).

    Args:
        num_input_pipelines: the number of datasets: one per worker or, under PER_REPLICA, one per replica.
        input_pipeline_id: the index of this one.
        num_replicas_in_sync: the number of all replicas.

    Raises:
        ValueError: for invalid numbers.

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
        """Return one replica's rows of a global batch.

        Raises:
            ValueError: when the batch size is not a multiple of the replicas.
        """
        if global_batch_size % self.num_replicas_in_sync:
            expected = f"a multiple of the {self.num_replicas_in_sync} replicas"
            raise ValueError(
                explain("get_per_replica_batch_size", "global_batch_size", expected=expected, got=global_batch_size)
            )
        return global_batch_size // self.num_replicas_in_sync


def call_dataset_fn(
    dataset_fn: Callable[[InputContext], Any],
    workers: Workers,
    mode: InputReplicationMode,
    within: Workers | None = None,
) -> FunctionPlan:
    """Call a dataset function once for this worker, or once for each of its replicas.

    Args:
        dataset_fn: the function.
        workers: the workers.
        mode: one call per worker or per replica.
        within: the workers that step together, if each of `workers` is a group of them; default all.

    Raises:
        TypeError: it is not a function, or does not return an iterable.
        ValueError: it returns a dataset of rows.
    """
    given: object = dataset_fn
    if not callable(given):
        expected = "a function of an InputContext"
        remedy = "distribute_dataset takes a dataset itself." if isinstance(given, Dataset) else ""
        got = type(given).__name__
        raise TypeError(explain(FUNCTION, "dataset_fn", expected=expected, got=got, remedy=remedy))
    together, offset = within or workers, within.replica_offset if within else 0
    if mode is InputReplicationMode.PER_WORKER:
        pipelines, number = workers.count, workers.index
        if within is not None:
            pipelines, number = pipelines * within.count, number * within.count + within.index
        contexts = [InputContext(pipelines, number, together.num_replicas)]
    else:
        first, total = workers.replica_offset + offset, workers.num_replicas
        contexts = [InputContext(total, first + i, together.num_replicas) for i in range(together.num_local_replicas)]
    return FunctionPlan([dataset_fn(context) for context in contexts], together)


@final
class FunctionPlan(Plan):
    """One element for each local replica at every step. The workers exchange the lengths of their iterables.

    If all are Datasets with random access, one exchange covers many steps, else one.

    Args:
        iterables: one, from which the local replicas take elements in turn; or one per local replica. Elements are nests
            of arrays whose first axes count rows; each `iter()` is an epoch.
        workers: the workers.
    """

    def __init__(self, iterables: Sequence[Iterable[Any]], workers: Workers) -> None:
        self._iterables = [_checked(iterable) for iterable in iterables]
        super().__init__(workers, [each.node for each in self._iterables if isinstance(each, Dataset)])
        self._cardinality = self._length = UNKNOWN  # until `agree`
        first = self._iterables[0]
        self._row_spec: Any = first.node.row_spec if isinstance(first, Dataset) else getattr(first, "row_spec", None)
        self._own_cardinality = self._count_steps()  # opens all files, while an error can still reach the other workers

    @property
    def row_spec(self) -> Any:
        return self._row_spec

    @property
    def prefetch_depth(self) -> None:
        return None

    def cardinality(self) -> int:
        return self._length

    def agree(self, sum_over_ranks: SumOverRanks) -> None:
        """Exchange the workers' numbers of steps. Collective; called before the first step."""
        lengths = np.zeros((2, self.workers.count), np.int64)
        lengths[:, self.workers.index] = self._own_cardinality, self._steps_of_others()
        known, others = sum_over_ranks(lengths)
        self._cardinality = self._length = _longest(known)
        if self._cardinality == UNKNOWN:  # of other iterables it may be known, but not the rows of each step
            self._length = _longest(others)

    def _steps_of_others(self) -> int:
        """Return the number of steps, of an iterable that is no Dataset too; UNKNOWN if it does not tell."""
        if self._own_cardinality != UNKNOWN or len(self._iterables) > 1:
            return self._own_cardinality
        length = getattr(self._iterables[0], "length", UNKNOWN)
        return int(length if length < 0 else -(-length // self.workers.num_local_replicas))

    def _count_steps(self) -> int:
        lengths = [dataset.cardinality() for dataset in self.datasets]
        known = len(lengths) == len(self._iterables) and all(dataset.random_access for dataset in self.datasets)
        if not known or UNKNOWN in lengths:
            return UNKNOWN
        if INFINITE in lengths:
            return INFINITE
        return max(lengths) if len(lengths) > 1 else -(-lengths[0] // self.workers.num_local_replicas)

    def elements(self, epoch: int, start: int) -> Iterator[Step]:
        local = self.workers.num_local_replicas
        if len(self._iterables) == 1:
            elements = self._begin(self._iterables[0], epoch, start * local)
            sources = [elements] * local
        else:
            sources = [self._begin(iterable, epoch, start) for iterable in self._iterables]
        return map(functools.partial(self._step, sources, epoch, start), itertools.count(start))

    def _step(self, sources: Sequence[Iterator[Any]], epoch: int, start: int, step: int) -> Step:
        asks = step == start or step % _TOGETHER == 0
        counts = self._counts(epoch, step) if asks and self._cardinality != UNKNOWN else None
        blocks = [next(source, None) for source in sources]
        if all(block is None for block in blocks):
            return Step(None, None, counts)
        if self._cardinality == UNKNOWN:
            counts = np.array([[1, sum(row_count(block) for block in blocks if block is not None)]], np.int64)
        return Step(None, [empty_rows(self._row_spec) if block is None else block for block in blocks], counts)

    def _counts(self, epoch: int, start: int) -> NDArray[np.int64]:
        """Return `Step.counts` for the steps from `start` to the next exchange."""
        local, datasets = self.workers.num_local_replicas, self.datasets
        counts = np.zeros((_TOGETHER - start % _TOGETHER, 2), np.int64)
        for count, step in zip(counts, itertools.count(start), strict=False):
            for i in range(local):
                dataset, position = (datasets[i], step) if len(datasets) > 1 else (datasets[0], step * local + i)
                count += has_element(dataset, position), rows_in(dataset, epoch, position)
        np.minimum(counts[:, 0], 1, out=counts[:, 0])
        return counts

    def _begin(self, iterable: Iterable[Any], epoch: int, start: int) -> Iterator[Any]:
        if isinstance(iterable, Dataset):
            return iterable.node.elements(epoch, start)
        if start:
            expected = "a dataset of ms.data, to start after the first element"
            remedy = "Make one with ms.data.from_generator or another of its sources."
            raise ValueError(explain("restore", "", expected=expected, got=type(iterable).__name__, remedy=remedy))
        return map(self._block, iterable)

    def _block(self, element: Any) -> Any:
        block = nest.map_structure(lambda leaf: plain_array(leaf, FUNCTION, "dataset_fn"), element)
        if self._row_spec is None:
            if any(leaf.ndim == 0 for leaf in nest.flatten(block)):
                expected = "batches, whose arrays have a first axis of rows"
                raise ValueError(explain(FUNCTION, "dataset_fn", expected=expected, got="a scalar"))
            self._row_spec = spec_of_rows(block)
        return block

    def describe(self) -> str:
        made = "one for each replica" if len(self._iterables) > 1 else "one for each worker"
        return f"made by a function, {made}"


def _longest(lengths: NDArray[np.int64]) -> int:
    return next((special for special in (UNKNOWN, INFINITE) if special in lengths), int(lengths.max()))


def _checked(iterable: Any) -> Iterable[Any]:
    if not isinstance(iterable, Iterable):
        expected = "an iterable of batches from the dataset function"
        raise TypeError(explain(FUNCTION, "dataset_fn", expected=expected, got=type(iterable).__name__))
    if isinstance(iterable, Dataset) and iterable.node.batching is None:
        remedy = "Add .batch(context.get_per_replica_batch_size(global_batch_size))."
        raise ValueError(explain(FUNCTION, "dataset_fn", expected="batches", got="rows", remedy=remedy))
    return iterable
