"""Strategies to test with: in one process without MPI, and every strategy on every layout of ranks and devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mpistrat as ms
from mpistrat.base.environment import Environment
from mpistrat.cluster import Topology
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.cross_device.auto import AutoAllReduce

# The one line that a new strategy adds: its name, and how to make it with these devices on each rank.
STRATEGIES: dict[str, Callable[[Sequence[str]], Any]] = {
    "one_device": lambda devices: ms.OneDeviceStrategy(devices[0]),
    "mirrored": lambda devices: ms.MirroredStrategy(devices),
    "multi_worker_mirrored": lambda devices: ms.MultiWorkerMirroredStrategy(devices=devices),
    "central_storage": lambda devices: ms.CentralStorageStrategy(devices),
    "mesh": lambda devices: ms.MeshStrategy({"data": -1}),
}

# How many devices, hence replicas, a rank has.
DEVICES: dict[str, Callable[[int], int]] = {
    "1": lambda rank: 1,
    "2": lambda rank: 2,
    "uneven": lambda rank: 1 + rank % 2,
}


def layout_for(name: str, ranks: int) -> str | None:
    """On which devices to test a strategy with so many ranks: over all numbers of ranks each meets all. None: on none."""
    if name == "mesh":  # of whose replicas several ranks may have a part, but none several
        return "1"
    if ranks == 1:
        return {"one_device": "1", "multi_worker_mirrored": "1"}.get(name, "2")
    if name == "one_device":
        return None
    return list(DEVICES)[-(list(STRATEGIES).index(name) + ranks) % len(DEVICES)]


def devices_of(devices: str, rank: int) -> list[str]:
    return [f"cpu:{index}" for index in range(DEVICES[devices](rank))]


@contextlib.contextmanager
def made(name: str, devices: str = "1") -> Iterator[Any]:
    """A strategy on all ranks, closed at the end."""
    from mpi4py import MPI

    with STRATEGIES[name](devices_of(devices, MPI.COMM_WORLD.rank)) as strategy:
        yield strategy


def without_mpi(replicas: int = 1) -> ms.Strategy:
    """A strategy of this process alone, with so many replicas."""
    group = ProcessGroup(Topology.single([f"cpu:{index}" for index in range(replicas)]), Environment())
    ops = AutoAllReduce()
    ops.bind(group)
    strategy = object.__new__(ms.Strategy)
    ms.Strategy.__init__(strategy, ms.StrategyExtended(strategy, group, ops))
    return strategy
