"""Messages of a group that no rank has received when the group is freed.

MPI gives a freed communicator's number, and its messages, to a later one (seen with MPICH 5.0.2): a receive in a new group would
take a message of an old one.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol, final

import numpy as np

from ...comm.process_group import ProcessGroup

__all__ = ["Moving", "Unreceived"]

_FEW = 16  # transfers up to which ended ones are not removed
_PAUSE = 1e-4  # seconds


class Moving(Protocol):
    """A message that is being transferred.

    Attributes:
        over: True once MPI no longer uses its memory.
    """

    over: bool

    def ended(self) -> bool:
        """Move the message; return True if MPI does not use its memory, or no longer does."""


@final
class Unreceived:
    """An attachment of a group that receives such messages before the group's communicator is freed.

    Args:
        ranks: the group.

    Attributes:
        sent: True if this rank has sent messages; set by the sender.
    """

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks, self.sent = ranks, False
        self._moving: list[Moving] = []
        self._most, self._lock = _FEW, threading.Lock()
        ranks.attach(self)

    def keep(self, transfer: Moving) -> None:
        """Keep a transfer, whose memory MPI reads or writes, until it has ended or the group is freed."""
        with self._lock:
            self._moving.append(transfer)
            if len(self._moving) > self._most:
                self._moving = [each for each in self._moving if not each.over]
                self._most = 2 * len(self._moving) + _FEW

    def close(self) -> None:
        """Receive pending messages. Collective; if no rank has sent any, ranks exchange nothing else."""
        from mpi4py import MPI

        if not self._ranks.agree(int(self.sent), "max"):
            return
        comm, status = self._ranks.topology.comm, MPI.Status()
        last = comm.Get_attr(MPI.TAG_UB) - 2
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        requests = [comm.Isend([b"", MPI.BYTE], rank, last) for rank in others]
        for rank in others:
            while True:  # messages of a rank are found in the order of sending
                message = comm.Mprobe(rank, MPI.ANY_TAG, status)
                message.Recv([np.empty(status.Get_count(MPI.BYTE), np.uint8), MPI.BYTE])
                if status.Get_tag() == last:
                    break
        MPI.Request.Waitall(requests)
        for transfer in self._moving:
            while not transfer.ended():
                time.sleep(_PAUSE)
        self._moving.clear()

    def leave(self) -> None:
        """Leave the messages to MPI's end."""

    def abandon(self) -> None:
        """Leave the messages: the communicator is not freed."""
