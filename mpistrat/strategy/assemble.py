"""How a strategy is put together: communicators, group, algorithms, memory; agreed on by all ranks, or refused by all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, final

from .._util import log
from ..cluster.cores import set_blas_threads
from ..cluster.devices import check_devices
from ..cluster.topology import Topology
from ..comm.agree import gather_text, together
from ..comm.monitor import abort
from ..comm.process_group import ProcessGroup
from ..cross_device.auto import make_cross_device_ops
from ..cross_device.ops import CrossDeviceOps
from ..environment import Environment
from ..errors import CollectiveTimeoutError, LayoutError, PeerExitError, explain
from ..options import CommunicationOptions
from ..variables import ArenaAllocator, Placement
from ..variables.placement import Store
from .extended import StrategyExtended
from .layout import Layout, check_layout

__all__ = ["Parts", "RankOrder", "assemble"]

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Parts:
    """What a strategy is put together from."""

    layout: Layout
    group: ProcessGroup
    ops: CrossDeviceOps
    options: CommunicationOptions | None = None
    parameter_device: str | None = None
    is_default: bool = False
    shared: bool = False  # with the strategy that this one is a copy of, which closes what they share
    sync_group: ProcessGroup | None = None  # the ranks whose replicas step together, where these are not all
    store: Store | None = None  # of the variables, where that is not the arenas
    partitioner: Any = None  # of variables, see Placement
    num_input_pipelines: int | None = None

    @classmethod
    def of(cls, extended: StrategyExtended) -> Parts:
        """Return the parts of a strategy, for another one that shares its communicators."""
        devices = extended.placement.arenas.devices
        own = devices == extended.topology.devices
        return cls(
            extended.layout,
            extended.process_group,
            extended.cross_device_ops,
            extended.reductions.merged(None),
            None if own else devices[0],
            extended.is_default,
            shared=True,
        )

    def extend(self, strategy: Any) -> StrategyExtended:
        """Return the inner parts of a strategy."""
        group = self.sync_group or self.group
        devices = group.topology.devices if self.parameter_device is None else (self.parameter_device,)
        placement = Placement(
            group,
            self.ops,
            ArenaAllocator(group, devices, self.layout.central),
            strategy,
            group.topology.devices,
            distributed=self.layout.distributed,
            store=self.store,
            partitioner=self.partitioner,
        )
        return StrategyExtended(
            strategy,
            self.layout,
            self.group,
            self.ops,
            placement,
            self.options,
            is_default=self.is_default,
            shared=self.shared,
            num_input_pipelines=self.num_input_pipelines,
        )


@final
@dataclass(frozen=True)
class RankOrder:
    """How the ranks of a strategy are numbered, where that is not MPI's affair.

    Attributes:
        tell: returns what this rank tells the others; what it raises is raised on every rank.
        arrange: takes what each rank told; returns the ranks in their new order, none to leave them as they are, or
            raises, all that on every rank alike.
    """

    tell: Callable[[], str]
    arrange: Callable[[Sequence[str]], Sequence[int]]


def assemble(
    layout: Layout,
    comm: Any = None,
    devices: Sequence[str] | str | None = None,
    cross_device_ops: CrossDeviceOps | str | None = None,
    options: CommunicationOptions | None = None,
    parameter_device: str | None = None,
    check: Callable[[Topology], None] | None = None,
    make_sync_group: Callable[[ProcessGroup], ProcessGroup] | None = None,
    order: RankOrder | None = None,
) -> Parts:
    """Return the parts of a new strategy. Collective over `comm`.

    Args:
        layout: which strategy.
        comm: communicator, duplicated; default COMM_WORLD.
        devices: this rank's, one replica each; default see `cluster.devices.default_devices`.
        cross_device_ops: how values are reduced; default what `options` say, else the chooser's table.
        options: defaults of every reduction.
        parameter_device: where variables lie; default on `devices`.
        check: whatever else this rank must find right; what it raises is raised on every rank.
        make_sync_group: returns the ranks whose replicas step together, where these are not all; collective.
        order: how the ranks are numbered; default as in `comm`.

    Raises:
        LayoutError: on every rank, when the strategy does not accept the ranks and nodes.
        ClusterError: on every rank, when the launcher or the resolver contradict MPI.
        DeviceError: on every rank, for a device that is not there.
    """
    topology = Topology.create(comm, devices, layout.name)
    try:
        check_layout(layout, topology)
    except LayoutError:
        topology.close()
        raise
    if order is not None:
        topology = _in_order(topology, order, devices, layout.name)
    abort.install(topology.rank, topology.size)  # from here on one rank's exception must not leave the others waiting
    environment = Environment.read()
    log.set_rank(topology.rank)
    log.setup(environment.log)
    set_blas_threads(topology.local_size, topology.num_local_replicas, topology.node_cores)
    group = ProcessGroup.create(topology, environment)

    settings = options, parameter_device

    def finish() -> tuple[CrossDeviceOps, str | None]:
        given: object = options
        if given is not None and not isinstance(given, CommunicationOptions):
            expected, got = "CommunicationOptions", repr(given)
            raise TypeError(explain(layout.name, "communication_options", expected=expected, got=got))
        implementation = None if options is None else options.implementation
        ops = make_cross_device_ops(implementation if cross_device_ops is None else cross_device_ops)
        if check is not None:
            check(topology)
        return ops, None if parameter_device is None else check_devices(parameter_device, layout.name)[0]

    ops, place = _agree(group, layout, settings, finish)
    try:
        sync_group = None if make_sync_group is None else make_sync_group(group)
    except Exception:  # raised on every rank
        group.close()
        topology.close()
        raise
    _agree(group, layout, settings, lambda: ops.bind(sync_group or group))
    return Parts(layout, group, ops, options, place, sync_group=sync_group)


def _in_order(topology: Topology, order: RankOrder, devices: Sequence[str] | str | None, name: str) -> Topology:
    """Return the topology of the same ranks in another order, or this one if that is its order. Collective."""
    exchange = partial(gather_text, topology.comm)
    try:
        with together(exchange):
            text = order.tell()
        ranks = order.arrange(exchange(text))
    except Exception:  # raised on every rank
        topology.close()
        raise
    if not ranks or list(ranks) == list(range(topology.size)):
        return topology
    comm = topology.comm.Split(0, ranks.index(topology.rank))
    topology.close()
    ordered = Topology.create(comm, devices, name)
    comm.Free()
    return ordered


def _agree(group: ProcessGroup, layout: Layout, settings: tuple[Any, ...], act: Callable[[], T]) -> T:
    """Return what `act` returns; raise on every rank what it raises on any, or that their settings differ. Collective."""
    detail = ", ".join(repr(setting) for setting in settings if setting is not None)
    try:
        with together(partial(group.exchange, layout.name, detail=detail)):
            return act()
    except (PeerExitError, CollectiveTimeoutError):  # some are not here to free it with
        raise
    except Exception:
        group.close()
        group.topology.close()
        raise
