"""Row and column sums of a variable's matrices, from any flat parts of it, and their product."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from ..arena.values import move_like
from ..base.underflow import may_underflow
from ..comm.arrays import to_host

__all__ = ["MatrixSums", "rectangles"]


def rectangles(low: int, high: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Yield rows and columns of the elements [low, high) of a matrix of a width: at most three rectangles, in order.

    Example:
        >>> [(rows.start, rows.stop, columns.start, columns.stop) for rows, columns in rectangles(3, 14, 4)]
        [(0, 1, 3, 4), (1, 3, 0, 4), (3, 4, 0, 2)]
    """
    while low < high:
        row, column = divmod(low, width)
        rows = 1 if column or high - low < width else (high - low) // width
        end = min(width, column + high - low)
        yield slice(row, row + rows), slice(column, end)
        low += rows * (end - column)


@final
class MatrixSums:
    """Sums of the rows and columns of matrices: the last two dimensions of an array, one matrix for each index of the others.

    Example:
        >>> sums = MatrixSums((2, 3))
        >>> sums.add(np.array([1.0, 2.0]), 0)
        >>> sums.add(np.array([3.0, 4.0, 5.0, 6.0]), 2)
        >>> sums.sums.tolist()
        [6.0, 15.0, 5.0, 7.0, 9.0]

    Attributes:
        sums: float64, those of all rows, then those of all columns; may be replaced by the sums over several ranks.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._height, self._width = shape[-2:]
        self._size = math.prod(shape)
        self._count = self._size // self._width  # of rows
        self.sums = np.zeros(self._count + self._size // self._height)

    @property
    def _columns(self) -> np.ndarray:
        return self.sums[self._count :].reshape(-1, self._width)

    @may_underflow
    def add(self, flat: Any, first: int) -> None:
        """Add elements that start at element `first` of the array; elements after its end are ignored."""
        for rows, columns, part in self._parts(to_host(flat), first):
            self.sums[rows] += part.sum(axis=1, dtype=np.float64)
            one, last = rows.start // self._height, (rows.stop - 1) // self._height
            if one == last:
                self._columns[one, columns] += part.sum(axis=0, dtype=np.float64)
            else:
                starts = np.maximum(np.arange(one, last + 1) * self._height - rows.start, 0)
                sums = np.add.reduceat(part, starts, axis=0, dtype=np.float64)
                self._columns[one : last + 1, columns] += sums

    @may_underflow
    def product(self, flat: Any, first: int) -> None:
        """Overwrite elements, as in `add`, with their row sum times their column sum, divided by their matrix's sum."""
        host = to_host(flat)
        per_row = self.sums[: self._count].reshape(-1, self._height)
        shares = (per_row / per_row.sum(axis=1, keepdims=True)).reshape(-1)
        for rows, columns, part in self._parts(host, first):
            one, last = rows.start // self._height, (rows.stop - 1) // self._height
            which: Any = one if one == last else np.arange(rows.start, rows.stop) // self._height
            np.multiply(shares[rows, np.newaxis], self._columns[which, columns], out=part, casting="same_kind")
        if host is not flat:
            flat[...] = move_like(host, flat)

    def _parts(self, flat: np.ndarray, first: int) -> Iterator[tuple[slice, slice, np.ndarray]]:
        done, end = 0, min(first + flat.size, self._size)
        for rows, columns in rectangles(first, end, self._width):
            count = (rows.stop - rows.start) * (columns.stop - columns.start)
            yield rows, columns, flat[done : done + count].reshape(rows.stop - rows.start, -1)
            done += count
