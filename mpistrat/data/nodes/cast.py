"""The operator that changes dtypes without changing values; rows of a source are cast block by block while they are read."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.conversion import converted
from ...base.errors import explain
from ..buffers import RowBuffers
from ..spec import ArraySpec, DatasetSpec, is_ragged, row_nbytes, stack_rows, stacked_nbytes, unstack_rows
from .node import LocatedRange, Node, Outcome, OwnRows, changed_outcomes, read_plan
from .stage import InputRows, Stage

__all__ = ["Cast", "cast"]

_FUNCTION = "Dataset.cast"
_BLOCK_BYTES = 1 << 20  # of rows of a source that are read before they are cast


@final
class Cast(Stage):
    """The same elements in other dtypes."""

    def __init__(self, parent: Node, dtypes: Any) -> None:
        super().__init__(parent, dtypes)
        self._given = dtypes
        self._buffers = RowBuffers()

    @functools.cached_property
    def _dtypes(self) -> list[np.dtype[Any] | None]:
        """The dtype that each array is cast to, in the order of `nest.flatten`; None to leave it as it is."""
        spec = self._parent.row_spec
        names, given = nest.paths(spec), dict(zip(nest.paths(self._given), nest.flatten(self._given), strict=True))
        found: dict[str, np.dtype[Any] | None] = dict.fromkeys(names)
        for path, dtype in given.items():
            own = [name for name in names if name == path or name.startswith(f"{path}[")]
            if not own:
                expected = f"names among {', '.join(names)}" if names != [""] else "one dtype, for rows of one array"
                raise ValueError(explain(_FUNCTION, "dtypes", expected=expected, got=path))
            found.update(dict.fromkeys(own, dtype))
        for (name, dtype), leaf in zip(found.items(), nest.flatten(spec), strict=True):
            if dtype is not None and (isinstance(leaf, DatasetSpec) or leaf.dtype.kind == "V"):
                remedy = "Leave it out, or change it with map."
                expected = "arrays of numbers, times or text"
                raise ValueError(explain(_FUNCTION, name, expected=expected, got=leaf, remedy=remedy))
        return list(found.values())

    @functools.cached_property
    def row_spec(self) -> Any:
        specs = zip(nest.flatten(self._parent.row_spec), self._dtypes, strict=True)
        leaves = [leaf if dtype is None else ArraySpec(leaf.shape, dtype) for leaf, dtype in specs]
        return nest.pack_like(self._parent.row_spec, leaves)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        source, *addresses = read_plan(self._parent, epochs, positions)
        rows = self._rows_of_block(source)
        if positions.size <= rows:
            return self._cast(source.gather(*addresses), epochs, positions)
        # In the order of the source: a chunk that two blocks share is still cached for the second one.
        order = None if source.chunk_starts() is None else np.lexsort(addresses[::-1])
        order = None if order is not None and bool((np.diff(order) == 1).all()) else order
        out = [self._empty(number, leaf, positions.size) for number, leaf in enumerate(nest.flatten(self.row_spec))]
        for start in range(0, positions.size, rows):
            block = slice(start, start + rows) if order is None else order[start : start + rows]
            found = self._cast(source.gather(*(each[block] for each in addresses)), epochs[block], positions[block])
            for column, leaf in zip(out, nest.flatten(found), strict=True):
                column[block] = leaf
        return nest.pack_like(self.row_spec, out)

    def _rows_of_block(self, source: Node) -> int:
        """Return the number of rows that are cast together; all, unless most bytes are cast and one by one are read."""
        specs = nest.flatten(self._parent.row_spec)
        pairs = zip(specs, self._dtypes, strict=True)
        changed = sum(stacked_nbytes(leaf) for leaf, dtype in pairs if _changes(leaf.dtype, dtype))
        row_bytes = row_nbytes(self._parent.row_spec)  # 0 if rows differ in their bytes
        if not isinstance(source, InputRows) or not row_bytes or 2 * changed < row_bytes:
            return sys.maxsize
        return max(1, _BLOCK_BYTES // max(row_bytes, row_nbytes(self.row_spec)))

    def _empty(self, number: int, leaf: ArraySpec, rows: int) -> NDArray[Any]:
        return self._buffers.empty(number, (rows, *leaf.shape), leaf.dtype)  # type: ignore[arg-type]

    def _cast(self, rows: Any, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        """Return stacked rows in the dtypes. Errors name the first row with a value that cannot be cast."""
        specs, leaves = nest.flatten(self._parent.row_spec), nest.flatten(rows)
        columns = list(zip(nest.paths(rows), specs, leaves, self._dtypes, strict=True))
        try:
            return nest.pack_like(rows, [_column(*each) for each in columns])
        except ValueError:
            for row, (epoch, position) in enumerate(zip(epochs.tolist(), positions.tolist(), strict=True)):
                for name, spec, leaf, dtype in columns:
                    where = f"row {position} of epoch {epoch}{name and ': ' + name}"
                    _column(where, spec, leaf[row : row + 1], dtype)
            raise

    def locate_range(self, epoch: int, start: int, stop: int, own: OwnRows | None = None) -> LocatedRange:
        return self._parent.locate_range(epoch, start, stop, own)

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        for position, element in enumerate(self._parent.elements(epoch, start), start):
            yield self._element(element, epoch, position)

    def outcomes(self, epoch: int) -> Iterator[Outcome]:
        if self.random_access:
            return super().outcomes(epoch)
        return changed_outcomes(self._parent.outcomes(epoch), lambda each, at: self._element(each, epoch, at))

    def _element(self, element: Any, epoch: int, position: int) -> Any:
        batching = self.batching
        rows = stack_rows([element], self._parent.row_spec) if batching is None else element
        first, count = (position, 1) if batching is None else (position * batching.size, len(nest.flatten(rows)[0]))
        made = self._cast(rows, np.full(count, epoch), np.arange(first, first + count))
        return unstack_rows(made)[0] if batching is None else made

    def describe(self) -> str:
        given = self._given
        named = nest.map_structure(lambda leaf: None if leaf is None else str(leaf), given)
        return f"cast({named if nest.is_nested(given) else given})"


def _changes(given: np.dtype[Any], wanted: np.dtype[Any] | None) -> bool:
    return wanted is not None and wanted != given


def _column(where: str, spec: ArraySpec, rows: NDArray[Any], dtype: np.dtype[Any] | None) -> NDArray[Any]:
    if dtype is None or dtype == rows.dtype:
        return rows
    if not is_ragged(spec) or rows.dtype != object:
        return converted(_FUNCTION, where, rows, dtype)
    out = np.empty(len(rows), object)
    for number, row in enumerate(rows):
        out[number] = converted(_FUNCTION, where, row, dtype)
    return out


def cast(parent: Node, dtypes: Any) -> Node:
    """Change dtypes without changing values: floats are rounded to narrower floats, every other value must fit exactly.

    Rows of a source are cast in blocks of 1 MiB while they are read, so a batch is never in memory in both dtypes. Put it right
    after the source. After `batch`, too, rows are cast one independently of another.

    Args:
        dtypes: a dtype of numbers or bool for all arrays; or a dict from names (positions in a tuple) to dtypes, a dict in it for
            a dict in the element. None, or no name, leaves an array as it is. Text and times may become numbers.

    Raises:
        TypeError: for what is not a dtype of numbers or bool.
        ValueError: a name does not exist. While reading, a value that the dtype cannot represent, such as 300, −1, 0.5 or NaN in
            uint8, or 2**24 + 1 in float32, with its row.

    Example:
        >>> rows = ms.data.from_arrays({"image": np.eye(2), "label": np.arange(2)})
        >>> smaller = rows.cast({"image": "float32", "label": np.uint8})
        >>> smaller.element_spec
        {'image': ArraySpec((2,), float32), 'label': ArraySpec((), uint8)}
        >>> next(iter(ms.data.from_arrays(np.array([1.0, 2.5])).cast(int).batch(2)))
        Traceback (most recent call last):
            ...
        ValueError: Dataset.cast: row 1 of epoch 0: expected values that int64 holds, got 2.5. ...
    """
    return Cast(parent, nest.map_structure(_checked, dtypes))


def _checked(dtype: Any) -> np.dtype[Any] | None:
    if dtype is None:
        return None
    try:
        found = np.dtype(dtype).newbyteorder("=")
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "biufc":
        raise TypeError(explain(_FUNCTION, "dtypes", expected="dtypes of numbers or bool", got=repr(dtype)))
    return found
