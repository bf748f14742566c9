"""A batched dataset divided over replicas by index arithmetic: no rank talks to another, and each reads its own rows.

This module is handed integers; of MPI and strategies it knows nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ... import nest, partition
from ...context import set_global_batch_size
from ...distributed_values import regroup
from ...errors import explain
from ..dataset import INFINITE, Dataset
from ..iterator import PositionReader
from ..spec import batch_spec, nest_bytes, row_count

__all__ = ["DistributedDataset", "DistributedIterator", "InputStats", "ToDevice"]

ToDevice = Callable[[np.ndarray, int], Any]  # (host array, local replica) -> array on that replica's device

PREFETCH = 2  # batches read ahead: one in hand, one on the way


@dataclass
class InputStats:
    """What one rank's input has done so far, over all epochs.

    Attributes:
        steps: steps handed out.
        samples: rows that this rank has handed to its replicas.
        bytes: their size in bytes.
        wait_seconds: how long the training loop waited for them.
    """

    steps: int = 0
    samples: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0


@dataclass(frozen=True)
class _Share:
    """Which replicas are ours, and what the chain reads for them. The prefetch thread holds this, not the iterator."""

    dataset: Dataset
    num_replicas: int
    replica_offset: int
    num_local_replicas: int

    def elements(self, epoch: int, start: int) -> Iterator[tuple[int, list[Any]]]:
        """The steps of an epoch, from one on."""
        cardinality = self.dataset.cardinality()
        step = start
        while cardinality == INFINITE or step < cardinality:
            yield self.read(epoch, step)
            step += 1

    def read(self, epoch: int, step: int) -> tuple[int, list[Any]]:
        """The true global number of rows in a step, and each local replica's rows of it: one gather, then views."""
        epochs, positions = self.dataset.locate(epoch, step)
        count = int(positions.size)
        first = self.replica_offset
        blocks = [
            partition.block(count, self.num_replicas, replica)
            for replica in range(first, first + self.num_local_replicas)
        ]
        start, stop = blocks[0][0], blocks[-1][1]
        rows = self.dataset.gather(epochs[start:stop], positions[start:stop])
        if self.num_local_replicas == 1:
            return count, [rows]
        return count, [_cut(rows, low - start, high - start) for low, high in blocks]


def _cut(rows: Any, low: int, high: int) -> Any:
    return nest.map_structure(lambda leaf: leaf[low:high], rows)


class DistributedDataset:
    """A batched dataset whose batches are split over the replicas of a strategy. Not collective.

    Each step's batch is cut into contiguous blocks, one a replica in the order of replica ids, whose sizes differ by
    at most one; so is a smaller last batch. A replica without a row gets arrays of zero rows. All ranks make the same
    number of steps, because each computes it. The order of the samples does not depend on the number of replicas.

    Args:
        dataset: a dataset after `batch`; its batches are those of all replicas together.
        num_replicas: replicas in all.
        replica_offset: the id of this rank's first replica.
        num_local_replicas: how many this rank has, at least 1.
        to_device: moves a host array to a local replica's device; None leaves it. It is called by the thread that
            iterates.
        prefetch: how many steps a thread reads ahead; 0 reads in the iterating thread.

    Raises:
        ValueError: for a dataset that is not batched, and for impossible numbers.
        ShardError: when a shard cannot be opened or does not match; files are opened here, before training starts.

    Example:
        >>> from mpistrat.data import from_arrays
        >>> whole = from_arrays(np.arange(10)).batch(4)
        >>> parts = [DistributedDataset(whole, num_replicas=2, replica_offset=r, num_local_replicas=1) for r in (0, 1)]
        >>> [[batch.tolist() for batch in part] for part in parts]
        [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        num_replicas: int,
        replica_offset: int,
        num_local_replicas: int,
        to_device: ToDevice | None = None,
        prefetch: int = PREFETCH,
    ) -> None:
        given: object = dataset
        if not isinstance(given, Dataset):
            got = type(given).__name__
            remedy = "Make one with ms.data.from_arrays or ms.data.HDF5Dataset."
            raise TypeError(explain("distribute_dataset", "dataset", expected="a Dataset", got=got, remedy=remedy))
        if dataset.batching is None:
            remedy = "Add .batch(global_batch_size), the rows of all replicas together."
            raise ValueError(
                explain(
                    "distribute_dataset", "dataset", expected="batches", got="rows that are not batched", remedy=remedy
                )
            )
        if replica_offset < 0 or num_local_replicas < 1 or replica_offset + num_local_replicas > num_replicas:
            expected = "local replicas within the replicas in all"
            got = f"replicas {replica_offset} to {replica_offset + num_local_replicas - 1} of {num_replicas}"
            raise ValueError(explain("distribute_dataset", "", expected=expected, got=got))
        if prefetch < 0:
            raise ValueError(explain("distribute_dataset", "prefetch", expected="at least 0", got=prefetch))
        self._share = _Share(dataset, num_replicas, replica_offset, num_local_replicas)
        self._to_device = to_device
        self._prefetch = prefetch
        self._stats = InputStats()
        self._epoch = 0
        self._cardinality = dataset.cardinality()

    @property
    def element_spec(self) -> Any:
        """The elements' structure with an `ArraySpec` for every array of one replica; its first axis varies."""
        return batch_spec(self._share.dataset.row_spec, None)

    def cardinality(self) -> int:
        """Return the number of steps in an epoch, the same on every rank; INFINITE for no end. Not collective."""
        return self._cardinality

    def __len__(self) -> int:
        return len(self._share.dataset)

    def __bool__(self) -> bool:
        return True

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` begin that epoch. Not collective; do it on every rank alike."""
        if epoch < 0:
            raise ValueError(explain("DistributedDataset.set_epoch", "epoch", expected="at least 0", got=epoch))
        self._epoch = int(epoch)

    def stats(self) -> InputStats:
        """Return what this rank's input has done so far, over all epochs. Not collective."""
        return replace(self._stats)

    def __iter__(self) -> DistributedIterator:
        self._share.dataset.check()
        reader = PositionReader(self._share.elements, self._cardinality, self._epoch, self._prefetch)
        self._epoch += 1
        return DistributedIterator(reader, self._to_device, self._stats)

    def __str__(self) -> str:
        share = self._share
        local = f"{share.replica_offset} to {share.replica_offset + share.num_local_replicas - 1}"
        return (
            f"{share.dataset}\ndistributed over {share.num_replicas} replicas, {local} here, prefetch {self._prefetch}"
        )


class DistributedIterator(Iterator[Any]):
    """One epoch of a distributed dataset. Not collective.

    With one local replica each step gives plain arrays, with several PerReplica values in the dataset's structure.

    Attributes:
        global_batch_size: rows of the step handed out last, over all replicas; None before the first and after the end.
    """

    def __init__(self, reader: PositionReader, to_device: ToDevice | None, stats: InputStats) -> None:
        self._reader = reader
        self._to_device = to_device
        self._stats = stats
        self.global_batch_size: int | None = None

    def __next__(self) -> Any:
        started = time.perf_counter()
        try:
            self.global_batch_size, blocks = self._reader.next()
        except StopIteration:
            self.global_batch_size = None
            set_global_batch_size(None)
            raise
        self._stats.samples += sum(row_count(block) for block in blocks)
        self._stats.bytes += sum(nest_bytes(block) for block in blocks)
        element = deliver(blocks, self._to_device)
        self._stats.steps += 1
        self._stats.wait_seconds += time.perf_counter() - started
        set_global_batch_size(self.global_batch_size)
        return element

    def state(self) -> dict[str, int]:
        """Return the position of what was consumed: {"epoch", "next"}, the same on every rank. Not collective."""
        return self._reader.state()

    def restore(self, state: dict[str, int]) -> None:
        """Go to where an iterator stood, on this or another number of replicas. Not collective; do it on every rank.

        Raises:
            ValueError: for what is no state of this dataset.
        """
        self._reader.restore(state)
        self.global_batch_size = None

    def close(self) -> None:
        """End the prefetch thread. Dropping the iterator or reading it to its end does so too. Not collective."""
        self._reader.close()


def deliver(blocks: list[Any], to_device: ToDevice | None) -> Any:
    """One structure out of each local replica's, moved to their devices."""
    if to_device is not None:
        blocks = [
            nest.map_structure(lambda leaf, index=index: to_device(leaf, index), block)
            for index, block in enumerate(blocks)
        ]
    return regroup(blocks)
