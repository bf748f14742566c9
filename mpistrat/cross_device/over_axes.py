"""Reductions over the replicas and over axes of their arrays: the array to send, and the conversion of its total."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..arena.arithmetic import arithmetic
from ..base.distributed_values import DistributedValues, Mirrored, PerReplica
from ..base.errors import explain
from ..base.types import ReduceOp
from ..base.underflow import may_underflow
from ..comm.arrays import accumulation_dtype, array_module, as_array, check_reducible, mean_dtype, on_device_of

__all__ = ["OVER_AXES", "Axis"]

Axis = int | Sequence[int] | None
Finish = Callable[[Any], Any]


def _sum_over(leaf: Any, axis: Axis, replicas: int, function: str) -> tuple[Any, Finish]:
    """Return the array to send for a sum over axes, and the function that converts its total to the result."""
    parts, wrap = _parts(leaf, replicas, function, repeat=False)
    dtype = parts[0].dtype
    check_reducible(dtype, function)
    work = accumulation_dtype(dtype)
    sums = [_sum(part, _axes(part, axis, function), work) for part in parts]
    return wrap(sums), may_underflow(lambda total: total if total.dtype == dtype else total.astype(dtype))


def _mean_over(leaf: Any, axis: Axis, replicas: int, function: str) -> tuple[Any, Finish]:
    """Return the same as `_sum_over` for a mean: numerators and their count, in one flat array."""
    parts, wrap = _parts(leaf, replicas, function, repeat=True)
    check_reducible(parts[0].dtype, function)
    result = mean_dtype(parts[0].dtype)
    work = np.result_type(accumulation_dtype(result), np.float64)  # counts up to 2^53 are exact
    packs = []
    for part in parts:
        axes = _axes(part, axis, function)
        numerator = _sum(part, axes, work)
        module = array_module(part)
        with on_device_of(part):
            count = module.full(1, np.prod([part.shape[a] for a in axes], dtype=np.int64), work)
            packs.append(module.concatenate([numerator.reshape(-1), count]))

    @may_underflow
    def finish(total: Any) -> Any:
        count = int(total[-1].real)
        if count == 0:
            raise _no_element(function, "mean")
        return (total[:-1] / count).reshape(numerator.shape).astype(result)

    return wrap(packs), finish


def _product_over(leaf: Any, axis: Axis, replicas: int, function: str) -> tuple[Any, Finish]:
    """Return the same as `_sum_over` for a product, which is 1 for a replica without elements."""
    parts, wrap = _parts(leaf, replicas, function, repeat=False)
    work = arithmetic(ReduceOp.PROD, parts[0].dtype, 1, function)
    products = []
    for part in parts:
        with on_device_of(part):
            product = part.prod(axis=_axes(part, axis, function), dtype=work.accumulate)
            products.append(array_module(part).asarray(product))
    return wrap(products), lambda total: total.astype(work.result, copy=False)


def _extreme_over(op: ReduceOp, leaf: Any, axis: Axis, replicas: int, function: str) -> tuple[Any, Finish]:
    """Return the same as `_sum_over` for MIN or MAX; with the extremes it sends a flag for replicas without elements."""
    parts, wrap = _parts(leaf, replicas, function, repeat=True)
    work = arithmetic(op, parts[0].dtype, 1, function)
    bounds = np.iinfo(work.accumulate) if work.accumulate.kind in "iu" else None
    smallest = op is ReduceOp.MIN
    if work.accumulate.kind == "b":
        identity: Any = smallest
    elif bounds is None:
        identity = np.inf if smallest else -np.inf
    else:
        identity = bounds.max if smallest else bounds.min
    packs = []
    for part in parts:
        axes = _axes(part, axis, function)
        shape = tuple(length for a, length in enumerate(part.shape) if a not in axes)
        empty = any(part.shape[a] == 0 for a in axes)
        module = array_module(part)
        with on_device_of(part):
            if empty:
                extreme = module.full(shape, identity, work.accumulate)
            else:
                wide = part.astype(work.accumulate, copy=False)
                extreme = module.asarray(wide.min(axis=axes) if smallest else wide.max(axis=axes))
            none = module.full(1, empty if smallest else not empty, work.accumulate)  # equal if all are empty
            packs.append(module.concatenate([extreme.reshape(-1), none]))

    def finish(total: Any) -> Any:
        if bool(total[-1]) is smallest:
            raise _no_element(function, "minimum" if smallest else "maximum")
        return total[:-1].reshape(shape).astype(work.result, copy=False)

    return wrap(packs), finish


#: By reduction: a function of a leaf, axes, the number of local replicas and the caller. It returns the array to send and the
#: function that converts its total.
OVER_AXES: dict[ReduceOp, Callable[[Any, Axis, int, str], tuple[Any, Finish]]] = {
    ReduceOp.SUM: _sum_over,
    ReduceOp.MEAN: _mean_over,
    ReduceOp.MIN: functools.partial(_extreme_over, ReduceOp.MIN),
    ReduceOp.MAX: functools.partial(_extreme_over, ReduceOp.MAX),
    ReduceOp.PROD: _product_over,
}


def _no_element(function: str, what: str) -> ValueError:
    remedy = f"The {what} of no elements is undefined"
    return ValueError(explain(function, "value", expected="an element on some replica", got="none", remedy=remedy))


def _parts(leaf: Any, replicas: int, function: str, *, repeat: bool) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Return the local replicas' arrays of a leaf, and the function that wraps their results."""
    if isinstance(leaf, DistributedValues):
        mirrored = isinstance(leaf, Mirrored) and not repeat  # its SUM is rejected below
        wrap: Callable[[list[Any]], Any] = Mirrored if mirrored else PerReplica
        return [as_array(value, function) for value in leaf.values], wrap
    array = as_array(leaf, function)
    if repeat:
        return [array] * replicas, PerReplica
    return [array], lambda sums: sums[0]


def _axes(array: Any, axis: Axis, function: str) -> tuple[int, ...]:
    """Return the axes as distinct numbers from 0 up."""
    given = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    axes = tuple(a + array.ndim if isinstance(a, (int, np.integer)) and a < 0 else a for a in given)
    if all(isinstance(a, (int, np.integer)) and 0 <= a < array.ndim for a in axes) and len(set(axes)) == len(axes):
        return tuple(int(a) for a in axes)  # type: ignore[arg-type]
    expected = f"different axes in [{-array.ndim}, {array.ndim}) for an array of shape {tuple(array.shape)}"
    raise ValueError(explain(function, "axis", expected=expected, got=axis))


def _sum(array: Any, axes: tuple[int, ...], dtype: np.dtype) -> Any:
    with on_device_of(array):
        return array_module(array).asarray(array.sum(axis=axes, dtype=dtype))
