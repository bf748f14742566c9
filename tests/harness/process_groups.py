"""Process groups of several layouts on one machine, and gradient arenas, for the tests of CrossDeviceOps."""

from __future__ import annotations

import contextlib

import numpy as np

from mpistrat.base.distributed_values import PerReplica
from mpistrat.base.environment import Environment
from mpistrat.base.partition import aligned_bounds
from mpistrat.cluster.topology import Topology
from mpistrat.comm.process_group import ProcessGroup


def fake_nodes(comm, node_of, devices=("cpu:0",)):
    """A topology that takes the ranks of one machine for those of several nodes."""
    from mpi4py import MPI

    own = comm.Dup()
    own.Set_errhandler(MPI.ERRORS_RETURN)
    intra = own.Split(node_of[own.rank], key=own.rank)
    slices = min(node_of.count(node) for node in set(node_of))
    inter = None
    if len(set(node_of)) > 1:
        inter = own.Split(intra.rank if intra.rank < slices else MPI.UNDEFINED, key=node_of[own.rank])
        inter = None if inter == MPI.COMM_NULL else inter
    counts = own.allgather(len(devices))
    level = MPI.Query_thread()
    return Topology(own.rank, node_of, counts, devices, comm=own, intra=intra, inter=inter, thread_level=level)


def nodes_of(size, layout):
    """The node of each rank: with "private" memory each is one; else two are made up, of 3 ranks one of two and one of one."""
    if layout == "private":
        return list(range(size))
    return [rank * 2 // size if size != 3 else rank // 2 for rank in range(size)]


def set_layout(layout, monkeypatch):
    """Have strategies see several nodes on this machine, as `nodes_of` says."""
    if layout == "private":
        monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
        return

    def create(comm=None, **more):
        from mpi4py import MPI

        comm = comm or MPI.COMM_WORLD
        return fake_nodes(comm, nodes_of(comm.size, layout))

    monkeypatch.setattr(Topology, "create", create)


def make_topology(layout):
    """One of: "shared" memory of all ranks; "private"; two "nodes" made of one machine; several "devices" on some ranks.

    "nodes of devices" has both.
    """
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    devices = ["cpu:0", "cpu:1", "cpu:2"][: 2 - rank % 2 if size > 1 else 3] if "devices" in layout else ["cpu:0"]
    if "nodes" in layout:
        return fake_nodes(MPI.COMM_WORLD, nodes_of(size, layout), devices)
    return Topology.create(devices=devices)


@contextlib.contextmanager
def open_group(layout, **settings):
    """A group over all ranks in a layout of `make_topology`, closed at the end of the block."""
    settings = {"abort_after": 20.0, "shared_memory": layout != "private", **settings}
    with make_topology(layout) as topology:
        group = ProcessGroup.create(topology, Environment(**settings))
        try:
            yield group
        finally:
            group.close()


def local(group, of_replica):
    """PerReplica of what a function gives for the numbers of the local replicas."""
    topology = group.topology
    numbers = range(topology.replica_offset, topology.replica_offset + topology.num_local_replicas)
    return PerReplica([of_replica(number) for number in numbers])


class Gradients:
    """A gradient arena in the memory of a group's nodes."""

    def __init__(self, group, size, dtype):
        self.dtype, self.size, self.key = np.dtype(dtype), size, "test"
        self._group = group
        nbytes = size * self.dtype.itemsize
        segments = group.node.allocate([nbytes * n for n in group.replicas_of_node], "gradients").segments
        by_rank = [
            [segment[i * nbytes : (i + 1) * nbytes].view(self.dtype) for i in range(n)]
            for segment, n in zip(segments, group.replicas_of_node, strict=True)
        ]
        self.local = by_rank[group.node.rank]
        self.node = [flat for flats in by_rank for flat in flats] if group.node.shared else None

    def pieces(self, ranges):
        """Whether nodes own pieces of a slice: here each owns all."""

    def owned(self, ranges):
        if self._group.slice_index is None:
            return []
        low, high = aligned_bounds(self.size, self._group.slices, 16)[self._group.slice_index]
        parts = [(max(low, begin), min(high, end)) for begin, end in ranges]
        return [(begin, end) for begin, end in parts if begin < end]


class Variable:
    """What CrossDeviceOps see of a variable: where its gradient lies."""

    def __init__(self, gradients, offset, size):
        self.gradients, self.offset, self.size = gradients, offset, size
        self.arena = self

    def grad(self, local_replica):
        return self.arena.gradients.local[local_replica][self.offset : self.offset + self.size]
