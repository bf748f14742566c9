"""CrossDeviceOps: the reduction of several replicas' values. Subclass it for your own algorithm.

It checks and compares values. Each algorithm has a file; `gather.py` gathers, `values.py` broadcasts.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..arena.arithmetic import Arithmetic, arithmetic
from ..arena.reduction import Consume, Gradients, StartedSums, block_of
from ..base.distributed_values import Mirrored, PerReplica
from ..base.errors import explain
from ..base.options import CommunicationOptions
from ..base.partition import blocks
from ..base.types import CommunicationImplementation, IndexedSlices, ReduceOp
from ..comm.arrays import array_module, dtype_name, on_device_of
from ..comm.contract import Collective
from ..comm.process_group import ProcessGroup
from .values import (
    Leaves,
    beside,
    broadcast_all,
    broadcast_one,
    call_of,
    check_destinations,
    check_out,
    check_root,
    checked_slices,
    counted_axis,
    form,
    local_arrays,
    local_values,
    on_destination,
    reduced_already,
    reducible_values,
)

__all__ = ["IMPLEMENTATIONS", "CrossDeviceOps", "Planned"]

CHUNK = 1 << 22  # elements that an algorithm without its own arenas reduces at a time

_NO_OPTIONS = CommunicationOptions()
_NUMBERS = (float, int, np.number)
_KEPT_PLANS = 1024
_COPIED = 1 << 17  # bytes; smaller results are copied into the caller's array

#: The algorithms that a setting can name; each class registers itself: `class X(CrossDeviceOps, implementation=...)`.
IMPLEMENTATIONS: dict[CommunicationImplementation, type[CrossDeviceOps]] = {}


Planned = Callable[..., Any]


class CrossDeviceOps(ABC):
    """An algorithm that reduces values of several replicas (TF: tf.distribute.CrossDeviceOps).

    A strategy owns one and calls its public methods, which check the values, compare the calls of all ranks, and then call the
    `…_implementation` methods. A subclass overrides those: `batch_reduce_implementation` always, the other three if it has a
    better way. It is called for SUM and MEAN only, unless it names more in `reduce_ops`. Sums have a fixed order: the same layout
    of ranks gives the same bits.
    """

    #: The reductions that the algorithm supports; others raise an error.
    reduce_ops: tuple[ReduceOp, ...] = (ReduceOp.SUM, ReduceOp.MEAN)

    #: True if `reduce_arena` sends each node only the sums that it owns: nodes then share slots by default.
    sums_pieces: bool = False

    #: True if float32 sums may travel between nodes in fewer bytes when a call's options ask for it; else that is an error.
    encodes: bool = False

    #: True if an error in the middle of `reduce_arena` leaves messages between nodes pending.
    sends_ahead: bool = False

    _group: ProcessGroup | None = None
    _others: dict[type[CrossDeviceOps], CrossDeviceOps] | None = None
    #: The current collective call, which the first node barrier of `reduce_implementation` compares.
    call: Any = None

    def __init_subclass__(cls, implementation: CommunicationImplementation | None = None, **more: Any) -> None:
        super().__init_subclass__(**more)
        if implementation is not None:
            IMPLEMENTATIONS[implementation] = cls

    @functools.cached_property
    def plans(self) -> dict[Hashable, tuple[Collective, Planned]]:
        """The cached call and its function for an array with known dtype, shape and options."""
        return {}

    def bind(self, group: ProcessGroup) -> None:
        """Set the ranks that this object works over; the strategy calls it once.

        Raises:
            ValueError: it already belongs to another strategy.
        """
        if self._group is not None and self._group is not group and not self._group.closed:
            remedy = "Create a separate object for each strategy"
            expected, got = "an object of one strategy", "one that another strategy uses"
            raise ValueError(explain(type(self).__name__, "", expected=expected, got=got, remedy=remedy))
        self._group = group
        self._others, self.plans = None, {}

    def close(self) -> None:
        """Free the algorithm's resources, such as NCCL communicators. Collective; the strategy calls it before it closes."""
        self.plans.clear()
        for other in (self._others or {}).values():
            other.close()

    @property
    def group(self) -> ProcessGroup:
        """The ranks that this object works over."""
        if self._group is None:
            remedy = "Pass it to a strategy as cross_device_ops=, or call bind()"
            text = explain(
                type(self).__name__, "", expected="an object of a strategy", got="one without a strategy", remedy=remedy
            )
            raise RuntimeError(text)
        return self._group

    # Calls of users and strategies

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any = None,
        options: CommunicationOptions | None = None,
        name: str = "",
        function: str = "reduce",
    ) -> Any:
        """Return the sum, or another reduction, of a value over all replicas, a new array, equal on every rank. Collective.

        MEAN divides by the number of replicas; integers then give float64. float16 and bfloat16 are combined in float32 and
        rounded once. IndexedSlices give IndexedSlices with the rows of all replicas.

        Args:
            reduce_op: a ReduceOp, or its name.
            per_replica_value: PerReplica with one array for each local replica, all of one shape and dtype; or a plain value: the
                local replica's if the rank has one.
            destinations: a Variable, a device string, a value, or None: the destination of the result. If every value is the
                memory of this Variable's gradient, HierarchicalAllReduce sums in place, and the result is a read-only view, valid
                until that gradient is written again.
            options: bytes_per_pack, timeout_seconds, implementation of this call; wire: "bfloat16" encodes float32 sums of at
                least 64 KB between nodes, with two roundings, one for each node and one for the total.
            name: the name of the value, the same on every rank.
            function: the public caller, for errors; the same on every rank.

        Raises:
            CollectiveMismatchError: ranks passed different operations, shapes or dtypes.
            CollectiveTimeoutError: a rank did not arrive.
            ValueError: a plain value under SUM or PROD on a rank with several replicas; a list of destinations; a reduction or a
                wire that this object does not support.
            TypeError: values that cannot be reduced: bool, structured, objects; by MIN, MAX and PROD complex numbers and
                IndexedSlices.
        """
        op = reduce_op if type(reduce_op) is ReduceOp else ReduceOp.parse(reduce_op, function)
        if destinations is not None:
            check_destinations(destinations, function)
        value = per_replica_value
        if type(value) is PerReplica and len(value.values) == 1:
            value = value.values[0]
        if type(value) is np.ndarray or isinstance(value, _NUMBERS):
            array = value if type(value) is np.ndarray else np.asarray(value)
            plan = self.plans.get((op, array.dtype, array.shape, options, name, function))
            if plan:
                with plan[0] as call:
                    result = plan[1](array, call)
                return result if destinations is None else on_destination(result, destinations)
        return self._reduce(op, Leaves(function, [per_replica_value], name), destinations, options)

    def _reduce(
        self, op: ReduceOp, leaf: Leaves, destinations: Any, given: CommunicationOptions | None, out: Any = None
    ) -> Any:
        """Reduce like `reduce` a value without a plan, or into an array. Collective."""
        function, (per_replica_value,), name, _, said = leaf
        options = given or _NO_OPTIONS
        asked = self.chosen(options)
        asked._check_known(op, options, function)
        group = asked.group
        if out is None and reduced_already(op, per_replica_value, group, function):
            return per_replica_value
        values = reducible_values(per_replica_value, group, op, function)
        if isinstance(values[0], IndexedSlices):
            from .gather import reduce_slices

            slices = checked_slices(values, op, function)
            how = arithmetic(op, slices[0].values.dtype, group.topology.num_replicas, function)
            what = op.value, form(slices[0])
            with group.collective(function, name, detail=what, timeout=options.timeout_seconds) as call:
                return reduce_slices(group, call, how, slices, function)
        arrays = local_arrays(values, function)
        first = arrays[0]
        ops = asked._algorithm_for(first, options)
        synchronize, way = ops.entry(arrays, destinations)
        how = arithmetic(op, first.dtype, 1, function)  # rejects irreducible dtypes
        if out is not None:
            check_out(out, first.shape, how.result, function)
        words = op.value, asked._said_of(first), way, *_said(options)
        dtype, detail = said or (first.dtype, " ".join(str(word) for word in words if word))
        timeout = options.timeout_seconds
        with group.collective(
            function, name, dtype, first.shape, detail, timeout=timeout, synchronize=synchronize
        ) as ops.call:
            if out is not None:
                ops.reduce_into(op, arrays, out, options)
                return out
            result = ops.reduce_implementation(op, PerReplica(arrays), destinations, options)
        if len(arrays) == 1 and not (synchronize and options.between_nodes()):
            small = ops.small_reduction(op, first)
            if small is not None:
                self.keep_plan((op, first.dtype, first.shape, given, said or name, function), ops.call, small)
        return result if destinations is None else on_destination(result, destinations)

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
        name: str = "",
        function: str = "batch_reduce",
    ) -> list[Any]:
        """Return the reductions of several values, in fewer messages than `reduce`. Collective.

        Values of one dtype are sent together, up to `options.bytes_per_pack` bytes at a time. Ranks compare all values at once
        before any is sent.

        Args:
            reduce_op: a ReduceOp, or its name.
            value_destination_pairs: values as for `reduce`, each with its destinations.
            options, name, function: see `reduce`.

        Raises:
            Exception: as `reduce`.
        """
        op = ReduceOp.parse(reduce_op, function)
        options = options or _NO_OPTIONS
        ops = self.chosen(options)
        ops._check_known(op, options, function)
        group = ops.group
        dense: list[tuple[PerReplica, Any]] = []
        results: list[Any] = []
        forms: list[Hashable] = []
        for value, destination in value_destination_pairs:
            check_destinations(destination, function)
            values = reducible_values(value, group, op, function)
            if isinstance(values[0], IndexedSlices):
                slices = checked_slices(values, op, function)
                results.append(slices)
                forms.append(form(slices[0]))
                continue
            arrays = local_arrays(values, function)
            arithmetic(op, arrays[0].dtype, 1, function)
            results.append(None)
            dense.append((PerReplica(arrays), destination))
            algorithm = ops._algorithm_for(arrays[0])
            way = algorithm.entry(arrays, destination)[1]
            forms.append((dtype_name(arrays[0].dtype), arrays[0].shape, *filter(None, (ops._said_of(arrays[0]), way))))
        detail = (op.value, options.bytes_per_pack, tuple(forms), *_said(options))
        with group.collective(function, name, detail=detail, timeout=options.timeout_seconds) as ops.call:
            ops.call.nbytes = sum([values.values[0].nbytes for values, _ in dense])
            done = iter(ops.batch_reduce_implementation(op, dense, options) if dense else ())
            for index, slices in enumerate(results):
                if slices is None:
                    results[index] = next(done)
                else:
                    from .gather import reduce_slices

                    how = arithmetic(op, slices[0].values.dtype, group.topology.num_replicas, function)
                    results[index] = reduce_slices(group, ops.call, how, slices, function)
        return [on_destination(result, pair[1]) for result, pair in zip(results, value_destination_pairs, strict=True)]

    def reduce_leaves(
        self,
        op: ReduceOp,
        leaves: Leaves,
        options: CommunicationOptions | None,
        outs: Sequence[np.ndarray] | None = None,
    ) -> Sequence[Any]:
        """Return the reduction of each of several values, in one collective; in `outs` if given. Collective."""
        function, values, name, _, said = leaves
        if len(values) != 1:
            totals: Sequence[Any] = self.batch_reduce(op, [(value, None) for value in values], options, name, function)
        elif outs is not None and outs[0].nbytes > _COPIED:
            return [self._reduce(op, leaves, None, options, outs[0])]
        elif said is not None:
            plan = self.plans.get((op, values[0].dtype, values[0].shape, options, said, function))
            if plan is None:
                totals = [self._reduce(op, leaves, None, options)]
            else:
                with plan[0] as call:
                    totals = [plan[1](values[0], call)]
        else:
            totals = [self.reduce(op, values[0], None, options, name, function)]
        if outs is None:
            return totals
        for out, total in zip(outs, totals, strict=True):
            check_out(out, total.shape, total.dtype, function)
            out[...] = total
        return outs

    def broadcast(
        self, value: Any, destinations: Any = None, root: int = 0, name: str = "", function: str = "broadcast"
    ) -> Any:
        """Return the value of one replica, a new array, equal on every rank. Collective.

        Args:
            value: as for `reduce`; every replica passes an array of the same shape and dtype.
            destinations: see `reduce`.
            root: global replica that sends its value.
            name, function: see `reduce`.

        Raises:
            ValueError: there is no such replica.
            CollectiveMismatchError: ranks passed another root, shape or dtype.
        """
        check_destinations(destinations, function)
        leaves = Leaves(function, [value], name)
        return on_destination(self.broadcast_leaves(leaves, root, destinations)[0], destinations)

    def broadcast_leaves(self, leaves: Leaves, root: int, destinations: Any = None) -> list[Any]:
        """Return the results of `broadcast` for several values, in one collective. Collective."""
        function, group = leaves.function, self.group
        check_root(root, group, function)
        arrays = [local_arrays(local_values(leaf, group, function), function) for leaf in leaves.values]
        from .small import small_broadcast

        firsts = [each[0] for each in arrays]
        own = type(self).broadcast_implementation is not CrossDeviceOps.broadcast_implementation
        small = None if own else small_broadcast(group, firsts, root)
        what = call_of(firsts, f"root {root}")
        with group.collective(function, leaves.name, *what, synchronize=small is None) as self.call:
            if own:
                return [self.broadcast_implementation(PerReplica(each), destinations, root) for each in arrays]
            if small is None:
                results = broadcast_all(group, arrays, root, leaves.paths, function)
            else:
                parts = small.broadcast(arrays, self.call)
                results = [beside(part, first) for part, first in zip(parts, firsts, strict=True)]
        if len(arrays) == 1 == len(arrays[0]) and group.topology.size > 1:
            key = function, firsts[0].dtype, firsts[0].shape, root, leaves.name
            self.keep_plan(key, self.call, small or partial(broadcast_one, group, root))
        return results

    def gather(
        self,
        per_replica_value: Any,
        destinations: Any = None,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        name: str = "",
    ) -> Any:
        """Return the replicas' arrays concatenated along an axis in replica order, equal on every rank. Collective.

        Args:
            per_replica_value: as for `reduce`; lengths along `axis` may differ.
            destinations: see `reduce`.
            axis: from 0, or from the end if it is negative.
            options, name: see `reduce`.

        Raises:
            CollectiveMismatchError: number of dimensions, dtype or another dimension differ; on every rank, naming a rank and
                both shapes, before data is sent.
            ValueError: a scalar, or an axis out of range.
        """
        check_destinations(destinations, "gather")
        leaves = Leaves("gather", [per_replica_value], name)
        return on_destination(self.gather_leaves(leaves, axis, options, destinations)[0], destinations)

    def gather_leaves(
        self,
        leaves: Leaves,
        axis: int,
        given: CommunicationOptions | None,
        destinations: Any = None,
        equal: bool = False,
    ) -> list[Any]:
        """Return the results of `gather` for several values, in one collective. Collective.

        `equal` is True if all ranks have one replica and arrays of one shape.
        """
        from .gather import Gather, to_gather

        options = given or _NO_OPTIONS
        ops, function = self.chosen(options), leaves.function
        group = ops.group
        arrays = [
            to_gather(leaf, group, function, path) for leaf, path in zip(leaves.values, leaves.paths, strict=True)
        ]
        gather = None
        if type(ops).gather_implementation is CrossDeviceOps.gather_implementation:
            gather = Gather(group, arrays, axis, leaves.paths, function, equal)
        what = call_of([each[0] for each in arrays], f"axis {axis}") if equal else (None, None, ("axis", axis))
        synchronize = gather is None or not gather.synchronizes
        with group.collective(
            function, leaves.name, *what, timeout=options.timeout_seconds, synchronize=synchronize
        ) as ops.call:
            if gather is None:
                return [
                    ops.gather_implementation(PerReplica(each), destinations, counted_axis(axis, each[0].ndim), options)
                    for each in arrays
                ]
            results = gather.gather(arrays, ops.call)
        if len(arrays) == 1 == len(arrays[0]) and group.topology.size > 1:
            self.keep_plan(
                (function, arrays[0][0].dtype, arrays[0][0].shape, axis, given, equal, leaves.name), ops.call, gather
            )
        return results

    # Overridden by algorithms

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions | None,
    ) -> Any:
        """Return the reduced value, a new array. Collective; all ranks have arrived and agree.

        Args:
            reduce_op: one of `reduce_ops`.
            per_replica_value: one array of NumPy or CuPy for each local replica, of one shape and dtype on every rank.
            destinations: the caller's.
            options: of this call.
        """
        return self.batch_reduce_implementation(reduce_op, [(per_replica_value, destinations)], options)[0]

    @abstractmethod
    def batch_reduce_implementation(
        self,
        reduce_op: ReduceOp,
        value_destination_pairs: Sequence[tuple[PerReplica, Any]],
        options: CommunicationOptions | None,
    ) -> Sequence[Any]:
        """Return the reduced values, in order. Collective; all ranks have arrived and agree."""

    def broadcast_implementation(self, value: PerReplica, destinations: Any, root: int) -> Any:
        """Return the array of global replica `root`, a new one. Collective; all ranks have arrived and agree."""
        return broadcast_all(self.group, [value.values], root, [""], "broadcast")[0]

    def gather_implementation(
        self, per_replica_value: PerReplica, destinations: Any, axis: int, options: CommunicationOptions | None
    ) -> Any:
        """Return the concatenated arrays. Collective; all ranks have arrived, and this method compares the shapes."""
        from .gather import Gather

        leaves = [per_replica_value.values]
        return Gather(self.group, leaves, axis, [""], "gather").gather(leaves, self.call)[0]

    def reduce_into(
        self, reduce_op: ReduceOp, arrays: Sequence[Any], out: np.ndarray, options: CommunicationOptions | None
    ) -> None:
        """Write the reduction of the local replicas' arrays into `out`, which may be one of them. Collective; all ranks agree."""
        out[...] = self.reduce_implementation(reduce_op, PerReplica(arrays), None, options)

    def reduce_arena(self, arena: Gradients, ranges: Sequence[tuple[int, int]], consume: Consume) -> None:
        """Sum gradient arenas over all replicas and pass the sums to `consume` block by block. Collective, inside one.

        Every rank of the node has arrived before the call; no rank may write a gradient before the caller's next barrier.

        Args:
            arena: the gradients of all replicas.
            ranges: element ranges, ascending, equal on every rank.
            consume: called as consume(low, high, block) for blocks that cover exactly `arena.owned(ranges)`, in order. `block` is
                scratch in the accumulation dtype, and valid in the call only.
        """
        dtype = arithmetic(ReduceOp.SUM, arena.dtype, 1).accumulate
        xp, block_size = array_module(arena.local[0]), block_of(arena.local[0])
        with on_device_of(arena.local[0]):
            scratch = xp.empty(min(block_size, arena.size), dtype)
        chunk = max(CHUNK, block_size)
        for range_low, range_high in ranges:
            for low in range(range_low, range_high, chunk):
                high = min(low + chunk, range_high)
                values = PerReplica([flat[low:high] for flat in arena.local])
                total = self.reduce_implementation(ReduceOp.SUM, values, None, None)
                total = total.values[0] if isinstance(total, Mirrored) else total
                for begin, end in blocks(arena.owned([(low, high)]), block_size):
                    block = scratch[: end - begin]
                    xp.copyto(block, total[begin - low : end - low], casting="unsafe")
                    consume(begin, end, block)

    def node_gradients(self, arena: Gradients) -> Sequence[np.ndarray] | None:
        """Return the gradients of all replicas, to be summed from the first to the last instead of by `reduce_arena`.

        Each rank sums its own part. None if this rank does not see all of them.
        """
        return None

    def small_reduction(self, reduce_op: ReduceOp, array: Any) -> Planned | None:
        """Return a function that reduces arrays of one dtype and shape instead of `reduce_implementation`, or None.

        It is called as small(array, call). If `entry` returns False, it begins with `self.group.node.barrier(call)` itself.
        """
        return None

    def early_sums(self, arena: Gradients) -> StartedSums | None:
        """Return an object that can sum an arena before `reduce_arena`, which uses the sums; None if that is impossible.

        Equal on every rank.
        """
        return None

    def entry(self, arrays: Sequence[Any], destinations: Any) -> tuple[bool, Hashable]:
        """Return how a reduction starts: what ranks must agree on in addition to the values.

        Returns:
            True if all ranks must arrive before `reduce_implementation` is called (else it must itself begin with
            `self.group.node.barrier(self.call)`); and a word for the algorithm's method.
        """
        return True, ""

    # Used by algorithms

    def arithmetic(self, reduce_op: ReduceOp, dtype: np.dtype) -> Arithmetic:
        """Return the function, accumulation dtype, divisor and result dtype of a reduction.

        Raises:
            TypeError: values of the dtype cannot be reduced.
        """
        return arithmetic(reduce_op, dtype, self.group.topology.num_replicas)

    def keep_plan(self, key: Hashable, call: Collective, planned: Planned) -> None:
        """Cache the function of a call of one array in `plans`."""
        if len(self.plans) >= _KEPT_PLANS:
            self.plans.clear()
        self.plans[key] = call, planned

    # Internals

    def _algorithm_for(self, array: Any, options: CommunicationOptions | None = None) -> CrossDeviceOps:
        """Return the object that reduces an array: this one, unless it chooses among several."""
        return self

    def _said_of(self, array: Any) -> str:
        """Return the text that ranks compare of an array's algorithm and device: by default the class."""
        return type(self).__name__

    def _check_known(self, op: ReduceOp, options: CommunicationOptions, function: str) -> None:
        if options.between_nodes():
            from .fewer_bytes import check

            check(options, function, type(self).__name__, self.encodes, self.group.num_nodes)
        if op not in self.reduce_ops:
            name = type(self).__name__
            expected = f"{', '.join(known.value for known in self.reduce_ops)}, the reductions of {name}"
            remedy = f"Use another CrossDeviceOps, or add it to reduce_ops of {name} if it is your own algorithm"
            raise ValueError(explain(function, "reduce_op", expected=expected, got=op.value, remedy=remedy))

    def chosen(self, options: CommunicationOptions) -> CrossDeviceOps:
        """Return the object that executes a call: this one, unless the options name another algorithm."""
        wanted = options.implementation
        if wanted is None or wanted is CommunicationImplementation.AUTO:
            return self
        cls = IMPLEMENTATIONS[CommunicationImplementation(wanted)]
        if cls is type(self):
            return self
        others = self._others = {} if self._others is None else self._others
        if cls not in others:
            others[cls] = other = cls()
            other.bind(self.group)
        return others[cls]


def _said(options: CommunicationOptions) -> tuple[str, ...]:
    """Return the parts of the options that ranks compare and no other text shows."""
    return tuple(f"{name} {value}" for name, value in options.between_nodes().items())
