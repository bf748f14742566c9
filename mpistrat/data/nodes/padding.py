"""Shapes and values for padding rows that differ in shape."""

from __future__ import annotations

from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.arguments import integer
from ...base.errors import explain
from ...base.masks import unmasked
from ..buffers import RowBuffers
from ..spec import ArraySpec

__all__ = ["FUNCTION", "Padding"]

FUNCTION = "Dataset.padded_batch"


@final
class Padding:
    """The padded shapes and padding values, as the user passed them.

    Args:
        shapes: None, or a nest of shapes (tuples, with None or -1 for the longest in the batch).
        values: None for 0 and "", one value for all arrays, or a nest of values.
    """

    def __init__(self, shapes: Any, values: Any) -> None:
        self._shapes = shapes
        self._values = values

    def spec(self, row_spec: Any) -> Any:
        """Return the spec of a padded row: None where the longest in the batch decides."""
        return nest.pack_like(row_spec, [spec for spec, _ in self.leaves(row_spec)])

    def leaves(self, row_spec: Any) -> list[tuple[ArraySpec, Any]]:
        """Return the padded spec and the value of each array."""
        specs, names = nest.flatten(row_spec), nest.paths(row_spec)
        shapes = [None] * len(specs) if self._shapes is None else _leaves_like(self._shapes, row_spec, "padded_shapes")
        single = self._values is None or not nest.is_nested(self._values)
        values = [self._values] * len(specs) if single else _leaves_like(self._values, row_spec, "padding_values")
        return [_leaf(*each) for each in zip(specs, names, shapes, values, strict=True)]

    def pad(self, rows: Any, row_spec: Any, buffers: RowBuffers, length: int | None = None) -> Any:
        """Return stacked rows, ragged or not, as dense arrays.

        Args:
            row_spec: the spec of an unpadded row.
            length: the padded length of axes that vary; None for the longest row.
        """
        leaves = zip(nest.flatten(rows), self.leaves(row_spec), nest.paths(row_spec), strict=True)
        padded = []
        for leaf, (spec, value), name in leaves:
            shape = tuple(length if wanted is None else wanted for wanted in spec.shape)
            padded.append(_pad_leaf(leaf, ArraySpec(shape, spec.dtype), value, name, buffers))
        return nest.pack_like(row_spec, padded)


def _pad_leaf(rows: NDArray[Any], spec: ArraySpec, value: Any, name: str, buffers: RowBuffers) -> NDArray[Any]:
    shapes = np.array([row.shape for row in rows] if spec.shape else np.empty((len(rows), 0)), np.int64)
    longest = shapes.max(axis=0) if len(rows) else np.zeros(len(spec.shape), np.int64)
    shape = tuple(int(n) if wanted is None else wanted for n, wanted in zip(longest, spec.shape, strict=True))
    if (longest > np.array(shape, np.int64)).any():
        row = int(np.flatnonzero((shapes > np.array(shape, np.int64)).any(axis=1))[0])
        got = f"{tuple(int(n) for n in shapes[row])} in row {row} of a batch"
        raise ValueError(explain(FUNCTION, f"padded_shapes{name}", expected=f"rows of at most {shape}", got=got))
    if (shapes == np.array(shape, np.int64)).all() and rows.shape[1:] == shape:
        return rows.astype(spec.dtype, copy=False)
    out = buffers.empty(name, (len(rows), *shape), spec.dtype)
    out[...] = value
    for i, row in enumerate(rows):
        out[i][tuple(slice(n) for n in row.shape)] = row
    return out


def _leaves_like(given: Any, row_spec: Any, argument: str) -> list[Any]:
    """Return the values of a nest at the spec's leaves; a shape is a tuple or list, not a nest."""
    found: list[Any] = []

    def visit(spec: Any, part: Any) -> None:
        if not nest.is_nested(spec):
            found.append(part)
            return
        keys = list(spec) if isinstance(spec, dict) else None
        if keys is not None and isinstance(part, dict) and set(part) == set(keys):
            for key in sorted(keys):
                visit(spec[key], part[key])
        elif isinstance(spec, (tuple, list)) and isinstance(part, (tuple, list)) and len(part) == len(spec):
            for below, here in zip(spec, part, strict=True):
                visit(below, here)
        else:
            expected = f"the structure of an element, {nest.paths(row_spec)}"
            raise ValueError(explain(FUNCTION, argument, expected=expected, got=repr(given)))

    visit(row_spec, given)
    return found


def _leaf(spec: ArraySpec, name: str, shape: Any, value: Any) -> tuple[ArraySpec, Any]:
    place = f"padded_shapes{name}"
    if shape is None:
        shape = spec.shape
    elif not isinstance(shape, (tuple, list)) or len(shape) != len(spec.shape):
        raise ValueError(explain(FUNCTION, place, expected=f"a shape of {len(spec.shape)} axes", got=repr(shape)))
    shape = tuple(None if length in (None, -1) else integer(FUNCTION, place, length, 0) for length in shape)
    for here, wanted in zip(spec.shape, shape, strict=True):
        if here is not None and wanted is not None and wanted < here:
            raise ValueError(explain(FUNCTION, place, expected=f"at least the rows' {spec}", got=shape))
    # A length that all rows share is known.
    shape = tuple(here if wanted is None else wanted for here, wanted in zip(spec.shape, shape, strict=True))
    if value is None:
        return ArraySpec(shape, spec.dtype), "" if spec.dtype == object else np.zeros((), spec.dtype)[()]
    if not _is_value(spec.dtype, unmasked(value, FUNCTION, f"padding_values{name}")):
        expected = "a string" if spec.dtype.kind in "OUS" else f"a {spec.dtype}"
        raise ValueError(explain(FUNCTION, f"padding_values{name}", expected=expected, got=repr(value)))
    wide = spec.dtype.kind in "US"  # the string may be longer than all rows
    dtype = np.promote_types(spec.dtype, np.asarray(value, spec.dtype.kind).dtype) if wide else spec.dtype
    return ArraySpec(shape, dtype), value


def _is_value(dtype: np.dtype[Any], value: Any) -> bool:
    if dtype.kind in "OUS":
        return isinstance(value, (str, bytes) if dtype.kind == "O" else str if dtype.kind == "U" else bytes)
    if np.ndim(value) or not np.can_cast(np.min_scalar_type(value), dtype, "same_kind"):
        return False
    return dtype.kind not in "iu" or bool(np.iinfo(dtype).min <= value <= np.iinfo(dtype).max)
