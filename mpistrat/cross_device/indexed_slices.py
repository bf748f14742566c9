"""The reduction of IndexedSlices: rows of all replicas side by side, duplicates kept."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from ..comm.arrays import array_module, as_array, on_device_of
from ..comm.process_group import ProcessGroup
from ..errors import CollectiveMismatchError, explain
from ..types import IndexedSlices, ReduceOp
from .arithmetic import arithmetic, finish
from .gather import gather

__all__ = ["checked_slices", "form", "reduce_slices"]


def checked_slices(values: Sequence[Any], reduce_op: ReduceOp, function: str) -> list[IndexedSlices]:
    """Return the local replicas' slices with arrays in them, checked, all of one form.

    Raises:
        CollectiveMismatchError: a local replica's value is no IndexedSlices, or has another form than the first.
        ValueError: indices are not one integer for each row of the values.
        TypeError: another reduction than SUM and MEAN, which rows side by side cannot stand for.
    """
    if reduce_op not in (ReduceOp.SUM, ReduceOp.MEAN):
        expected, got = f"dense arrays for {reduce_op.value}", "IndexedSlices"
        remedy = "IndexedSlices have SUM and MEAN only: pass to_dense() of them"
        raise TypeError(explain(function, "value", expected=expected, got=got, remedy=remedy))
    slices = []
    for index, value in enumerate(values):
        if not isinstance(value, IndexedSlices):
            got = f"a {type(value).__name__} on local replica {index}"
            raise CollectiveMismatchError(explain(function, "value", expected="IndexedSlices on all", got=got))
        slices.append(_as_slices(value, function))
        if form(slices[-1]) != form(slices[0]):
            expected = f"{form(slices[0])} as on local replica 0"
            got = f"{form(slices[-1])} on local replica {index}"
            raise CollectiveMismatchError(explain(function, "value", expected=expected, got=got))
    return slices


def _as_slices(value: IndexedSlices, function: str) -> IndexedSlices:
    values = as_array(value.values, function, "value.values")
    indices = as_array(value.indices, function, "value.indices")
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        got = f"{indices.dtype} of shape {indices.shape}"
        raise ValueError(explain(function, "value.indices", expected="one dimension of integers", got=got))
    if values.ndim == 0 or values.shape[0] != indices.shape[0]:
        expected = f"one row for each of the {indices.shape[0]} indices"
        raise ValueError(explain(function, "value.values", expected=expected, got=f"shape {values.shape}"))
    shape = None if value.dense_shape is None else tuple(int(n) for n in value.dense_shape)
    return IndexedSlices(values, indices, shape)


def form(value: IndexedSlices) -> Hashable:
    """Return what must be equal on every rank: all but the number of rows."""
    return (
        "IndexedSlices",
        value.values.dtype.name,
        value.values.shape[1:],
        value.indices.dtype.name,
        value.dense_shape,
    )


def reduce_slices(
    group: ProcessGroup, reduce_op: ReduceOp, values: Sequence[IndexedSlices], function: str
) -> IndexedSlices:
    """Return the rows and indices of all replicas in replica order; MEAN divides the rows. Collective, inside one.

    Args:
        group: the ranks.
        reduce_op: SUM or MEAN over the replicas.
        values: the local replicas' slices, from `checked_slices`.
        function: the public caller to name in errors.
    """
    rows = gather(group, [value.values for value in values], 0, function)
    indices = gather(group, [value.indices for value in values], 0, function)
    how = arithmetic(reduce_op, rows.dtype, group.topology.num_replicas)
    return IndexedSlices(_divide(rows, how), indices, values[0].dense_shape)


def _divide(rows: Any, how: Any) -> Any:
    if how.divisor == 1:
        return rows
    with on_device_of(rows):
        return finish(array_module(rows).asarray(rows, how.accumulate), how)
