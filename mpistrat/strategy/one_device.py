"""OneDeviceStrategy: everything on one device of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from ..cluster.devices import default_devices
from .assemble import assemble
from .layout import ONE_DEVICE
from .strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["OneDeviceStrategy"]


@final
class OneDeviceStrategy(Strategy):
    """One replica on one device (TF: tf.distribute.OneDeviceStrategy). For trying a program out before it is spread.

    Args:
        device: such as "cpu:0" or "gpu:1"; default the first GPU, else the CPU.
        comm: communicator of one rank; default COMM_WORLD.

    Raises:
        LayoutError: the communicator has several ranks.
        DeviceError: there is no such device.
    """

    def __init__(self, device: str | None = None, comm: MPI.Intracomm | None = None) -> None:
        super().__init__(assemble(ONE_DEVICE, comm, default_devices(0, 1)[:1] if device is None else (device,)))
