"""StrategyExtended: the inner parts of a strategy, for optimizers, variables and library authors."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, final

from ..base import context, nest
from ..base.context import Frame
from ..base.distributed_values import DistributedValues, Mirrored, regroup, select_replica
from ..base.errors import ClosedError, ContextError, explain
from ..base.global_batch import Ledger
from ..base.options import CommunicationOptions, StepOptions
from ..base.types import Quality, ReduceOp
from ..cluster.topology import Topology
from ..comm.process_group import ProcessGroup
from ..cross_device.collectives import PLAIN, Collectives, as_scalar
from ..cross_device.ops import CrossDeviceOps
from ..optimizers.core import ArenaMemory
from ..state.optimizer_states import OptimizerStates
from ..step.table import Steps
from ..variables import ArenaAllocator, Placement, ShardedVariable, Variable, create_variable, explain_foreign
from ..variables.create import make_here
from .contexts import ReplicaContext
from .copies import copies_of_variables
from .replica_threads import ReplicaThreads, current_rendezvous
from .tensorflow_names import EXTENDED, OtherNames

if TYPE_CHECKING:
    from .process_set import ProcessSets

__all__ = ["CommonObjects", "Coordination", "StrategyExtended"]

_OWN_NAMES = {"all_reduce": "reduce", "all_gather": "gather"}  # TensorFlow's names of a strategy's collectives
_beside: ContextVar[Variable | None] = ContextVar("mpistrat_colocate", default=None)


class Coordination:
    """The use of this rank by a coordinator; this one: none.

    Attributes:
        leads: whether a coordinator of this rank runs, which the other ranks serve.
        scheduled: whether this rank runs a function of a coordinator, alone.
    """

    leads = False
    scheduled = False

    def announce(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Record a call that this rank is about to make with all ranks; a coordinator has the serving ranks make it, too."""


@final
class CommonObjects:
    """Numbered objects of this rank, the same numbers on every rank. It does not keep them alive.

    Example:
        >>> class Model: pass
        >>> models, model = CommonObjects(), Model()
        >>> models.add(model)
        >>> models.number(model), models.find(0) is model, models.number(Model())
        (0, True, None)
    """

    def __init__(self) -> None:
        self._found: list[Callable[[], Any]] = []
        self._numbers: dict[int, tuple[int, Any]] = {}  # by id: the number, and a reference

    def add(self, thing: Any, find: Callable[[], Any] | None = None) -> None:
        """Give an object the next number.

        Args:
            thing: one that can have weak references.
            find: returns the object that now takes its place; default itself, None once it is deleted.
        """
        reference = weakref.ref(thing)
        self._numbers[id(thing)] = len(self._found), reference
        self._found.append(find or reference)

    def number(self, thing: Any) -> int | None:
        """Return the number of an object; None if it has none."""
        number, reference = self._numbers.get(id(thing), (None, None))
        return number if reference is not None and reference() is thing else None

    def varies(self, number: int) -> bool:
        """Return True if another object may take the place of a numbered one."""
        return not isinstance(self._found[number], weakref.ref)

    def find(self, number: int) -> Any:
        """Return the object of a number on this rank; None if it does not exist."""
        return self._found[number]() if number < len(self._found) else None


@final
class StrategyExtended(OtherNames):
    """A strategy's inner parts (TF: tf.distribute.StrategyExtended); `strategy.extended`.

    Attributes:
        topology: ranks, nodes and devices.
        process_group: all ranks, for collectives.
        sync_topology: the ranks whose replicas step together: all, or with parameter servers this one.
        num_input_pipelines: the number of workers that read input.
        cross_device_ops: the reductions of the replicas' values.
        placement: the memory of variables.
        replicas: the contexts of the local replicas.
        collectives: those of the replicas that step together.
        rank_collectives: those of all ranks, for barriers and objects.
        threads: the threads of several local replicas; None with one.
        optimizer_states: the states of optimizers, in files and before they are applied.
        coordination: the use of this rank by a coordinator.
        models: models and optimizers of frameworks; a coordinator refers to them by number.
        batches: the batches of its distributed datasets on this rank.
        is_default: whether this is the strategy outside every scope.
        closed: whether the strategy was closed.
    """

    def __init__(
        self,
        strategy: Any,
        group: ProcessGroup,
        ops: CrossDeviceOps,
        options: CommunicationOptions | None = None,
        *,
        sync_group: ProcessGroup | None = None,
        parameter_devices: Sequence[str] | None = None,
        distributed: bool = True,
        central: bool = False,
        step: StepOptions | None = None,
        is_default: bool = False,
        shared: bool = False,
    ) -> None:
        """Store the parts from `assemble`.

        Args:
            strategy: their strategy; opaque here.
            group: all ranks.
            ops: the reductions of the replicas' values.
            options: defaults of every reduction.
            sync_group: the ranks whose replicas step together, if not all.
            parameter_devices: the devices of variables; default this rank's devices.
            distributed, central, step: see `Placement` and `ArenaAllocator`.
            is_default: see the class.
            shared: whether the group belongs to another strategy, which closes it.
        """
        sync_group = sync_group or group
        self.topology: Topology = group.topology
        self.sync_topology: Topology = sync_group.topology
        self.num_input_pipelines = self.topology.size
        self.process_group, self.cross_device_ops = group, ops
        arenas = ArenaAllocator(sync_group, parameter_devices, central, step)
        devices = self.sync_topology.devices
        self.placement = Placement(sync_group, ops, arenas, strategy, group, make_here, devices, distributed)
        self.placement.steps, self.placement.optimizers = Steps(self.placement), ArenaMemory(self.placement)
        self.is_default, self.closed = is_default, False
        self.coordination = Coordination()
        self.models = CommonObjects()
        self.batches = Ledger(self.sync_topology.num_replicas)
        self._strategy = strategy
        self._shared = shared
        self.frame = Frame(strategy)
        self.collectives = Collectives(
            sync_group, "Strategy", names=_OWN_NAMES, ops=ops, options=options, alone=is_default
        )
        self.rank_collectives = self.collectives if sync_group is group else Collectives(group, "Strategy")
        in_step = Collectives(sync_group, "ReplicaContext", ops=ops, options=options, alone=is_default)
        local = range(self.sync_topology.num_local_replicas)
        self.replicas = [ReplicaContext(strategy, index, self.sync_topology, in_step) for index in local]
        frames = [replica.frame for replica in self.replicas]
        self.threads = ReplicaThreads(frames, devices) if len(frames) > 1 else None
        self.optimizer_states = OptimizerStates(self.placement)

    @functools.cached_property
    def process_sets(self) -> ProcessSets:
        """The existing process sets. The first use is collective over all ranks."""
        from .process_set import ProcessSets

        return ProcessSets(self.process_group)

    def share_with(self, strategy: Any) -> StrategyExtended:
        """Return the inner parts of a copy of the strategy: new variables, but the same communicators."""
        placement = self.placement
        return StrategyExtended(
            strategy,
            self.process_group,
            self.cross_device_ops,
            self.collectives.merged(None),
            parameter_devices=placement.arenas.devices,
            distributed=placement.distributed,
            central=placement.arenas.central,
            step=placement.arenas.step,
            is_default=self.is_default,
            shared=True,
        )

    def coordinate(self, coordination: Coordination) -> None:
        """Register a coordinator's use of this rank; `Coordination()` ends it."""
        self.coordination = coordination

    def renumber(self, num_input_pipelines: int) -> None:
        """Continue with the group's remaining ranks. Each of them calls it."""
        self.num_input_pipelines = num_input_pipelines
        self.rank_collectives = Collectives(self.process_group, "Strategy")
        vars(self).pop("process_sets", None)

    # devices

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of this rank, one replica each."""
        return self._devices("worker_devices", self.sync_topology.devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The devices of this rank's copies of the variables."""
        return self._devices("parameter_devices", self.placement.arenas.devices)

    def _devices(self, what: str, devices: Sequence[str]) -> tuple[str, ...]:
        if self.is_default:
            remedy = "Create a strategy first"
            raise ContextError(explain(what, "", expected="a strategy", got="the default one", remedy=remedy))
        return tuple(devices)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """Return the devices for data of several variables: those of the variables."""
        return self.parameter_devices

    # variables

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables made in this strategy's scope, in that order, the same on every rank."""
        return tuple(self.placement.variables)

    def create_variable(self, *args: Any, **kwargs: Any) -> Variable | ShardedVariable:
        """Return a new variable, for `ms.Variable(...)`. Collective; in a step all replicas create it together."""
        self.require_open("Variable")
        beside = _beside.get()
        if beside is not None and beside.placement is self.placement:
            kwargs["beside"] = beside
        if context.in_update_context():
            raise ContextError(explain("Variable", "", expected="a call outside of update context", got="one in it"))
        rendezvous = current_rendezvous()
        if rendezvous is None:
            self.coordination.announce("variable", *args, **kwargs)
            return create_variable(self.placement, *args, **kwargs)
        index = self.replicas.index(context.current().replica)

        def together(posts: list[Any]) -> list[Variable | ShardedVariable]:
            first_args, first_kwargs = posts[0]
            self.coordination.announce("variable", *first_args, **first_kwargs)
            return [create_variable(self.placement, *first_args, **first_kwargs)] * len(posts)

        return rendezvous.call_once(index, "Variable", together, (args, kwargs))

    def forget_step(self) -> None:
        """Drop the announced or submitted gradients of a step that failed. Call it on every rank."""
        self.placement.steps.forget_step()

    def register_optimizer(self, optimizer: Any) -> None:
        """Register an optimizer for `save` and `restore`; it does so when first applied.

        Raises:
            ValueError: the restored state belongs to another optimizer.
        """
        self.optimizer_states.register(optimizer)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that were applied or restored, the same on every rank."""
        return self.optimizer_states.registered

    def variable_created_in_scope(self, v: Any) -> bool:
        """Return whether a variable was made in this strategy's scope."""
        return isinstance(v, (Variable, ShardedVariable)) and v.placement is self.placement

    def value_container(self, value: Any) -> Any:
        """Return the variable of a component: here the same."""
        return value

    @contextlib.contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable | ShardedVariable) -> Iterator[None]:
        """Return a context in which new variables are placed with this one, whole: with parameter servers on its server.

        Every rank enters it with the same variable. Under other strategies variables of one dtype are neighbours anyway.

        Args:
            colocate_with_variable: of this strategy; of a ShardedVariable its first shard is used.

        Raises:
            ValueError: the variable was not made in this strategy's scope.

        Example:
            >>> with strategy.extended.colocate_vars_with(embedding):  # doctest: +SKIP
            ...     counts = ms.Variable(np.zeros(1000), name="counts")
        """
        self.require_own(colocate_with_variable, "colocate_vars_with")
        sharded = isinstance(colocate_with_variable, ShardedVariable)
        token = _beside.set(colocate_with_variable.variables[0] if sharded else colocate_with_variable)
        try:
            yield
        finally:
            _beside.reset(token)

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call `fn(var, *args, **kwargs)` once for each physical copy that this rank writes. Collective.

        The ranks of a node share one copy, and each calls the function. Writes in it are collective, with the same values on
        every rank. Inside, `get_replica_context()` is None and `get_update_replica_id()` the number of the copy.

        Args:
            var: a variable of this strategy.
            fn: may write to its variable.
            args, kwargs: plain values; of a Mirrored, the copy's own part is passed.
            group: whether to return one value, Mirrored if there are several copies, instead of a list.

        Raises:
            ValueError: a PerReplica among the arguments, or a variable of another strategy.
            ContextError: in replica context.
        """
        self.require_cross("extended.update")
        self.require_own(var, "extended.update")
        return self.call_on_copies("extended.update", var.num_copies, partial(fn, var), (args, kwargs), group)

    def call_on_copies(
        self,
        function: str,
        copies: int,
        fn: Callable[..., Any],
        call: tuple[Sequence[Any], Mapping[str, Any] | None],
        group: bool,
    ) -> Any:
        """Call a function once for each of some copies, in update context; `update` without its checks.

        Args:
            function: the caller, for errors.
            copies: their number.
            fn, call, group: the function, its positional and named arguments, and whether to return one value.

        Raises:
            ValueError: a PerReplica among the arguments.
        """
        call = (tuple(call[0]), dict(call[1] or {}))
        for leaf in nest.flatten(call):
            if isinstance(leaf, DistributedValues) and not isinstance(leaf, Mirrored):
                remedy = "Reduce it first: extended.reduce_to or batch_reduce_to"
                got = f"a {type(leaf).__name__}"
                expected = "plain or Mirrored values"
                raise ValueError(explain(function, "args", expected=expected, got=got, remedy=remedy))
        results = []
        for copy in range(copies):
            copy_args, copy_kwargs = select_replica(copy, call)
            token = context.push(Frame(self._strategy, update_replica_id=copy))
            try:
                results.append(fn(*copy_args, **copy_kwargs))
            finally:
                context.pop(token)
        return regroup(results, Mirrored) if group else results

    # values

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Return the sum, or another reduction, of a value over all replicas, on the devices of destinations. Collective.

        Args:
            reduce_op: ReduceOp.SUM, MEAN, MIN, MAX or PROD, or its name.
            value: PerReplica, Mirrored or plain value.
            destinations: a variable, a value or a device string; no list of them.
            options: bytes_per_pack, timeout_seconds, implementation of this call.

        Raises:
            ValueError: another reduce_op; a list of destinations; a plain or Mirrored value under SUM or PROD on a rank with
                several replicas.
            CollectiveMismatchError: ranks pass different operations, shapes or dtypes.
        """
        self.require_cross("extended.reduce_to")
        op = ReduceOp.parse(reduce_op, "extended.reduce_to")
        if self.is_default:
            return value
        value, options = self.copies_of_variables(value), self.collectives.merged(options)
        return as_scalar(self.cross_device_ops.reduce(op, value, destinations, options, function="extended.reduce_to"))

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Return the results of `reduce_to` for pairs of a value and its destinations, in one call. Collective.

        Raises:
            Exception: as `reduce_to`.
        """
        self.require_cross("extended.batch_reduce_to")
        op = ReduceOp.parse(reduce_op, "extended.batch_reduce_to")
        if self.is_default:
            return [value for value, _ in value_destination_pairs]
        pairs = [(self.copies_of_variables(value), where) for value, where in value_destination_pairs]
        options, function = self.collectives.merged(options), "extended.batch_reduce_to"
        return [as_scalar(total) for total in self.cross_device_ops.batch_reduce(op, pairs, options, function=function)]

    def broadcast_to(self, tensor: Any, destinations: Any = None) -> Any:
        """Return global replica 0's value on the devices of destinations, equal on every rank. Collective."""
        self.require_cross("extended.broadcast_to")
        if self.is_default:
            return tensor
        return as_scalar(self.cross_device_ops.broadcast(tensor, destinations, function="extended.broadcast_to"))

    # for the strategy's own modules

    def copies_of_variables(self, value: Any) -> Any:
        """Return a nest with each variable replaced by the local replicas' values."""
        if type(value) in PLAIN:
            return value
        return copies_of_variables(value, self.sync_topology.num_replicas, self.is_default)

    def require_open(self, function: str) -> None:
        """Raise ClosedError if the strategy was closed."""
        if self.closed:
            raise ClosedError(f"{function}: the strategy was closed")

    def require_cross(self, function: str) -> None:
        """Raise an error unless in cross-replica context of this strategy.

        Raises:
            ClosedError: the strategy was closed.
            ContextError: in a step, or in another strategy's scope.
        """
        self.require_open(function)
        context.expect_cross(self._strategy, function)

    def require_own(self, variable: Any, function: str) -> None:
        """Raise ValueError unless a variable was made in this strategy's scope."""
        if self.variable_created_in_scope(variable):
            return
        if isinstance(variable, (Variable, ShardedVariable)):
            raise ValueError(explain_foreign(function, variable, self._strategy))
        expected, got = "a Variable made in this strategy's scope", f"a {type(variable).__name__}"
        raise ValueError(explain(function, "variable", expected=expected, got=got))

    def close(self) -> None:
        """Free variables, threads and, except in a copy, communicators. Collective; `Strategy.close` calls it."""
        if self.closed:
            return
        self.closed = True
        self.batches.close()
        if self.threads is not None:
            self.threads.close()
        self.placement.close()
        if not self._shared:
            self.cross_device_ops.close()
            self.placement.group.close()
            self.placement.group.topology.close()
            self.process_group.close()
            self.topology.close()

    @property
    def first_worker(self) -> int:
        """The first rank that takes steps."""
        return self.placement.first_worker

    @property
    def common_steps(self) -> bool:
        """True if all ranks take each step together, False if workers have their own batches."""
        return not self.placement.lacks(Quality.COMMON_STEPS)

    # TensorFlow 1

    _other_names = EXTENDED
    experimental_require_static_shapes = False  # shapes may change from step to step

    @property
    def should_checkpoint(self) -> bool:
        """True if this rank writes checkpoints that are not collective: on the chief, else the first worker."""
        return self.topology.rank == self.first_worker

    should_save_summary = should_checkpoint

    @property
    def experimental_should_init(self) -> bool:
        """True: every rank takes part in the initialisation of variables."""
        return True

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a step once on each local replica: `Strategy.run`. Collective if the step is."""
        return self._strategy.run(fn, args, kwargs)
