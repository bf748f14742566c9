"""MirroredStrategy: synchronous training on the devices of one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from ..cross_device.cross_device_ops import CrossDeviceOps
from .assemble import assemble
from .layout import MIRRORED
from .strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MirroredStrategy"]


@final
class MirroredStrategy(Strategy):
    """Synchronous training on one node: any number of ranks, any number of devices on each (TF: MirroredStrategy).

    Creation is collective over `comm`. Every device of every rank is a replica. The ranks share one copy of the
    variables; each updates its own slice of them.

    Args:
        devices: this rank's, such as ["gpu:0", "gpu:1"]; default: the GPU of the rank's number on the node, all GPUs for
            a rank that is alone, else the CPU. Ranks may have different numbers of devices.
        cross_device_ops: how values are reduced, such as `ms.NcclAllReduce()`; default: the chooser's table.
        comm: communicator, duplicated here; default COMM_WORLD.

    Raises:
        LayoutError: on every rank, when they are on several nodes.
        DeviceError: on every rank, for a device that is not there.
    """

    def __init__(
        self,
        devices: Sequence[str] | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        super().__init__(assemble(MIRRORED, comm, devices, cross_device_ops))
