"""Reorderings of elements (take, skip, repeat, shard, full shuffle), and settings of the whole chain."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base.errors import explain
from ..options import SHARD_HINT, Options
from ..permutation import localities, permute
from ..stats import StageStats
from .node import INFINITE, UNKNOWN, Addresses, Below, Node, Traits
from .stage import SameElements, Stage, cut_chunks, one_address

__all__ = [
    "Configured",
    "Order",
    "Prefetched",
    "Reindexed",
    "Reordered",
    "Repeat",
    "ShardOrder",
    "Shuffle",
    "ShuffleSettings",
    "Skip",
    "Take",
    "options_of",
    "with_shard",
]


class Order(ABC):
    """A mapping from positions to elements of the dataset below."""

    @property
    def hinted(self) -> bool:
        """True while its numbers are SHARD_HINT."""
        return False

    def check(self) -> None:  # noqa: B027
        """Raise if no elements can be read."""

    def cardinality(self, below: int) -> int:
        """Return the number of elements, given the number below."""
        return below

    @abstractmethod
    def addresses(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: int) -> Addresses:
        """Return the addresses below, for random access."""

    def elements(self, parent: Node, epoch: int, start: int) -> Iterator[Any]:
        """Return the elements from a position on, for a parent that reads in order."""
        raise NotImplementedError(f"{self} needs random access")

    def chunks(self, starts: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        """Return the starts of chunks in this order; None if it splits chunks."""
        return None


@dataclass(frozen=True)
class ShuffleSettings:
    """The settings common to full and block shuffles: seed, whether epochs differ, and the reason for the kind."""

    seed: int
    reshuffle_each_epoch: bool
    why: str

    def key(self, epoch: int) -> int:
        """Return the epoch whose order is used."""
        return epoch if self.reshuffle_each_epoch else 0

    def rows(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], order: Callable[..., Any]) -> Addresses:
        """Return the addresses below, given a function from one epoch's positions to rows."""
        if epochs.size == 0 or epochs.min() == epochs.max():
            return epochs, order(self.key(int(epochs[0]) if epochs.size else 0), positions)
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            own = epochs == epoch
            rows[own] = order(self.key(int(epoch)), positions[own])
        return epochs, rows

    def __str__(self) -> str:
        return f"shuffle(seed={self.seed}, reshuffle_each_epoch={self.reshuffle_each_epoch})"


@dataclass(frozen=True)
class Shuffle(ShuffleSettings, Order):
    """A full shuffle."""

    def addresses(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: int) -> Addresses:
        return self.rows(epochs, positions, lambda key, own: permute(own, below, seed=self.seed, epoch=key))

    def __str__(self) -> str:
        return f"{super().__str__()}: full: {self.why}"


@dataclass(frozen=True)
class Take(Order):
    """The first elements."""

    count: int

    def cardinality(self, below: int) -> int:
        if below == UNKNOWN and self.count:
            return UNKNOWN
        return self.count if below < 0 else min(self.count, below)

    def addresses(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: int) -> Addresses:
        return epochs, positions

    def elements(self, parent: Node, epoch: int, start: int) -> Iterator[Any]:
        return itertools.islice(parent.elements(epoch, start), max(0, self.count - start))

    def chunks(self, starts: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        return cut_chunks(starts, 0, self.count)

    def __str__(self) -> str:
        return f"take({self.count})"


@dataclass(frozen=True)
class Skip(Order):
    """All but the first elements."""

    count: int

    def cardinality(self, below: int) -> int:
        return below if below < 0 else max(0, below - self.count)

    def addresses(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: int) -> Addresses:
        return epochs, positions + self.count

    def elements(self, parent: Node, epoch: int, start: int) -> Iterator[Any]:
        return parent.elements(epoch, start + self.count)

    def chunks(self, starts: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
        return None if starts is None else cut_chunks(starts, self.count, int(starts[-1]))

    def __str__(self) -> str:
        return f"skip({self.count})"


@dataclass(frozen=True)
class Repeat(Order):
    """Several epochs of the dataset below."""

    count: int | None

    def cardinality(self, below: int) -> int:
        if below == 0 or self.count == 0:
            return 0
        if below == UNKNOWN:
            return UNKNOWN  # also for endless repetition: it ends at once if nothing is below
        return INFINITE if self.count is None or below == INFINITE else below * self.count

    def addresses(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: int) -> Addresses:
        if below in (0, INFINITE):
            return epochs, positions
        rounds, inside = np.divmod(positions, below)
        return epochs * (1 if self.count is None else self.count) + rounds, inside

    def elements(self, parent: Node, epoch: int, start: int) -> Iterator[Any]:
        first = epoch * (1 if self.count is None else self.count)
        below = parent.cardinality()
        if below == INFINITE:
            if self.count != 0:
                yield from parent.elements(epoch, start)
            return
        done, start = divmod(start, below) if below > 0 else (0, start)
        for number in itertools.count(done) if self.count is None else range(done, self.count):
            any_element = False
            for element in parent.elements(first + number, start if below > 0 else 0):
                any_element = True
                if start and below <= 0:
                    start -= 1
                else:
                    yield element
            if not any_element and self.count is None:
                return  # else an endless repetition of nothing would never return
            start = 0 if below > 0 else start

    def __str__(self) -> str:
        return f"repeat({'' if self.count is None else self.count})"


@dataclass(frozen=True)
class ShardOrder(Order):
    """Every num_shards-th element, from the one at `index` on."""

    num_shards: int
    index: int

    @property
    def hinted(self) -> bool:
        return SHARD_HINT in (self.num_shards, self.index)

    def cardinality(self, below: int) -> int:
        if below < 0 or self.hinted:
            return UNKNOWN if self.hinted else below
        return max(0, -(-(below - self.index) // self.num_shards))

    def check(self) -> None:
        if self.hinted:
            remedy = "Distribute the dataset with AutoShardPolicy.HINT, which sets the numbers."
            raise ValueError(
                explain("Dataset.shard", "", expected="numbers, to read elements", got="SHARD_HINT", remedy=remedy)
            )

    def addresses(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: int) -> Addresses:
        self.check()
        return epochs, positions * self.num_shards + self.index

    def elements(self, parent: Node, epoch: int, start: int) -> Iterator[Any]:
        self.check()
        return itertools.islice(parent.elements(epoch, start * self.num_shards + self.index), 0, None, self.num_shards)

    def __str__(self) -> str:
        names = ["SHARD_HINT" if value == SHARD_HINT else str(value) for value in (self.num_shards, self.index)]
        return f"shard({names[0]}, {names[1]})"


class Reordered(Stage):
    """The elements of a parent in another order. Rows of batches have the same addresses as below."""

    @abstractmethod
    def _addresses(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Addresses:
        """Return the addresses of the elements below."""

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        addresses = self._addresses(epochs, positions) if self.batching is None else (epochs, positions)
        return [(self._parent, addresses, None)]

    def locate(self, epoch: int, position: int) -> Addresses:
        here = one_address(epoch, position)
        if self.batching is None:
            return here
        epochs, positions = self._addresses(*here)
        return self._parent.locate(int(epochs[0]), int(positions[0]))


@final
class Reindexed(Reordered):
    """The elements in an `Order`, which does not depend on their values."""

    def __init__(self, parent: Node, order: Order) -> None:
        super().__init__(parent, order)
        self.order = order

    def length_over(self, below: int) -> int:
        return self.order.cardinality(below)

    @property
    def traits(self) -> Traits:
        below = self._parent.traits
        if isinstance(self.order, Repeat) and self.order.count is None:
            return below._replace(repeated=True)
        return below._replace(shard_hinted=True) if self.order.hinted else below

    def _addresses(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Addresses:
        return self.order.addresses(epochs, positions, self._parent.cardinality())

    def locality(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        if isinstance(self.order, Shuffle) and self.batching is None and self._parent.chunk_starts() is not None:
            return localities(self._addresses(epochs, positions)[1], self._parent.cardinality())
        return super().locality(epochs, positions)

    def check(self) -> None:
        self.order.check()
        super().check()

    def chunk_starts(self) -> NDArray[np.int64] | None:
        return self.order.chunks(self._parent.chunk_starts())

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        return self.order.elements(self._parent, epoch, start)

    def describe(self) -> str:
        return str(self.order)


class Configured(SameElements):
    """The same elements, with options of the whole chain."""

    def __init__(self, parent: Node, options: Options) -> None:
        super().__init__(parent, options)
        self.options = options

    def describe(self) -> str:
        return f"with_options({self.options})"


class Prefetched(SameElements):
    """The same elements, with the number that the iterator's thread reads ahead."""

    def __init__(self, parent: Node, depth: int) -> None:
        super().__init__(parent, depth)
        self._depth = depth
        self._counters = StageStats()

    @property
    def counters(self) -> StageStats:
        return self._counters

    def count_wait(self, seconds: float) -> None:
        self._counters.add(wait_seconds=seconds)

    @property
    def prefetch_depth(self) -> int:
        return self._depth

    def describe(self) -> str:
        return f"prefetch({self._depth})"


def options_of(node: Node) -> Options:
    """Return the options that `with_options` set in a chain; later ones override earlier ones."""
    merged = Options()
    for parent in node.parents:
        merged = merged.merge(options_of(parent))
    return merged.merge(node.options) if isinstance(node, Configured) else merged


def with_shard(node: Node, num_shards: int, index: int) -> Node:
    """Return the chain with these numbers in every `shard` that has SHARD_HINT."""
    if not node.traits.shard_hinted:
        return node
    parents = [with_shard(parent, num_shards, index) for parent in node.parents]
    if isinstance(node, Reindexed) and node.order.hinted:
        return Reindexed(parents[0], ShardOrder(num_shards, index))
    return node.rebuild(parents)
