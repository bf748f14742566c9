"""Arrays in memory as a dataset."""

from __future__ import annotations

import hashlib
import re
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .._util import nest
from ..errors import explain
from .buffers import RowBuffers
from .dataset import Dataset
from .nodes.stage import RowSource
from .spec import spec_of_rows

__all__ = ["from_arrays", "plain_lists", "row_content", "take_rows"]

_COMPARED, _ELEMENTS = 64, 4096  # rows that ranks compare, and about as many elements of each


def take_rows(array: NDArray[Any], rows: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy rows of an array, in range and in any order, into a buffer: one memory copy where they are consecutive."""
    if rows.size == 0 or out.nbytes == 0:
        return
    first, last = rows.item(0), rows.item(-1)
    if last - first == rows.size - 1 and (rows.size < 3 or bool((np.diff(rows) == 1).all())):
        out[...] = array[first : last + 1]
    elif array.flags.c_contiguous and array.flags.aligned:
        array.take(rows, axis=0, out=out, mode="clip")  # "raise" would go through a second buffer
    else:
        out[...] = array[rows]  # take would first copy the whole array


@final
class _Arrays(RowSource):
    """Rows of arrays in memory."""

    def __init__(self, arrays: Any, length: int) -> None:
        self._arrays = arrays
        self._length = length
        self._row_spec = spec_of_rows(arrays)
        self._buffers = RowBuffers()

    @property
    def row_spec(self) -> Any:
        return self._row_spec

    def cardinality(self) -> int:
        return self._length

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        picked = []
        for field, array in enumerate(nest.flatten(self._arrays)):
            picked.append(self._buffers.empty(field, (positions.size, *array.shape[1:]), array.dtype))
            take_rows(array, positions, picked[-1])
        return nest.pack_like(self._arrays, picked)

    def describe(self) -> str:
        leaves = zip(nest.paths(self._arrays), nest.flatten(self.row_spec), strict=True)
        fields = ", ".join(f"{name.strip('[]')} {spec}".strip() for name, spec in leaves)
        return f"from_arrays: {self._length} rows of {fields}"

    def fingerprint(self) -> int:
        """Return a number below 2**63 that differs where some of 64 rows at fixed places do."""
        hasher = hashlib.sha256(self.describe().encode())
        for array in nest.flatten(self._arrays):
            for row in np.unique(np.linspace(0, self._length - 1, _COMPARED, dtype=np.int64)) if self._length else ():
                hasher.update(row_content(array[row]))
        return int.from_bytes(hasher.digest()[:8], "big") >> 1


def row_content(row: Any) -> bytes:
    """Return what tells a row from others: some of its elements, in words where bytes are not the same in every process."""
    values = np.asarray(row)
    some = values.reshape(1) if values.ndim == 0 else values.flat[:: max(1, values.size // _ELEMENTS)]
    if some.dtype.kind in "OV":  # pointers, padding
        return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(some.tolist())).encode()
    return some.astype(some.dtype.newbyteorder("<"), copy=False).tobytes()


def from_arrays(arrays: Any) -> Dataset:
    """Make a dataset of the rows of arrays in memory (TF: tf.data.Dataset.from_tensor_slices).

    The arrays are not copied: leave them as they are while the dataset is in use. Batches are copies.

    Args:
        arrays: a nest of arrays with the same length along their first axis; elements have its structure. A list of
            numbers or strings, or of such lists, is one array. Rows of different shapes are a 1-D object array of arrays,
            strings one of `str`.

    Raises:
        ValueError: for a scalar, for different lengths, for rows of different dtypes and for an empty nest.

    Example:
        >>> dataset = from_arrays({"x": np.arange(6.0).reshape(3, 2), "y": np.array([7, 8, 9])}).batch(2)
        >>> [batch["y"].tolist() for batch in dataset]
        [[7, 8], [9]]
    """
    held = nest.map_structure(np.asarray, plain_lists(arrays))
    leaves = nest.flatten(held)
    if not leaves:
        raise ValueError(explain("from_arrays", "arrays", expected="at least one array", got=repr(arrays)))
    for name, leaf in zip(nest.paths(held), leaves, strict=True):
        if leaf.ndim == 0:
            raise ValueError(
                explain("from_arrays", f"arrays{name}", expected="rows along a first axis", got="a scalar")
            )
        if len(leaf) != len(leaves[0]):
            expected = f"{len(leaves[0])} rows, as arrays{nest.paths(held)[0]} has"
            raise ValueError(explain("from_arrays", f"arrays{name}", expected=expected, got=f"{len(leaf)} rows"))
    return _Arrays(held, len(leaves[0]))


def plain_lists(arrays: Any) -> Any:
    """Return a nest in which lists of numbers and strings are arrays, not structures."""
    if isinstance(arrays, list) and arrays and _plain(arrays):
        try:
            return np.asarray(arrays)
        except ValueError:
            expected, remedy = "lists of one length", "Rows of different shapes are a 1-D object array of arrays."
            got = "lists of different lengths"
            raise ValueError(explain("from_arrays", "arrays", expected=expected, got=got, remedy=remedy)) from None
    if type(arrays) is tuple:
        return tuple(plain_lists(each) for each in arrays)
    if type(arrays) is dict:
        return {name: plain_lists(each) for name, each in arrays.items()}
    return arrays


def _plain(values: list[Any]) -> bool:
    kinds = (int, float, complex, str, bytes, np.generic)
    return all(isinstance(each, kinds) or (isinstance(each, list) and _plain(each)) for each in values)
