"""Base classes of nodes with defaults: a source, a node over one parent, a node over several."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...base.errors import explain
from ...base.masks import plain_array
from ..feed.batches import LookAhead, successive_batches
from ..spec import unstack_rows
from .node import Addresses, Batching, Below, LocatedRange, Node, Outcome, OwnRows, Traits

__all__ = [
    "Combined",
    "InputRows",
    "SameElements",
    "Stage",
    "common_batching",
    "cut_chunks",
    "gather_rows",
    "one_address",
]

_ROWS = 64  # successive single rows that are read together


def _successive(node: Node, epoch: int, start: int) -> Iterator[Any]:
    """Return an epoch's elements from a position on, of a node with random access."""
    if node.batching is None:
        return _successive_rows(node, epoch, start)
    return map(operator.itemgetter(1), successive_batches(node, epoch, start))  # a generator would hold a batch


def _successive_rows(node: Node, epoch: int, start: int) -> Iterator[Any]:
    length = node.cardinality()
    position, together = start, 1
    ahead = LookAhead(node)
    while length < 0 or position < length:
        stop = position + together if length < 0 else min(position + together, length)
        ahead.rows(_addresses(epoch, stop, stop + _ROWS if length < 0 else min(stop + _ROWS, length)))
        try:
            rows = unstack_rows(node.gather(*_addresses(epoch, position, stop)))
        except Exception:
            if together == 1:
                raise
            together = 1  # yield the rows before the one that raises
            continue
        yield from rows
        position, together = stop, min(2 * together, _ROWS)


def _addresses(epoch: int, start: int, stop: int) -> Addresses:
    positions = np.arange(start, stop, dtype=np.int64)
    return np.full(positions.size, epoch, np.int64), positions


def gather_rows(node: Node, indices: ArrayLike, epoch: int) -> Any:
    """Gather rows; see `Dataset.rows`."""
    if node.batching is not None:
        remedy = "Call rows before batch."
        raise ValueError(explain("Dataset.rows", "", expected="a dataset of rows", got="batches", remedy=remedy))
    if not node.random_access:
        got = f"one that reads in order, for {node.describe()}"
        raise ValueError(explain("Dataset.rows", "", expected="a dataset with random access", got=got))
    positions = np.atleast_1d(plain_array(indices, "Dataset.rows", "indices"))
    if positions.ndim != 1 or (positions.size and positions.dtype.kind not in "iu"):
        got = f"{positions.dtype} of shape {positions.shape}"
        raise IndexError(explain("Dataset.rows", "indices", expected="integers in one axis", got=got))
    positions = positions.astype(np.int64)
    length = node.cardinality()
    if positions.size and (positions.min() < 0 or 0 <= length <= positions.max()):
        got = f"{positions.min()} to {positions.max()}"
        raise IndexError(explain("Dataset.rows", "indices", expected=f"integers in [0, {length})", got=got))
    node.check()
    return node.gather(np.full(positions.size, epoch, np.int64), positions)


def cut_chunks(starts: NDArray[np.int64] | None, low: int, high: int) -> NDArray[np.int64] | None:
    """Return the chunk starts (see `Node.chunk_starts`) of the rows from low to high, counted from low."""
    if starts is None or starts.size == 0:
        return starts
    high = min(high, int(starts[-1]))
    if high <= low:
        return np.zeros(1, np.int64)
    inside = starts[(starts > low) & (starts < high)]
    return np.concatenate(([low], inside, [high])).astype(np.int64) - low


def one_address(epoch: int, position: int) -> Addresses:
    """Return the address of one row."""
    return np.array([epoch], np.int64), np.array([position], np.int64)


class _Readable(Node):
    """A node that reads by addresses with random access, else by `_in_order`."""

    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return _successive(self, epoch, start) if self.random_access else self._in_order(epoch, start)

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        """Return the elements without random access: those before `start` are made and dropped."""
        return itertools.islice(self._all(epoch), start, None)

    def _all(self, epoch: int) -> Iterator[Any]:
        raise NotImplementedError(f"{self.describe()} needs random access")


class InputRows(_Readable):
    """Rows of a source; each is an element whose address is its position."""

    traits = Traits()

    @property
    def parents(self) -> tuple[Node, ...]:
        return ()

    @property
    def batching(self) -> Batching | None:
        return None

    def locate(self, epoch: int, position: int) -> Addresses:
        return one_address(epoch, position)

    def rebuild(self, parents: Sequence[Node]) -> Node:
        return self


class Stage(_Readable):
    """A node over one parent, with the parent's properties as defaults.

    Args:
        settings: the other arguments of the constructor, to rebuild the node over another parent.
    """

    def __init__(self, parent: Node, *settings: Any) -> None:
        self._parent = parent
        self._settings = settings

    def rebuild(self, parents: Sequence[Node]) -> Node:
        return type(self)(parents[0], *self._settings)

    @property
    def parents(self) -> tuple[Node, ...]:
        return (self._parent,)

    @property
    def batching(self) -> Batching | None:
        return self._parent.batching

    @property
    def row_spec(self) -> Any:
        return self._parent.row_spec

    def cardinality(self) -> int:
        return self.length_over(self._parent.cardinality())

    def length_over(self, below: int) -> int:
        """Return the number of elements, given that of the parent; `UNKNOWN` if it depends on more."""
        return below

    def locate(self, epoch: int, position: int) -> Addresses:
        return self._parent.locate(epoch, position)

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        return [(self._parent, (epochs, positions), None)]


class SameElements(Stage):
    """A node over one parent with the same elements: an option of the whole chain."""

    def locate_range(self, epoch: int, start: int, stop: int, own: OwnRows | None = None) -> LocatedRange:
        return self._parent.locate_range(epoch, start, stop, own)

    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return self._parent.elements(epoch, start)

    def outcomes(self, epoch: int) -> Iterator[Outcome]:
        return self._parent.outcomes(epoch)


class Combined(_Readable):
    """A node over several parents, whose elements are all rows or all batches; `function` is for errors."""

    def __init__(self, function: str, parents: Sequence[Node]) -> None:
        self._parents = tuple(parents)
        self._batching = common_batching(function, parents)

    @property
    def parents(self) -> tuple[Node, ...]:
        return self._parents

    @property
    def batching(self) -> Batching | None:
        return self._batching


def common_batching(function: str, parents: Sequence[Node]) -> Batching | None:
    """Return the batching of the elements of several nodes; ValueError for a mix of rows and batches."""
    batchings = [parent.batching for parent in parents]
    first = batchings[0]
    if all(batching == first for batching in batchings):
        return first
    if None in batchings:
        remedy = "Call batch on all of them before, or on the result."
        raise ValueError(
            explain(function, "", expected="all rows or all batches", got="rows and batches", remedy=remedy)
        )
    return Batching(max(batching.size for batching in batchings if batching is not None), drop_remainder=False)
