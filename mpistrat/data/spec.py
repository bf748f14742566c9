"""Specs of the arrays of elements, and functions that stack and unstack rows by them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..base import nest
from ..base.arguments import out_of_range
from ..base.errors import explain
from ..base.masks import check_unmasked, plain_array
from .buffers import RowBuffers

__all__ = [
    "ArraySpec",
    "DatasetSpec",
    "batch_spec",
    "conform",
    "empty_rows",
    "is_ragged",
    "row_count",
    "row_nbytes",
    "spec_of_element",
    "spec_of_rows",
    "stack_rows",
    "stacked_nbytes",
    "unstack_rows",
]


class ArraySpec:
    """The shape and dtype of one array of an element (TF: tf.TensorSpec).

    Args:
        shape: a tuple of lengths; None for a length that varies.
        dtype: a NumPy dtype; `object` with the shape () for strings.
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


class DatasetSpec(ArraySpec):
    """The spec of a dataset inside an element (TF: tf.data.DatasetSpec); see `Dataset.window`.

    Args:
        element_spec: the spec of its elements.
    """

    __slots__ = ("element_spec",)

    def __init__(self, element_spec: Any) -> None:
        super().__init__((), object)
        self.element_spec = element_spec

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DatasetSpec) and self.element_spec == other.element_spec

    def __hash__(self) -> int:
        return hash(str(self.element_spec))

    def __repr__(self) -> str:
        return f"DatasetSpec({self.element_spec!r})"

    def __str__(self) -> str:
        return f"dataset of {self.element_spec}"


def is_ragged(spec: ArraySpec) -> bool:
    """Return True if rows of this spec differ in shape; stacked they are a 1-D object array of arrays."""
    return None in spec.shape


def stacked_nbytes(spec: ArraySpec) -> int:
    """Return the bytes of one row in stacked arrays, without strings and arrays of varying shape."""
    if is_ragged(spec):
        return np.dtype(object).itemsize
    return spec.dtype.itemsize * math.prod(length or 0 for length in spec.shape)


def row_nbytes(row_spec: Any) -> int:
    """Return the bytes of one row; 0 if they vary, and for strings."""
    specs = nest.flatten(row_spec)
    if any(is_ragged(spec) or spec.dtype.hasobject for spec in specs):
        return 0
    return sum(map(stacked_nbytes, specs))


def spec_of_rows(rows: Any) -> Any:
    """Return the specs of one row of arrays whose first axis counts rows."""

    def spec(leaf: NDArray[Any]) -> ArraySpec:
        ragged = leaf.dtype == object and leaf.ndim == 1 and len(leaf) and isinstance(leaf[0], np.ndarray)
        return _ragged_spec(leaf) if ragged else ArraySpec(leaf.shape[1:], leaf.dtype)

    return nest.map_structure(spec, rows)


def _ragged_spec(arrays: NDArray[Any]) -> ArraySpec:
    first = arrays[0]
    for array in arrays:
        if (
            not isinstance(array, np.ndarray)
            or (array.dtype, array.ndim) != (first.dtype, first.ndim)
            or not first.ndim
        ):
            got = f"{_said(first)} and {_said(array)}"
            expected = "rows that are arrays of one dtype with equally many axes, at least one"
            raise ValueError(explain("rows", "", expected=expected, got=got))
    lengths = [set(column) for column in zip(*(array.shape for array in arrays), strict=True)]
    shape = [next(iter(seen)) if len(seen) == 1 else None for seen in lengths]
    return ArraySpec(tuple(shape) if None in shape else (None, *shape[1:]), first.dtype)


def spec_of_element(element: Any) -> Any:
    """Return the specs of one element: of a row, if elements are rows."""

    def spec(leaf: Any) -> ArraySpec:
        if isinstance(leaf, (str, bytes)):
            return ArraySpec((), object)
        array = plain_array(leaf, "element")
        if array.dtype.hasobject:
            raise ValueError(explain("element", "", expected="arrays, numbers or strings", got=_said(leaf)))
        return ArraySpec(array.shape, array.dtype)

    return nest.map_structure(spec, element)


_KINDS = {"b": 0, "u": 1, "i": 1, "f": 2, "c": 3}  # a Python number becomes an array of a kind that can represent it


def _fit(spec: ArraySpec, value: Any) -> Any:
    """Return the value as an array of this spec. Raise ValueError if it does not fit, TypeError if numbers are masked."""
    plain = type(value) is np.ndarray
    if (plain or isinstance(value, np.generic)) and value.dtype is spec.dtype and value.shape == spec.shape:
        return value[()] if plain and not value.shape else value
    if spec.dtype == object and not spec.shape:
        if isinstance(value, (str, bytes)):
            return value
        raise _misfit(spec, value)
    array = value if plain or isinstance(value, np.generic) else check_unmasked(value, np.asanyarray(value), "")
    number = not isinstance(value, (np.ndarray, np.generic)) and array.dtype != spec.dtype
    if number and _KINDS.get(array.dtype.kind, 9) <= _KINDS.get(spec.dtype.kind, -1):
        outside = out_of_range(array, spec.dtype)
        if outside is not None:  # astype would wrap it
            limits = np.iinfo(spec.dtype)
            raise ValueError(f"expected {spec}, from {limits.min} to {limits.max}, got {outside}")
        array = _cast(array, spec)
    same = array.dtype == spec.dtype
    if not same and array.ndim and not array.size and {array.dtype.kind, spec.dtype.kind} <= set(_KINDS):
        array, same = array.astype(spec.dtype), True  # an empty list has no dtype of its own
    if not same and array.dtype.newbyteorder("=") == spec.dtype.newbyteorder("="):  # NumPy's scalars have no byte order
        array, same = array.astype(spec.dtype), True
    if not same and spec.dtype.kind in "US":  # a row of a string array has the shortest dtype that fits it
        same = array.dtype.kind == spec.dtype.kind and array.dtype.itemsize <= spec.dtype.itemsize
    if not same or (array.shape != spec.shape and not _shape_fits(array.shape, spec.shape)):
        raise _misfit(spec, value)
    return (
        array if array.ndim else np.asarray(array)[()]
    )  # NumPy's scalar strings take an index for one of their characters


def _cast(array: NDArray[Any], spec: ArraySpec) -> NDArray[Any]:
    """Return numbers in the spec's dtype; ValueError if a finite one would become infinite."""
    with np.errstate(over="ignore"):
        found = array.astype(spec.dtype)
    if found.dtype.kind in "fc" and found.dtype.itemsize < array.dtype.itemsize:
        lost = np.isinf(found) & ~np.isinf(array)
        if lost.any():
            limits = np.finfo(found.dtype)
            raise ValueError(f"expected {spec}, from {limits.min} to {limits.max}, got {array[lost].flat[0]}")
    return found


def _shape_fits(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    return len(shape) == len(expected) and all(e in (None, n) for n, e in zip(shape, expected, strict=True))


def _said(value: Any) -> str:
    if isinstance(value, (str, bytes)):
        return f"a string {value!r:.40}"
    try:
        array = np.asarray(value)
    except ValueError:
        return f"a {type(value).__name__} that makes no array"
    return str(ArraySpec(array.shape, array.dtype)) if not array.dtype.hasobject else f"a {type(value).__name__}"


def _misfit(spec: ArraySpec, value: Any) -> ValueError:
    return ValueError(f"expected {spec if spec.dtype != object else 'a string'}, got {_said(value)}")


def conform(element: Any, spec: Any) -> Any:
    """Return the element with arrays of the spec, in its structure. Errors name the array that does not fit, see `_fit`."""
    if isinstance(spec, ArraySpec):
        return _fit(spec, element)
    try:
        if _is_flat(spec, ArraySpec) and type(element) is type(spec) and len(element) == len(spec):
            if type(spec) is tuple:
                return tuple(map(_fit, spec, element))
            if element.keys() == spec.keys():
                return {key: _fit(leaf, element[key]) for key, leaf in spec.items()}
        return nest.map_structure(_fit, spec, element)
    except (TypeError, ValueError) as error:
        if str(error).startswith("map_structure"):
            wanted, found = _form(spec), _form(element)
            if wanted == found:  # namedtuples of other fields
                wanted, found = nest.form(spec), nest.form(element)
            raise ValueError(f"expected the structure {wanted}, got {found}") from None
        for name, one, leaf in zip(nest.paths(spec), nest.flatten(spec), nest.flatten(element), strict=True):
            try:
                _fit(one, leaf)
            except (TypeError, ValueError) as reason:
                kind = TypeError if isinstance(reason, TypeError) else ValueError
                raise kind(f"at {name}: {reason}") from None
        raise


def _form(structure: Any) -> str:
    names = ", ".join(nest.paths(structure))
    return f"{type(structure).__name__}({names})" if nest.is_nested(structure) else "of one array"


def batch_spec(row_spec: Any, batch_size: int | None) -> Any:
    """Return the specs of a batch of rows; None where the number of rows varies."""
    return nest.map_structure(lambda leaf: ArraySpec((batch_size, *leaf.shape), leaf.dtype), row_spec)


def empty_rows(row_spec: Any, *, ragged: bool = False) -> Any:
    """Return arrays of zero rows. Lengths that vary are 0; with `ragged` such arrays are as before `batch`."""

    def empty(leaf: ArraySpec) -> NDArray[Any]:
        if ragged and is_ragged(leaf):
            return np.empty(0, object)
        return np.empty((0, *(length or 0 for length in leaf.shape)), leaf.dtype)

    return nest.map_structure(empty, row_spec)


def stack_rows(rows: Sequence[Any], row_spec: Any, buffers: RowBuffers | None = None) -> Any:
    """Stack rows of this spec along a first axis; ragged ones into a 1-D object array of arrays."""
    specs = nest.flatten(row_spec)
    if not rows:
        return empty_rows(row_spec, ragged=True)
    columns: Iterable[Sequence[Any]]
    if isinstance(row_spec, ArraySpec):
        columns = [rows]
    elif _is_flat(row_spec, ArraySpec):
        columns = zip(*rows, strict=True) if type(row_spec) is tuple else _dict_columns(rows, row_spec)
    else:
        columns = zip(*map(nest.flatten, rows), strict=True)
    buffers = buffers or RowBuffers()
    stacked = [_stack(column, spec, buffers, i) for i, (column, spec) in enumerate(zip(columns, specs, strict=True))]
    return nest.pack_like(row_spec, stacked)


def _is_flat(structure: Any, leaf: type) -> bool:
    """Return True for a plain tuple or dict of leaves: the usual rows, which need no recursion."""
    if type(structure) is tuple:
        return all(isinstance(value, leaf) for value in structure)
    return type(structure) is dict and all(isinstance(value, leaf) for value in structure.values())


def _dict_columns(rows: Sequence[Any], row_spec: dict[Any, Any]) -> list[list[Any]]:
    try:
        keys = sorted(row_spec)
    except TypeError:
        keys = list(row_spec)
    return [[row[key] for row in rows] for key in keys]


def _stack(values: Sequence[Any], spec: ArraySpec, buffers: RowBuffers, field: int) -> NDArray[Any]:
    shape = tuple(length for length in spec.shape if length is not None)
    if is_ragged(spec) or spec.dtype == object:
        out: NDArray[Any] = np.empty((len(values), *(() if is_ragged(spec) else shape)), object)
        for i, value in enumerate(values):
            out[i] = value
        return out
    if not spec.shape:
        return np.array(list(values), spec.dtype)  # NumPy would make one structured record of a tuple
    out = buffers.empty(field, (len(values), *shape), spec.dtype)
    return np.stack(values, out=out)


def unstack_rows(rows: Any) -> list[Any]:
    """Return the single rows of arrays whose first axis counts them, as views."""
    if isinstance(rows, np.ndarray):
        return list(rows)
    if _is_flat(rows, np.ndarray):
        if type(rows) is tuple:
            return list(zip(*rows, strict=True))
        return [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    columns = [list(leaf) for leaf in nest.flatten(rows)]
    return [nest.pack_like(rows, list(row)) for row in zip(*columns, strict=True)]


def row_count(rows: Any) -> int:
    """Return the length of the first axis, equal in all leaves."""
    leaves = nest.flatten(rows)
    return int(np.shape(leaves[0])[0]) if leaves else 0
