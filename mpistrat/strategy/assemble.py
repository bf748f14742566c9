"""How a strategy is put together: which ranks and nodes each accepts, group and algorithms; the same on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any, TypeVar, final

from ..base import log, loops
from ..base.agree import together
from ..base.cores import loop_threads, set_blas_threads
from ..base.devices import check_devices, parse, use_device
from ..base.environment import Environment
from ..base.errors import (
    ClusterError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    DeviceError,
    LayoutError,
    PeerExitError,
    RanksLostError,
    explain,
)
from ..base.options import CommunicationOptions, LocalSteps
from ..base.text import counted
from ..cluster.topology import Topology
from ..comm.monitor import abort
from ..comm.process_group import ProcessGroup
from ..cross_device.auto import make_cross_device_ops
from ..cross_device.flat import wire_of
from ..cross_device.ops import CrossDeviceOps
from .extended import StrategyExtended

__all__ = [
    "CENTRAL_STORAGE",
    "MESH",
    "MIRRORED",
    "MULTI_WORKER_MIRRORED",
    "ONE_DEVICE",
    "PARAMETER_SERVER",
    "StrategyKind",
    "assemble",
    "check_layout",
]

T = TypeVar("T")

MOST_NODES = 64  # that share slots unasked: messages of a step, and memory for them, grow with their number


@final
@dataclass(frozen=True)
class StrategyKind:
    """What a strategy is like.

    Attributes:
        name: of its class.
        many_ranks, many_nodes: whether it accepts them.
        distributed: whether it may have several replicas.
        central: whether the node's leader alone keeps and updates the variables.
        least_ranks: how few it accepts.
    """

    name: str
    many_ranks: bool = True
    many_nodes: bool = False
    distributed: bool = True
    central: bool = False
    least_ranks: int = 1

    def fits(self, ranks: int, nodes: int) -> bool:
        """Return whether the strategy accepts so many ranks on so many nodes."""
        return (self.many_ranks or ranks == 1) and (self.many_nodes or nodes == 1) and ranks >= self.least_ranks


ONE_DEVICE = StrategyKind("OneDeviceStrategy", many_ranks=False, distributed=False)
MIRRORED = StrategyKind("MirroredStrategy")
MULTI_WORKER_MIRRORED = StrategyKind("MultiWorkerMirroredStrategy", many_nodes=True)
CENTRAL_STORAGE = StrategyKind("CentralStorageStrategy", central=True)
MESH = StrategyKind("MeshStrategy", many_nodes=True)
PARAMETER_SERVER = StrategyKind("ParameterServerStrategy", many_nodes=True, least_ranks=2)

_ALL = (ONE_DEVICE, MIRRORED, CENTRAL_STORAGE, MULTI_WORKER_MIRRORED)  # what a synchronous program may use instead


def check_layout(kind: StrategyKind, topology: Topology) -> None:
    """Do nothing if a strategy accepts the ranks and nodes. The same on every rank.

    Raises:
        LayoutError: it does not, naming the strategies that do.
    """
    ranks, nodes = topology.size, topology.num_nodes
    if kind.fits(ranks, nodes):
        return
    fitting = ", ".join(other.name for other in _ALL if other.fits(ranks, nodes))
    remedy = f"What fits: {fitting}"
    if not kind.many_ranks:
        remedy += f"; or {kind.name}(comm=MPI.COMM_SELF), one of its own on each rank"
    elif kind.least_ranks > 1:
        remedy = f"Start workers and servers together: mpistrat run -n 3 --ps 1 program.py. One rank alone: {fitting}"
    several = "ranks of one node" if kind.least_ranks == 1 else f"at least {kind.least_ranks} ranks"
    raise LayoutError(
        explain(
            kind.name,
            "comm",
            expected=several if kind.many_ranks else "one rank",
            got=f"{ranks} ranks on {counted(nodes, 'node')}",
            remedy=remedy,
            rank=topology.rank,
        )
    )


def assemble(
    strategy: Any,
    kind: StrategyKind,
    comm: Any = None,
    devices: Sequence[str] | str | None = None,
    cross_device_ops: CrossDeviceOps | str | None = None,
    options: CommunicationOptions | None = None,
    parameter_device: str | None = None,
    check: Callable[[Topology], None] | None = None,
    make_sync_group: Callable[[ProcessGroup], ProcessGroup] | None = None,
    order: Callable[[Topology], Sequence[int]] | None = None,
    replicas: int | None = None,
    sharded_slots: bool | None = None,
    local_steps: LocalSteps | int | None = None,
    sharded_gradients: bool = False,
    axes: Any = None,
    ordered_replicas: int | None = None,
) -> StrategyExtended:
    """Return the inner parts of a new strategy. Collective over `comm`.

    Args:
        strategy: the new strategy; opaque here.
        kind: which one it is.
        comm: communicator, duplicated; default COMM_WORLD.
        devices: this rank's, one replica each; default see `cluster.devices.default_devices`.
        cross_device_ops: how values are reduced; default what `options` say, else the chooser's table.
        options: defaults of every reduction.
        parameter_device: where variables lie; default on `devices`.
        check: what else this rank checks; what it raises is raised on every rank.
        make_sync_group: returns the ranks whose replicas step together, where these are not all; collective.
        order: returns the ranks in their order, none to leave them as in `comm`, or raises, on every rank alike; collective.
        replicas: of all ranks, on their CPUs, whose sums do not depend on who has them; instead of devices.
        sharded_slots: whether each node keeps its part of the slots only; default: where nodes are few, reductions send each
            its part, and the job keeps no snapshots, of which each node must have all.
        local_steps: how nodes train by themselves, or after how many updates they take an outer step.
        sharded_gradients: whether gradients are handed over, and each rank keeps its part of the sums only.
        axes: of a mesh, as they were given.
        ordered_replicas: how many there must be, for sums in the order of replicas, where devices say which there are.

    Raises:
        LayoutError: on every rank, when the strategy does not accept the ranks and nodes.
        ClusterError: on every rank, when the launcher or the resolver contradict MPI.
        DeviceError: on every rank, for a device that is not there.
    """
    make_topology = partial(Topology.create, devices=devices, function=kind.name, replicas=replicas)
    topology = make_topology(comm)
    try:
        if comm is None:
            _check_evaluator(kind, topology)
        check_layout(kind, topology)
    except (ClusterError, LayoutError):
        topology.close()
        raise
    if order is not None:
        topology = _in_order(topology, order, make_topology)
    use_device(topology.devices[0])
    abort.install(topology.rank, topology.size)  # from here on one rank's exception must not leave the others waiting
    environment = Environment.read()
    log.set_rank(topology.rank)
    log.setup(environment.log)
    set_blas_threads(topology.local_size, topology.num_local_replicas, topology.node_cores)
    loops.set_threads(loop_threads(topology.local_size, topology.node_cores))
    group = ProcessGroup.create(topology, environment)

    given = {"sharded_slots": sharded_slots, "local_steps": local_steps, "axes": axes}
    given |= {"sharded_gradients": sharded_gradients or None}
    told = {name: value for name, value in given.items() if value is not None}
    settings = options, parameter_device, replicas, told or None, ordered_replicas

    def finish() -> tuple[CrossDeviceOps, Sequence[str] | None]:
        given: object = options
        if given is not None and not isinstance(given, CommunicationOptions):
            expected, got = "CommunicationOptions", repr(given)
            raise TypeError(explain(kind.name, "communication_options", expected=expected, got=got))
        implementation: Any = None if options is None else options.implementation
        if replicas is not None or ordered_replicas is not None:
            from ..cross_device.ordered import OrderedAllReduce

            if not isinstance(cross_device_ops or implementation, (OrderedAllReduce, NoneType)):
                expected, got = "no algorithm besides: OrderedAllReduce sums", repr(cross_device_ops or implementation)
                raise ValueError(explain(kind.name, "replicas", expected=expected, got=got))
            implementation = OrderedAllReduce()
        ops = make_cross_device_ops(implementation if cross_device_ops is None else cross_device_ops)
        if check is not None:
            check(topology)
        _check_local_steps(kind.name, local_steps, topology, replicas is not None, bool(sharded_slots))
        _log_what_has_no_effect(kind, options, cross_device_ops, topology)
        return ops, None if parameter_device is None else check_devices(parameter_device, kind.name)[:1]

    ops, parameter_devices = _agree(group, kind, settings, finish)
    try:
        sync_group = None if make_sync_group is None else make_sync_group(group)
    except Exception:  # raised on every rank
        group.close()
        topology.close()
        raise

    nodes = (sync_group or group).num_nodes

    def bind() -> None:
        if group.num_nodes > 1:
            _check_wire(kind, options, ops, sharded_slots, local_steps is not None)
        if sharded_gradients:
            _check_sharded_gradients(kind, options, ops, sharded_slots, local_steps is not None, topology, nodes)
        ops.bind(sync_group or group)

    _agree(group, kind, settings, bind)
    wire = wire_of(options)
    if wire is not None or sharded_gradients:
        sharded_slots = True
    if local_steps is not None and not isinstance(local_steps, LocalSteps):
        local_steps = LocalSteps(local_steps)
    if group.num_nodes == 1:
        local_steps = None
    few = 1 < nodes <= MOST_NODES and kind is not PARAMETER_SERVER
    unasked = few and ops.sums_pieces and not environment.job and local_steps is None
    return StrategyExtended(
        strategy,
        group,
        ops,
        options,
        sync_group=sync_group,
        parameter_devices=parameter_devices,
        distributed=kind.distributed,
        central=kind.central,
        sharded_slots=unasked if sharded_slots is None else sharded_slots and nodes > 1,
        local_steps=local_steps,
        wire=wire,
        sharded_gradients=sharded_gradients,
    )


def _log_what_has_no_effect(
    kind: StrategyKind, options: CommunicationOptions | None, ops: object, topology: Topology
) -> None:
    """Log settings that this strategy takes, as all do, and has no use for."""
    if not kind.distributed:
        given = {"communication_options": options, "cross_device_ops": ops}
        for name in (name for name, value in given.items() if value is not None):
            log.once(logging.INFO, f"{kind.name}: {name} has no effect: one replica has nothing to reduce")
    elif options is not None and options.wire is not None and topology.num_nodes == 1:
        log.once(logging.INFO, f"{kind.name}: wire={options.wire!r} has no effect: all ranks are on one node")


def _check_local_steps(
    function: str, given: LocalSteps | int | None, topology: Topology, ordered: bool, sharded: bool
) -> None:
    """Do nothing if a strategy can be made with these local steps.

    Raises:
        TypeError: no number of steps, nor LocalSteps.
        ValueError: a number out of range; with `replicas`, or with slots divided over nodes.
        DeviceError: this rank has GPUs.
    """
    if given is None:
        return
    if not isinstance(given, LocalSteps):
        try:
            LocalSteps(given)
        except (TypeError, ValueError) as error:
            expected = "ms.LocalSteps, or a number of updates of at least 1"
            raise type(error)(explain(function, "local_steps", expected=expected, got=repr(given))) from None
    if ordered or sharded:
        other = "replicas" if ordered else "sharded_slots=True"
        expected = f"no {other} beside local_steps"
        got = "both: nodes sum, and keep slots, each for itself"
        raise ValueError(explain(function, "local_steps", expected=expected, got=got))
    if any(parse(device)[0] != "cpu" for device in topology.devices):
        expected, got = "variables on CPUs", f"devices {', '.join(topology.devices)}"
        raise DeviceError(explain(function, "local_steps", expected=expected, got=got, rank=topology.rank))


def _check_wire(
    kind: StrategyKind,
    options: CommunicationOptions | None,
    ops: CrossDeviceOps,
    sharded_slots: bool | None,
    local: bool,
) -> None:
    """Raise ValueError where a form for the way between nodes is given, and steps have no use for it."""
    if options is None or options.wire is None:
        return
    remedy, got = "Leave wire out", ""
    if kind is PARAMETER_SERVER:
        got = f"a {kind.name}, whose servers and workers send numbers as they are"
    elif local:
        got = "local_steps, whose outer steps send numbers as they are"
    elif sharded_slots is False:
        got, remedy = "sharded_slots=False", "Leave sharded_slots out: sums travel to the node that keeps their slots"
    elif not ops.sums_pieces:
        got = f"{type(ops).__name__}, which sends whole sums"
        remedy = "Leave cross_device_ops, replicas and implementation out, or use HierarchicalAllReduce"
    if got:
        expected = f"what divides sums among nodes, for wire={options.wire!r}"
        raise ValueError(explain(kind.name, "communication_options", expected=expected, got=got, remedy=remedy))


def _check_sharded_gradients(
    kind: StrategyKind,
    options: CommunicationOptions | None,
    ops: CrossDeviceOps,
    sharded_slots: bool | None,
    local: bool,
    topology: Topology,
    nodes: int,
) -> None:
    """Do nothing if gradients can be handed over.

    Raises:
        ValueError: with what they cannot be combined with.
        DeviceError: this rank has GPUs.
    """
    if any(parse(device)[0] != "cpu" for device in topology.devices):
        expected, got = "variables on CPUs", f"devices {', '.join(topology.devices)}"
        remedy = "Leave sharded_gradients out: GPUs sum and update all weights"
        raise DeviceError(explain(kind.name, "sharded_gradients", expected=expected, got=got, remedy=remedy))
    remedy, got = "Leave sharded_gradients out", ""
    if local:
        got, remedy = "local_steps, by which each node sums for itself", "Leave local_steps or sharded_gradients out"
    elif sharded_slots is False and nodes > 1:
        got, remedy = "sharded_slots=False", "Leave sharded_slots out: a sum goes to the node that keeps its slots"
    elif not ops.sums_pieces:
        got = f"{type(ops).__name__}, which has an order of its own"
        remedy = "Leave cross_device_ops, replicas and implementation out, or use HierarchicalAllReduce"
    elif nodes > 1 and (wire := wire_of(options)) is not None and wire.feeds_back:
        got = f"wire={wire.name!r}, which sends with each sum what it lost of the last one of the same step"
        remedy = 'Use wire="bfloat16"'
    if got:
        expected = "what sums gradients bucket by bucket"
        raise ValueError(explain(kind.name, "sharded_gradients", expected=expected, got=got, remedy=remedy))


def _check_evaluator(kind: StrategyKind, topology: Topology) -> None:
    """Raise ClusterError, on every rank, where the job's evaluator would train unawares."""
    if Environment.read().evaluator and topology.size > 1:
        remedy = (
            "ms.estimator.train_and_evaluate makes it, ms.estimator.split_evaluator() returns it; or unset the variable"
        )
        expected, got = "the communicator of the ranks that train, for MPISTRAT_EVALUATOR=1", "all ranks"
        raise ClusterError(explain(kind.name, "comm", expected=expected, got=got, remedy=remedy, rank=topology.rank))


def _in_order(
    topology: Topology,
    order: Callable[[Topology], Sequence[int]],
    make_topology: Callable[[Any], Topology],
) -> Topology:
    """Return the topology of the same ranks in another order, or this one if that is its order. Collective."""
    try:
        ranks = order(topology)
    except Exception:  # raised on every rank
        topology.close()
        raise
    if not ranks or list(ranks) == list(range(topology.size)):
        return topology
    comm = topology.comm.Split(0, ranks.index(topology.rank))
    topology.close()
    ordered = make_topology(comm)
    comm.Free()
    return ordered


def _agree(group: ProcessGroup, kind: StrategyKind, settings: tuple[Any, ...], act: Callable[[], T]) -> T:
    """Return what `act` returns; raise on every rank what it raises on any, or that their settings differ. Collective."""
    detail = ", ".join(repr(setting) for setting in settings if setting is not None)
    try:
        with together(partial(group.exchange, kind.name, detail=detail)):
            return act()
    except (PeerExitError, RanksLostError, CollectiveTimeoutError):  # some are not here to free it with
        raise
    except Exception as error:
        if isinstance(error, CollectiveMismatchError):
            _meet(group)
        group.close()
        group.topology.close()
        raise


def _meet(group: ProcessGroup) -> None:
    """Wait until all ranks have left the call in which they differed. Collective.

    Where ranks of one node differ, they leave it first: the others do by comparing it with the next call of these.
    """
    try:
        group.barrier("differ")
    except CollectiveMismatchError:
        group.barrier("differ")
