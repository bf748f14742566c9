"""Layouts of the ranks over nodes, made on one machine."""

from __future__ import annotations

import os
from typing import Any

from mpi4py import MPI

from mpistrat.cluster.topology import Topology

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
HOSTS = int(os.environ.get("NETS_HOSTS", "1"))  # real ones, that the ranks are on


def nodes_of(layout: str) -> list[int]:
    """Return the node of each rank: one for all ("shared"), each its own ("private"), or two that are made up.

    Where the ranks are on several real hosts, their nodes are the hosts, in blocks of ranks; also of "private" ones each its own.
    """
    if SIZE == 1 or (layout == "shared" and HOSTS == 1):
        return [0] * SIZE
    if layout == "private":
        return list(range(SIZE))
    if HOSTS > 1:
        return [rank * HOSTS // SIZE for rank in range(SIZE)]
    return [rank * 2 // SIZE if SIZE != 3 else rank // 2 for rank in range(SIZE)]


_CREATE = Topology.create


def made_up_nodes(comm: Any = None, devices: Any = None, function: str = "", replicas: int | None = None) -> Topology:
    """Return a topology that takes the ranks of this machine for those of two nodes. Collective."""
    own = (comm or WORLD).Dup()
    own.Set_errhandler(MPI.ERRORS_RETURN)
    found = own.allgather(nodes_of("made up")[RANK])  # of a part of the ranks, too
    order = list(dict.fromkeys(found))
    node_of = [order.index(node) for node in found]
    intra = own.Split(node_of[own.rank], key=own.rank)
    slices = min(node_of.count(node) for node in set(node_of))
    inter = MPI.COMM_NULL
    if len(order) > 1:
        inter = own.Split(intra.rank if intra.rank < slices else MPI.UNDEFINED, key=node_of[own.rank])
    if replicas is not None:
        devices = [f"cpu:{i}" for i in range(block(replicas, own.size, own.rank))]
    devices = devices or ["cpu:0"]
    devices = [devices] if isinstance(devices, str) else list(devices)
    counts = own.allgather(len(devices))
    inter = None if inter == MPI.COMM_NULL else inter
    return Topology(own.rank, node_of, counts, devices, comm=own, intra=intra, inter=inter)


def set_layout(layout: str) -> None:
    """Let strategies that are made from now on see this layout."""
    os.environ["MPISTRAT_SHARED_MEMORY"] = "0" if layout == "private" else "1"
    Topology.create = made_up_nodes if layout == "made up" and SIZE > 1 and HOSTS == 1 else _CREATE


def block(total: int, parts: int, index: int) -> int:
    """Return the size of part `index` when `total` things are divided into nearly equal parts, larger ones first."""
    return total // parts + (index < total % parts)
