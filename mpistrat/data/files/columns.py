"""Columns of pyarrow tables as NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..spec import ArraySpec

__all__ = ["UnfitColumn", "column_of", "column_spec", "kind_of", "outer_column", "to_numpy"]


class UnfitColumn(Exception):
    """The error of a column or value without a NumPy array; `remedy` is the user's fix."""

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.remedy = remedy


def column_spec(kind: Any, first: ArraySpec | None = None) -> ArraySpec:
    """Return the spec of a row of a column of a pyarrow type.

    Args:
        kind: the type.
        first: the spec of the column in another file, which a column of nulls only has, too.

    Raises:
        UnfitColumn: for structures, maps, decimals and others without an array.
    """
    import pyarrow

    types = pyarrow.types
    if first is not None and types.is_null(kind):
        return first
    if types.is_dictionary(kind):
        return column_spec(kind.value_type)
    if isinstance(kind, pyarrow.FixedShapeTensorType):
        shape = tuple(kind.shape[axis] for axis in kind.permutation or range(len(kind.shape)))
        return ArraySpec(shape, column_spec(kind.value_type).dtype)
    if isinstance(kind, pyarrow.BaseExtensionType):
        return column_spec(kind.storage_type)
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        inner = column_spec(kind.value_type)
        if None in inner.shape or inner.dtype.hasobject:
            raise UnfitColumn(f"{kind}: lists of numbers can be read")
        length = kind.list_size if types.is_fixed_size_list(kind) else None
        return ArraySpec((length, *inner.shape), inner.dtype)
    if is_text(kind) or is_bytes(kind):
        return ArraySpec((), object)
    if types.is_time(kind) or types.is_decimal(kind) or types.is_nested(kind) or types.is_null(kind):
        raise UnfitColumn(str(kind))
    if types.is_timestamp(kind):
        return ArraySpec((), f"datetime64[{kind.unit}]")
    if types.is_date(kind):
        return ArraySpec((), "datetime64[D]" if types.is_date32(kind) else "datetime64[ms]")
    try:
        return ArraySpec((), kind.to_pandas_dtype())
    except (NotImplementedError, TypeError):
        raise UnfitColumn(str(kind)) from None


def _path(schema: Any, name: str) -> tuple[str, list[str], Any] | None:
    """Return a column, the members of its structures, and their type that a name such as "pose.x" means; None if it has none."""
    import pyarrow

    if schema.names.count(name) > 1:
        raise UnfitColumn("several columns of this name")
    if name in schema.names:
        return name, [], schema.field(name).type
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        column, members = ".".join(parts[:count]), parts[count:]
        if column not in schema.names:
            continue
        kind = schema.field(column).type
        for member in members:
            if not pyarrow.types.is_struct(kind) or kind.get_field_index(member) < 0:
                break
            kind = kind.field(member).type
        else:
            return column, members, kind
    return None


def kind_of(schema: Any, name: str) -> Any:
    """Return the pyarrow type of a column, or of a member of a structure such as "pose.x"; None if there is none.

    Raises:
        UnfitColumn: several columns have the name.
    """
    found = _path(schema, name)
    return None if found is None else found[2]


def outer_column(schema: Any, name: str) -> str:
    """Return the column of the file that a name is, or is a member of."""
    found = _path(schema, name)
    return name if found is None else found[0]


def column_of(table: Any, name: str) -> Any:
    """Return a column of a table, or a member of its structures. A member is null where its structure is."""
    import pyarrow.compute

    found = _path(table.schema, name)
    if found is None or not found[1]:
        return table.column(name)
    return pyarrow.compute.struct_field(table.column(found[0]), found[1])


def is_text(kind: Any) -> bool:
    """Return True if values of a type are `str`."""
    import pyarrow

    types = pyarrow.types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_bytes(kind: Any) -> bool:
    """Return True if values of a type are `bytes`."""
    import pyarrow

    types = pyarrow.types
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind))


_NULLS = "Write the column without nulls, or do not name it. Only floats and times have a value for them."


def to_numpy(column: Any, spec: ArraySpec) -> NDArray[Any]:
    """Return a column as stacked rows of a spec.

    Nulls become NaN in floats, NaT in times.

    Raises:
        UnfitColumn: for other nulls.
    """
    import pyarrow

    array = column
    if isinstance(column, pyarrow.ChunkedArray):  # one chunk is not copied
        array = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    if isinstance(array, pyarrow.ChunkedArray):  # of no chunk, or too large for one
        array = pyarrow.concat_arrays(array.chunks) if array.num_chunks else pyarrow.array([], array.type)
    if pyarrow.types.is_dictionary(array.type):
        if not spec.dtype.hasobject:
            array = array.dictionary_decode()
        elif not array.null_count:  # pyarrow cannot decode views, such as those of polars
            return to_numpy(array.dictionary, spec)[array.indices.to_numpy()]
    if isinstance(array.type, pyarrow.FixedShapeTensorType) and array.type.permutation:
        stored = to_numpy(array.storage, ArraySpec(tuple(array.type.shape), spec.dtype))
        return np.ascontiguousarray(stored.transpose(0, *(axis + 1 for axis in array.type.permutation)))
    if isinstance(array.type, pyarrow.BaseExtensionType):
        array = array.storage
    if array.null_count and (spec.shape or spec.dtype.kind not in "fcmM"):
        raise UnfitColumn(f"{array.null_count} nulls of {len(array)}", _NULLS)
    if spec.shape:
        return _lists(array, spec)
    if spec.dtype.hasobject:
        out = np.empty(len(array), object)
        out[:] = array.to_pylist()
        return out
    found = array.to_numpy(zero_copy_only=False)
    return np.ascontiguousarray(found.astype(spec.dtype, copy=False))


def _lists(array: Any, spec: ArraySpec) -> NDArray[Any]:
    values = array.flatten()
    if None not in spec.shape:
        while hasattr(values, "flatten") and hasattr(values.type, "value_type"):
            if values.null_count:
                raise UnfitColumn(f"{values.null_count} nulls of {len(values)} inner lists", _NULLS)
            values = values.flatten()
        flat = to_numpy(values, ArraySpec((), spec.dtype))
        return flat.reshape(len(array), *(length or 0 for length in spec.shape))
    inner = to_numpy(values, ArraySpec(spec.shape[1:], spec.dtype))
    out = np.empty(len(array), object)
    offsets = array.offsets.to_numpy()
    for row, (start, stop) in enumerate(zip(offsets[:-1] - offsets[0], offsets[1:] - offsets[0], strict=True)):
        out[row] = inner[start:stop]
    return out
