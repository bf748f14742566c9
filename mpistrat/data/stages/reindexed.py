"""The same elements in another order: shuffle, take, skip, repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..dataset import INFINITE, Addresses, Dataset
from ..order import permute

if TYPE_CHECKING:
    from .batched import Batching

__all__ = ["Order", "Reindexed", "Repeat", "Shuffle", "Skip", "Take"]


class Order(Protocol):
    """Which element of the dataset below stands where."""

    def cardinality(self, below: int) -> int: ...

    def source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: int) -> Addresses: ...


@dataclass(frozen=True)
class Shuffle:
    """A full shuffle; each epoch has its own order unless told otherwise."""

    seed: int
    reshuffle_each_epoch: bool

    def cardinality(self, below: int) -> int:
        return below

    def source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: int) -> Addresses:
        keys = epochs if self.reshuffle_each_epoch else np.zeros_like(epochs)
        if keys.size == 0 or keys.min() == keys.max():
            return epochs, permute(positions, below, seed=self.seed, epoch=int(keys[0]) if keys.size else 0)
        shuffled = np.empty_like(positions)
        for key in np.unique(keys):
            own = keys == key
            shuffled[own] = permute(positions[own], below, seed=self.seed, epoch=int(key))
        return epochs, shuffled

    def __str__(self) -> str:
        return f"shuffle(seed={self.seed}, reshuffle_each_epoch={self.reshuffle_each_epoch})"


@dataclass(frozen=True)
class Take:
    """The first elements."""

    count: int

    def cardinality(self, below: int) -> int:
        return self.count if below == INFINITE else min(self.count, below)

    def source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: int) -> Addresses:
        return epochs, positions

    def __str__(self) -> str:
        return f"take({self.count})"


@dataclass(frozen=True)
class Skip:
    """All but the first elements."""

    count: int

    def cardinality(self, below: int) -> int:
        return below if below == INFINITE else max(0, below - self.count)

    def source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: int) -> Addresses:
        return epochs, positions + self.count

    def __str__(self) -> str:
        return f"skip({self.count})"


@dataclass(frozen=True)
class Repeat:
    """Several passes, each an epoch of the dataset below."""

    count: int | None

    def cardinality(self, below: int) -> int:
        if below == 0 or self.count == 0:
            return 0
        return INFINITE if self.count is None or below == INFINITE else below * self.count

    def source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: int) -> Addresses:
        if below in (0, INFINITE):
            return epochs, positions
        passes, inside = np.divmod(positions, below)
        return epochs * (1 if self.count is None else self.count) + passes, inside

    def __str__(self) -> str:
        return f"repeat({'' if self.count is None else self.count})"


class Reindexed(Dataset):
    """A dataset in another order."""

    def __init__(self, parent: Dataset, order: Order) -> None:
        self._parent = parent
        self._order = order

    @property
    def parents(self) -> tuple[Dataset, ...]:
        return (self._parent,)

    @property
    def batching(self) -> Batching | None:
        return self._parent.batching

    @property
    def row_spec(self) -> Any:
        return self._parent.row_spec

    def cardinality(self) -> int:
        return self._order.cardinality(self._parent.cardinality())

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Reindexed(parents[0], self._order)

    def _source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Addresses:
        return self._order.source(epochs, positions, self._parent.cardinality())

    def locate(self, epoch: int, position: int) -> Addresses:
        here = np.array([epoch], np.int64), np.array([position], np.int64)
        if self.batching is None:
            return here
        epochs, positions = self._source(*here)
        return self._parent.locate(int(epochs[0]), int(positions[0]))

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        if self.batching is None:
            epochs, positions = self._source(epochs, positions)
        return self._parent.gather(epochs, positions)

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        if self.batching is None:
            epochs, positions = self._source(epochs, positions)
        self._parent.expect(epochs, positions)

    def describe(self) -> str:
        return str(self._order)
