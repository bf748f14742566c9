"""A writer's rows: nested dicts of arrays converted to columns by name, and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import explain
from ...base.masks import plain_array
from ...base.text import is_utf8
from ..spec import ArraySpec
from .manifest import Field

__all__ = ["Columns", "columns_of", "content_bytes", "fields_of", "fit", "named", "spec_of_fields", "varies"]

Columns = dict[str, NDArray[Any]]

_NUMBERS = "biufcS"


def named(function: str, argument: str, rows: Any, what: str = "a dict of arrays by name") -> dict[str, Any]:
    """Return the leaves of nested dicts by their names in a file, like "group/x".

    Raises:
        ValueError: for a value other than a non-empty dict, and for names that HDF5 cannot have.
    """
    if not isinstance(rows, Mapping) or not rows:
        raise ValueError(explain(function, argument, expected=what, got=f"{type(rows).__name__} {rows!r:.80}"))
    found: dict[str, Any] = {}
    for name, value in _walk(function, argument, rows, ""):
        if name in found:
            raise ValueError(explain(function, argument, expected="different names", got=f"two of {name!r}"))
        found[name] = value
    for name in found:
        parts = name.split("/")
        for inner in ("/".join(parts[:end]) for end in range(1, len(parts))):
            if inner in found:
                got = f"{inner!r} and {name!r}"
                raise ValueError(explain(function, argument, expected="no array where a group is", got=got))
    return found


def _walk(function: str, argument: str, rows: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in rows.items():
        where = f"{argument}[{key!r}]"
        parts = key.split("/") if isinstance(key, str) else []
        if not parts or "\0" in key or any(part in ("", ".", "..") for part in parts) or not is_utf8(key):
            expected = "a name in UTF-8 without a leading slash, and without empty parts, '.' and '..'"
            raise ValueError(explain(function, where, expected=expected, got=repr(key)))
        if isinstance(value, Mapping) and value:
            yield from _walk(function, where, value, f"{prefix}{key}/")
        else:
            yield prefix + key, value


def columns_of(function: str, argument: str, rows: Any) -> Columns:
    """Return rows as arrays of equal length by name; arrays are not copied.

    Raises:
        TypeError: for masked numbers.
        ValueError: for scalars, and for arrays of different lengths.
    """
    columns: Columns = {}
    for name, value in named(function, argument, rows).items():
        where = f"{argument}[{name!r}]"
        try:
            array = plain_array(value, function, where)
        except ValueError as error:
            remedy = "Rows of different lengths go into a 1-D array of dtype object that holds an array for each row."
            raise ValueError(explain(function, where, expected="an array", got=str(error), remedy=remedy)) from None
        if array.ndim == 0:
            raise ValueError(explain(function, where, expected="rows along a first axis", got="a scalar"))
        columns[name] = array
    first, rows_in = next((name, len(array)) for name, array in columns.items())
    for name, array in columns.items():
        if len(array) != rows_in:
            expected = f"{rows_in} rows, as {argument}[{first!r}] has"
            raise ValueError(explain(function, f"{argument}[{name!r}]", expected=expected, got=f"{len(array)} rows"))
    return columns


def content_bytes(array: NDArray[Any]) -> int:
    """Return the bytes of an array, including referenced objects."""
    if array.dtype != object:
        return array.nbytes
    return sum(value.nbytes if isinstance(value, np.ndarray) else len(value) for value in array.flat)


def varies(field: Field) -> bool:
    """Return True if rows of a field differ in length: strings, and arrays along one axis."""
    return field.dtype == object or None in field.shape


def fields_of(function: str, argument: str, columns: Columns) -> dict[str, Field]:
    """Return the fields of some columns.

    Raises:
        ValueError: for a dtype without an HDF5 form.
    """
    return {name: _field(function, f"{argument}[{name!r}]", array) for name, array in columns.items()}


def _field(function: str, where: str, array: NDArray[Any]) -> Field:
    if _has_fixed_size(array.dtype):
        return Field(array.dtype, array.shape[1:])
    if array.dtype.kind == "U" or _all_strings(array):
        return Field(np.dtype(object), array.shape[1:])
    if array.dtype == object and array.ndim == 1 and isinstance(array[0], np.ndarray):
        dtype = array[0].dtype
        if dtype.kind in "biufc" and dtype.isnative and all(_is_row(value, dtype) for value in array):
            return Field(dtype, (None,))
    expected = (
        "numbers, booleans, strings, structures of numbers and bytes, or arrays of one dtype along one axis as an "
        "object array"
    )
    raise ValueError(explain(function, where, expected=expected, got=f"dtype {array.dtype}"))


def _has_fixed_size(dtype: np.dtype[Any]) -> bool:
    """Return True for numbers, booleans, bytes, and structures and arrays of these."""
    if dtype.subdtype is not None:
        return dtype.itemsize > 0 and _has_fixed_size(dtype.base)
    if dtype.fields:
        return all("\0" not in name and _has_fixed_size(dtype[name]) for name in dtype.names or ())
    return dtype.kind in _NUMBERS and dtype.itemsize > 0


def _all_strings(array: NDArray[Any]) -> bool:
    return array.dtype == object and all(isinstance(value, str) for value in array.flat)


def _is_row(value: Any, dtype: np.dtype[Any]) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype == dtype


def fit(function: str, argument: str, columns: Columns, fields: Mapping[str, Field]) -> None:
    """Check that columns have the fields of those written before.

    Raises:
        ValueError: naming the column.
    """
    if set(columns) != set(fields):
        expected = f"the arrays {sorted(fields)}, as were written before"
        raise ValueError(explain(function, argument, expected=expected, got=str(sorted(columns))))
    for name, array in columns.items():
        field = fields[name]
        if array.dtype == object and varies(field) and not array.size:
            continue  # an empty object array does not show its elements' type
        found = _field(function, f"{argument}[{name!r}]", array)
        shorter = found.dtype.kind == field.dtype.kind == "S" and found.dtype.itemsize <= field.dtype.itemsize
        if found.shape != field.shape or (found.dtype != field.dtype and not shorter):
            expected = f"{field}, as were written before"
            raise ValueError(explain(function, f"{argument}[{name!r}]", expected=expected, got=str(found)))


def spec_of_fields(fields: Mapping[str, Field]) -> dict[str, ArraySpec]:
    """Return the specs of one row."""
    return {name: ArraySpec(field.shape, field.dtype) for name, field in fields.items()}
