"""Windows of successive elements, each a dataset."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.arguments import integer
from ..spec import DatasetSpec, batch_spec
from .node import Addresses, Below, Node
from .order import Order, Reindexed, ShardOrder, Skip, Take
from .sources import Held
from .stage import Stage, one_address

__all__ = ["Selected", "Windows", "window"]


@final
@dataclass(frozen=True)
class _OfEpoch(Order):
    """The elements of one fixed epoch in every epoch."""

    epoch: int

    def addresses(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: int) -> Addresses:
        return np.full_like(epochs, self.epoch), positions

    def elements(self, parent: Node, epoch: int, start: int) -> Iterator[Any]:
        return parent.elements(self.epoch, start)

    def __str__(self) -> str:
        return f"epoch {self.epoch}"


@final
class Selected(Stage):
    """One of the arrays of elements."""

    def __init__(self, parent: Node, leaf: int) -> None:
        super().__init__(parent, leaf)
        self._leaf = leaf

    @property
    def row_spec(self) -> Any:
        return self._of(self._parent.row_spec)

    def _of(self, element: Any) -> Any:
        return nest.flatten(element)[self._leaf]

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return self._of(self._parent.gather(epochs, positions))

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        return map(self._of, self._parent.elements(epoch, start))

    def describe(self) -> str:
        return f"array{nest.paths(self._parent.row_spec)[self._leaf]}"


@final
class Windows(Stage):
    """A dataset for each window. With random access below, a window reads lazily; else it holds its elements."""

    def __init__(
        self, parent: Node, dataset_of: Callable[[Node], Any], size: int, shift: int, stride: int, drop_remainder: bool
    ) -> None:
        super().__init__(parent, dataset_of, size, shift, stride, drop_remainder)
        self._dataset_of = dataset_of
        self._size, self._shift, self._stride = size, shift, stride
        self._span = (size - 1) * stride + 1  # the distance from a window's first to last element, plus 1
        self._drop_remainder = drop_remainder

    @property
    def batching(self) -> None:
        return None

    @property
    def row_spec(self) -> Any:
        spec, batching = self._parent.row_spec, self._parent.batching
        if batching is not None:
            spec = batch_spec(spec, batching.size if batching.drop_remainder else None)
        return nest.map_structure(DatasetSpec, spec)

    def length_over(self, below: int) -> int:
        if below < 0:
            return below
        begin = below - self._span + 1 if self._drop_remainder else below  # possible starts of a window
        return max(0, -(-begin // self._shift))

    def locate(self, epoch: int, position: int) -> Addresses:
        return one_address(epoch, position)

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        return []  # windows read lazily

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        spec = self.row_spec
        columns = [np.empty(positions.size, object) for _ in nest.flatten(spec)]
        for row, address in enumerate(zip(epochs.tolist(), positions.tolist(), strict=True)):
            for column, dataset in zip(columns, self._datasets(self._part(*address)), strict=True):
                column[row] = dataset
        return nest.pack_like(spec, columns)

    def _part(self, epoch: int, number: int) -> Node:
        orders: list[Order] = [_OfEpoch(epoch), Skip(number * self._shift), Take(self._span)]
        if self._stride > 1:
            orders.append(ShardOrder(self._stride, 0))
        node = self._parent
        for order in orders:
            node = Reindexed(node, order)
        return node

    def _datasets(self, window: Node) -> Sequence[Any]:
        """Return a window as a dataset, or as one dataset for each array of its elements."""
        spec = self._parent.row_spec
        if not nest.is_nested(spec):
            return [self._dataset_of(window)]
        return [self._dataset_of(Selected(window, leaf)) for leaf in range(len(nest.flatten(spec)))]

    def _all(self, epoch: int) -> Iterator[Any]:
        below = self._parent.elements(epoch)
        held: deque[Any] = deque()
        while True:
            held.extend(itertools.islice(below, self._span - len(held)))
            if not held or (self._drop_remainder and len(held) < self._span):
                return
            spec = self._parent.row_spec
            window = Held(list(itertools.islice(held, 0, None, self._stride)), spec, self._parent.batching)
            yield nest.pack_like(spec, list(self._datasets(window)))
            for _ in range(self._shift):
                if held:
                    held.popleft()
                elif next(below, held) is held:
                    return

    def describe(self) -> str:
        shown = f"{self._size}, shift={self._shift}, stride={self._stride}, drop_remainder={self._drop_remainder}"
        return f"window({shown})"


def window(
    parent: Node, dataset_of: Callable[[Node], Any], size: int, shift: int | None = None, stride: int = 1,
    drop_remainder: bool = False,
) -> Node:  # fmt: skip
    """Make a dataset of each window of successive elements; `flat_map` and the like make elements of them.

    Element j of window k is element k * shift + j * stride. If elements are tuples or dicts, windows are tuples or dicts
    of datasets, one per array. Functions of a window may return values read from it; those of `flat_map` and `interleave`
    return a dataset.

    With random access a window reads lazily; else its elements are in memory.

    Args:
        size: elements in a window; the last windows may have fewer.
        shift: the distance between the starts of successive windows, in elements; None for size.
        stride: the distance between successive elements of a window.
        drop_remainder: drop smaller windows.

    Raises:
        ValueError: for a number below 1.

    Example:
        >>> windows = ms.data.Dataset.range(7).window(3, shift=1, drop_remainder=True)
        >>> batches = windows.flat_map(lambda window: window.batch(3))
        >>> [batch.tolist() for batch in batches]
        [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]
    """
    size = integer("Dataset.window", "size", size, 1)
    shift = size if shift is None else integer("Dataset.window", "shift", shift, 1)
    stride = integer("Dataset.window", "stride", stride, 1)
    return Windows(parent, dataset_of, size, shift, stride, bool(drop_remainder))
