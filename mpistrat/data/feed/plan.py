"""Plans of the rows that each worker reads at each step: pure functions of integers, without MPI and strategies."""

from __future__ import annotations

import functools
import itertools
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base import nest, partition
from ...base.errors import explain
from ..nodes.batch import Batches
from ..nodes.cast import Cast
from ..nodes.map import Mapped
from ..nodes.node import INFINITE, UNKNOWN, Node
from ..nodes.stage import SameElements
from ..spec import row_count
from .batches import successive_batches

__all__ = [
    "GlobalPlan",
    "NoPlan",
    "Step",
    "SuccessiveBatches",
    "Plan",
    "WorkerPlan",
    "Workers",
    "cut",
    "has_element",
    "rows_in",
]


class Step(NamedTuple):
    """One worker's data of a step.

    Attributes:
        rows: the rows of all replicas together; None if the workers must exchange them.
        blocks: each local replica's rows; None if this worker has none left.
        counts: for this step and later ones, whether this worker has rows, and their number; shape (steps, 2), int64. All
            workers cover the same steps, so one exchange is enough. None for this step alone, without rows, and for steps
            covered before.
    """

    rows: int | None
    blocks: list[Any] | None
    counts: NDArray[np.int64] | None = None


class Plan(ABC):
    """The steps of every epoch. Threads that read ahead reference it, not the user's dataset.

    Args:
        workers: the workers.
        datasets: the datasets that this worker reads, as far as they are of this package.
        quorum: the number of workers that must have rows for a step; used if a step's rows are not known.
    """

    def __init__(self, workers: Workers, datasets: Sequence[Node], quorum: int = 1) -> None:
        self.workers = workers
        self.datasets = tuple(datasets)
        self.quorum = quorum

    def check(self) -> None:
        for dataset in self.datasets:
            dataset.check()

    def count_wait(self, seconds: float) -> None:
        for dataset in self.datasets:
            dataset.count_wait(seconds)

    @property
    def row_spec(self) -> Any:
        """The specs of one row; None if not known yet."""
        return self.datasets[0].row_spec if self.datasets else None

    @abstractmethod
    def cardinality(self) -> int:
        """Return the number of steps of an epoch, the same on every worker; `INFINITE`, or `UNKNOWN`."""

    @abstractmethod
    def elements(self, epoch: int, start: int) -> Iterator[Step]:
        """Return an iterator over an epoch's steps from `start` on; endless if the workers must find the end."""

    def rows_of_all(self, epoch: int, step: int) -> int | None:
        """Return the rows of a step over all workers that step independently; None if unknown."""
        return None

    def first_read(self, epoch: int) -> int:
        """Return a digest of the first elements read, if all workers must read the same and only reading shows it; else 0."""
        return 0

    @abstractmethod
    def describe(self) -> str:
        """Return a short description of the distribution."""

    @property
    def prefetch_depth(self) -> int | None:
        """The number of steps to read ahead, from `prefetch`; None without it."""
        return self.datasets[0].prefetch_depth if self.datasets else None


class GlobalPlan(Plan):
    """DATA: each global batch is split into contiguous blocks, one per replica, without communication.

    With random access a worker reads its own rows only; in order, it makes all batches and takes its slice of each.

    Args:
        which: the policy's name for texts.
        dealt: the dataset whose batches are distributed round-robin, of which `dataset` is a share, and the number of shares.
    """

    def __init__(
        self, dataset: Node, workers: Workers, which: str = "DATA", dealt: tuple[Node, int] | None = None
    ) -> None:
        super().__init__(workers, [dataset])
        self._dataset, self._which, self._dealt = dataset, which, dealt
        self._is_single = workers.num_local_replicas == 1

    def cardinality(self) -> int:
        return self._dataset.cardinality()

    def elements(self, epoch: int, start: int) -> Iterator[Step]:
        # No generators: their variables would hold a batch.
        if not self._dataset.random_access:
            return map(self._cut, self._dataset.elements(epoch, start))
        return itertools.starmap(self._divided, successive_batches(self._dataset, epoch, start, self._own_rows))

    def _cut(self, batch: Any) -> Step:
        count = row_count(batch)
        return Step(count, cut(batch, self.workers.blocks(count)))

    def _divided(self, count: int, rows: Any) -> Step:
        if self._is_single:
            return Step(count, [rows])
        blocks = self.workers.blocks(count)
        return Step(count, cut(rows, [(low - blocks[0][0], high - blocks[0][0]) for low, high in blocks]))

    def _own_rows(self, count: int) -> tuple[int, int]:
        blocks = self.workers.blocks(count)
        return blocks[0][0], blocks[-1][1]

    def rows_of_all(self, epoch: int, step: int) -> int | None:
        if self._dealt is None or not self._dealt[0].random_access:
            return None
        dataset, count = self._dealt
        return sum(rows_in(dataset, epoch, batch) for batch in range(step * count, (step + 1) * count))

    def first_read(self, epoch: int) -> int:
        return 0 if self._dataset.random_access else self._dataset.first_read(epoch)

    def describe(self) -> str:
        return f"each batch cut into blocks ({self._which})"


class NoPlan(Plan):
    """No steps, for a rank that only serves. It has the dataset, so that ranks can be compared."""

    def __init__(self, dataset: Node | None, workers: Workers) -> None:
        super().__init__(workers, [] if dataset is None else [dataset])

    def cardinality(self) -> int:
        return 0

    def elements(self, epoch: int, start: int) -> Iterator[Step]:
        return iter(())

    def describe(self) -> str:
        return "read by workers only"


class SuccessiveBatches(NamedTuple):
    """Successive batches of one size, of which the last may be smaller or dropped."""

    below: int
    size: int
    drop_remainder: bool

    @classmethod
    def of(cls, dataset: Node) -> SuccessiveBatches | None:
        """Return the form of a dataset with random access; None if its batches are reordered."""
        while isinstance(dataset, (Cast, SameElements, Mapped)):
            dataset = dataset.parents[0]
        if not isinstance(dataset, Batches):
            return None
        return cls(dataset.parents[0].cardinality(), *astuple(dataset.batching))

    def steps(self) -> int:
        if self.below < 0:
            return self.below
        return self.below // self.size if self.drop_remainder else -(-self.below // self.size)

    def whole(self) -> int:
        return sys.maxsize if self.below < 0 else self.below // self.size

    def rows(self, number: int) -> int:
        """Return the rows of a batch; 0 after the last one."""
        rest = self.size if self.below < 0 else min(self.size, max(0, self.below - number * self.size))
        return 0 if self.drop_remainder and rest < self.size else rest


class WorkerPlan(Plan):
    """FILE, OFF and HINT: each worker reads its own dataset, in batches of its share of the global batch.

    A worker at its end gets zero rows until no worker has any; with drop_remainder the steps end with the first such
    worker. With random access every worker computes all workers' rows, from few kinds of workers, and by arithmetic if
    batches are not reordered; in order, they exchange them.

    Args:
        own: the chain that this worker reads.
        kinds: the workers' chains, or their forms, each with the number of workers with equal rows at each step; empty if
            unknown.
        workers, policy: the workers, and the policy's name.
    """

    def __init__(
        self, own: Node, kinds: Iterable[tuple[Node | SuccessiveBatches, int]], workers: Workers, policy: str
    ) -> None:
        batching = own.batching
        self._whole = batching is not None and batching.drop_remainder
        super().__init__(workers, [own], quorum=workers.count if self._whole else 1)
        self._own, self._known, self._policy = own, own.random_access, policy
        # Workers by form, whose rows arithmetic gives, and by each other dataset.
        forms: Counter[SuccessiveBatches] = Counter()
        self._others: list[tuple[Node, int]] = []
        for kind, count in kinds:
            form = kind if isinstance(kind, SuccessiveBatches) else SuccessiveBatches.of(kind)
            if form is not None:
                forms[form] += count
            elif isinstance(kind, Node):
                self._others.append((kind, count))
        self._forms = list(forms.items())
        self._whole_steps = min(
            (form.whole() for form in forms), default=0
        )  # steps in which all these batches are full
        self._whole_rows = sum(n * form.size for form, n in self._forms)
        self._length: int | None = None

    def cardinality(self) -> int:
        if not self._known:
            return UNKNOWN
        if self._length is None:
            lengths = {batches.steps() for batches, _ in self._forms}
            lengths |= {dataset.cardinality() for dataset, _ in self._others}
            ending = lengths - {INFINITE}
            if not ending or (len(ending) < len(lengths) and not self._whole):
                self._length = INFINITE
            else:
                self._length = min(ending) if self._whole else max(ending)
        return self._length

    def elements(self, epoch: int, start: int) -> Iterator[Step]:
        if not self._known:
            return itertools.chain(
                map(self._split, self._own.elements(epoch, start)), itertools.repeat(Step(None, None))
            )
        cardinality = self.cardinality()
        own = successive_batches(self._own, epoch, start)
        steps = itertools.count(start) if cardinality == INFINITE else range(start, cardinality)
        return map(functools.partial(self._read, own, epoch), steps)

    def _split(self, batch: Any) -> Step:
        rows = row_count(batch)
        return Step(None, self.workers.split(batch, rows), np.array([[1, rows]], np.int64))

    def _read(self, own: Iterator[tuple[int, Any]], epoch: int, step: int) -> Step:
        count = self._whole_rows
        if step >= self._whole_steps:
            count = sum(n * batches.rows(step) for batches, n in self._forms)
        count += sum(n * rows_in(dataset, epoch, step) for dataset, n in self._others)
        rows, batch = next(own, (0, None))
        return Step(count, None if batch is None else self.workers.split(batch, rows))

    def describe(self) -> str:
        return f"each worker its own batches ({self._policy})"


def has_element(dataset: Node, position: int) -> bool:
    """Return True if a dataset of known length has an element at the position."""
    length = dataset.cardinality()
    return length == INFINITE or position < length


def rows_in(dataset: Node, epoch: int, position: int) -> int:
    """Return the rows of a batch of a dataset with random access; 0 after its end."""
    return int(np.size(dataset.locate(epoch, position)[0])) if has_element(dataset, position) else 0


@dataclass(frozen=True)
class Workers:
    """The workers that read a dataset: the ranks of a strategy.

    Args:
        replicas: the number of replicas of each worker, at least 1.
        index: the index of this worker.

    Attributes:
        num_replicas: replicas of all workers.
        replica_offset: the index of this worker's first replica.

    Raises:
        ValueError: for invalid numbers.

    Example:
        >>> Workers([2, 1], index=1).blocks(7)
        [(5, 7)]
    """

    replicas: Sequence[int] = (1,)
    index: int = 0
    num_replicas: int = field(init=False)
    replica_offset: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "replicas", tuple(self.replicas))
        if not self.replicas or min(self.replicas) < 1:
            expected = "at least one worker, each with at least one replica"
            raise ValueError(explain("Workers", "replicas", expected=expected, got=self.replicas))
        if not 0 <= self.index < len(self.replicas):
            expected = f"0 <= index < {len(self.replicas)}"
            raise ValueError(explain("Workers", "index", expected=expected, got=self.index))
        object.__setattr__(self, "num_replicas", sum(self.replicas))
        object.__setattr__(self, "replica_offset", sum(self.replicas[: self.index]))

    @property
    def count(self) -> int:
        """The number of workers."""
        return len(self.replicas)

    @property
    def num_local_replicas(self) -> int:
        """The number of this worker's replicas."""
        return self.replicas[self.index]

    def blocks(self, rows: int) -> list[tuple[int, int]]:
        """Return the row ranges of this worker's replicas in a global batch."""
        first = self.replica_offset
        return [partition.block(rows, self.num_replicas, r) for r in range(first, first + self.num_local_replicas)]

    def shares(self, global_batch_size: int) -> NDArray[np.int64]:
        """Return each worker's rows of a whole global batch.

        Example:
            >>> Workers([2, 2]).shares(7).tolist()
            [4, 3]
        """
        ends = np.cumsum([0, *self.replicas])
        rows, more = divmod(global_batch_size, self.num_replicas)
        return np.diff(ends * rows + np.minimum(ends, more))  # as `partition.block` has it

    def split(self, rows: Any, count: int) -> list[Any]:
        """Split this worker's own rows over its replicas, as views."""
        if self.num_local_replicas == 1:
            return [rows]
        return cut(rows, partition.bounds(count, self.num_local_replicas))


def cut(rows: Any, ranges: Sequence[tuple[int, int]]) -> list[Any]:
    """Return ranges of stacked rows, as views."""
    return [nest.map_structure(lambda leaf, low=low, high=high: leaf[low:high], rows) for low, high in ranges]
