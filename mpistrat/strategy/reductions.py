"""Reductions as strategies promise them: of nests, over axes too, each in one collective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import nest
from ..comm.arrays import array_module, as_array, on_device_of
from ..comm.dtypes import accumulation_dtype, check_reducible, mean_dtype
from ..distributed_values import DistributedValues, Mirrored, PerReplica
from ..errors import explain
from ..options import CommunicationOptions
from ..types import ReduceOp, VariableSynchronization
from ..variables import Variable

if TYPE_CHECKING:
    from .extended import StrategyExtended

__all__ = ["Axis", "broadcast_nest", "copies_of_variables", "gather_nest", "read_variables", "reduce_nest"]

Axis = int | Sequence[int] | None


def reduce_nest(
    extended: StrategyExtended, op: ReduceOp, value: Any, axis: Axis, options: CommunicationOptions | None
) -> Any:
    """Return a nest with the sum or mean over all replicas, and over axes where they are named. Collective.

    Arguments and errors: see `Strategy.reduce`.
    """
    if axis is None:
        if extended.is_default:
            return value
        if not nest.is_nested(value):
            return as_scalar(extended.cross_device_ops.reduce(op, value, None, extended.merged(options)))
        return nest.pack_like(value, _reduce_all(extended, op, nest.flatten(value), options, nest.form(value)))
    over = _sum_over if op is ReduceOp.SUM else _mean_over
    plans = [over(extended, leaf, axis) for leaf in nest.flatten(value)]
    name = nest.form(value) if nest.is_nested(value) else ""
    totals = _reduce_all(extended, ReduceOp.SUM, [pack for pack, _ in plans], options, name)
    leaves = [as_scalar(finish(total)) for (_, finish), total in zip(plans, totals, strict=True)]
    return nest.pack_like(value, leaves)


def gather_nest(extended: StrategyExtended, value: Any, axis: int, options: CommunicationOptions | None) -> Any:
    """Return a nest with the arrays of all replicas concatenated. Collective. See `Strategy.gather`."""
    if extended.is_default:
        return value
    ops, merged = extended.cross_device_ops, extended.merged(options)
    return _each(lambda leaf, name: ops.gather(leaf, None, axis, merged, name), value)


def broadcast_nest(extended: StrategyExtended, value: Any, root: int) -> Any:
    """Return a nest with the arrays of replica `root`. Collective. See `ReplicaContext.broadcast`."""
    if extended.is_default:
        return value
    ops = extended.cross_device_ops
    return _each(lambda leaf, name: as_scalar(ops.broadcast(leaf, None, root, name)), value)


def _each(act: Callable[[Any, str], Any], value: Any) -> Any:
    """The nest of what a collective makes of each leaf; its name is the leaf's place in the nest."""
    if not nest.is_nested(value):
        return act(value, "")
    form = nest.form(value)
    leaves = zip(nest.flatten(value), nest.paths(value), strict=True)
    return nest.pack_like(value, [act(leaf, f"{path} of {form}") for leaf, path in leaves])


def copies_of_variables(extended: StrategyExtended, value: Any) -> Any:
    """Return a nest in which each variable became what the local replicas have of it. Not collective.

    With one replica in all, an ON_WRITE variable is a value like any other.
    """
    if isinstance(value, Variable):
        if value.synchronization is VariableSynchronization.ON_READ and not extended.is_default:
            return PerReplica(value.values)
        return Mirrored(value.values) if extended.sync_topology.num_replicas > 1 else value
    if nest.is_nested(value):
        return nest.map_structure(lambda leaf: copies_of_variables(extended, leaf), value)
    return value


def read_variables(value: Any) -> Any:
    """Return a nest in which each variable became what this replica reads of it. Not collective."""
    return nest.map_structure(lambda leaf: leaf.array if isinstance(leaf, Variable) else leaf, value)


def as_scalar(value: Any) -> Any:
    """Return NumPy's scalar for an array without dimensions, anything else as it is. Not collective.

    Example:
        >>> type(as_scalar(np.zeros(()))).__name__
        'float64'
    """
    return value[()] if type(value) is np.ndarray and value.ndim == 0 else value


def _reduce_all(
    extended: StrategyExtended, op: ReduceOp, leaves: Sequence[Any], options: CommunicationOptions | None, name: str
) -> list[Any]:
    """One collective for all leaves."""
    ops, merged = extended.cross_device_ops, extended.merged(options)
    if len(leaves) == 1:
        return [as_scalar(ops.reduce(op, leaves[0], None, merged, name))]
    totals = ops.batch_reduce(op, [(leaf, None) for leaf in leaves], merged, name)
    return [as_scalar(total) for total in totals]


Finish = Callable[[Any], Any]


def _sum_over(extended: StrategyExtended, leaf: Any, axis: Axis) -> tuple[Any, Finish]:
    """What travels for a sum over axes, and how its total becomes the result."""
    parts, wrap = _parts(extended, leaf, repeat=False)
    dtype = parts[0].dtype
    check_reducible(dtype, "reduce")
    work = accumulation_dtype(dtype)
    sums = [_sum(part, _axes(part, axis), work) for part in parts]
    return wrap(sums), lambda total: total if total.dtype == dtype else total.astype(dtype)


def _mean_over(extended: StrategyExtended, leaf: Any, axis: Axis) -> tuple[Any, Finish]:
    """As `_sum_over` for a mean: numerators and the count of what they sum, side by side in one flat array."""
    parts, wrap = _parts(extended, leaf, repeat=True)
    check_reducible(parts[0].dtype, "reduce")
    result = mean_dtype(parts[0].dtype)
    work = np.result_type(accumulation_dtype(result), np.float64)  # counts up to 2^53 are exact
    packs = []
    for part in parts:
        axes = _axes(part, axis)
        numerator = _sum(part, axes, work)
        module = array_module(part)
        with on_device_of(part):
            count = module.full(1, np.prod([part.shape[a] for a in axes], dtype=np.int64), work)
            packs.append(module.concatenate([numerator.reshape(-1), count]))

    def finish(total: Any) -> Any:
        count = int(total[-1].real)
        if count == 0:
            remedy = "Not one replica has an element to take the mean of"
            raise ValueError(
                explain("reduce", "value", expected="an element on some replica", got="none", remedy=remedy)
            )
        return (total[:-1] / count).reshape(numerator.shape).astype(result)

    return wrap(packs), finish


def _parts(extended: StrategyExtended, leaf: Any, *, repeat: bool) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The local replicas' arrays of a leaf, and how to put into its place what is made of them."""
    if isinstance(leaf, DistributedValues):
        mirrored = isinstance(leaf, Mirrored) and not repeat  # its SUM is refused below, in one place
        wrap: Callable[[list[Any]], Any] = Mirrored if mirrored else PerReplica
        return [as_array(value, "reduce") for value in leaf.values], wrap
    array, replicas = as_array(leaf, "reduce"), extended.sync_topology.num_local_replicas
    if repeat:
        return [array] * replicas, PerReplica
    return [array], lambda sums: sums[0]


def _axes(array: Any, axis: Axis) -> tuple[int, ...]:
    """The axes as different numbers from 0 up."""
    given = tuple(axis) if isinstance(axis, Sequence) else (axis,)
    axes = tuple(a + array.ndim if isinstance(a, (int, np.integer)) and a < 0 else a for a in given)
    if all(isinstance(a, (int, np.integer)) and 0 <= a < array.ndim for a in axes) and len(set(axes)) == len(axes):
        return tuple(int(a) for a in axes)  # type: ignore[arg-type]
    expected = f"different axes in [{-array.ndim}, {array.ndim}) for an array of shape {tuple(array.shape)}"
    raise ValueError(explain("reduce", "axis", expected=expected, got=axis))


def _sum(array: Any, axes: tuple[int, ...], dtype: np.dtype) -> Any:
    with on_device_of(array):
        return array_module(array).asarray(array.sum(axis=axes, dtype=dtype))
