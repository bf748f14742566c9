"""What a strategy makes of a dataset: an iterable of steps, each with every local replica's part of a global batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from ..._util.arguments import integer
from ...errors import explain
from ...global_batch import HandedOut
from ..dataset import Dataset
from ..iterator import PATIENCE, PositionReader
from ..nodes.node import INFINITE, UNKNOWN, Node
from ..options import InputOptions
from ..spec import batch_spec
from ..stats import InputStats, StageStats
from .auto_shard import auto_shard
from .device_prefetch import Device, DevicePrefetch, Loaded
from .distributed_iterator import DistributedIterator, Drawn, Passes, SumOverRanks, alone
from .steps import Steps
from .workers import Workers

__all__ = ["DistributedDataset", "distribute"]

_WITHOUT_LENGTH = {
    INFINITE: ("no end", "Put take(n) behind repeat, or leave the loop after as many steps as you want."),
    UNKNOWN: (
        "an end that is found while it is read",
        "Loop to the end; cardinality() tells beforehand whether it is known.",
    ),
}

Divide = Callable[[Node, Workers], Steps]


@final
class DistributedDataset:
    """A dataset divided over the replicas of a strategy (TF: tf.distribute.DistributedDataset).

    `strategy.distribute_dataset` and `strategy.distribute_datasets_from_function` make them. Each `iter()` is the next
    epoch. All ranks make the same number of steps: until no replica has a row left. A replica without a row gets arrays
    of zero rows. Where a rank cannot compute the rows of all others, iterating is collective: steps begin with one small
    sum over the ranks, every step or, where each rank knows its own rows beforehand, some.

    Args:
        steps: what this worker reads.
        devices: one for each local replica, or None for host arrays.
        buffer_size: steps that wait ready, beyond the one that is being read; 0 reads in the iterating thread. Steps
            that are read faster than a thread could hand them over are read there, too.
        sum_over_ranks: returns the elementwise sum of a small int64 array over all ranks; collective.
        passes: who is told when an epoch begins and ends to be read.
        same_length: whether an epoch has as many steps wherever the state of an iterator is restored.
        drawn: called with the epoch and step of each batch that is handed out; None where the ranks need not draw alike.
    """

    def __init__(
        self,
        steps: Steps,
        *,
        devices: Sequence[Device | None] | None = None,
        buffer_size: int = InputOptions.per_replica_buffer_size,
        sum_over_ranks: SumOverRanks = alone,
        passes: Passes | None = None,
        same_length: bool = True,
        drawn: Drawn | None = None,
    ) -> None:
        self._steps, self._passes, self._same_length, self._drawn = steps, passes, same_length, drawn
        self._prefetch = DevicePrefetch(devices)
        depth = steps.prefetch_depth
        self._depth = depth if depth is not None else buffer_size + 1 if buffer_size else 0
        self._patience = 0.0 if depth is not None or self._prefetch.copies else PATIENCE
        self._sum_over_ranks = sum_over_ranks
        self._stats = InputStats()
        self._handed_out = HandedOut()
        self._epoch = 0

    @property
    def element_spec(self) -> Any:
        """The elements' structure with an `ArraySpec` for every array of one replica; its first axis varies.

        None while a dataset function's own iterable has not given its first element.
        """
        spec = self._steps.row_spec
        return None if spec is None else batch_spec(spec, None)

    def cardinality(self) -> int:
        """Return the number of steps in an epoch, the same on every rank; INFINITE, or UNKNOWN."""
        return self._steps.cardinality()

    def __len__(self) -> int:
        length = self.cardinality()
        if length < 0:
            got, remedy = _WITHOUT_LENGTH[length]
            raise TypeError(
                explain("DistributedDataset", "len", expected="a known number of steps", got=got, remedy=remedy)
            )
        return length

    def __bool__(self) -> bool:
        return True

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` begin that epoch. Do it on every rank alike."""
        self._epoch = integer("DistributedDataset.set_epoch", "epoch", epoch, 0)

    def stats(self) -> InputStats:
        """Return what this rank's input has done so far, over all epochs.

        Example:
            >>> data = ms.get_strategy().distribute_dataset(ms.data.from_arrays(np.arange(10)).batch(4))
            >>> stats = [data.stats() for batch in data][-1]
            >>> stats.steps, stats.samples
            (3, 10)
        """
        return self._stats.snapshot(tuple(_stages(self._steps.datasets)))

    def __iter__(self) -> DistributedIterator:
        self._steps.check()
        # The thread that reads ahead holds these, not the dataset nor the iterator.
        steps, prefetch = self._steps, self._prefetch

        def elements(epoch: int, start: int) -> Iterator[Loaded]:
            return prefetch.load(steps.elements(epoch, start))

        settings = self._epoch, self._depth, self._patience, self._same_length, steps
        reader = PositionReader(elements, self.cardinality(), *settings)
        self._epoch += 1
        told = self._sum_over_ranks, self._stats, self.set_epoch, self._handed_out, self._passes, self._drawn
        return DistributedIterator(reader, steps, prefetch, *told)

    def __str__(self) -> str:
        workers = self._steps.workers
        first, last = workers.replica_offset, workers.replica_offset + workers.num_local_replicas - 1
        here = f"replica {first}" if first == last else f"replicas {first} to {last}"
        division = (
            f"distributed over {_count(workers.num_replicas, 'replica')} of {_count(workers.count, 'worker')}, {here} here:"
            f" {self._steps.describe()}; {self._depth} steps ahead"
        )
        return "\n".join([*map(str, self._steps.datasets), division])


def distribute(dataset: Dataset, workers: Workers, divide: Divide = auto_shard, **settings: Any) -> DistributedDataset:
    """Return a dataset divided by the policy of its options.

    Args:
        dataset: a dataset after `batch`; its batches are those of all replicas together.
        workers: who reads.
        divide: returns the steps of a dataset.
        settings: as for DistributedDataset.

    Raises:
        TypeError: for what is no Dataset.
        ValueError: for a dataset that is not batched, or has not what the policy needs.
        ShardError: when a shard cannot be opened or does not match; files are opened here, before training starts.

    Example:
        >>> whole = ms.data.from_arrays(np.arange(10)).batch(4)
        >>> [[batch.tolist() for batch in distribute(whole, Workers([1, 1], index))] for index in (0, 1)]
        [[[0, 1], [4, 5], [8]], [[2, 3], [6, 7], [9]]]
    """
    given: object = dataset
    if not isinstance(given, Dataset):
        got = type(given).__name__
        remedy = "Make one with ms.data.from_arrays or ms.data.HDF5Dataset."
        raise TypeError(explain("distribute_dataset", "dataset", expected="a Dataset", got=got, remedy=remedy))
    steps = divide(dataset.node, workers)
    _ = steps.row_spec, steps.cardinality()  # open the files
    return DistributedDataset(steps, **settings)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _stages(datasets: Sequence[Node]) -> Iterator[tuple[str, StageStats | None]]:
    """Each stage's description and counters, sources first."""
    for dataset in datasets:
        yield from _stages(dataset.parents)
        yield dataset.describe(), dataset.counters
