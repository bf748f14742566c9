"""The clocks of the nodes, compared by messages that go there and back."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ..cluster.topology import Topology
from .finding import Finding, ok, warning

__all__ = ["check_clocks"]

_ROUNDS = 20
_LIMIT = 1.0  # seconds; programs that date files or leases misbehave beyond


def check_clocks(topology: Topology) -> Finding:
    """Return how far the ranks' clocks are from rank 0's. Collective.

    Of several messages to a rank and back the quickest counts: its clock was read in the middle of the journey, give or
    take half of it.
    """
    comm = topology.comm
    offsets = np.zeros(comm.size)
    doubts = np.zeros(comm.size)
    for rank in range(1, comm.size):
        if comm.rank == 0:
            offsets[rank], doubts[rank] = _ask(comm, rank)
        elif comm.rank == rank:
            _answer(comm)
    comm.Bcast(offsets)
    comm.Bcast(doubts)
    worst = int(np.argmax(np.abs(offsets)))
    if abs(offsets[worst]) - doubts[worst] > _LIMIT:
        what = f"the clock of rank {worst} is {offsets[worst]:+.1f} s from that of rank 0"
        return warning("clocks", what, "Ask the site to run NTP on that node: dates of files and lines of logs mislead")
    apart = float(np.max(np.abs(offsets) + doubts))
    return ok("clocks", f"within {max(apart * 1e3, 0.1):.1f} ms of that of rank 0")


def _ask(comm: Any, rank: int) -> tuple[float, float]:
    word = np.zeros(1)
    best = (0.0, np.inf)
    for _ in range(_ROUNDS):
        start = time.time()
        comm.Send(word, rank)
        comm.Recv(word, rank)
        end = time.time()
        if (end - start) / 2 < best[1]:
            best = float(word[0]) - (start + end) / 2, (end - start) / 2
    return best


def _answer(comm: Any) -> None:
    word = np.zeros(1)
    for _ in range(_ROUNDS):
        comm.Recv(word, 0)
        word[0] = time.time()
        comm.Send(word, 0)
