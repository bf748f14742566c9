"""What a step is made of, one by one: the constants from which `mpistrat plan` predicts steps on other layouts.

A step begins when each rank has just written its gradients, as a backward pass does, so that they lie in its core's caches
or in memory, and ends when all have the new weights. All constants are steps, of strategies of one rank, of two, or of all,
less the same on few parameters. They are taken on parts of several sizes, as caches hold small ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .._util import loops
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

ALONE = "update of 1 M parameters, 1 gradient, by one rank on all cores"
TOGETHER = "update of 1 M parameters, 1 gradient, by each rank, all at once"
GRADIENT = "each gradient more, of another rank, all at once"
FIXED = "a step on 1,024 parameters"
STEP = "a step"
PING = "8 bytes to a node and from one"
MILLION = 1_000_000
# Parameters for each core: close to each other, as where the caches end a few times more take many times as long.
PARTS = {
    "393 K": 3 << 17, "786 K": 3 << 18, "1.6 M": 3 << 19, "3.1 M": 3 << 20, "6.3 M": 3 << 21, "12.6 M": 3 << 22, "25 M": 3 << 23,
}  # fmt: skip
CROWDED = {"262 K": 1 << 18, "1 M": 1 << 20, "4.2 M": 1 << 22}  # of each rank, of more ranks than cores
NETWORK_PART = {"2.1 M": 1 << 21}  # of those of several nodes: then rounds of messages follow each other for long
COLUMNS = ("a rank", "least", "most")  # the median, and quartiles
_COPIES = 6  # of a part, that a rank holds
_SMALL = 1024
_TAG = 7

MakeStrategy = Callable[[], Any]


def name_of(what: str, part: str) -> str:
    """Return the name of a constant on parts of a size."""
    return f"{what}; parts of {part}"


def measure(setting: Setting) -> Result:
    """Return the seconds of each constant. Collective."""
    strategy = MultiWorkerMirroredStrategy(comm=setting.comm)
    group, comm, seconds = strategy.extended.process_group, strategy.comm, setting.budget(0.8)
    topology = group.topology
    found: dict[str, Spread] = {}
    crowded = max(topology.ranks_per_node) > topology.node_cores
    if crowded:
        for label, size in _fitting(setting, CROWDED).items():
            count = size * max(topology.ranks_per_node)
            found[name_of(STEP, label)] = step_seconds(strategy, count, 3 * seconds)
    else:
        found |= _sum_and_update(comm, group.node.rank, _fitting(setting, PARTS), seconds)
    found[FIXED] = step_seconds(strategy, _SMALL, seconds)
    if group.num_nodes > 1:
        inter = group.inter  # None on ranks that own nothing, where nodes have unequal numbers
        found[PING] = spread(comm, _ping(inter), seconds)
        for label, size in NETWORK_PART.items():
            found[name_of(STEP, label)] = step_seconds(strategy, size * max(topology.ranks_per_node), 3 * seconds)
    strategy.close()
    return Result(
        title="What a step is made of",
        unit="seconds",
        first_column="what",
        values={name: dict(zip(COLUMNS, each, strict=True)) for name, each in found.items()},
        note="mpistrat plan takes these, from files of --json, and predicts steps on other layouts.",
    )


def step_seconds(strategy: Any, count: int, seconds: float) -> Spread:
    """Return the seconds of a step on so many parameters, whose gradients all ranks have just written. Collective."""
    write, step = written_and_taken(strategy, count)
    return spread(strategy.comm, step, seconds, before=write)


def _fitting(setting: Setting, parts: dict[str, int]) -> dict[str, int]:
    """Return the sizes of parts for which a rank has the memory, at least the smallest; with `quick` that one."""
    fitting = [label for label, size in parts.items() if 4 * _COPIES * size <= setting.memory]
    return {label: parts[label] for label in list(parts)[: 1 if setting.quick else max(len(fitting), 1)]}


def _sum_and_update(comm: Any, local_rank: int, parts: dict[str, int], seconds: float) -> dict[str, Spread]:
    """Return the seconds of a million parameters by part: of one rank of each node, of all, of a gradient more. Collective."""
    from mpi4py import MPI

    own = loops.threads()
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    pairs = node.Split(
        local_rank // 2
    )  # each as if it were a node: the gradients of all ranks of a node may be too many
    replicas = ["cpu:0"] if node.size > 1 else ["cpu:0", "cpu:1"]

    def of_itself() -> Any:
        return MultiWorkerMirroredStrategy(comm=MPI.COMM_SELF)

    def of_a_pair() -> Any:
        return MultiWorkerMirroredStrategy(comm=pairs, devices=replicas)

    one = _costs(comm, of_itself, own, parts, seconds)
    alone = one
    if comm.allreduce(node.size) > comm.size:  # else each has its node alone
        alone = _costs(comm, of_itself if local_rank == 0 else None, 0, parts, seconds)
    two = _costs(comm, of_a_pair, own, parts, seconds)
    pairs.Free()
    node.Free()
    loops.set_threads(own)
    found: dict[str, Spread] = {}
    for label in parts:
        found[name_of(ALONE, label)], found[name_of(TOGETHER, label)] = alone[label], one[label]
        found[name_of(GRADIENT, label)] = _difference(two[label], one[label])
    return found


def _costs(
    comm: Any, make: MakeStrategy | None, threads: int, parts: dict[str, int], seconds: float
) -> dict[str, Spread]:
    """Return the seconds of a million parameters of a rank by part: of a step, less one on few parameters. Collective.

    Args:
        comm: all ranks.
        make: a strategy, whose collectives are not those of `comm`; None where this rank leaves its core to others.
        threads: of the loops of this rank, which has a part for each; 0 for those that the strategy sets, and leaves others idle.
        parts: their sizes, by label.
        seconds: of each measurement.
    """
    strategy = None if make is None else make()
    if threads:
        loops.set_threads(threads)
    ranks = 1 if strategy is None else strategy.extended.process_group.topology.size
    found = {}
    for label, size in {"": 0, **parts}.items():
        count = size * loops.threads() * ranks or _SMALL
        write, step = (None, None) if strategy is None else written_and_taken(strategy, count)
        found[label] = spread(comm, step, seconds, before=write, everyone=threads > 0)
        if label:
            million = [max(each - found[""][0], 0.0) / count * ranks * MILLION for each in found[label]]
            found[label] = million[0], million[1], million[2]
    if strategy is not None:
        strategy.close()
    return found


def _difference(more: Spread, less: Spread) -> Spread:
    """Return how much longer the first takes; with what is quick of the second comes what is quick of the first."""
    median, least, most = (max(long - short, 0.0) for long, short in zip(more, less, strict=True))
    return median, min(least, median), max(most, median)


def _ping(inter: Any) -> Operation:
    """Return what sends eight bytes to the next node, and receives as many from the one before."""
    given, taken = np.zeros(8, np.uint8), np.empty(8, np.uint8)

    def exchange() -> None:
        if inter is not None:
            after, before = (inter.rank + 1) % inter.size, (inter.rank - 1) % inter.size
            inter.Sendrecv(given, after, _TAG, taken, before, _TAG)

    return exchange
