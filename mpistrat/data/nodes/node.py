"""The protocol of nodes, the sources and operators of a chain of datasets: what they are, and how they are read.

Most chains are random access. A row is addressed by (epoch, position). A node translates addresses into those of the
nodes below (`below`), and the source gathers rows. So no node holds data, any part of any batch of any epoch can be read
by itself, and each rank of a job reads its own rows only.

What cannot know its elements before it has made those in front (a generator, a filter) reads in order: from there on
each rank makes every element and keeps its own rows, and going to a position means making all that precede it.

Base classes with the defaults: stage.py. What users hold: dataset.py.
"""

from __future__ import annotations

import itertools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ...base.text import displayable, printable

if TYPE_CHECKING:
    from ...comm.process_group import ProcessGroup
    from ..stats import StageStats

__all__ = [
    "INFINITE",
    "NO_ROWS",
    "UNKNOWN",
    "Addresses",
    "Batching",
    "Below",
    "LocatedRange",
    "Node",
    "Outcome",
    "OwnRows",
    "ReadPlan",
    "Traits",
    "own_rows",
]

INFINITE = -1  # tf.data.INFINITE_CARDINALITY
UNKNOWN = -2  # tf.data.UNKNOWN_CARDINALITY

Addresses = tuple[NDArray[np.int64], NDArray[np.int64]]  # epochs and positions, one of each a row
Outcome = tuple[Any, Exception | None]  # an element, or the error that is raised instead of it
OwnRows = Callable[[int], tuple[int, int]]  # the range of rows that are ours of a batch of so many
# Addresses of the rows of elements, or of those that are ours; the number of rows of each element; where its rows end.
LocatedRange = tuple[Addresses, list[int], list[int]]
ReadPlan = tuple["Node", NDArray[np.int64], NDArray[np.int64]]  # the node that makes rows, and their addresses there
# A node below, addresses there, and the places of these rows among those asked for; None where each is in its own place.
Below = tuple["Node", Addresses, NDArray[np.int64] | None]
NO_ROWS: Addresses = (np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class Batching:
    """How many rows a batch has, and whether a smaller last one is left out."""

    size: int
    drop_remainder: bool


class Traits(NamedTuple):
    """What matters about a chain to who reads it.

    Attributes:
        deterministic: an epoch's elements come in the same order every time: all but a `map` with deterministic=False.
        calls_functions: a function of the user's makes elements of this chain.
        shares_memory: something in it shares memory with other ranks, which `bind` makes.
        shard_hinted: a `shard` of it has SHARD_HINT for a number.
        repeated: something in it is repeated for ever; only then can `cardinality` be INFINITE.
    """

    deterministic: bool = True
    calls_functions: bool = False
    shares_memory: bool = False
    shard_hinted: bool = False
    repeated: bool = False


class Node(ABC):
    """A source, or an operator over other nodes."""

    # What it is.

    @property
    @abstractmethod
    def parents(self) -> tuple[Node, ...]:
        """The nodes that this one reads from; none for a source."""

    @abstractmethod
    def rebuild(self, parents: Sequence[Node]) -> Node:
        """Return this node over other parents, which have the same specs; a source returns itself."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line about this node."""

    # What its elements are.

    def first_read(self, epoch: int) -> int:
        """Return a digest of the first element of an epoch, where only reading shows what elements are; else 0.

        Also 0 of several parents: ranks read ahead of the loop, and have begun another number of them.
        """
        return self.parents[0].first_read(epoch) if len(self.parents) == 1 else 0

    @property
    @abstractmethod
    def row_spec(self) -> Any:
        """The specs of one row of an element's arrays, without the axis of the batch."""

    @property
    @abstractmethod
    def batching(self) -> Batching | None:
        """How rows were put into batches; None while elements are rows."""

    @abstractmethod
    def cardinality(self) -> int:
        """Return the number of elements of one epoch; `INFINITE` without an end, or `UNKNOWN`."""

    # Reading in order.

    @abstractmethod
    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Return an iterator over an epoch's elements from a position on."""

    def outcomes(self, epoch: int) -> Iterator[Outcome]:
        """Return an iterator over an epoch's elements, and in the places of those that cannot be made the errors.

        An error behind which nothing can be read any more is raised.
        """
        if not self.random_access:
            return ((element, None) for element in self.elements(epoch))
        return self._outcomes_by_position(epoch)

    def _outcomes_by_position(self, epoch: int) -> Iterator[Outcome]:
        position = 0
        while True:
            try:
                for element in self.elements(epoch, position):
                    yield element, None
                    position += 1
                return
            except Exception as error:
                yield None, error
            position += 1

    # Random access.

    @property
    def random_access(self) -> bool:
        """Whether any element can be read without those in front of it: then `locate` and `gather` work."""
        return all(parent.random_access for parent in self.parents)

    def locate(self, epoch: int, position: int) -> Addresses:
        """Return the addresses of the rows that make up one element."""
        raise NotImplementedError(f"{self.describe()} reads in order")

    def locate_range(self, epoch: int, start: int, stop: int, own: OwnRows | None = None) -> LocatedRange:
        """Return the addresses of the rows of successive elements, at least one, or of the rows that are ours of each."""
        each = [self.locate(epoch, position) for position in range(start, stop)]
        epochs, positions = (np.concatenate(parts) for parts in zip(*each, strict=True))
        counts = [positions.size for _, positions in each]
        if own is None:
            return (epochs, positions), counts, list(itertools.accumulate(counts))
        rows, ends = own_rows(np.cumsum([0, *counts[:-1]], dtype=np.int64), counts, own)
        return (epochs[rows], positions[rows]), counts, ends

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        """Return the rows of other nodes that the rows at some addresses are made of; nothing for a source.

        Also nothing where those rows are found only as they are read: hints end there.
        """
        return []

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        """Return the rows at addresses that `locate` gave, stacked along a first axis.

        A node that makes rows, or joins them, has a `gather` of its own; others return those of the node below.
        """
        below = self.below(epochs, positions)
        if not below:
            raise NotImplementedError(f"{self.describe()} reads in order")
        ((parent, addresses, _),) = below
        return parent.gather(*addresses)

    @final
    def read_plan(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> ReadPlan:
        """Return the node that makes the rows at some addresses, and their addresses there: gathering there gives the same."""
        if type(self).gather is not Node.gather:
            return self, epochs, positions
        ((parent, addresses, _),) = self.below(epochs, positions)
        return parent.read_plan(*addresses)

    # Hints: which rows are cheap to read, and which will be read.

    def chunk_starts(self) -> NDArray[np.int64] | None:
        """Return where the chunks that are read as a whole begin, as row numbers, or None.

        Behind them stands the number of rows. None means that single rows are cheap to read.
        """
        below = self.below(*NO_ROWS)
        starts = below[0][0].chunk_starts() if len(below) == 1 else None
        return starts if starts is not None and self.batching is None else None

    def locality(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return a number in [0, LOCALITIES) for each row, near for rows of the same chunks, or None.

        A batch whose rows are sorted by it can be cut into parts that need few chunks each. It depends on an address
        only, and is None for all of them where no shuffle puts the rows of chunks apart.
        """
        numbers = None
        for parent, addresses, places in self.below(epochs, positions):
            found = parent.locality(*addresses)
            if found is None:
                continue
            if places is None:
                return found
            numbers = np.empty(positions.size, np.int64) if numbers is None else numbers
            numbers[places] = found
        return numbers

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Announce that the rows at these addresses will be gathered soon: a source may read ahead."""
        for parent, addresses, _ in self.below(epochs, positions):
            parent.expect(*addresses)

    def keep(self, rows: int) -> None:
        """Announce that rows are read in windows of this size: a source keeps them decoded."""
        for parent in self.parents:
            parent.keep(rows)

    # State.

    @property
    def traits(self) -> Traits:
        """What holds for this node and all below it."""
        parents = [parent.traits for parent in self.parents]
        if len(parents) == 1:
            return parents[0]
        return Traits(
            all(each.deterministic for each in parents),
            *(any(values) for values in list(zip(*parents, strict=True))[1:]),
        )

    @property
    def prefetch_depth(self) -> int | None:
        """How many elements are to be read ahead: the argument of `prefetch`; None without one."""
        depths = [parent.prefetch_depth for parent in self.parents]
        return max((depth for depth in depths if depth is not None), default=None)

    @property
    def counters(self) -> StageStats | None:
        """What this node alone has done so far; None where it does not count."""
        return None

    def count_wait(self, seconds: float) -> None:
        """Take note how long the loop waited for what a thread reads ahead; the last `prefetch` counts."""
        for parent in self.parents:
            parent.count_wait(seconds)

    def fingerprint(self) -> int | str | None:
        """Return what ranks must have alike beside the description; None for nothing."""
        return None

    def check(self) -> None:
        """Raise if a source has changed since it was opened; called as an epoch begins, and each repetition."""
        for parent in self.parents:
            parent.check()

    def bind(self, group: ProcessGroup) -> Node:
        """Return this chain as the ranks of a group use it. Collective where a cache shares memory or rows are kept in files.

        `distribute_dataset` calls it. It is this very node unless something in it is shared with other ranks: `cache("node")`
        and `cache("job")` make their memory here, `snapshot` its files.
        """
        parents = [parent.bind(group) for parent in self.parents]
        same = all(bound is parent for bound, parent in zip(parents, self.parents, strict=True))
        return self if same else self.rebuild(parents)

    # In words.

    def __str__(self) -> str:
        return displayable(self._drawn(), sys.stdout)

    def _drawn(self) -> str:
        if not self.parents:
            return printable(self.describe())
        if len(self.parents) > 1:
            marks = ["┌─ ", *["├─ "] * (len(self.parents) - 1)]
            drawn = [
                mark + each._drawn().replace("\n", "\n│  ") for mark, each in zip(marks, self.parents, strict=True)
            ]
            return "\n".join([*drawn, f"└─ {printable(self.describe())}"])
        above = self.parents[0]._drawn()
        last = above.splitlines()[-1]
        indent = len(last) - len(last.lstrip(" └─"))
        return f"{above}\n{' ' * indent}└─ {printable(self.describe())}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {printable(self.describe())}>"


def own_rows(firsts: NDArray[np.int64], counts: Sequence[int], own: OwnRows) -> tuple[NDArray[np.int64], list[int]]:
    """Return the numbers of the rows of successive batches that are ours, and where those of each batch end.

    Args:
        firsts: the number of each batch's first row.
        counts: the number of rows of each batch.
        own: returns the range of rows that are ours.

    Example:
        >>> rows, ends = own_rows(np.array([10, 14]), [4, 2], lambda count: (count // 2, count))
        >>> rows.tolist(), ends
        ([12, 13, 15], [2, 3])
    """
    ranges = {count: own(count) for count in set(counts)}
    if len(ranges) == 1:
        low, high = ranges[counts[0]]
        size, number = high - low, len(counts)
        return (firsts[:, None] + np.arange(low, high)).reshape(-1), [size * n for n in range(1, number + 1)]
    lows, highs = np.array([ranges[count] for count in counts], np.int64).T
    sizes = highs - lows
    ends = np.cumsum(sizes)
    return np.arange(ends[-1]) + np.repeat(firsts + lows - (ends - sizes), sizes), ends.tolist()
