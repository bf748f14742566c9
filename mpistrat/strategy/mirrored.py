"""MirroredStrategy: synchronous training on the devices of one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from ..cross_device.ops import CrossDeviceOps
from ..errors import explain
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
        num_gpus: instead of devices: this rank's first so many GPUs, 0 for the CPU.

    Raises:
        ValueError: both devices and num_gpus.
        LayoutError: on every rank, when they are on several nodes.
        DeviceError: on every rank, for a device that is not there.
    """

    def __init__(
        self,
        devices: Sequence[str] | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        comm: MPI.Intracomm | None = None,
        *,
        num_gpus: int | None = None,
    ) -> None:
        if num_gpus is not None:
            if devices is not None:
                got = f"devices={devices!r} and num_gpus={num_gpus!r}"
                raise ValueError(explain("MirroredStrategy", "num_gpus", expected="devices or num_gpus", got=got))
            devices = [f"gpu:{index}" for index in range(num_gpus)] or "cpu:0"
        super().__init__(assemble(MIRRORED, comm, devices, cross_device_ops))
