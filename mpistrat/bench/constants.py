"""The constants of a step, from which `mpistrat plan` predicts steps on other layouts.

A step starts when each rank has just written its gradients, so that they are in its core's caches or in memory, and ends when
all have the new weights. Constants are times of steps, on one rank, on two, or on all, minus those on few parameters. They
are measured for several sizes per core, since small ones fit into caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..base import loops
from ..strategy import MultiWorkerMirroredStrategy
from .measure import Operation, Spread, spread
from .result import Result, Setting
from .training_step import written_and_taken

__all__ = [
    "ALONE",
    "COLUMNS",
    "CROWDED",
    "FIXED",
    "GRADIENT",
    "MILLION",
    "NETWORK_PART",
    "PARTS",
    "PING",
    "STEP",
    "TOGETHER",
    "measure",
    "name_of",
    "step_seconds",
]

ALONE = "sum and update of 1 M parameters by one rank on all cores"
TOGETHER = "sum and update of 1 M parameters by each rank, all at once, in pairs that share them"
GRADIENT = "each gradient more, all at once"
FIXED = "a step on 1,024 parameters"
STEP = "a step"
PING = "8 bytes to a node and from one"
MILLION = 1_000_000
# Parameters per core, in small steps: just above the size of the caches, slightly more parameters take much longer.
PARTS = {
    "393 K": 3 << 17, "786 K": 3 << 18, "1.6 M": 3 << 19, "3.1 M": 3 << 20, "6.3 M": 3 << 21, "12.6 M": 3 << 22, "25 M": 3 << 23,
}  # fmt: skip
CROWDED = {"262 K": 1 << 18, "1 M": 1 << 20, "4.2 M": 1 << 22}  # of each rank, with more ranks than cores
NETWORK_PART = {"2.1 M": 1 << 21}  # per core, on several nodes: then there are many rounds of messages
COLUMNS = ("a rank", "least", "most")  # the median, and quartiles
_COPIES = 8  # of the parameters, in a rank's memory
_SMALL = 1024
_TAG = 7

MakeStrategy = Callable[[], Any]


def name_of(what: str, part: str) -> str:
    """Return the name of a constant for a size."""
    return f"{what}; parts of {part}"


def measure(setting: Setting) -> Result:
    """Return the seconds of each constant. Collective."""
    strategy = MultiWorkerMirroredStrategy(comm=setting.comm)
    group, comm, seconds = strategy.extended.process_group, strategy.comm, setting.budget(0.8)
    topology = group.topology
    found: dict[str, Spread] = {}
    steps = {"": _SMALL}
    if max(topology.ranks_per_node) > topology.node_cores:
        steps |= _fitting(setting, CROWDED)
    else:
        found |= _sum_and_update(comm, group.node.rank, _fitting(setting, PARTS), seconds)
    if group.num_nodes > 1:
        found[PING] = spread(comm, _ping(group.inter), seconds)
        steps |= NETWORK_PART
    for label, size in steps.items():
        count = size * max(topology.ranks_per_node) if label else size
        name = name_of(STEP, label) if label else FIXED
        found[name] = step_seconds(comm, count, 3 * seconds if label else seconds)
    strategy.close()
    return Result(
        title="What a step is made of",
        unit="seconds",
        first_column="what",
        values={name: dict(zip(COLUMNS, each, strict=True)) for name, each in found.items()},
        note="mpistrat plan takes these, from files of --json, and predicts steps on other layouts.",
    )


def step_seconds(comm: Any, count: int, seconds: float) -> Spread:
    """Return the seconds of a step on `count` parameters, whose gradients all ranks have just written. Collective."""
    strategy = MultiWorkerMirroredStrategy(comm=comm)
    write, step = written_and_taken(strategy, count)
    found = spread(strategy.comm, step, seconds, before=write)
    strategy.close()
    return found


def _fitting(setting: Setting, parts: dict[str, int]) -> dict[str, int]:
    """Return the sizes that fit into a rank's memory, at least the smallest; with `quick` only that one."""
    fitting = [label for label, size in parts.items() if 4 * _COPIES * size <= setting.memory]
    return {label: parts[label] for label in list(parts)[: 1 if setting.quick else max(len(fitting), 1)]}


def _sum_and_update(comm: Any, local_rank: int, parts: dict[str, int], seconds: float) -> dict[str, Spread]:
    """Return the seconds per million parameters by size: of one rank per node, of all, of a further gradient. Collective."""
    from mpi4py import MPI

    own = loops.threads()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    # Each pair as if it were a node: the gradients of all ranks of a node may be too many.
    pairs = node.Split(local_rank // 2)

    def alone() -> Any:
        return MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF)

    def in_pairs(replicas: int) -> MakeStrategy:
        return lambda: MultiWorkerMirroredStrategy(comm=pairs, devices=[f"cpu:{i}" for i in range(replicas)])

    found: dict[str, Spread] = {}
    for what, make, threads in (
        (ALONE, alone if local_rank == 0 else None, 0),
        (TOGETHER, in_pairs(1), own),
        (GRADIENT, in_pairs(2), own),
    ):
        small = _step_of_part(comm, make, threads, 0, seconds)[0][0]
        for label, size in parts.items():
            step, count = _step_of_part(comm, make, threads, size, seconds)
            median, least, most = (max(each - small, 0.0) / count * MILLION for each in step)
            found[name_of(what, label)] = median, least, most
            if what == GRADIENT:  # each rank of a pair has one more
                less = found[name_of(TOGETHER, label)]
                found[name_of(what, label)] = _difference((median, least, most), less, pairs.size)
    pairs.Free()
    node.Free()
    loops.set_threads(own)
    return found


def _step_of_part(comm: Any, make: MakeStrategy | None, threads: int, size: int, seconds: float) -> tuple[Spread, int]:
    """Return the seconds of a step on `size` parameters per core, or on few for 0, and the parameters of each rank.
    Collective.

    Args:
        comm: all ranks.
        make: a strategy with other collectives than `comm`; None if this rank leaves its core to others. One for each size:
            other contents of an arena change its division over ranks.
        threads: of the loops of each rank; 0 for those that the strategy sets, if the other ranks of a node are idle.
        size: parameters per core.
        seconds: for all repetitions.
    """
    strategy = None if make is None else make()
    if threads:
        loops.set_threads(threads)
    write, step, count = None, None, size * loops.threads() or _SMALL
    if strategy is not None:
        write, step = written_and_taken(strategy, count * strategy.extended.process_group.topology.size)
    found = spread(comm, step, seconds if size else seconds / 4, before=write, everyone=threads > 0)
    if strategy is not None:
        strategy.close()
    return found, count


def _difference(more: Spread, less: Spread, count: int) -> Spread:
    """Return the difference per unit of `count`, of minima and of maxima."""
    median, least, most = (max(long - short, 0.0) / count for long, short in zip(more, less, strict=True))
    return median, min(least, median), max(most, median)


def _ping(inter: Any) -> Operation:
    """Return an exchange of eight bytes with the neighbouring nodes; without `inter` it does nothing."""
    given, taken = np.zeros(8, np.uint8), np.empty(8, np.uint8)

    def exchange() -> None:
        if inter is not None:
            after, before = (inter.rank + 1) % inter.size, (inter.rank - 1) % inter.size
            inter.Sendrecv(given, after, _TAG, taken, before, _TAG)

    return exchange
