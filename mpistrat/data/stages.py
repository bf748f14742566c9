"""The stages of a chain: another order of the elements, batches of rows, a function of the elements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .. import nest
from ..errors import explain
from .dataset import INFINITE, Addresses, Dataset
from .order import permute
from .spec import ArraySpec, empty_rows, spec_of_rows

__all__ = ["Batched", "Batching", "Enumerated", "Mapped", "Reindexed", "Repeat", "Shuffle", "Skip", "Take"]


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

    def describe(self) -> str:
        return str(self._order)


@dataclass(frozen=True)
class Batching:
    """How many rows a batch has, and whether a smaller last one is left out."""

    size: int
    drop_remainder: bool


class Batched(Dataset):
    """Batches of successive rows."""

    def __init__(self, parent: Dataset, batching: Batching) -> None:
        self._parent = parent
        self._batching = batching

    @property
    def parents(self) -> tuple[Dataset, ...]:
        return (self._parent,)

    @property
    def batching(self) -> Batching:
        return self._batching

    @property
    def row_spec(self) -> Any:
        return self._parent.row_spec

    def cardinality(self) -> int:
        rows = self._parent.cardinality()
        if rows == INFINITE:
            return INFINITE
        return rows // self._batching.size if self._batching.drop_remainder else -(-rows // self._batching.size)

    def locate(self, epoch: int, position: int) -> Addresses:
        rows = self._parent.cardinality()
        start = position * self._batching.size
        stop = start + self._batching.size
        if rows != INFINITE:
            stop = min(stop, rows)
        positions = np.arange(start, stop, dtype=np.int64)
        return np.full(positions.size, epoch, np.int64), positions

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return self._parent.gather(epochs, positions)

    def describe(self) -> str:
        return f"batch({self._batching.size}, drop_remainder={self._batching.drop_remainder})"


class Enumerated(Dataset):
    """Rows with their positions in front."""

    def __init__(self, parent: Dataset) -> None:
        self._parent = parent

    @property
    def parents(self) -> tuple[Dataset, ...]:
        return (self._parent,)

    @property
    def batching(self) -> None:
        return None

    @property
    def row_spec(self) -> Any:
        return ArraySpec((), np.int64), self._parent.row_spec

    def cardinality(self) -> int:
        return self._parent.cardinality()

    def locate(self, epoch: int, position: int) -> Addresses:
        return self._parent.locate(epoch, position)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return positions.copy(), self._parent.gather(epochs, positions)

    def describe(self) -> str:
        return "enumerate()"


class Mapped(Dataset):
    """A function of every element."""

    def __init__(self, parent: Dataset, function: Callable[..., Any]) -> None:
        self._parent = parent
        self._function = function
        self._row_spec: Any = None

    @property
    def parents(self) -> tuple[Dataset, ...]:
        return (self._parent,)

    @property
    def batching(self) -> Batching | None:
        return self._parent.batching

    @property
    def row_spec(self) -> Any:
        if self._row_spec is None:
            first = np.zeros(1 if self._parent.cardinality() else 0, np.int64)
            if first.size and self._parent.batching is not None:
                epochs, positions = self._parent.locate(0, 0)
                rows = self._apply(self._parent.gather(epochs[:1], positions[:1]), 1)
            elif first.size:
                rows = self._apply(self._parent.gather(first, first), 1)
            else:
                rows = self._batch_call(empty_rows(self._parent.row_spec), 0)
            self._row_spec = spec_of_rows(rows)
        return self._row_spec

    def _call(self, element: Any) -> Any:
        plain_tuple = isinstance(element, tuple) and not hasattr(element, "_fields")
        return self._function(*element) if plain_tuple else self._function(element)

    def _batch_call(self, rows: Any, count: int) -> Any:
        mapped = nest.map_structure(np.asarray, self._call(rows))
        for name, leaf in zip(nest.paths(mapped), nest.flatten(mapped), strict=True):
            if leaf.ndim == 0 or leaf.shape[0] != count:
                expected = f"{count} rows{name and ' in ' + name}, as many as the batch has"
                remedy = "A function after batch must keep the first axis; before batch it gets single rows."
                raise ValueError(
                    explain(self.describe(), "", expected=expected, got=f"shape {leaf.shape}", remedy=remedy)
                )
        return mapped

    def _row_calls(self, rows: Any, count: int) -> Any:
        elements = [self._call(nest.map_structure(lambda leaf, i=i: leaf[i], rows)) for i in range(count)]
        return nest.map_structure(lambda *leaves: np.stack(leaves), *elements)

    def _apply(self, rows: Any, count: int) -> Any:
        return self._row_calls(rows, count) if self._parent.batching is None else self._batch_call(rows, count)

    def cardinality(self) -> int:
        return self._parent.cardinality()

    def locate(self, epoch: int, position: int) -> Addresses:
        return self._parent.locate(epoch, position)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        if positions.size == 0:
            return empty_rows(self.row_spec)
        return self._apply(self._parent.gather(epochs, positions), positions.size)

    def describe(self) -> str:
        return f"map({getattr(self._function, '__name__', repr(self._function))})"
