"""torch's monitored barrier: rank 0 receives messages, names the missing ranks, and answers the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...base.waiting import Deadline, wait_until
from ...comm.process_group import ProcessGroup

__all__ = ["monitored_barrier"]

_GRACE = 5.0  # seconds after the time limit in which rank 0, which knows more, may raise first
_abandoned: list[Any] = []  # requests that never ended, and the memory that MPI may still use


def monitored_barrier(ranks: ProcessGroup, number: int, seconds: float, wait_all_ranks: bool) -> None:
    """Wait until all ranks arrive. Collective. After an error the group remains usable.

    Args:
        ranks: the group.
        number: of this barrier in the group: a late rank has sent an old one.
        seconds: the time limit of rank 0.
        wait_all_ranks: True if rank 0 waits for all, and names all missing ranks, not the first.

    Raises:
        RuntimeError: on every rank that has arrived, if one has not.
    """
    from mpi4py import MPI

    rank, comm = ranks.topology.rank, ranks.topology.comm
    if comm is None:
        return
    most = comm.Get_attr(MPI.TAG_UB)  # programs take small tags
    if rank:
        _send(comm, 0, most - 1, number, False)
        failed = _receive(comm, 0, most, number, seconds + _GRACE)
        if failed is None:
            text = f"Rank {rank} failed to pass monitoredBarrier in {seconds * 1e3:.0f} ms: rank 0 did not answer"
            raise RuntimeError(text)
        if failed:
            raise RuntimeError(
                f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv from"
                " rank 0, which names the missing ranks"
            )
        return
    if seconds == 0:
        raise RuntimeError("[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms")
    deadline, missing = Deadline(seconds), list[int]()
    for other in range(1, ranks.topology.size):
        if _receive(comm, other, most - 1, number, max(deadline.left, 1e-3)) is None:
            missing.append(other)
            if not wait_all_ranks:
                break
    for other in range(1, ranks.topology.size):
        _send(comm, other, most, number, bool(missing))
    if missing:
        who = f"Ranks {', '.join(map(str, missing))}" if wait_all_ranks else f"Rank {missing[0]}"
        raise RuntimeError(f"[Rank 0]: {who} failed to pass monitoredBarrier in {seconds * 1e3:.0f} ms")


def _send(comm: Any, target: int, tag: int, number: int, failed: bool) -> None:
    note = np.array([number, failed], np.int64)
    request = comm.Isend(note, target, tag)
    if not request.Test():
        _abandoned.append((request, note))


def _receive(comm: Any, source: int, tag: int, number: int, seconds: float) -> bool | None:
    """Return a rank's message for this barrier: True if it failed; None if nothing arrived in time."""
    deadline, note = Deadline(seconds), np.zeros(2, np.int64)
    while wait_until(lambda: comm.Iprobe(source, tag), deadline.left):
        comm.Recv(note, source, tag)
        if note[0] >= number:
            return bool(note[1])
    return None
