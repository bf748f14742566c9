"""The protocol of nodes: the sources and operators of a chain of datasets.

Most chains have random access. A row's address is (epoch, position). A node translates addresses into those of the nodes
below (`below`), and the source gathers the rows. So nodes hold no data, any range of any batch of any epoch can be read
by itself, and each rank of a job reads its own rows only.

A node that must make all earlier elements before it knows the next one (a generator, a filter) reads in order. After it
each rank makes every element and uses its own rows; to start at a position it makes all elements before that.

Base classes with defaults: stage.py. The node of operators that read in order: streamed.py. The public class: dataset.py.
"""

from __future__ import annotations

import itertools
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

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
    "FilesOfSource",
    "LocatedRange",
    "Node",
    "Outcome",
    "OwnRows",
    "ReadPlan",
    "Traits",
    "changed_outcomes",
    "own_rows",
    "read_plan",
]

INFINITE = -1  # tf.data.INFINITE_CARDINALITY
UNKNOWN = -2  # tf.data.UNKNOWN_CARDINALITY

Addresses = tuple[NDArray[np.int64], NDArray[np.int64]]  # the epoch and the position of each row
Outcome = tuple[Any, Exception | None]  # an element, or the error that it raises
OwnRows = Callable[[int], tuple[int, int]]  # this worker's range of rows, given the rows of a batch
# Addresses of rows of elements; the number of rows of each element; the end of its rows among the addresses.
LocatedRange = tuple[Addresses, list[int], list[int]]
ReadPlan = tuple["Node", NDArray[np.int64], NDArray[np.int64]]  # the node that makes rows, and their addresses there
# A node below, addresses there, and the index of each of these rows in the request; None for 0, 1, 2 …
Below = tuple["Node", Addresses, NDArray[np.int64] | None]
NO_ROWS: Addresses = (np.empty(0, np.int64), np.empty(0, np.int64))


@dataclass(frozen=True)
class Batching:
    """The number of rows of a batch; `drop_remainder` if a smaller last batch is left out."""

    size: int
    drop_remainder: bool


class Traits(NamedTuple):
    """Properties of a chain that its reader must know.

    Attributes:
        deterministic: an epoch's elements come in the same order every time. False only for `map` with deterministic=False.
        calls_functions: a function of the user makes elements of this chain.
        shares_memory: a node of it shares memory with other ranks; `bind` allocates it.
        shard_hinted: the numbers of a `shard` are SHARD_HINT.
        repeated: a node of it is repeated without end. Only then can `cardinality` be INFINITE.
    """

    deterministic: bool = True
    calls_functions: bool = False
    shares_memory: bool = False
    shard_hinted: bool = False
    repeated: bool = False


class FilesOfSource(Protocol):
    """The files of a source."""

    def copied(self, folder: str | os.PathLike[str], limit: int | None) -> Node:
        """Copy them to a folder of this node's disk, and return the same source of the copies."""


def changed_outcomes(below: Iterator[Outcome], change: Callable[[Any, int], Any]) -> Iterator[Outcome]:
    """Yield outcomes with changed elements; an error of change(element, position) takes the element's place."""
    for position, (element, error) in enumerate(below):
        if error is None:
            try:
                element = change(element, position)
            except Exception as raised:
                element, error = None, raised
        yield element, error


class Node(ABC):
    """A source, or an operator over other nodes."""

    files: FilesOfSource | None = None  # of a source

    # The chain.

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

    # Its elements.

    def first_read(self, epoch: int) -> int:
        """Return a digest of the first element read of an epoch, if only reading can show the elements; else 0.

        Also 0 for several parents: ranks read ahead, so they may have started different numbers of them.
        """
        return self.parents[0].first_read(epoch) if len(self.parents) == 1 else 0

    @property
    @abstractmethod
    def row_spec(self) -> Any:
        """The specs of one row of an element's arrays, without the axis of the batch."""

    @property
    @abstractmethod
    def batching(self) -> Batching | None:
        """The batching of the elements; None if elements are rows."""

    @abstractmethod
    def cardinality(self) -> int:
        """Return the number of elements of one epoch; `INFINITE` without an end, or `UNKNOWN`."""

    # Reading in order.

    @abstractmethod
    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Return an iterator over an epoch's elements from a position on."""

    def outcomes(self, epoch: int) -> Iterator[Outcome]:
        """Return an iterator over an epoch's pairs: an element and None, or None and the error raised for it.

        It raises errors after which it cannot continue.
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
        """True if an element can be read without the elements before it. Then `locate` and `gather` work."""
        return all(parent.random_access for parent in self.parents)

    def locate(self, epoch: int, position: int) -> Addresses:
        """Return the addresses of the rows that make up one element."""
        raise NotImplementedError(f"{self.describe()} reads in order")

    def locate_range(self, epoch: int, start: int, stop: int, own: OwnRows | None = None) -> LocatedRange:
        """Return the addresses of the rows of successive elements; with `own`, of this worker's rows of each."""
        each = [self.locate(epoch, position) for position in range(start, stop)]
        epochs, positions = (np.concatenate(parts) for parts in zip(*each, strict=True))
        counts = [positions.size for _, positions in each]
        if own is None:
            return (epochs, positions), counts, list(itertools.accumulate(counts))
        rows, ends = own_rows(np.cumsum([0, *counts[:-1]], dtype=np.int64), counts, own)
        return (epochs[rows], positions[rows]), counts, ends

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        """Return the rows of other nodes from which the rows at given addresses are made.

        Empty for a source, and if these rows are known only at reading. Hints end there.
        """
        return []

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        """Return the rows at addresses from `locate`, stacked along a first axis.

        A node that makes or joins rows overrides this. Other nodes return the rows of the one node below.
        """
        below = self.below(epochs, positions)
        if not below:
            raise NotImplementedError(f"{self.describe()} reads in order")
        ((parent, addresses, _),) = below
        return parent.gather(*addresses)

    # Hints: which rows are cheap to read, and which will be read.

    def chunk_starts(self) -> NDArray[np.int64] | None:
        """Return the first row of each chunk that is read as a whole, then the number of rows.

        None if single rows are cheap to read.
        """
        below = self.below(*NO_ROWS)
        starts = below[0][0].chunk_starts() if len(below) == 1 else None
        return starts if starts is not None and self.batching is None else None

    def locality(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return a number in [0, LOCALITIES) for each row. Rows of the same chunks have numbers close to each other.

        A batch sorted by it can be cut into slices that need few chunks each. The number depends on the address only.
        None, for all rows, if no shuffle separates the rows of chunks.
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
        """Announce that the rows at these addresses will be gathered soon. A source may read ahead."""
        for parent, addresses, _ in self.below(epochs, positions):
            parent.expect(*addresses)

    def keep(self, rows: int) -> None:
        """Announce that rows are read in windows of this size. A source caches that many decoded rows."""
        for parent in self.parents:
            parent.keep(rows)

    # State.

    @property
    def traits(self) -> Traits:
        """The traits of this node and all below it."""
        parents = [parent.traits for parent in self.parents]
        if len(parents) == 1:
            return parents[0]
        return Traits(
            all(each.deterministic for each in parents),
            *(any(values) for values in list(zip(*parents, strict=True))[1:]),
        )

    @property
    def prefetch_depth(self) -> int | None:
        """The number of elements to read ahead, as `prefetch` sets it; None without `prefetch`."""
        depths = [parent.prefetch_depth for parent in self.parents]
        return max((depth for depth in depths if depth is not None), default=None)

    @property
    def counters(self) -> StageStats | None:
        """The counters of this node alone; None if it has none."""
        return None

    def count_wait(self, seconds: float) -> None:
        """Record the time that the loop waited for a thread that reads ahead, in the counters of the last `prefetch`."""
        for parent in self.parents:
            parent.count_wait(seconds)

    def fingerprint(self) -> int | str | None:
        """Return what must be equal on all ranks in place of the description; None to compare the description."""
        return None

    def check(self) -> None:
        """Raise if a source has changed since it was opened. Called when an epoch or a repetition starts."""
        for parent in self.parents:
            parent.check()

    def bind(self, group: ProcessGroup) -> Node:
        """Return the chain that the ranks of a group use. Collective if a cache shares memory or rows are stored in files.

        `distribute_dataset` calls it. It returns this node unless ranks share something: `cache("node")` and `cache("job")`
        allocate their memory here, `snapshot` writes its files.
        """
        parents = [parent.bind(group) for parent in self.parents]
        same = all(bound is parent for bound, parent in zip(parents, self.parents, strict=True))
        return self if same else self.rebuild(parents)

    # Text.

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


def read_plan(node: Node, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> ReadPlan:
    """Return the node that makes the rows at some addresses of `node`, and their addresses there.

    `gather` there returns the same rows as here. A node makes rows if it overrides `gather`; an attribute could contradict that.
    """
    while type(node).gather is Node.gather:
        ((node, (epochs, positions), _),) = node.below(epochs, positions)
    return node, epochs, positions


def own_rows(firsts: NDArray[np.int64], counts: Sequence[int], own: OwnRows) -> tuple[NDArray[np.int64], list[int]]:
    """Return the numbers of this worker's rows of successive batches, and where those of each batch end.

    Args:
        firsts: the number of each batch's first row.
        counts: the number of rows of each batch.
        own: returns the range of this worker's rows, given the number of rows.

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
