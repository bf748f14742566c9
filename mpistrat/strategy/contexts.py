"""The contexts of a strategy: its scope, and that of one replica in a step, with the replicas' common calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..base import context, nest, random
from ..base.context import Frame
from ..base.cores import limit_new_libraries
from ..base.distributed_values import PerReplica, regroup, select_replica
from ..base.errors import ContextError, explain
from ..base.options import CommunicationOptions
from ..base.types import ReduceOp
from ..cluster.topology import Topology
from ..comm.arrays import as_array
from ..cross_device.collectives import Collectives
from .copies import read_variables
from .old_calls import formerly
from .replica_threads import current_rendezvous

if TYPE_CHECKING:
    from .mesh import Mesh

__all__ = ["ReplicaContext", "Scope", "ValueContext", "in_step", "local_replica", "require_one_call", "stepping"]

_NO_KWARGS: dict[str, Any] = {}
_ALL_REDUCE = {op: f"all_reduce {op.value}" for op in ReduceOp}


@final
class Scope:
    """A context that makes a strategy the current one for a `with` block. It can be entered several times."""

    def __init__(self, strategy: Any, frame: Frame) -> None:
        self._strategy, self._frame = strategy, frame
        self._tokens: list[Token[tuple[Frame, ...]]] = []

    def __enter__(self) -> Any:
        context.expect_cross(self._strategy, "Strategy.scope")
        self._tokens.append(context.push(self._frame))
        limit_new_libraries()
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        context.leave(self._tokens[-1], self._frame)
        self._tokens.pop()


@final
@dataclass(frozen=True)
class ValueContext:
    """The replica that a value function is called for (TF: tf.distribute.experimental.ValueContext).

    Attributes:
        replica_id_in_sync_group: number of the replica that the value is for, from 0.
        num_replicas_in_sync: total number of replicas.
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1


@final
class ReplicaContext:
    """One replica's view of its strategy, inside `strategy.run` (TF: tf.distribute.ReplicaContext).

    `ms.get_replica_context()` returns it. All replicas must make its collective calls, the same number of times and in the same
    order.

    Attributes:
        strategy: the strategy that runs the step.
        replica_id_in_sync_group: number of this replica, from 0, by rank and then device.
        num_replicas_in_sync: total number of replicas.
    """

    __slots__ = (
        "_collectives",
        "_cross_frame",
        "_device",
        "_index",
        "frame",
        "num_replicas_in_sync",
        "replica_id_in_sync_group",
        "strategy",
    )

    def __init__(self, strategy: Any, index: int, topology: Topology, collectives: Collectives) -> None:
        """Create the context of local replica `index` of the ranks that step together. Strategies call it."""
        self.strategy = strategy
        self.replica_id_in_sync_group = topology.replica_offset + index
        self.num_replicas_in_sync = topology.num_replicas
        self.frame = Frame(strategy, replica=self)
        self._cross_frame = Frame(strategy)
        self._device, self._collectives = topology.devices[index], collectives
        self._index = index

    @property
    def num_input_pipelines(self) -> int:
        """The number of workers that read input: the ranks without parameter servers."""
        return int(self.strategy.extended.num_input_pipelines)

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica."""
        return (self._device,)

    @property
    def mesh(self) -> Mesh:
        """The collectives of the ranks of this replica under a MeshStrategy.

        Raises:
            ContextError: under another strategy.
        """
        mesh: Mesh | None = getattr(self.strategy, "mesh", None)
        if mesh is None:
            expected, got = "a MeshStrategy", f"a {type(self.strategy).__name__}, of whose replicas each is one rank's"
            raise ContextError(explain("ReplicaContext.mesh", "", expected=expected, got=got))
        return mesh

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function once for all replicas of this rank, in cross-replica context. Collective on this rank only.

        Every local replica waits for all of them. Then `merge_fn(strategy, *args, **kwargs)` is called once, with a PerReplica
        in place of each argument that differs between them. Every rank calls its own.

        Args:
            merge_fn: if replicas pass different functions, the first local replica's is called.
            args, kwargs: for `merge_fn`; of the same form on every local replica.

        Returns:
            The result of `merge_fn`; of a PerReplica or Mirrored in it, this replica's part.

        Raises:
            ContextError: outside the step; or another local replica ends its step without this call.
        """
        self._require("merge_call")
        rendezvous = current_rendezvous()
        if rendezvous is None:
            token = context.push(self._cross_frame)
            try:
                result = merge_fn(self.strategy, *args, **(kwargs or _NO_KWARGS))
            finally:
                context.pop(token)
            return result if result is None else select_replica(0, result)
        kwargs = dict(kwargs or {})

        def together(posts: list[Any]) -> list[Any]:
            result = self._call_merged(merge_fn, posts)
            return [select_replica(index, result) for index in range(len(posts))]

        return rendezvous.call_once(self._index, "merge_call", together, (tuple(args), kwargs))

    def _call_merged(self, merge_fn: Callable[..., Any], posts: list[Any]) -> Any:
        args, kwargs = regroup(posts)
        token = context.push(self._cross_frame)
        try:
            return merge_fn(self.strategy, *args, **kwargs)
        finally:
            context.pop(token)

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Return the sum, or another reduction, of a value over all replicas, in one call for a nest. Collective.

        MEAN divides by the number of replicas. The result is equal on every replica.

        Args:
            reduce_op: ReduceOp.SUM, MEAN, MIN, MAX or PROD, or its name.
            value: array, number, IndexedSlices or a nest of them; of the same shapes and dtypes on every replica.
            options: bytes_per_pack, timeout_seconds, implementation of this call.

        Raises:
            CollectiveMismatchError: replicas pass different forms.

        Example:
            >>> def step():  # with 4 replicas
            ...     ctx = ms.get_replica_context()
            ...     # 0 + 1 + 2 + 3 = 6
            ...     return ctx.all_reduce("SUM", ctx.replica_id_in_sync_group)
        """
        op = ReduceOp.parse(reduce_op, "ReplicaContext.all_reduce")
        return self._together(_ALL_REDUCE[op], partial(self._collectives.all_reduce, op, options=options), value)

    def all_gather(self, value: Any, axis: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the replicas' arrays concatenated along an axis, in replica order, on every replica. Collective.

        Args:
            value: array or nest of arrays, at least one-dimensional; lengths along `axis` may differ.
            axis: from 0, or from the end if it is negative.
            options: as for `all_reduce`.

        Raises:
            CollectiveMismatchError: anything but the length along `axis` differs.
            ValueError: a scalar, or an axis out of range.
        """
        what = f"all_gather on axis {axis}"
        return self._together(what, partial(self._collectives.all_gather, axis=axis, options=options), value)

    @formerly()
    def reduce_scatter(
        self, reduce_op: ReduceOp | str, value: Any, *, axis: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Return this replica's part of the sum, or another reduction, of a value over all replicas. Collective.

        The replicas divide the dimension `axis` in order, the first ones getting one more if it does not divide evenly. It is
        the first half of an `all_reduce`; `all_gather` is the second. A nest is one exchange. Values are combined in the order
        of the replicas, float16 and bfloat16 in float32; MEAN divides by the number of replicas. Arrays on GPUs go through the
        host's memory.

        Args:
            reduce_op: ReduceOp.SUM, MEAN, MIN, MAX or PROD, or its name.
            value: array or nest of arrays; of the same shapes and dtypes on every replica.
            axis: from 0, or from the end if it is negative.
            options: timeout_seconds of this call.

        Raises:
            CollectiveMismatchError: replicas pass other shapes, dtypes, reductions or axes.
            ValueError: a scalar, or an axis out of range.
            TypeError: values that cannot be reduced.

        Example:
            >>> def step():  # [0, 2, 4] on the first of 2 replicas, [6, 8] on the second
            ...     return ms.get_replica_context().reduce_scatter("SUM", np.arange(5))
        """
        op = ReduceOp.parse(reduce_op, "ReplicaContext.reduce_scatter")
        what = f"reduce_scatter {op.value} on axis {axis}"
        act = partial(self._collectives.reduce_scatter, op, axis=axis, options=options)
        return self._together(what, act, value)

    @formerly()
    def all_to_all(self, value: Any, *, splits: Any = None, axis: int = 0) -> Any:
        """Send each replica a part of a value, and return the parts from all of them, in replica order. Collective.

        A nest is one exchange, with equal cuts of each array. Arrays on GPUs go through the host's memory (not yet run on a
        GPU).

        Args:
            value: array or nest of arrays; only lengths along `axis` may differ between replicas.
            splits: whole numbers, the length along `axis` for each replica; a list per replica, given by all or by none.
                Default: equal parts.
            axis: from 0, or from the end if it is negative.

        Returns:
            The parts concatenated along `axis`. With `splits` a pair of these and the lengths from each replica (int64).

        Raises:
            CollectiveMismatchError: anything but the length along `axis` differs, or only some pass splits.
            ValueError: on every replica: a scalar, an axis out of range, splits that do not add up to the length on one of
                them, or without splits a length that the replicas do not divide.

        Example:
            >>> def step():  # label 0 on the first of 2 replicas, label 1 on the second
            ...     rows, labels = np.arange(4.0), np.array([0, 1, 1, 1])
            ...     splits = np.bincount(labels, minlength=2)
            ...     return ms.get_replica_context().all_to_all(rows, splits=splits)
        """
        if splits is None:
            what = f"all_to_all on axis {axis}"
            return self._together(what, lambda joined: self._collectives.all_to_all(joined, axis=axis)[0], value)
        posted = (value, as_array(splits, "ReplicaContext.all_to_all", "splits"))
        what = f"all_to_all with splits on axis {axis}"
        return self._together(
            what, lambda joined: self._collectives.all_to_all(joined[0], splits=joined[1], axis=axis), posted
        )

    @formerly()
    def broadcast(self, value: Any, *, root: int = 0) -> Any:
        """Return one replica's value on every replica. Collective.

        Args:
            value: array or nest of arrays, of the same shapes and dtypes on every replica.
            root: the replica that sends.

        Raises:
            ValueError: there is no such replica.
        """
        what = f"broadcast from {root}"
        return self._together(what, partial(self._collectives.broadcast, root=root), value)

    def rng(self, seed: int, step: int = 0, sample: int | None = None) -> np.random.Generator:
        """Return the random generator of a sample, or of this replica, at a step.

        Keyed by `sample`, the example's index in the dataset, the numbers are the same for any number of replicas.

        Args:
            seed: any integer.
            step: the training step, from 0.
            sample: the example's index; without it the generator is this replica's own.
        """
        replica = self.replica_id_in_sync_group if sample is None else None
        return random.rng(seed=seed, step=step, sample=sample, replica=replica)

    def _together(self, what: str, act: Callable[[Any], Any], value: Any) -> Any:
        """Call `act` once with all local replicas' values; each replica gets its own result."""
        self._require(what)
        rendezvous = current_rendezvous()
        if rendezvous is None:
            return act(value)

        def together(posts: list[Any]) -> list[Any]:
            token = context.push(self._cross_frame)
            try:
                result = act(nest.map_structure(lambda *leaves: PerReplica(leaves), *posts))
            finally:
                context.pop(token)
            others = [nest.map_structure(_copy, select_replica(index, result)) for index in range(1, len(posts))]
            return [select_replica(0, result), *others]

        return rendezvous.call_once(self._index, what, together, read_variables(value))

    def _require(self, function: str) -> None:
        if context.current().replica is not self:
            expected = "a call inside the step that this context belongs to"
            raise ContextError(explain(f"ReplicaContext.{function}", "", expected=expected, got="one outside of it"))

    def __repr__(self) -> str:
        return f"<ReplicaContext {self.replica_id_in_sync_group} of {self.num_replicas_in_sync} on {self.devices[0]}>"


def _copy(value: Any) -> Any:
    return value.copy() if isinstance(value, np.ndarray) else value


def stepping(strategy: Any) -> bool:
    """Return whether this call is in a step of a strategy, for one of its replicas."""
    frame = context.current()
    return frame.strategy is strategy and frame.replica is not None


def require_one_call(strategy: Any, function: str) -> None:
    """Raise ContextError in a step of one of several replicas: a rank has one value in this call, independent of its replicas."""
    replicas = len(strategy.extended.replicas)
    if replicas > 1 and stepping(strategy):
        expected, got = "one call of a rank", f"a call of one of its {replicas} replicas"
        remedy = "Call it in a merge_call, or outside of the step"
        raise ContextError(explain(function, "", expected=expected, got=got, remedy=remedy))


def local_replica(strategy: Any) -> int:
    """Return the local replica of this call: 0 on a rank with one, and outside of steps."""
    frame = context.current()
    if frame.strategy is not strategy or frame.replica is None:
        return 0
    return int(frame.replica.replica_id_in_sync_group - strategy.extended.sync_topology.replica_offset)


def in_step(strategy: Any, function: Callable[[], Any], name: str, remedy: str) -> None:
    """Call a function that acts for a replica: in the current step, else by `run` on a rank with one replica and its variables.

    Args:
        strategy: the strategy.
        function: the function.
        name: its name in the program, for the error.
        remedy: the alternative for the program, for the error.

    Raises:
        ContextError: outside of `strategy.run` on a rank with several local replicas, or with servers.
    """
    if stepping(strategy):
        function()
    elif len(strategy.extended.replicas) == 1 and strategy.extended.common_steps:
        strategy.run(function)
    else:
        expected, got = "a call in a step", "one outside of strategy.run, with several local replicas or servers"
        raise ContextError(explain(name, "", expected=expected, got=got, remedy=remedy))
