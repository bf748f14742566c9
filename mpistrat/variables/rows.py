"""Which rows an index of NumPy's reads: so that no more is fetched of an array that lies elsewhere or in several parts."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["row_ranges", "rows_of"]


def rows_of(index: Any, shape: tuple[int, ...]) -> tuple[range | np.ndarray, tuple[Any, ...]] | None:
    """Return which rows an index reads, and the index that gives the same of these rows alone.

    Args:
        index: anything between [ and ].
        shape: of the array; at least one axis.

    Returns:
        The rows as a range or as ascending numbers, each once, and the other index; None where the index does not begin
        with the rows, as `...` and `None` do not, or where NumPy refuses it.

    Raises:
        IndexError: there is no such row.

    Example:
        >>> rows_of((slice(4, 1, -2), 0), (5, 2))
        (range(4, 1, -2), (slice(None, None, None), 0))
        >>> rows_of([3, -1, 3], (5,))
        (array([3, 4]), (array([0, 1, 0]),))
    """
    index = index if isinstance(index, tuple) else (index,)
    if not index:
        return None
    first, *rest = index
    length = shape[0]
    if isinstance(first, slice):
        return range(*first.indices(length)), (slice(None), *rest)
    if first is None or first is Ellipsis or isinstance(first, (bool, np.bool_)):
        return None
    try:
        row = operator.index(first)
    except TypeError:
        return _rows_of_array(first, rest, shape)
    row = int(_counted_from_zero(np.array([row]), length)[0])
    return range(row, row + 1), (0, *rest)


def _rows_of_array(
    first: Any, rest: Sequence[Any], shape: tuple[int, ...]
) -> tuple[np.ndarray, tuple[Any, ...]] | None:
    try:
        numbers = np.asarray(first)
    except ValueError:  # lists of unequal length
        return None
    if numbers.dtype == bool and numbers.ndim:
        if numbers.shape != shape[: numbers.ndim]:
            return None
        numbers, *others = numbers.nonzero()  # what NumPy takes a mask for
        rest = (*others, *rest)
    if isinstance(first, list) and not numbers.size:
        numbers = numbers.astype(np.int64)
    if numbers.dtype.kind not in "iu" or not numbers.ndim:
        return None
    rows, place = np.unique(_counted_from_zero(numbers, shape[0]), return_inverse=True)
    return rows, (place.reshape(numbers.shape), *rest)


def _counted_from_zero(numbers: np.ndarray, length: int) -> np.ndarray:
    wrong = numbers[(numbers < -length) | (numbers >= length)]
    if wrong.size:
        raise IndexError(f"index {wrong.flat[0]} is out of bounds for axis 0 with size {length}")
    return np.where(numbers < 0, numbers + length, numbers)


def row_ranges(rows: range, bounds: Sequence[tuple[int, int]]) -> list[slice | None]:
    """Return what of ascending rows lies within each of the bounds, counted from there; None for nothing.

    Example:
        >>> row_ranges(range(1, 9, 3), [(0, 3), (3, 4), (4, 9)])
        [slice(1, 2, 3), None, slice(0, 4, 3)]
    """
    found: list[slice | None] = []
    for low, high in bounds:
        begin, end = (max(0, -(-(edge - rows.start) // rows.step)) for edge in (low, high))
        part = rows[begin : max(begin, end)]
        found.append(slice(part[0] - low, part[-1] - low + 1, rows.step) if part else None)
    return found
