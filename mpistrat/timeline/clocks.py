"""One clock for all ranks: how far a node's monotonic clock is from that of rank 0's node."""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from ..comm.process_group import ProcessGroup

__all__ = ["Offset", "clock_offset"]

_JOURNEYS = 20  # of a message, of which the quickest counts
_TAG = 7301


class Offset(NamedTuple):
    """What to add to this rank's clock.

    Attributes:
        ns: nanoseconds.
        doubt: by how many it may be wrong.
    """

    ns: int
    doubt: int


def clock_offset(group: ProcessGroup) -> Offset:
    """Return what to add to this rank's monotonic clock for that of rank 0. Collective; inside `collective()`.

    The ranks of a node have one clock. Between nodes the first rank of each asks one that knows already, in as many rounds as the
    number of nodes has binary digits; half of a journey's time is its doubt, and doubts add up.

    Source: F. Cristian, Probabilistic clock synchronization, Distributed Computing 3 (1989).
    """
    topology = group.topology
    found = np.zeros(2, np.int64)
    if topology.num_nodes > 1:
        if topology.local_rank == 0:
            found[:] = _ask(topology.inter, topology.node_index, topology.num_nodes)
        assert topology.intra is not None
        topology.intra.Bcast(found)
    return Offset(int(found[0]), int(found[1]))


def _ask(comm: object, node: int, nodes: int) -> tuple[int, int]:
    mine, theirs = np.zeros(3, np.int64), np.zeros(3, np.int64)  # a time, an offset, a doubt
    ns, doubt, known = 0, 0, 1
    while known < nodes:
        if node < known and node + known < nodes:
            for _ in range(_JOURNEYS):
                comm.Recv(theirs, node + known, _TAG)  # type: ignore[attr-defined]
                mine[:] = perf_counter_ns(), ns, doubt
                comm.Send(mine, node + known, _TAG)  # type: ignore[attr-defined]
        elif known <= node < 2 * known:
            quickest = None
            for _ in range(_JOURNEYS):
                before = perf_counter_ns()
                comm.Send(mine, node - known, _TAG)  # type: ignore[attr-defined]
                comm.Recv(theirs, node - known, _TAG)  # type: ignore[attr-defined]
                after = perf_counter_ns()
                if quickest is None or after - before < quickest:
                    quickest = after - before
                    ns = int(theirs[0]) - (before + after) // 2 + int(theirs[1])
                    doubt = (after - before) // 2 + int(theirs[2])
        known *= 2
    return ns, doubt
