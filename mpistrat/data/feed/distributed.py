"""A strategy's view of a dataset: steps that all ranks take together, with each local replica's block of a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from ...base import context, nest
from ...base.arguments import integer
from ...base.distributed_values import regroup
from ...base.errors import explain
from ...base.global_batch import HandedOut, Ledger
from ...base.text import counted
from ...comm.recorder import RECORDER
from ..dataset import Dataset
from ..nodes.node import INFINITE, UNKNOWN, Node
from ..options import InputOptions
from ..spec import batch_spec, empty_rows
from ..stats import InputStats, StageStats
from .auto_shard import auto_shard
from .feed import NOTHING, PATIENCE, Elements, Feed
from .plan import Plan, Step, Workers

__all__ = [
    "DistributedDataset",
    "DistributedIterator",
    "Drawn",
    "Optional",
    "Passes",
    "SumOverRanks",
    "alone",
    "distribute",
]

SumOverRanks = Callable[[NDArray[np.int64]], NDArray[np.int64]]

Drawn = Callable[[int, int, int], None]

_INPUT = RECORDER.name("i", "next batch")
# A peeked step: its rows over all replicas, its element, and each local replica's arrays in it.
_Ahead = tuple[int, Any, list[list[Any]]]


class Device(Protocol):
    """One replica's device, to which arrays are copied on a separate stream."""

    def start(self, array: NDArray[Any]) -> Any:
        """Start to copy a host array, in any thread; return the argument of `finish`."""

    def finish(self, started: Any) -> Any:
        """Make this thread's next computation wait for the copy, and return the array on the device."""

    def reclaim(self) -> None:
        """Reuse the memory of arrays that the program has dropped; called by the computing thread."""


class Devices:
    """The copies of each step to the devices: started when it is read, finished when it is delivered.

    The thread that reads ahead starts the copies, so its number of steps are on the devices. Without devices arrays stay
    in place.

    Args:
        devices: one for each local replica, None for one that takes host arrays; None if all do.

    Attributes:
        copying: the devices to which steps are copied.
    """

    def __init__(self, devices: Sequence[Device | None] | None) -> None:
        self.copying = [device for device in devices or () if device is not None]
        self._devices = devices if self.copying else None

    def elements(self, plan: Plan) -> Elements:
        """Return the function of an epoch's steps with started copies, for the thread that reads ahead."""
        if self._devices is None:
            return plan.elements
        return lambda epoch, start: map(self._load, plan.elements(epoch, start))  # a generator would hold a batch

    def _load(self, step: Step) -> Step:
        return step if step.blocks is None else step._replace(blocks=self._start(step.blocks))

    def _start(self, blocks: list[Any]) -> list[Any]:
        return [
            block
            if device is None
            else nest.map_structure(lambda leaf, device=device: _Started(device.start(leaf)), block)
            for device, block in zip(self._devices or (), blocks, strict=True)
        ]

    def hand_out(self, step: Step, plan: Plan) -> tuple[Any, list[list[Any]]]:
        """Return the element of a step, and each replica's arrays in it, on its device.

        The arrays have zero rows if the worker has none left.
        """
        blocks = step.blocks
        if blocks is None:
            if plan.row_spec is None:
                expected = "at least one batch on every worker, or a Dataset, to know the spec of zero rows"
                raise ValueError(
                    explain("distribute_datasets_from_function", "dataset_fn", expected=expected, got="none")
                )
            blocks = [empty_rows(plan.row_spec) for _ in range(plan.workers.num_local_replicas)]
            if self._devices is not None:
                blocks = self._start(blocks)
        if self._devices is not None:
            blocks = [
                block
                if device is None
                else nest.map_structure(lambda leaf, device=device: device.finish(leaf.copy), block)
                for device, block in zip(self._devices, blocks, strict=True)
            ]
        return regroup(blocks), [nest.flatten(block) for block in blocks]


class _Started:
    """The result of a device's `start`, wrapped as one leaf."""

    def __init__(self, copy: Any) -> None:
        self.copy = copy


def alone(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum over one rank."""
    return counts


class Passes(Protocol):
    """Callbacks at the start and end of a pass over a dataset: parameter servers serve meanwhile."""

    def begin_pass(self) -> None:
        """Run before the first step."""

    def end_pass(self) -> None:
        """Run once after the last step, or when the iterator is closed or dropped."""


@final
class DistributedIterator(Feed):
    """An iterator over one epoch of a distributed dataset (TF: tf.distribute.DistributedIterator).

    With one local replica a step is plain arrays, with several it is PerReplica values in the dataset's structure. Taking
    a step is collective only if the dataset's number of rows is unknown (see DistributedDataset).

    Args:
        plan, devices: the source and target of steps; threads reference these, not the iterator.
        sum_over_ranks, stats, handed_out, passes, drawn: see `DistributedDataset`, which makes iterators.
        reading: the other arguments of `Feed`.

    Attributes:
        global_batch_size: rows of the latest step, over all replicas; None before the first and after the end.
    """

    def __init__(
        self,
        plan: Plan,
        devices: Devices,
        sum_over_ranks: SumOverRanks,
        stats: InputStats,
        handed_out: HandedOut,
        passes: Passes | None,
        drawn: Drawn | None,
        **reading: Any,
    ) -> None:
        super().__init__(devices.elements(plan), plan.cardinality(), supplier=plan, **reading)
        self._plan = plan
        self._devices = devices
        self._sum_over_ranks = sum_over_ranks
        self._stats = stats
        self._handed_out, self._drawn = handed_out, drawn
        self._ahead: _Ahead | None = None
        self._answers: dict[int, tuple[int, int]] = {}  # by step: the number of workers with rows, and the rows of all
        self._ended = False
        self._passes, self._pass_open = passes, False
        self._last: float | None = None  # time of the loop's latest step
        self.global_batch_size: int | None = None

    @property
    def element_spec(self) -> Any:
        """The same as `DistributedDataset.element_spec`."""
        spec = self._plan.row_spec
        return None if spec is None else batch_spec(spec, None)

    def __next__(self) -> Any:
        context.expect_outside_steps("DistributedIterator.get_next")
        started = time.perf_counter()
        event = RECORDER.begin(_INPUT, self._next)
        try:
            for device in self._devices.copying:
                device.reclaim()
            total, element, arrays = self._look()
            self._peeked, self._ahead = NOTHING, None
            self._next += 1
            stats = self._stats
            stats.steps += 1
            rows = sum([leaves[0].shape[0] for leaves in arrays if leaves])
            stats.samples += rows
            stats.bytes += sum([leaf.nbytes for leaves in arrays for leaf in leaves])
            RECORDER.count("rows", rows)
            self.global_batch_size = total
            self._handed_out.next(arrays, total, (self._epoch, self._next - 1))
            if self._drawn is not None:
                self._drawn(self._epoch, self._next - 1, self._plan.first_read(self._epoch))
        except StopIteration:
            self._time(started)
            self._last = self.global_batch_size = None
            self._handed_out.end()
            raise
        finally:  # also after an error that the program catches, which must not count as input time
            RECORDER.end(event)
        self._last = self._time(started)
        for observer in context.OBSERVERS:
            observer.batch(element)
        return element

    def _look(self) -> _Ahead:
        if self._ended:
            raise StopIteration
        if self._passes is not None and not self._pass_open:
            self._pass_open = True
            self._passes.begin_pass()
        if self._ahead is None:
            if self._peeked is NOTHING:
                try:
                    self._peeked = self._read()
                except StopIteration:
                    self._ended = True  # later calls must not start another epoch
                    self.close()
                    raise
            step: Step = self._peeked
            total = step.rows
            if total is None:
                having, total = self._ask(step)
                if having < self._plan.quorum:
                    self._ended = True
                    self.close()
                    raise StopIteration
            self._ahead = total, *self._devices.hand_out(step, self._plan)
        return self._ahead

    def _ask(self, step: Step) -> tuple[int, int]:
        """Return the number of workers with rows in the next step, and their rows. Collective."""
        if self._next not in self._answers:
            counts = np.zeros((1, 2), np.int64) if step.counts is None else step.counts
            answers = self._sum_over_ranks(counts.ravel()).reshape(counts.shape)
            self._answers = {self._next + i: (int(having), int(rows)) for i, (having, rows) in enumerate(answers)}
        return self._answers[self._next]

    def _time(self, started: float) -> float:
        """Add the time since `started` to the wait, and that before it to the loop; return the current time."""
        now = time.perf_counter()
        self._stats.wait_seconds += now - started
        self._stats.seconds += now - (started if self._last is None else self._last)
        return now

    def get_next(self) -> Any:
        """Return the next step's element, like `next(iterator)`. Collective if the number of rows is unknown.

        Raises:
            StopIteration: at the end, on all ranks together.
            ContextError: in a step.
        """
        return next(self)

    def get_next_as_optional(self) -> Optional:
        """Return the next step's element in an Optional, which is empty at the end. Collective if `get_next` is.

        It has a value on every rank while any replica has a row; replicas without one get zero rows.

        Raises:
            ContextError: in a step.
        """
        try:
            return Optional.from_value(next(self))
        except StopIteration:
            return Optional.empty()

    def peek(self) -> Any:
        """Return the next step's element without consuming it. Collective if `get_next` is.

        Raises:
            StopIteration: at the end, on all ranks together.
            ContextError: in a step.
        """
        context.expect_outside_steps("DistributedIterator.peek")
        return self._look()[1]

    def restore(self, state: dict[str, int]) -> None:
        """Move to the state of an iterator of the same dataset. Call it on every rank.

        The dataset's next `iter()` starts the epoch after it. Under AUTO and DATA the number of replicas may differ.
        Datasets that read in order make the elements before the position again; the iterable of a dataset function must
        be a Dataset, or the next step raises ValueError.

        Raises:
            ValueError: for a state of another dataset, or with another number of steps per epoch.
            ShardError: for files that have changed.
        """
        super().restore(state)
        self._ahead = self.global_batch_size = self._last = None
        self._answers, self._ended = {}, False

    def close(self) -> None:
        """End the thread that reads ahead. Dropping the iterator or reading it to its end does so too."""
        self._stop()
        if self._pass_open and self._passes is not None:
            self._pass_open = False
            self._passes.end_pass()

    def __del__(self) -> None:
        if self._pass_open:
            self.close()


_WITHOUT_LENGTH = {
    INFINITE: ("no end", "Use take(n) after repeat, or break out of the loop."),
    UNKNOWN: (
        "an end that only reading shows",
        "Loop to the end; cardinality() is UNKNOWN for such datasets.",
    ),
}

Divide = Callable[[Node, Workers], Plan]


@final
class DistributedDataset:
    """A dataset distributed over the replicas of a strategy (TF: tf.distribute.DistributedDataset).

    `strategy.distribute_dataset` and `strategy.distribute_datasets_from_function` make them. Each `iter()` is the next
    epoch. All ranks take the same number of steps, until no replica has a row left. A replica without a row gets arrays
    of zero rows. If a rank cannot compute all others' rows, iterating is collective: one small sum over the ranks in
    every step or, if each rank knows its own rows in advance, in some steps.

    Args:
        plan: the steps of this worker.
        devices: one for each local replica, or None for host arrays.
        buffer_size: buffered steps, in addition to the one being read; 0 reads in the iterating thread, which also reads
            very fast steps.
        sum_over_ranks: returns the elementwise sum of a small int64 array over all ranks; collective.
        passes: called at the start and end of an epoch.
        same_length: whether an epoch has the same number of steps wherever an iterator's state is restored.
        drawn: called with the epoch and step of each delivered batch, and `Plan.first_read`; None if ranks may draw differently.
        ledger: records the delivered batches.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        devices: Sequence[Device | None] | None = None,
        buffer_size: int = InputOptions.per_replica_buffer_size,
        sum_over_ranks: SumOverRanks = alone,
        passes: Passes | None = None,
        same_length: bool = True,
        drawn: Drawn | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self._plan, self._passes, self._same_length, self._drawn = plan, passes, same_length, drawn
        self._devices = Devices(devices)
        depth = plan.prefetch_depth
        self._depth = depth if depth is not None else buffer_size + 1 if buffer_size else 0
        self._patience = 0.0 if depth is not None or self._devices.copying else PATIENCE
        self._sum_over_ranks = sum_over_ranks
        self._stats = InputStats()
        self._handed_out = HandedOut(ledger, plan.workers.num_replicas, plan.rows_of_all)
        self._epoch = 0

    @property
    def element_spec(self) -> Any:
        """The elements' structure with an `ArraySpec` for every array of one replica; its first axis varies.

        None until the first element of a dataset function's own iterable.
        """
        spec = self._plan.row_spec
        return None if spec is None else batch_spec(spec, None)

    def cardinality(self) -> int:
        """Return the number of steps in an epoch, equal on every rank; INFINITE, or UNKNOWN."""
        return self._plan.cardinality()

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
        """Set the epoch of the next `iter()`. Call it on every rank with the same value."""
        self._epoch = integer("DistributedDataset.set_epoch", "epoch", epoch, 0)

    def stats(self) -> InputStats:
        """Return the counters of this rank's input, over all epochs.

        Example:
            >>> rows = ms.data.from_arrays(np.arange(10)).batch(4)
            >>> data = ms.get_strategy().distribute_dataset(rows)
            >>> stats = [data.stats() for batch in data][-1]
            >>> stats.steps, stats.samples
            (3, 10)
        """
        return self._stats.snapshot(tuple(_stages(self._plan.datasets)))

    def __iter__(self) -> DistributedIterator:
        self._plan.check()
        iterator = DistributedIterator(
            self._plan, self._devices, self._sum_over_ranks, self._stats, self._handed_out, self._passes, self._drawn,
            epoch=self._epoch, prefetch=self._depth, patience=self._patience, same_length=self._same_length,
            set_epoch=self.set_epoch,
        )  # fmt: skip
        self._epoch += 1
        return iterator

    def __str__(self) -> str:
        workers = self._plan.workers
        first, last = workers.replica_offset, workers.replica_offset + workers.num_local_replicas - 1
        here = f"replica {first}" if first == last else f"replicas {first} to {last}"
        division = (
            f"distributed over {counted(workers.num_replicas, 'replica')} of {counted(workers.count, 'worker')}, {here} here:"
            f" {self._plan.describe()}; {self._depth} steps ahead"
        )
        return "\n".join([*map(str, self._plan.datasets), division])


def distribute(dataset: Dataset, workers: Workers, divide: Divide = auto_shard, **settings: Any) -> DistributedDataset:
    """Return a dataset distributed by the policy of its options.

    Args:
        dataset: a batched dataset; its batches are for all replicas together.
        workers: the workers.
        divide: returns the plan of a dataset.
        settings: as for DistributedDataset.

    Raises:
        TypeError: for an argument other than Dataset.
        ValueError: for a dataset that is not batched, or does not meet the policy's requirements.
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
    plan = divide(dataset.node, workers)
    _ = plan.row_spec, plan.cardinality()  # opens the files
    return DistributedDataset(plan, **settings)


def _stages(datasets: Sequence[Node]) -> Iterator[tuple[str, StageStats | None]]:
    """Yield each stage's description and counters, sources first."""
    for dataset in datasets:
        yield from _stages(dataset.parents)
        yield dataset.describe(), dataset.counters


_NO_VALUE: Any = object()


@final
class Optional:
    """An element, or no element (TF: tf.experimental.Optional).

    Example:
        >>> Optional.from_value(3).get_value(), Optional.empty().has_value()
        (3, False)
    """

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    @classmethod
    def from_value(cls, value: Any) -> Optional:
        """Return an Optional with a value."""
        return cls(value)

    @classmethod
    def empty(cls, element_spec: Any = None) -> Optional:
        """Return an Optional without a value.

        Args:
            element_spec: accepted as in TF, without effect.
        """
        return cls(_NO_VALUE)

    def has_value(self) -> bool:
        """Return True if there is a value."""
        return self._value is not _NO_VALUE

    def get_value(self) -> Any:
        """Return the value.

        Raises:
            ValueError: if there is none.
        """
        if self._value is _NO_VALUE:
            remedy = "Call has_value() first: the dataset has ended."
            raise ValueError(explain("Optional.get_value", "", expected="a value", got="none", remedy=remedy))
        return self._value

    def __repr__(self) -> str:
        return f"Optional({self._value!r})" if self.has_value() else "Optional()"
