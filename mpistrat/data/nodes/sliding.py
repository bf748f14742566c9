"""Windows of successive rows as elements, by random access."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.arguments import integer
from ..spec import batch_spec, stack_rows
from .batch import refuse_batches, require_one_shape
from .node import Addresses, Below, Node
from .stage import Stage, one_address

__all__ = ["sliding_window"]

_FUNCTION = "Dataset.sliding_window"


@final
class _Sliding(Stage):
    """Each window as a row, or with a horizon as two: the window, and the rows after it."""

    def __init__(self, parent: Node, length: int, horizon: int, shift: int, stride: int) -> None:
        super().__init__(parent, length, horizon, shift, stride)
        self._length, self._horizon, self._shift, self._stride = length, horizon, shift, stride
        self._rows = length + horizon
        self._span = (self._rows - 1) * stride + 1  # the distance from the first to the last row, plus 1

    @property
    def batching(self) -> None:
        return None

    @property
    def row_spec(self) -> Any:
        spec = self._parent.row_spec
        window = batch_spec(spec, self._length)
        return (window, batch_spec(spec, self._horizon)) if self._horizon else window

    def length_over(self, below: int) -> int:
        return below if below < 0 else max(0, -(-(below - self._span + 1) // self._shift))

    def locate(self, epoch: int, position: int) -> Addresses:
        return one_address(epoch, position)

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        return [(self._parent, (epochs, positions * self._shift), None)]  # the first rows: where a window is

    def _addresses(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Addresses:
        rows = positions[:, None] * self._shift + np.arange(self._rows) * self._stride
        return np.repeat(epochs, self._rows), rows.reshape(-1)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        """Return windows; of one epoch, their common rows are read once."""
        epochs, rows = self._addresses(epochs, positions)
        places = np.arange(rows.size)
        if rows.size and epochs.min() == epochs.max():
            rows, places = np.unique(rows, return_inverse=True)
        found = self._parent.gather(epochs[: rows.size], rows)
        past, future = np.split(places.reshape(-1, self._rows), [self._length], axis=1)
        window = nest.map_structure(lambda leaf: leaf[past], found)
        return (window, nest.map_structure(lambda leaf: leaf[future], found)) if self._horizon else window

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        self._parent.expect(*self._addresses(epochs, positions))

    def keep(self, rows: int) -> None:
        self._parent.keep(rows * self._shift + self._span)

    def chunk_starts(self) -> NDArray[np.int64] | None:
        """Return the numbers of the windows that start in each chunk below."""
        starts = self._parent.chunk_starts()
        return None if starts is None else np.unique(np.minimum(-(-starts // self._shift), self.cardinality()))

    def _all(self, epoch: int) -> Iterator[Any]:
        below, held, spec = self._parent.elements(epoch), deque[Any](), self._parent.row_spec
        while True:
            held.extend(itertools.islice(below, self._span - len(held)))
            if len(held) < self._span:
                return
            rows = list(itertools.islice(held, 0, None, self._stride))
            window = stack_rows(rows[: self._length], spec)
            yield (window, stack_rows(rows[self._length :], spec)) if self._horizon else window
            for _ in range(min(self._shift, self._span)):
                held.popleft()
            for _ in range(self._shift - self._span):
                next(below, None)

    def check(self) -> None:
        require_one_shape(_FUNCTION, self._parent.row_spec)
        super().check()

    def describe(self) -> str:
        horizon = f", horizon={self._horizon}" if self._horizon else ""
        return f"sliding_window({self._length}{horizon}, shift={self._shift}, stride={self._stride})"


def sliding_window(parent: Node, length: int, horizon: int = 0, shift: int = 1, stride: int = 1) -> Node:
    """Make an element of each window of successive rows, and with a horizon of the rows that follow it.

    For forecasts from a series: window k has the rows k * shift + j * stride for j below `length`, as arrays with one more axis.
    With `horizon=h` an element is a pair: the window, and the next h rows at the same stride, for the prediction. Windows
    that lack a row are dropped. Windows are read by their numbers, so a shuffle after it is global; use `window` for datasets of
    elements, as in tf.data.

    Args:
        length: rows in a window.
        horizon: rows after it, in an array of their own; 0 for none.
        shift: the distance between the starts of successive windows, in rows.
        stride: the distance between successive rows of a window.

    Raises:
        ValueError: for batches; while reading, for rows that differ in shape.

    Example:
        >>> series = ms.data.Dataset.range(6).sliding_window(3, horizon=1)
        >>> [(past.tolist(), future.tolist()) for past, future in series]
        [([0, 1, 2], [3]), ([1, 2, 3], [4]), ([2, 3, 4], [5])]
    """
    refuse_batches(_FUNCTION, parent)
    return _Sliding(
        parent,
        integer(_FUNCTION, "length", length, 1),
        integer(_FUNCTION, "horizon", horizon, 0),
        integer(_FUNCTION, "shift", shift, 1),
        integer(_FUNCTION, "stride", stride, 1),
    )
