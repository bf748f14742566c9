"""Sparse reads and writes of a variable: rows by index, elements by coordinates. Duplicate rows are applied one by one.

`rows_of` and `row_ranges` return the rows that a NumPy index reads, so that arrays in several parts fetch only those.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arena.values import convert
from ..base.arguments import tensorflow_names
from ..base.errors import explain
from ..base.masks import plain_array
from ..base.types import IndexedSlices
from ..comm.arrays import as_array, on_device_of, to_host

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ScatterMethods", "checked_slices", "row_numbers", "row_ranges", "rows_of", "scatter"]

_UFUNCS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "min": np.minimum,
    "max": np.maximum,
}


def scatter(op: str, rows: np.ndarray, first: int, indices: np.ndarray, updates: np.ndarray) -> None:
    """Apply updates to the rows that are here; of several "update"s of a row the last one wins.

    Args:
        op: "update", or a key of the table above.
        rows: array (r, c), rows `first` to `first + r` of the whole; changed in place.
        first: number of the first of them.
        indices: (k,) row numbers of the whole.
        updates: (k, c).
    """
    here = (indices >= first) & (indices < first + len(rows))
    if not here.all():
        indices, updates = indices[here], updates[here]
    if op == "update":
        rows[indices - first] = updates
    else:
        _UFUNCS[op].at(rows, indices - first, updates)


def row_numbers(shape: tuple[int, ...], indices: Any, function: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return flat row numbers of an array of that shape, and the shape of a read.

    Raises:
        TypeError, IndexError: they are not integers, or not rows of it.

    Example:
        >>> row_numbers((5, 2), [[4, 0]], "f")
        (array([4, 0]), (1, 2, 2))
    """
    array = _integers(indices, function)
    return _flat_indices(shape, array[..., np.newaxis], function), array.shape + shape[1:]


def checked_slices(slices: IndexedSlices, variable: Any, function: str) -> IndexedSlices:
    """Return IndexedSlices of arrays that fit a variable.

    Raises:
        ValueError: rows of another shape, or rows that do not exist.
        TypeError: no arrays.
    """
    shape, name = variable.shape, variable.name
    values = as_array(slices.values, function, name)
    indices = as_array(slices.indices, function, name)
    if indices.ndim != 1 or indices.dtype.kind not in "iu" or values.shape != (indices.size, *shape[1:]):
        expected = f"IndexedSlices with rows of shape {shape[1:]}"
        got = f"values of shape {tuple(values.shape)}, indices of shape {tuple(indices.shape)}"
        raise ValueError(explain(function, name, expected=expected, got=got))
    with on_device_of(indices):
        least, most = (int(indices.min()), int(indices.max())) if indices.size else (0, -1)
    if least < 0 or most >= shape[0]:
        expected, got = f"indices from 0 to {shape[0] - 1}", f"{least} to {most}"
        raise ValueError(explain(function, name, expected=expected, got=got))
    return IndexedSlices(values, indices, shape)


class ScatterMethods(ABC):
    """The scatter and gather methods of a Variable (TF: those of tf.Variable, tf.gather_nd).

    `delta` is an IndexedSlices, or a pair (indices, updates) with updates of shape `indices.shape + v.shape[1:]`. Indices count
    from 0 and cannot be negative. Every write is collective. In cross-replica and update context each rank passes the same. In
    replica context the replicas' updates are concatenated in replica order: `add` and `sub` with SUM, MEAN and
    ONLY_FIRST_REPLICA, `mul` and `div` with SUM and ONLY_FIRST_REPLICA, `min`, `max` and `update` with ONLY_FIRST_REPLICA. The
    methods return the variable. ON_READ variables have none of them.

    Raises:
        IndexError: an index outside the variable.
        ValueError: updates of another shape.
        NotImplementedError: an ON_READ variable; an operation that is undefined under the aggregation.
    """

    __slots__ = ()

    @abstractmethod
    def _scatter(self, op: str, depth: int, indices: np.ndarray, updates: np.ndarray) -> Self:
        """Apply (k,) row numbers and (k, c) updates to the variable seen as rows of its first `depth` dimensions."""

    @tensorflow_names("use_locking", sparse_delta="delta")
    def scatter_add(self, delta: Any) -> Self:
        """Add updates to rows, duplicates one by one. Collective."""
        return self._scatter_rows("add", delta)

    @tensorflow_names("use_locking", sparse_delta="delta")
    def scatter_sub(self, delta: Any) -> Self:
        """Subtract updates from rows. Collective."""
        return self._scatter_rows("sub", delta)

    @tensorflow_names("use_locking", sparse_delta="delta")
    def scatter_mul(self, delta: Any) -> Self:
        """Multiply rows by updates. Collective."""
        return self._scatter_rows("mul", delta)

    @tensorflow_names("use_locking", sparse_delta="delta")
    def scatter_div(self, delta: Any) -> Self:
        """Divide rows by updates; not for integers. Collective."""
        return self._scatter_rows("div", delta)

    @tensorflow_names("use_locking", sparse_delta="delta")
    def scatter_min(self, delta: Any) -> Self:
        """Take the smaller of row and update. Collective."""
        return self._scatter_rows("min", delta)

    @tensorflow_names("use_locking", sparse_delta="delta")
    def scatter_max(self, delta: Any) -> Self:
        """Take the larger of row and update. Collective."""
        return self._scatter_rows("max", delta)

    @tensorflow_names("use_locking", sparse_delta="delta")
    def scatter_update(self, delta: Any) -> Self:
        """Replace rows by updates; of duplicates the last wins. Collective."""
        return self._scatter_rows("update", delta)

    @tensorflow_names()
    def scatter_nd_add(self, indices: Any, updates: Any) -> Self:
        """Add `updates[i]` at coordinates `indices[i]`; the last dimension of indices holds coordinates. Collective."""
        return self._scatter_nd("add", indices, updates)

    @tensorflow_names()
    def scatter_nd_sub(self, indices: Any, updates: Any) -> Self:
        """Subtract at coordinates. Collective."""
        return self._scatter_nd("sub", indices, updates)

    @tensorflow_names()
    def scatter_nd_min(self, indices: Any, updates: Any) -> Self:
        """Take the smaller at coordinates. Collective."""
        return self._scatter_nd("min", indices, updates)

    @tensorflow_names()
    def scatter_nd_max(self, indices: Any, updates: Any) -> Self:
        """Take the larger at coordinates. Collective."""
        return self._scatter_nd("max", indices, updates)

    @tensorflow_names()
    def scatter_nd_update(self, indices: Any, updates: Any) -> Self:
        """Replace at coordinates. Collective."""
        return self._scatter_nd("update", indices, updates)

    @tensorflow_names("use_locking", sparse_delta="delta")
    def batch_scatter_update(self, delta: Any) -> Self:
        """Replace `v[b..., indices[b..., k]]` by `updates[b..., k]`, for batches b. Collective.

        All but the last dimension of the indices are batches, and must be the variable's first dimensions.
        """
        indices, updates = _pair(delta)
        indices = _integers(indices, "batch_scatter_update")
        if indices.ndim == 0 or indices.shape[:-1] != self.shape[: indices.ndim - 1]:
            expected, got = f"batches of shape {self.shape[: indices.ndim - 1]}", f"shape {indices.shape}"
            raise ValueError(explain("Variable.batch_scatter_update", "indices", expected=expected, got=got))
        batches = np.indices(indices.shape)[:-1]
        return self._scatter_nd("update", np.stack([*batches, indices], axis=-1), updates)

    @tensorflow_names()
    def sparse_read(self, indices: Any) -> Any:
        """Return a copy of the rows with these numbers, in order. Collective for ON_READ variables in cross-replica context."""
        return self.gather_nd(_integers(indices, "sparse_read")[..., np.newaxis])

    @tensorflow_names()
    def embedding_lookup(self, ids: Any) -> Any:
        """Return a copy of these rows, like `sparse_read`. Collective for ON_READ variables in cross-replica context.

        TF: tf.nn.embedding_lookup. The shape is `ids.shape + v.shape[1:]`.
        """
        return self.sparse_read(ids)

    @tensorflow_names()
    def gather_nd(self, indices: Any) -> Any:
        """Return a new array of the elements at coordinates. Collective for ON_READ variables in cross-replica context."""
        indices = _integers(indices, "gather_nd")
        flat = _flat_indices(self.shape, indices, "gather_nd")
        depth = indices.shape[-1]
        rows = self.array.reshape(-1, *self.shape[depth:])
        with on_device_of(rows):
            return rows[flat].reshape(indices.shape[:-1] + self.shape[depth:])

    # attributes of subclasses
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    @abstractmethod
    def array(self) -> Any: ...

    def _scatter_rows(self, op: str, delta: Any) -> Self:
        indices, updates = _pair(delta)
        return self._scatter_nd(op, _integers(indices, f"scatter_{op}")[..., np.newaxis], updates)

    def _scatter_nd(self, op: str, indices: Any, updates: Any) -> Self:
        function = f"scatter_{op}"
        indices = _integers(indices, function)
        flat = _flat_indices(self.shape, indices, function)
        array = to_host(as_array(updates, f"Variable.{function}", "updates"))
        array = convert(updates, array, self.dtype, f"Variable.{function}")
        expected = indices.shape[:-1] + self.shape[indices.shape[-1] :]
        if array.shape not in (expected, ()):
            text = explain(f"Variable.{function}", "updates", expected=f"shape {expected}", got=f"shape {array.shape}")
            raise ValueError(text)
        if op == "div" and self.dtype.kind in "biu":
            text = explain(f"Variable.{function}", "", expected="a floating dtype", got=str(self.dtype))
            raise TypeError(text)
        width = int(np.prod(self.shape[indices.shape[-1] :], dtype=np.int64))
        # A copy, never a view: another rank might be writing to the variable.
        rows = np.array(np.broadcast_to(array, expected)).reshape(flat.size, width)
        return self._scatter(op, indices.shape[-1], flat, rows)


def _pair(delta: Any) -> tuple[Any, Any]:
    return (delta.indices, delta.values) if isinstance(delta, IndexedSlices) else delta


def _integers(indices: Any, function: str) -> np.ndarray:
    array = to_host(as_array(indices, f"Variable.{function}", "indices"))
    if array.dtype.kind not in "iu" and array.size:
        text = explain(f"Variable.{function}", "indices", expected="integers", got=str(array.dtype))
        raise TypeError(text)
    return array.astype(np.int64, copy=False)


def _flat_indices(shape: tuple[int, ...], indices: np.ndarray, function: str) -> np.ndarray:
    """Return the row number of each coordinate in the array seen as rows of its first dimensions."""
    if indices.ndim == 0 or indices.shape[-1] > len(shape):
        expected = f"at most {len(shape)} coordinates for shape {shape}"
        text = explain(f"Variable.{function}", "indices", expected=expected, got=f"shape {indices.shape}")
        raise ValueError(text)
    flat = np.zeros(indices.shape[:-1], np.int64)
    for axis in range(indices.shape[-1]):
        index, length = indices[..., axis], shape[axis]
        if index.size and (index.min() < 0 or index.max() >= length):
            wrong = index[(index < 0) | (index >= length)].flat[0]
            expected = f"0 <= index < {length}"
            raise IndexError(explain(f"Variable.{function}", "indices", expected=expected, got=int(wrong)))
        flat = flat * length + index
    return flat.reshape(-1)


# The rows that an index reads


def rows_of(index: Any, shape: tuple[int, ...]) -> tuple[range | np.ndarray, tuple[Any, ...]] | None:
    """Return the rows that an index reads, and the index that selects the same from these rows.

    Args:
        index: anything between [ and ].
        shape: of the array; at least one axis.

    Returns:
        The rows as a range or as ascending numbers, each once, and the other index; None if the index does not start with the
        rows, as `...` and `None` do not, or if NumPy refuses it.

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
        numbers = plain_array(first, "Variable", "index")
    except ValueError:  # lists of unequal length
        return None
    if numbers.dtype == bool and numbers.ndim:
        if numbers.shape != shape[: numbers.ndim]:
            return None
        numbers, *others = numbers.nonzero()  # as NumPy interprets a mask
        rest = (*others, *rest)
    if isinstance(first, list) and not numbers.size:
        numbers = numbers.astype(np.int64)
    if numbers.dtype.kind not in "iu" or not numbers.ndim:
        return None
    rows, where = np.unique(_counted_from_zero(numbers, shape[0]), return_inverse=True)
    return rows, (where.reshape(numbers.shape), *rest)


def _counted_from_zero(numbers: np.ndarray, length: int) -> np.ndarray:
    wrong = numbers[(numbers < -length) | (numbers >= length)]
    if wrong.size:
        raise IndexError(f"index {wrong.flat[0]} is out of bounds for axis 0 with size {length}")
    return np.where(numbers < 0, numbers + length, numbers)


def row_ranges(rows: range, bounds: Sequence[tuple[int, int]]) -> list[slice | None]:
    """Return the ascending rows within each of the bounds, counted from its start; None if there are none.

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
