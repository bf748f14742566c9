"""Messages of a group that no rank has received when the group is freed.

MPI gives the number of a freed communicator to a later one, and its messages with it (seen with MPICH 5.0.2): a receive in a new
group would take a message of an old one.
"""

from __future__ import annotations

from typing import final

import numpy as np

from ...comm.process_group import ProcessGroup

__all__ = ["Unreceived"]


@final
class Unreceived:
    """Receives such messages before the communicator of a group is freed. It is an attachment of the group.

    Args:
        ranks: the group.

    Attributes:
        sent: True if this rank has sent messages; the sender sets it.
    """

    def __init__(self, ranks: ProcessGroup) -> None:
        self._ranks, self.sent = ranks, False
        ranks.attach(self)

    def close(self) -> None:
        """Receive what no rank has received. Collective; where no rank has sent anything, nothing but that is exchanged."""
        from mpi4py import MPI

        if not self._ranks.agree(int(self.sent), "max"):
            return
        comm, status = self._ranks.topology.comm, MPI.Status()
        last = comm.Get_attr(MPI.TAG_UB) - 2
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        requests = [comm.Isend([b"", MPI.BYTE], rank, last) for rank in others]
        for rank in others:
            while True:  # messages of a rank are found in the order in which it sent them
                message = comm.Mprobe(rank, MPI.ANY_TAG, status)
                message.Recv([np.empty(status.Get_count(MPI.BYTE), np.uint8), MPI.BYTE])
                if status.Get_tag() == last:
                    break
        MPI.Request.Waitall(requests)

    def leave(self) -> None:
        """Leave the messages to MPI's end."""

    def abandon(self) -> None:
        """Leave the messages: the communicator is not freed."""
