"""Reductions of a strategy: of nests, over axes too, each in one collective."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..arena.arithmetic import arithmetic
from ..base import nest
from ..base.distributed_values import DistributedValues, Mirrored, PerReplica
from ..base.errors import explain
from ..base.options import CommunicationOptions
from ..base.types import ReduceOp, VariableSynchronization
from ..base.underflow import may_underflow
from ..comm.arrays import accumulation_dtype, array_module, as_array, check_reducible, mean_dtype, on_device_of
from ..cross_device.ops import CrossDeviceOps
from ..variables import SyncOnReadVariable, Variable

if TYPE_CHECKING:
    from ..cross_device.nonblocking import CollectiveRequest, NonblockingCollectives

__all__ = ["Axis", "Reductions", "as_scalar", "read_variables"]

Axis = int | Sequence[int] | None
_PLAIN = frozenset({np.ndarray, np.float64, np.float32, float, int})  # so quick to ask that it is asked first


@final
class Reductions:
    """What a strategy does with values of all its replicas.

    Args:
        ops: how values of the replicas become one.
        options: defaults of every call, but for `wire`, which the strategy's are for steps only.
        replicas, local_replicas: how many there are, and how many of them on this rank.
        alone: whether it is the default strategy's, which returns values as they are.
    """

    def __init__(
        self, ops: CrossDeviceOps, options: CommunicationOptions | None, replicas: int, local_replicas: int, alone: bool
    ) -> None:
        self.ops, self.alone = ops, alone
        self._options = None if options is None else replace(options, wire=None)
        self._replicas, self._local_replicas = replicas, local_replicas
        self._nonblocking: NonblockingCollectives | None = None

    def merged(self, options: CommunicationOptions | None) -> CommunicationOptions | None:
        """Return the options of a call: the strategy's, overridden by the caller's."""
        if options is None or self._options is None:
            return options or self._options
        return self._options.merge(options)

    def reduce(self, op: ReduceOp, value: Any, axis: Axis, options: CommunicationOptions | None) -> Any:
        """Return a nest with a reduction over all replicas, and over axes where they are named. Collective.

        Arguments and errors: see `Strategy.reduce`.
        """
        if axis is None:
            if self.alone:
                return value
            if type(value) in _PLAIN or not nest.is_nested(value):
                return as_scalar(self.ops.reduce(op, value, None, self.merged(options)))
            return nest.pack_like(value, self._reduce_all(op, nest.flatten(value), options, nest.form(value)))
        over = _OVER[op]
        plans = [over(leaf, axis, self._local_replicas) for leaf in nest.flatten(value)]
        name = nest.form(value) if nest.is_nested(value) else ""
        between = ReduceOp.SUM if op is ReduceOp.MEAN else op
        totals = self._reduce_all(between, [pack for pack, _ in plans], options, name)
        leaves = [as_scalar(finish(total)) for (_, finish), total in zip(plans, totals, strict=True)]
        return nest.pack_like(value, leaves)

    def _reduce_all(
        self, op: ReduceOp, leaves: Sequence[Any], options: CommunicationOptions | None, name: str
    ) -> list[Any]:
        """One collective for all leaves."""
        merged = self.merged(options)
        if len(leaves) == 1:
            return [as_scalar(self.ops.reduce(op, leaves[0], None, merged, name))]
        totals = self.ops.batch_reduce(op, [(leaf, None) for leaf in leaves], merged, name)
        return [as_scalar(total) for total in totals]

    def gather(self, value: Any, axis: int, options: CommunicationOptions | None) -> Any:
        """Return a nest with the arrays of all replicas concatenated. Collective. See `Strategy.gather`."""
        if self.alone:
            return value
        merged = self.merged(options)
        if not nest.is_nested(value):
            return self.ops.gather(value, None, axis, merged)
        from ..cross_device.nests import gather_nest

        leaves, name = _leaves(value)
        return nest.pack_like(value, gather_nest(self.ops, leaves, axis, merged, name, nest.paths(value)))

    def broadcast(self, value: Any, root: int) -> Any:
        """Return a nest with the arrays of replica `root`. Collective. See `ReplicaContext.broadcast`."""
        if self.alone:
            return value
        if not nest.is_nested(value):
            return as_scalar(self.ops.broadcast(value, None, root))
        from ..cross_device.nests import broadcast_nest

        leaves, name = _leaves(value)
        found = broadcast_nest(self.ops, leaves, root, name, nest.paths(value))
        return nest.pack_like(value, [as_scalar(leaf) for leaf in found])

    def reduce_scatter(self, op: ReduceOp, value: Any, axis: int, options: CommunicationOptions | None) -> Any:
        """Return a nest with each local replica's parts of the reductions. Collective. See `ReplicaContext.reduce_scatter`."""
        from ..cross_device.all_to_all import reduce_scatter

        if self.alone:
            return value
        leaves, name = _leaves(value)
        return _packed_like(value, reduce_scatter(self.ops.group, op, leaves, index(axis), self.merged(options), name))

    def all_to_all(self, value: Any, splits: Any, axis: int) -> tuple[Any, Any]:
        """Return a nest with what each local replica gets, and its lengths. Collective. See `ReplicaContext.all_to_all`."""
        from ..cross_device.all_to_all import all_to_all

        if self.alone:
            return value, splits
        leaves, name = _leaves(value)
        results, received = all_to_all(self.ops.group, leaves, splits, index(axis), name)
        return _packed_like(value, results), received

    def all_reduce_async(self, op: ReduceOp, value: Any) -> CollectiveRequest:
        """Start the reduction of a nest. Collective. See `Strategy.all_reduce_async`."""
        return self._start("all_reduce_async", value, lambda started, *form: started.all_reduce(op, *form))

    def broadcast_async(self, value: Any, root: int) -> CollectiveRequest:
        """Start to send a nest of replica `root`. Collective. See `Strategy.broadcast_async`."""
        return self._start("broadcast_async", value, lambda started, *form: started.broadcast(root, *form))

    def _start(self, function: str, value: Any, start: Callable[..., CollectiveRequest]) -> CollectiveRequest:
        """Start a collective of a nest, which the caller may change at once."""
        from ..cross_device.nonblocking import CollectiveRequest, NonblockingCollectives

        if self.alone:
            kept = copy.deepcopy(value)
            return CollectiveRequest(function, None, (), lambda: kept)
        if self._nonblocking is None:
            self._nonblocking = NonblockingCollectives(self.ops.group)
        leaves, name = _leaves(value)
        like = nest.map_structure(lambda leaf: None, value)
        return start(self._nonblocking, leaves, name, lambda found: _packed_like(like, [*map(as_scalar, found)]))

    def copies_of_variables(self, value: Any) -> Any:
        """Return a nest in which each variable became what the local replicas have of it.

        With one replica in all, an ON_WRITE variable is a value like any other.
        """
        if type(value) in _PLAIN:
            return value
        if isinstance(value, SyncOnReadVariable) and value.led:
            return value.array
        if isinstance(value, Variable):
            if value.synchronization is VariableSynchronization.ON_READ and not self.alone:
                return PerReplica(value.values)
            return Mirrored(value.values) if self._replicas > 1 else value
        if nest.is_nested(value):
            return nest.map_structure(self.copies_of_variables, value)
        return value


def _leaves(value: Any) -> tuple[list[Any], str]:
    """Return the leaves of a nest, and its form; of anything else itself, and no name."""
    return (nest.flatten(value), nest.form(value)) if nest.is_nested(value) else ([value], "")


def _packed_like(value: Any, leaves: list[Any]) -> Any:
    return nest.pack_like(value, leaves) if nest.is_nested(value) else leaves[0]


def read_variables(value: Any) -> Any:
    """Return a nest in which each variable became what this replica reads of it."""
    return nest.map_structure(lambda leaf: leaf.array if isinstance(leaf, Variable) else leaf, value)


def as_scalar(value: Any) -> Any:
    """Return NumPy's scalar for an array without dimensions, anything else as it is.

    Example:
        >>> type(as_scalar(np.zeros(()))).__name__
        'float64'
    """
    return value[()] if type(value) is np.ndarray and value.ndim == 0 else value


Finish = Callable[[Any], Any]


def _sum_over(leaf: Any, axis: Axis, replicas: int) -> tuple[Any, Finish]:
    """What travels for a sum over axes, and how its total becomes the result."""
    parts, wrap = _parts(leaf, replicas, repeat=False)
    dtype = parts[0].dtype
    check_reducible(dtype, "reduce")
    work = accumulation_dtype(dtype)
    sums = [_sum(part, _axes(part, axis), work) for part in parts]
    return wrap(sums), may_underflow(lambda total: total if total.dtype == dtype else total.astype(dtype))


def _mean_over(leaf: Any, axis: Axis, replicas: int) -> tuple[Any, Finish]:
    """As `_sum_over` for a mean: numerators and the count of what they sum, side by side in one flat array."""
    parts, wrap = _parts(leaf, replicas, repeat=True)
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

    @may_underflow
    def finish(total: Any) -> Any:
        count = int(total[-1].real)
        if count == 0:
            raise _no_element("mean")
        return (total[:-1] / count).reshape(numerator.shape).astype(result)

    return wrap(packs), finish


def _product_over(leaf: Any, axis: Axis, replicas: int) -> tuple[Any, Finish]:
    """As `_sum_over` for a product, which is 1 for a replica without elements."""
    parts, wrap = _parts(leaf, replicas, repeat=False)
    work = arithmetic(ReduceOp.PROD, parts[0].dtype, 1)
    products = []
    for part in parts:
        with on_device_of(part):
            product = part.prod(axis=_axes(part, axis), dtype=work.accumulate)
            products.append(array_module(part).asarray(product))
    return wrap(products), lambda total: total.astype(work.result, copy=False)


def _extreme_over(op: ReduceOp, leaf: Any, axis: Axis, replicas: int) -> tuple[Any, Finish]:
    """As `_sum_over` for MIN or MAX: beside the extremes travels whether a replica has elements at all."""
    parts, wrap = _parts(leaf, replicas, repeat=True)
    work = arithmetic(op, parts[0].dtype, 1)
    bounds = np.iinfo(work.accumulate) if work.accumulate.kind in "iu" else None
    smallest = op is ReduceOp.MIN
    if bounds is None:
        identity: Any = np.inf if smallest else -np.inf
    else:
        identity = bounds.max if smallest else bounds.min
    packs = []
    for part in parts:
        axes = _axes(part, axis)
        shape = tuple(length for a, length in enumerate(part.shape) if a not in axes)
        empty = any(part.shape[a] == 0 for a in axes)
        module = array_module(part)
        with on_device_of(part):
            if empty:
                extreme = module.full(shape, identity, work.accumulate)
            else:
                wide = part.astype(work.accumulate, copy=False)
                extreme = module.asarray(wide.min(axis=axes) if smallest else wide.max(axis=axes))
            none = module.full(1, empty if smallest else not empty, work.accumulate)  # equal where all are empty
            packs.append(module.concatenate([extreme.reshape(-1), none]))

    def finish(total: Any) -> Any:
        if bool(total[-1]) is smallest:
            raise _no_element("minimum" if smallest else "maximum")
        return total[:-1].reshape(shape).astype(work.result, copy=False)

    return wrap(packs), finish


_OVER: dict[ReduceOp, Callable[[Any, Axis, int], tuple[Any, Finish]]] = {
    ReduceOp.SUM: _sum_over,
    ReduceOp.MEAN: _mean_over,
    ReduceOp.MIN: functools.partial(_extreme_over, ReduceOp.MIN),
    ReduceOp.MAX: functools.partial(_extreme_over, ReduceOp.MAX),
    ReduceOp.PROD: _product_over,
}


def _no_element(what: str) -> ValueError:
    remedy = f"Not one replica has an element to take the {what} of"
    return ValueError(explain("reduce", "value", expected="an element on some replica", got="none", remedy=remedy))


def _parts(leaf: Any, replicas: int, *, repeat: bool) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """The local replicas' arrays of a leaf, and how to put into its place what is made of them."""
    if isinstance(leaf, DistributedValues):
        mirrored = isinstance(leaf, Mirrored) and not repeat  # its SUM is refused below, in one place
        wrap: Callable[[list[Any]], Any] = Mirrored if mirrored else PerReplica
        return [as_array(value, "reduce") for value in leaf.values], wrap
    array = as_array(leaf, "reduce")
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
