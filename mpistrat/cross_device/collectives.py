"""The collectives of one group of ranks. Strategies, process sets and meshes hold a `Collectives` and add their own methods."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..base import nest
from ..base.agree import as_told, together
from ..base.errors import explain
from ..base.options import CommunicationOptions
from ..base.types import ReduceOp
from ..comm.arrays import on_device_of
from ..comm.process_group import ProcessGroup
from .auto import make_cross_device_ops
from .ops import CrossDeviceOps
from .over_axes import OVER_AXES, Axis
from .values import Leaves, check_out

if TYPE_CHECKING:
    from .nonblocking import CollectiveRequest, NonblockingCollectives

__all__ = ["PLAIN", "Collectives", "as_scalar", "check_rank"]

PLAIN = frozenset({np.ndarray, np.float64, np.float32, float, int})  # for a quick first test


@final
class Collectives:
    """The collectives of a group, which only its members need to create.

    Each method checks its values, compares the call over all ranks (a mismatch raises an error that names them), and sends a nest
    in one message. Values are PerReplica of the local replicas' arrays, or the array of a single one. The compared call
    (`detail`) contains all values that ranks must share. Values are rejected only inside of the call, so that all ranks raise the
    same error.

    Args:
        group: the ranks.
        front: the class whose methods call this object: "ProcessSet" makes `all_reduce` "ProcessSet.all_reduce" in errors.
        label: a name of the ranks, shown with the name of a call.
        names: the front's own names of operations, if they differ.
        ops: the algorithm of reductions, bound to the group; default the chooser's.
        options: defaults of all calls, except `wire`, which is for steps.
        alone: True for the default strategy, which returns values unchanged.
    """

    def __init__(
        self,
        group: ProcessGroup,
        front: str,
        label: str = "",
        *,
        names: Mapping[str, str] | None = None,
        ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
        alone: bool = False,
    ) -> None:
        self.group, self.alone = group, alone
        self._front, self.label, self._names = front, label, names or {}
        self._all_reduce, self._all_gather = self._called("all_reduce"), self._called("all_gather")
        self._broadcast, self._all_to_all = self._called("broadcast"), self._called("all_to_all")
        self._reduce_scatter = self._called("reduce_scatter")
        self._options = None if options is None else replace(options, **dict.fromkeys(options.between_nodes()))
        self.ops = make_cross_device_ops() if ops is None else ops
        if ops is None:
            self.ops.bind(group)

    @functools.cached_property
    def _started(self) -> NonblockingCollectives:
        from .nonblocking import NonblockingCollectives

        return NonblockingCollectives(self.group)

    def close(self) -> None:
        """Free the algorithm's resources. Collective, before the group is closed."""
        self.ops.close()

    def merged(self, options: CommunicationOptions | None) -> CommunicationOptions | None:
        """Return the options of a call: the defaults, overridden by the caller's."""
        if options is None or self._options is None:
            return options or self._options
        return self._options.merge(options)

    # arrays

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        *,
        axis: Axis = None,
        options: CommunicationOptions | None = None,
        out: Any = None,
    ) -> Any:
        """Return the reduction of a nest over all replicas, and over axes if given. Collective. See `Strategy.reduce`.

        Args:
            reduce_op: a ReduceOp, or its name.
            value, axis, options: see `Strategy.reduce`.
            out: arrays of the results' shapes and dtypes, which receive them and are returned; they may be the values' own.
        """
        op = reduce_op if type(reduce_op) is ReduceOp else ReduceOp.parse(reduce_op, self._all_reduce)
        if axis is None and out is None:
            if self.alone:
                return value
            if type(value) in PLAIN or not nest.is_nested(value):
                options = self._options if options is None else self.merged(options)
                return as_scalar(self.ops.reduce(op, value, None, options, self.label, self._all_reduce))
        leaves = Leaves.of(self._all_reduce, value, self.label)
        if out is not None:
            outs = _outs(self._all_reduce, value, out)
            self.ops.reduce_leaves(op, leaves, self.merged(options), outs)
            return out
        if axis is None:
            totals = self.ops.reduce_leaves(op, leaves, self.merged(options))
            return nest.pack_like(value, [as_scalar(total) for total in totals])
        over = OVER_AXES[op]
        replicas = self.group.topology.num_local_replicas
        plans = [over(leaf, axis, replicas, self._all_reduce) for leaf in leaves.values]
        between = ReduceOp.SUM if op is ReduceOp.MEAN else op
        packs = leaves._replace(values=[pack for pack, _ in plans])
        totals = self.ops.reduce_leaves(between, packs, self.merged(options))
        results = []
        for (_, finish), total in zip(plans, totals, strict=True):
            with on_device_of(total):
                results.append(as_scalar(finish(total)))
        return nest.pack_like(value, results)

    def all_gather(
        self, value: Any, *, axis: int = 0, options: CommunicationOptions | None = None, equal: bool = False
    ) -> Any:
        """Return a nest with the arrays of all replicas concatenated along an axis. Collective. See `Strategy.gather`.

        Args:
            value, axis, options: see `Strategy.gather`.
            equal: True if all ranks have one replica and arrays of one shape: no lengths are exchanged.
        """
        if self.alone:
            return value
        options = self.merged(options)
        if type(value) is np.ndarray and type(axis) is int:
            plan = self.ops.plans.get((self._all_gather, value.dtype, value.shape, axis, options, equal, self.label))
            if plan is not None:
                with plan[0] as call:
                    return plan[1](value, call)
        leaves = Leaves.of(self._all_gather, value, self.label)
        return nest.pack_like(value, self.ops.gather_leaves(leaves, axis, options, equal=equal))

    def reduce_scatter(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        *,
        axis: int = 0,
        options: CommunicationOptions | None = None,
        equal: bool = False,
        out: Any = None,
    ) -> Any:
        """Return a nest with each local replica's parts of the reductions. Collective. See `ReplicaContext.reduce_scatter`.

        Args:
            reduce_op, value, axis, options: see `ReplicaContext.reduce_scatter`.
            equal: True if parts must have equal lengths.
            out: arrays of the parts' shapes and dtypes, which receive them and are returned; for one replica per rank.
        """
        from .all_to_all import reduce_scatter, small_reduce_scatter

        function, axis = self._reduce_scatter, index(axis)
        op = reduce_op if type(reduce_op) is ReduceOp else ReduceOp.parse(reduce_op, function)
        if self.alone:
            return value
        options, key = self.merged(options), None
        plan: Any = None
        if type(value) is np.ndarray and (out is None or type(out) is np.ndarray):
            key = function, op, value.dtype, value.shape, axis, options, equal, self.label
            plan = self.ops.plans.get(key)
        if plan is None:
            leaves = Leaves.of(function, value, self.label)
            plan = small_reduce_scatter(self.group, leaves, op, axis, options, equal)
            if key is None or plan is None:
                outs = None if out is None else _outs(function, value, out)
                parts = reduce_scatter(self.group, leaves, op, axis, options, outs, equal, plan)
                return out if out is not None else nest.pack_like(value, parts)
            self.ops.keep_plan(key, *plan)
        if out is not None:
            check_out(out, plan[1].shape, plan[1].dtype, function)
        with plan[0] as call:
            part = plan[1](value, call)
        if out is None:
            return part
        out[...] = part
        return out

    def all_to_all(self, value: Any, *, splits: Any = None, axis: int = 0) -> tuple[Any, Any]:
        """Return a nest with what each local replica receives, and its lengths. Collective. See `ReplicaContext.all_to_all`."""
        return (value, splits) if self.alone else self._sent(self._all_to_all, value, splits, index(axis), None)

    def reshard(self, value: Any, *, old: int, new: int) -> Any:
        """Return a nest with this rank's parts along axis `new` of arrays that are split along axis `old`. Collective."""
        return self._sent(self._called("reshard"), value, None, new, old)[0]

    def _sent(self, function: str, value: Any, splits: Any, axis: int, joined: int | None) -> tuple[Any, Any]:
        """Return a nest with the parts from the others, and their lengths. Collective. See `all_to_all.all_to_all`."""
        from .all_to_all import all_to_all, small_all_to_all

        plan: Any = None
        key = None
        if type(value) is np.ndarray and type(axis) is int and (joined is None or type(joined) is int):
            key = function, value.dtype, value.shape, splits is None, axis, joined, self.label
            plan = self.ops.plans.get(key)
        if plan is None:
            leaves = Leaves.of(function, value, self.label)
            plan = small_all_to_all(self.group, leaves, splits, axis, joined)
            if key is None or plan is None:
                results, lengths = all_to_all(self.group, leaves, splits, axis, joined, plan)
                return nest.pack_like(value, results), lengths
            self.ops.keep_plan(key, *plan)
        with plan[0] as call:
            result: tuple[Any, Any] = plan[1](value, call, splits)
        return result

    def broadcast(self, value: Any, *, root: int = 0) -> Any:
        """Return a nest with the arrays of replica `root`. Collective. See `ReplicaContext.broadcast`."""
        if self.alone:
            return value
        if type(value) is np.ndarray and type(root) is int:
            plan = self.ops.plans.get((self._broadcast, value.dtype, value.shape, root, self.label))
            if plan is not None:
                with plan[0] as call:
                    result = plan[1](value, call)
                return result if value.ndim else as_scalar(result)
        found = self.ops.broadcast_leaves(Leaves.of(self._broadcast, value, self.label), root)
        return nest.pack_like(value, [as_scalar(leaf) for leaf in found])

    # started now, waited for later

    def all_reduce_async(self, reduce_op: ReduceOp | str, value: Any) -> CollectiveRequest:
        """Start the reduction of a nest. Collective. See `Strategy.all_reduce_async`."""
        op = ReduceOp.parse(reduce_op, self._called("all_reduce_async"))
        return self._start("all_reduce_async", value, lambda *call: self._started.all_reduce(op, *call))

    def broadcast_async(self, value: Any, *, root: int = 0) -> CollectiveRequest:
        """Start the broadcast of a nest from replica `root`. Collective. See `Strategy.broadcast_async`."""
        return self._start("broadcast_async", value, lambda *call: self._started.broadcast(root, *call))

    def _start(self, operation: str, value: Any, start: Callable[..., CollectiveRequest]) -> CollectiveRequest:
        """Start a collective of a nest, which the caller may change immediately."""
        from .nonblocking import CollectiveRequest

        function = self._called(operation)
        if self.alone:
            kept = copy.deepcopy(value)
            return CollectiveRequest(function, None, (), lambda: kept)
        leaves, like = Leaves.of(function, value, self.label), nest.map_structure(lambda leaf: None, value)
        return start(leaves, lambda found: nest.pack_like(like, [*map(as_scalar, found)]))

    # ranks' objects, pickled by mpi4py

    def broadcast_object(self, obj: Any = None, *, root: int = 0) -> Any:
        """Return the object of one rank on all. Collective. See `Strategy.broadcast_object`."""
        function, group = self._called("broadcast_object"), self.group
        check_rank(function, group, root)
        if group.topology.size == 1:
            return obj
        here = group.topology.rank == root
        with group.collective(function, self.label, detail=f"root {root}"):
            data = self._pickled(function, obj, here)
            length = np.array([len(data)], np.int64)
            group.broadcast(length, root)
            buffer = np.frombuffer(data, np.uint8).copy() if here else np.empty(int(length[0]), np.uint8)
            group.broadcast(buffer, root)
        return obj if here else _loads(buffer)

    def all_gather_object(self, obj: Any = None) -> list[Any]:
        """Return the objects of all ranks. Collective. See `Strategy.all_gather_object`."""
        function, group = self._called("all_gather_object"), self.group
        if group.topology.size == 1:
            return [obj]
        with group.collective(function, self.label):
            pickles = group.all_gather_bytes(self._pickled(function, obj))
        mine = group.topology.rank
        return [obj if rank == mine else _loads(np.frombuffer(one, np.uint8)) for rank, one in enumerate(pickles)]

    def _pickled(self, function: str, obj: Any, needed: bool = True) -> bytes:
        """Return the bytes of an object, or none; an error is raised on all ranks. Collective, inside one."""
        from mpi4py import MPI

        with together(self.group.all_gather_text, as_told):
            try:
                return bytes(MPI.pickle.dumps(obj)) if needed else b""
            except Exception as error:
                got = f"on rank {self.group.topology.rank}: {type(error).__name__}: {error}"
                raise TypeError(explain(function, "obj", expected="an object that can be pickled", got=got)) from None

    def barrier(self, timeout: float | None = None, name: str | None = None) -> None:
        """Wait until every rank is here. Collective. See `Strategy.barrier`."""
        self.group.barrier(name or "", timeout, self._called("barrier"))

    def _called(self, operation: str) -> str:
        """Return the name of the front's method."""
        return f"{self._front}.{self._names.get(operation, operation)}"


def check_rank(function: str, group: ProcessGroup, root: Any) -> None:
    """Raise ValueError unless `root` is a rank of a group."""
    size = group.topology.size
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < size:
        raise ValueError(explain(function, "root", expected=f"0 <= root < {size}", got=repr(root)))


def as_scalar(value: Any) -> Any:
    """Return NumPy's scalar for an array without dimensions, anything else unchanged.

    Example:
        >>> type(as_scalar(np.zeros(()))).__name__
        'float64'
    """
    return value[()] if type(value) is np.ndarray and value.ndim == 0 else value


def _outs(function: str, value: Any, out: Any) -> list[np.ndarray]:
    """Return the caller's arrays for the results of a nest, or raise ValueError."""
    outs = nest.flatten(out)
    if nest.form(out) != nest.form(value) or not all(isinstance(each, np.ndarray) for each in outs):
        expected, got = f"NumPy arrays in the form of the value, {nest.form(value)}", repr(out)[:60]
        raise ValueError(explain(function, "out", expected=expected, got=got))
    return outs


def _loads(buffer: np.ndarray) -> Any:
    from mpi4py import MPI

    return MPI.pickle.loads(buffer)
