"""Assembly of a strategy: the ranks and nodes that each accepts, its group and algorithms; the same on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import NoneType
from typing import Any, TypeVar, final

from ..base import log, loops
from ..base.agree import together
from ..base.cores import loop_threads, set_blas_threads
from ..base.devices import check_devices, use_device
from ..base.environment import Environment
from ..base.errors import (
    ClusterError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    LayoutError,
    PeerExitError,
    RanksLostError,
    explain,
)
from ..base.options import CommunicationOptions, StepOptions
from ..base.text import counted
from ..cluster.topology import Topology
from ..comm.monitor import abort
from ..comm.process_group import ProcessGroup
from ..cross_device.auto import make_cross_device_ops
from ..cross_device.ops import CrossDeviceOps
from ..step.interface import OptionCheck
from ..step.table import check_options
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

MOST_NODES = 64  # that divide slots by default: messages of a step, and their memory, grow with the nodes


@final
@dataclass(frozen=True)
class StrategyKind:
    """The properties of a strategy.

    Attributes:
        name: of its class.
        many_ranks, many_nodes: whether it accepts them.
        distributed: whether it may have several replicas.
        central: whether the node's leader alone stores and updates the variables.
        least_ranks: the least number of ranks.
    """

    name: str
    many_ranks: bool = True
    many_nodes: bool = False
    distributed: bool = True
    central: bool = False
    least_ranks: int = 1

    def fits(self, ranks: int, nodes: int) -> bool:
        """Return whether the strategy accepts this many ranks and nodes."""
        return (self.many_ranks or ranks == 1) and (self.many_nodes or nodes == 1) and ranks >= self.least_ranks


ONE_DEVICE = StrategyKind("OneDeviceStrategy", many_ranks=False, distributed=False)
MIRRORED = StrategyKind("MirroredStrategy")
MULTI_WORKER_MIRRORED = StrategyKind("MultiWorkerMirroredStrategy", many_nodes=True)
CENTRAL_STORAGE = StrategyKind("CentralStorageStrategy", central=True)
MESH = StrategyKind("MeshStrategy", many_nodes=True)
PARAMETER_SERVER = StrategyKind("ParameterServerStrategy", many_nodes=True, least_ranks=2)

_ALL = (ONE_DEVICE, MIRRORED, CENTRAL_STORAGE, MULTI_WORKER_MIRRORED)  # alternatives for a synchronous program


def check_layout(kind: StrategyKind, topology: Topology) -> None:
    """Raise LayoutError unless a strategy accepts the ranks and nodes; it names strategies that do. The same on every rank."""
    ranks, nodes = topology.size, topology.num_nodes
    if kind.fits(ranks, nodes):
        return
    fitting = ", ".join(other.name for other in _ALL if other.fits(ranks, nodes))
    remedy = f"What fits: {fitting}"
    if not kind.many_ranks:
        remedy += f"; or {kind.name}(comm=MPI.COMM_SELF), a separate one on each rank"
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
    step: StepOptions | None = None,
    axes: Any = None,
    ordered_replicas: int | None = None,
) -> StrategyExtended:
    """Return the inner parts of a new strategy. Collective over `comm`.

    The other arguments are those of the strategies.

    Args:
        strategy: the new strategy; opaque here.
        kind: its kind.
        options: defaults of every reduction.
        step: the options of training steps.
        parameter_device: the device of variables; default `devices`.
        check: another check of this rank; its error is raised on every rank.
        make_sync_group: returns the ranks whose replicas step together, if not all; collective.
        order: returns the ranks in their order, none for that of `comm`, or raises, equally on every rank; collective.
        ordered_replicas: the required number of replicas, for sums in their order, if devices define the replicas.

    Raises:
        LayoutError: on every rank: the strategy does not accept the ranks and nodes.
        ClusterError: on every rank: the launcher or the resolver contradict MPI.
        DeviceError: on every rank: a device does not exist.
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
    abort.install(topology.rank, topology.size)  # from here on an exception on one rank ends the others' waits
    environment = Environment.read()
    log.set_rank(topology.rank)
    log.setup(environment.log)
    set_blas_threads(topology.local_size, topology.num_local_replicas, topology.node_cores)
    loops.set_threads(loop_threads(topology.local_size, topology.node_cores))
    group = ProcessGroup.create(topology, environment)

    step = step or StepOptions()
    given = step.given() | ({} if axes is None else {"axes": axes})
    settings = options, parameter_device, replicas, given or None, ordered_replicas

    def finish() -> tuple[CrossDeviceOps, Sequence[str] | None]:
        given: object = options
        if given is not None and not isinstance(given, CommunicationOptions):
            expected, got = "CommunicationOptions", repr(given)
            raise TypeError(explain(kind.name, "communication_options", expected=expected, got=got))
        implementation: Any = None if options is None else options.implementation
        if replicas is not None or ordered_replicas is not None:
            from ..cross_device.ordered import OrderedAllReduce

            if not isinstance(cross_device_ops or implementation, (OrderedAllReduce, NoneType)):
                expected, got = "no other algorithm than OrderedAllReduce", repr(cross_device_ops or implementation)
                raise ValueError(explain(kind.name, "replicas", expected=expected, got=got))
            implementation = OrderedAllReduce()
        ops = make_cross_device_ops(implementation if cross_device_ops is None else cross_device_ops)
        if check is not None:
            check(topology)
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
    if options is not None and kind is not PARAMETER_SERVER:  # there pushes are encoded, not sums
        step = replace(step, **options.between_nodes())

    def bind() -> None:
        ways = type(ops).__name__, ops.sums_pieces, replicas is not None
        check_options(OptionCheck(kind.name, step, group.num_nodes, nodes, topology.rank, topology.devices, *ways))
        ops.bind(sync_group or group)

    _agree(group, kind, settings, bind)
    divides = nodes <= MOST_NODES and kind is not PARAMETER_SERVER and ops.sums_pieces and not environment.job
    return StrategyExtended(
        strategy,
        group,
        ops,
        options,
        sync_group=sync_group,
        parameter_devices=parameter_devices,
        distributed=kind.distributed,
        central=kind.central,
        step=step.in_effect(group.num_nodes, nodes, divides),
    )


def _log_what_has_no_effect(
    kind: StrategyKind, options: CommunicationOptions | None, ops: object, topology: Topology
) -> None:
    """Log settings that have no effect under this strategy."""
    if not kind.distributed:
        given = {"communication_options": options, "cross_device_ops": ops}
        for name in (name for name, value in given.items() if value is not None):
            log.once(logging.INFO, f"{kind.name}: {name} has no effect: one replica has nothing to reduce")
    elif kind is not PARAMETER_SERVER and options is not None and topology.num_nodes == 1:
        for name, value in options.between_nodes().items():
            log.once(logging.INFO, f"{kind.name}: {name}={value!r} has no effect: all ranks are on one node")


def _check_evaluator(kind: StrategyKind, topology: Topology) -> None:
    """Raise ClusterError, on every rank, if the job's evaluator would train."""
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
    """Return the topology of the same ranks in another order, or this one if it is in order. Collective."""
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
    """Return the result of `act`; raise on every rank the error of any, or that settings differ. Collective."""
    detail = ", ".join(repr(setting) for setting in settings if setting is not None)
    try:
        with together(partial(group.exchange, kind.name, detail=detail)):
            return act()
    except (PeerExitError, RanksLostError, CollectiveTimeoutError):  # freeing is collective, and some ranks are gone
        raise
    except Exception as error:
        if isinstance(error, CollectiveMismatchError):
            _meet(group)
        group.close()
        group.topology.close()
        raise


def _meet(group: ProcessGroup) -> None:
    """Wait until all ranks have left the call in which they differed. Collective.

    If ranks of one node differ, they leave it first; the others leave when they compare it with the next call of these.
    """
    try:
        group.barrier("differ")
    except CollectiveMismatchError:
        group.barrier("differ")
