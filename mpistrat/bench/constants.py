"""What a step is made of, one by one: the constants from which `mpistrat plan` predicts steps on other layouts.

Sum and update are steps of a strategy of one rank and one or two replicas, less the same step on few parameters: what a rank
does to its part, whatever loops that takes. They are measured on parts of several sizes, as caches hold small ones.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np

from .._util import loops
from ..cross_device.arena import NETWORK_CHUNK
from ..strategy import MultiWorkerMirroredStrategy
from .measure import Operation, meet
from .result import Result, Setting
from .training_step import ours

__all__ = [
    "CHUNK_BYTES",
    "COLUMNS",
    "EXCHANGE",
    "FIXED",
    "GRADIENT",
    "MILLION",
    "PARTS",
    "PING",
    "UPDATE",
    "measure",
    "name_of",
]

UPDATE, GRADIENT = "sum and update of 1 M parameters, 1 gradient", "each gradient more"
FIXED = "a step on 1,024 parameters"
PING = "8 bytes to a node and from one"
EXCHANGE = "1 MiB to a node and from one, all ranks at once"
CHUNK_BYTES = NETWORK_CHUNK
MILLION = 1_000_000
PARTS = {"262 K": 1 << 18, "1 M": 1 << 20, "4.2 M": 1 << 22}  # parameters of a rank's part
COLUMNS = ("a rank", "least", "most")  # the median, and quartiles
_COPIES = 6  # of a part, that a rank holds
_SMALL = 1024
_TAG = 7

Spread = tuple[float, float, float]


def name_of(what: str, part: str, together: bool) -> str:
    """Return the name of `UPDATE` or `GRADIENT` on parts of a size, of one rank of a node alone or of all."""
    return f"{what}; parts of {part}, {'all ranks' if together else 'one rank'}"


def measure(setting: Setting) -> Result:
    """Return the seconds of each constant. Collective."""
    strategy = MultiWorkerMirroredStrategy(comm=setting.comm)
    group, comm, seconds = strategy.extended.process_group, strategy.comm, setting.budget(0.8)
    found: dict[str, Spread] = {}
    parts = {label: size for label, size in PARTS.items() if 4 * _COPIES * size <= setting.memory} or {"262 K": 1 << 18}
    for label, size in list(parts.items())[: 1 if setting.quick else None]:
        for together in (False, True):
            found |= _sum_and_update(comm, label, size, together or group.node.rank == 0, together, seconds)
    found[FIXED] = _times(comm, ours(strategy, _SMALL), seconds)
    if group.num_nodes > 1:
        inter = group.inter  # None on ranks that own nothing, where nodes have unequal numbers
        operations = {PING: _exchanging(inter, 8), EXCHANGE: _exchanging(inter, CHUNK_BYTES)}
        found |= {name: _times(comm, operation, seconds) for name, operation in operations.items()}
    strategy.close()
    return Result(
        title="What a step is made of",
        unit="seconds",
        first_column="what",
        values={name: dict(zip(COLUMNS, spread, strict=True)) for name, spread in found.items()},
        note="mpistrat plan takes these, from files of --json, and predicts steps on other layouts.",
    )


def _sum_and_update(
    comm: Any, label: str, size: int, takes_part: bool, together: bool, seconds: float
) -> dict[str, Spread]:
    """Return the seconds of a million parameters of a part, and of each gradient more. Collective."""
    from mpi4py import MPI

    times: dict[int, Spread] = {}
    for replicas in (1, 2):
        own = None
        if takes_part:
            threads = loops.threads()
            own = MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF, devices=[f"cpu:{i}" for i in range(replicas)])
            loops.set_threads(threads)  # those of this rank among all, not of one that has all cores
        spreads = []
        for count in (size, _SMALL):
            operation = None if own is None else ours(own, count)
            spreads.append(_times(comm, operation, seconds, everyone=together))
        if own is not None:
            own.close()
        times[replicas] = _of_million(spreads[0], spreads[1][0], size)
    more = max(times[2][0] - times[1][0], 0.0)
    width = max(times[2][2] - times[2][1], times[1][2] - times[1][1]) / 2
    found = {UPDATE: times[1], GRADIENT: (more, max(more - width, 0.0), more + width)}
    return {name_of(what, label, together): spread for what, spread in found.items()}


def _of_million(spread: Spread, fixed: float, size: int) -> Spread:
    median, least, most = (max(value - fixed, 0.0) / size * MILLION for value in spread)
    return median, least, most


def _exchanging(inter: Any, nbytes: int) -> Operation:
    """Return what sends to the next node, and receives from the one before: both directions are busy."""
    given, taken = np.zeros(nbytes, np.uint8), np.empty(nbytes, np.uint8)

    def exchange() -> None:
        if inter is not None:
            after, before = (inter.rank + 1) % inter.size, (inter.rank - 1) % inter.size
            inter.Sendrecv(given, after, _TAG, taken, before, _TAG)

    return exchange


def _times(comm: Any, operation: Operation | None, seconds: float, everyone: bool = True) -> Spread:
    """Return the median, and the quartiles, of the seconds of an operation on the slowest rank. Collective.

    Args:
        comm: all ranks.
        operation: what this rank does; None where it only waits.
        seconds: for all repetitions; at least five are made.
        everyone: whether all ranks do something; else those that wait leave their cores to others.
    """
    from mpi4py import MPI

    times: list[float] = []
    start, go_on, worst = time.perf_counter(), np.ones(1, np.int32), np.empty(1)
    while go_on[0]:
        for timed in (False, True):  # once before, for the caches
            if everyone:
                comm.Barrier()
            else:
                meet(comm)
            before = time.perf_counter()
            if operation is not None:
                operation()
            if timed:
                mine = np.array([time.perf_counter() - before if operation is not None else 0.0])
        if not everyone:
            meet(comm)
        comm.Allreduce(mine, worst, op=MPI.MAX)
        times.append(float(worst[0]))
        go_on[0] = len(times) < 5 or (time.perf_counter() - start < seconds and len(times) < 1000)
        comm.Bcast(go_on, root=0)
    least, median, most = statistics.quantiles(times, n=4)
    return median, least, most
