"""Time shares of each rank, and the ranks that others wait for, computed from the recorded events."""

from __future__ import annotations

from functools import partial
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from ..comm.process_group import ProcessGroup
from ..comm.recorder import RECORDER, Ring
from .trace import clock_offset, process_group_of

__all__ = ["RankTimes", "shares", "times"]

_LATE_NS = 100_000  # a rank is late if it comes more than that after the first
_MOST = 8192  # collectives compared, at most


class RankTimes(NamedTuple):
    """The time of one rank, as far as its recorder reaches back.

    Attributes:
        rank: its number.
        host: the name of its node.
        seconds: the recorded time.
        input: the share of `seconds` in the input, from 0 to 1, as all shares.
        compute: the share in `run`, outside of collectives.
        communication: the share in collectives, without waiting.
        waiting: the share in waiting for ranks of its node.
        saving: the share in saving.
        steps: calls of `run` in that time.
        last: collectives in which this rank came last, and more than 0.1 ms after the first.
        compared: collectives that all ranks have recorded.
        cost: seconds that the other ranks waited for this one, in total.
    """

    rank: int
    host: str
    seconds: float
    input: float
    compute: float
    communication: float
    waiting: float
    saving: float
    steps: int
    last: int
    compared: int
    cost: float


def times(strategy: Any = None, seconds: float | None = None) -> list[RankTimes]:
    """Return the time shares of each rank, and how long others waited for it, by rank. Collective.

    Args:
        strategy: a strategy, or a process group of torch.distributed; default the current strategy, or outside of scopes the
            default group.
        seconds: use the last n seconds; default all that is recorded.

    Example:
        >>> with ms.OneDeviceStrategy() as strategy:
        ...     for _ in range(3):
        ...         strategy.run(lambda: None)
        ...     found = ms.timeline.times(strategy)
        >>> found[0].rank, found[0].steps >= 3
        (0, True)
    """
    group = process_group_of(strategy, "timeline.times")
    return group.in_order("timeline.times", partial(_times, group, seconds))


def _times(group: ProcessGroup, seconds: float | None) -> list[RankTimes]:
    ring = RECORDER.ring()
    first = 0 if seconds is None else perf_counter_ns() - int(seconds * 1e9)
    own = shares(ring, first)
    with group.collective("timeline.times"):
        last, compared, cost = _lateness(group, ring, first)
        numbers = np.array([*own, last, compared, cost])
        table = numbers[None]
        if group.topology.size > 1:
            table = group.all_gather_int(numbers.view(np.int64).tolist()).view(np.float64)
        host = group.topology.hostname
        hosts = group.all_gather_text(host) if group.topology.size > 1 else [host]
    found = []
    for rank, row in enumerate(table):
        values: list[Any] = [*row[:6].tolist(), *row[6:9].astype(int).tolist(), float(row[9])]
        found.append(RankTimes(rank, hosts[rank], *values))
    return found


def shares(ring: Ring, first: int) -> tuple[float, ...]:
    """Return the recorded seconds since a moment, the shares of `RankTimes` in its order, and the steps."""
    now = perf_counter_ns()
    end = np.where(ring.end == 0, now, ring.end)
    kept = end > first
    if not kept.any():
        return (0.0,) * 7
    end, begin, waits = end[kept], np.maximum(ring.begin[kept], first), ring.waited[kept] * (ring.end[kept] != 0)
    kinds = np.array([ord(kind) for kind, _ in ring.names])[ring.name[kept]]
    whole = max(int(end.max()) - int(begin[0]), 1)

    def outermost(letters: str) -> np.ndarray:
        """Return the events of these kinds that lie in no other of them."""
        among = np.flatnonzero(np.isin(kinds, [ord(letter) for letter in letters]))
        before = np.maximum.accumulate(end[among])
        inside = np.r_[False, end[among][1:] <= before[:-1]] if len(among) else np.zeros(0, bool)
        return among[~inside]

    def seconds(rows: np.ndarray) -> float:
        return float((end[rows] - begin[rows]).sum())

    saves, inputs, runs = (outermost(letter) for letter in "sir")
    meetings = outermost("cp")
    inside = meetings[_within(begin, end, meetings, runs)]
    outside = meetings[~_within(begin, end, meetings, np.union1d(saves, inputs))]
    waited = float(np.minimum(waits, end - begin)[outside].clip(0).sum())
    return (
        whole / 1e9,
        seconds(inputs) / whole,
        max(seconds(runs) - seconds(inside), 0.0) / whole,
        max(seconds(outside) - waited, 0.0) / whole,
        waited / whole,
        seconds(saves) / whole,
        float(len(runs)),
    )


def _within(begin: np.ndarray, end: np.ndarray, rows: np.ndarray, around: np.ndarray) -> np.ndarray:
    """Return which events lie in one of others, which do not overlap."""
    if not len(around):
        return np.zeros(len(rows), bool)
    at = np.searchsorted(begin[around], begin[rows], side="right") - 1
    return (at >= 0) & (end[rows] <= end[around][at.clip(0)])


def _lateness(group: ProcessGroup, ring: Ring, since: int) -> tuple[int, int, float]:
    """Return in how many collectives this rank came last, of how many, and the others' cost in seconds. Collective."""
    topology = group.topology
    if topology.size == 1:
        return 0, 0, 0.0
    offset = clock_offset(group)
    ours = np.array([kind == "c" for kind, _ in ring.names])[ring.name]
    ours &= (ring.group == group.monitor.group) & (ring.begin >= since)
    begun = ring.begin[ours] + offset.ns
    known = dict(zip(ring.number[ours].tolist(), begun.tolist(), strict=True))
    table = group.all_gather_int([min(known, default=0), max(known, default=-1), offset.doubt])
    low, high = int(table[:, 0].max()), int(table[:, 1].min())
    low = max(low, high - _MOST)
    if high < low:
        return 0, 0, 0.0
    mine = np.array([known.get(number, 0) for number in range(low, high)], np.int64)  # without the current one
    latest, first, total = (np.empty_like(mine) for _ in range(3))
    from mpi4py import MPI

    missing = mine == 0
    zero = int(group.all_gather_int([int(mine[~missing].min()) if (~missing).any() else 0])[0, 0])
    mine = np.where(missing, 0, mine - zero)
    for out, operation in ((latest, MPI.MAX), (first, MPI.MIN), (total, MPI.SUM)):
        topology.comm.Allreduce(mine, out, operation)
    threshold = max(_LATE_NS, 2 * int(table[:, 2].max()))
    late = (latest - first > threshold) & (mine == latest) & ~missing
    cost = (topology.size * latest - total)[late].sum()
    return int(late.sum()), high - low, float(cost) / 1e9
