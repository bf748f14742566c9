"""CentralStorageStrategy: variables in one place of the node, computation on all its devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from .assemble import assemble
from .layout import CENTRAL_STORAGE
from .strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["CentralStorageStrategy"]


@final
class CentralStorageStrategy(Strategy):
    """Variables kept and updated by the node's leader, steps on all devices of all ranks (TF: CentralStorageStrategy).

    Creation is collective over `comm`. The numbers are those of MirroredStrategy.

    Args:
        compute_devices: this rank's, one replica each; default as for MirroredStrategy.
        parameter_device: where the variables lie; default the CPU.
        comm: communicator, duplicated here; default COMM_WORLD.

    Raises:
        LayoutError: on every rank, when they are on several nodes.
        DeviceError: on every rank, for a device that is not there.
    """

    def __init__(
        self,
        compute_devices: Sequence[str] | str | None = None,
        parameter_device: str | None = None,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        super().__init__(assemble(CENTRAL_STORAGE, comm, compute_devices, parameter_device=parameter_device or "cpu:0"))
