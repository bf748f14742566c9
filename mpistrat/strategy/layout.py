"""Which ranks and nodes each strategy accepts, and what else distinguishes one from another: facts, not code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from .._util.text import counted
from ..cluster.topology import Topology
from ..errors import LayoutError, explain

__all__ = [
    "CENTRAL_STORAGE",
    "MIRRORED",
    "MULTI_WORKER_MIRRORED",
    "ONE_DEVICE",
    "PARAMETER_SERVER",
    "Layout",
    "check_layout",
]


@final
@dataclass(frozen=True)
class Layout:
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


ONE_DEVICE = Layout("OneDeviceStrategy", many_ranks=False, distributed=False)
MIRRORED = Layout("MirroredStrategy")
MULTI_WORKER_MIRRORED = Layout("MultiWorkerMirroredStrategy", many_nodes=True)
CENTRAL_STORAGE = Layout("CentralStorageStrategy", central=True)
PARAMETER_SERVER = Layout("ParameterServerStrategy", many_nodes=True, least_ranks=2)

_ALL = (ONE_DEVICE, MIRRORED, CENTRAL_STORAGE, MULTI_WORKER_MIRRORED)  # what a synchronous program may use instead


def check_layout(layout: Layout, topology: Topology) -> None:
    """Do nothing if a strategy accepts the ranks and nodes. The same on every rank.

    Raises:
        LayoutError: it does not, naming the strategies that do.
    """
    ranks, nodes = topology.size, topology.num_nodes
    if layout.fits(ranks, nodes):
        return
    fitting = ", ".join(other.name for other in _ALL if other.fits(ranks, nodes))
    remedy = f"What fits: {fitting}"
    if not layout.many_ranks:
        remedy += f"; or {layout.name}(comm=MPI.COMM_SELF), one of its own on each rank"
    elif layout.least_ranks > 1:
        remedy = f"Start workers and servers together: mpistrat run -n 3 --ps 1 program.py. One rank alone: {fitting}"
    several = "ranks of one node" if layout.least_ranks == 1 else f"at least {layout.least_ranks} ranks"
    raise LayoutError(
        explain(
            layout.name,
            "comm",
            expected=several if layout.many_ranks else "one rank",
            got=f"{ranks} ranks on {counted(nodes, 'node')}",
            remedy=remedy,
            rank=topology.rank,
        )
    )
