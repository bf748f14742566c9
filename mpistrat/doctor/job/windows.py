"""Windows: memory that other ranks write and read, within each node and between nodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter, sleep
from typing import Any

import numpy as np

from ...bench.measure import pair
from ...cluster.topology import Topology
from ...comm.window import RemoteWindow, SharedWindow, Window
from .collectives import pattern
from .trial import Trial

__all__ = ["run"]

_SIZES = {"8 B": 8, "4 KB": 1 << 12, "64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24}  # bytes
_HEAD = 64  # bytes before the data; the first are a counter
_SECONDS = 0.4
_CALLS = 16  # of each operation, at least
_WHAT = "the doctor's trial"


def run(trial: Trial) -> None:
    """Check and measure windows: put, get, counters. Collective."""
    topology, room = trial.topology, _HEAD + max(_SIZES.values())
    if topology.intra is not None:
        trial.part("memory of a node")
        shared = SharedWindow(topology.intra, topology.comm, [room] * topology.intra.size, _WHAT)
        _try(trial, "on a node", shared, topology.intra, (topology.intra.rank + 1) % topology.intra.size)
    if topology.num_nodes > 1:
        trial.part("a window between nodes")
        window = RemoteWindow.allocate(topology.comm, room, _WHAT)
        _try(trial, "between nodes", window, topology.comm, _on_another_node(topology))


def _on_another_node(topology: Topology) -> int:
    """Return the rank whose memory this rank alone writes, on another node.

    In the order of nodes the distance is the size of the largest node. If that node has more than half of all ranks, some of
    them get one on their own node.
    """
    ordered = [rank for node in range(topology.num_nodes) for rank in topology.ranks_of_node(node)]
    return ordered[(ordered.index(topology.rank) + max(topology.ranks_per_node)) % topology.size]


def _try(trial: Trial, where: str, window: Window, comm: Any, neighbour: int) -> None:
    """Put to a rank, read it back, and count together with all. Collective.

    Args:
        trial: for reports.
        where: for reports.
        window: of the ranks of `comm`; it is closed.
        comm: the ranks that have the window.
        neighbour: the rank in `comm` whose memory only this rank writes and reads.
    """
    world, size = trial.comm, comm.size
    for label, nbytes in _SIZES.items():
        sent = np.resize(pattern(comm.rank, min(nbytes, 1 << 12)).astype(np.uint8), nbytes)
        found = np.zeros_like(sent)
        calls: dict[str, Callable[[], None]] = {
            "put": partial(window.put, neighbour, [(_HEAD, sent)]),
            "get": partial(window.get, neighbour, _HEAD, found),
        }
        trial.part(f"put and get {where}, {label}")
        start = perf_counter()
        for call in calls.values():
            call()
        trial.same(f"put and get {where}, {label}", found, sent)
        world.Barrier()
        if trial.has_time(_CALLS * (perf_counter() - start)):
            for name, seconds in pair(world, calls, repetitions=200, seconds=_SECONDS).items():
                trial.number(f"{where} {label}", name, seconds, "seconds")
    trial.part(f"counter {where}")
    before = window.fetch_and_add(0, 0, comm.rank + 1)
    trial.same(f"counter {where}, before", before < size * (size + 1) // 2, True)
    world.Barrier()
    total = size * (size + 1) // 2
    for when in ("", ", a second later"):  # shows whether an addition is lost or late
        found_total = window.get_word(0, 0)
        trial.same(f"counter {where}{when}", found_total, total)
        if found_total == total:
            break
        sleep(1)
    world.Barrier()
    adds = {"fetch and add": lambda: window.fetch_and_add(0, 0, 1)}
    for name, seconds in pair(world, adds, repetitions=200, seconds=_SECONDS).items():
        trial.number(f"{where} counter of rank 0", name, seconds, "seconds")
    window.close()
