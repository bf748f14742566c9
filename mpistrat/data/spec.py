"""What the arrays of an element look like: shape and dtype without data."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from .. import nest

__all__ = ["ArraySpec", "batch_spec", "empty_rows", "nest_bytes", "row_count", "spec_of_rows"]


class ArraySpec:
    """Shape and dtype of one array of an element (TF: tf.TensorSpec). Not collective.

    Args:
        shape: a tuple of lengths; None for a length that varies.
        dtype: what NumPy takes for a dtype.
    """

    __slots__ = ("dtype", "shape")

    def __init__(self, shape: tuple[int | None, ...], dtype: DTypeLike) -> None:
        self.shape = tuple(shape)
        self.dtype: np.dtype[Any] = np.dtype(dtype)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ArraySpec) and (self.shape, self.dtype) == (other.shape, other.dtype)

    def __hash__(self) -> int:
        return hash((self.shape, self.dtype))

    def __repr__(self) -> str:
        return f"ArraySpec({self.shape}, {self.dtype})"

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}".replace("None", "?")


def spec_of_rows(rows: Any) -> Any:
    """The specs of one row, from arrays whose first axis counts rows."""
    return nest.map_structure(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), rows)


def batch_spec(row_spec: Any, batch_size: int | None) -> Any:
    """The specs of a batch of rows; None where the number of rows varies."""
    return nest.map_structure(lambda leaf: ArraySpec((batch_size, *leaf.shape), leaf.dtype), row_spec)


def empty_rows(row_spec: Any) -> Any:
    """Arrays of zero rows."""
    return nest.map_structure(lambda leaf: np.empty((0, *leaf.shape), leaf.dtype), row_spec)


def row_count(rows: Any) -> int:
    """The length of the first axis, which all leaves share."""
    leaves = nest.flatten(rows)
    return int(np.shape(leaves[0])[0]) if leaves else 0


def nest_bytes(rows: Any) -> int:
    """The bytes of all leaves together."""
    return sum(int(leaf.nbytes) for leaf in nest.flatten(rows))
