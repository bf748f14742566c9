"""A strategy with its inner parts at hand, for tests of variables, and a communicator that pretends nodes."""

from __future__ import annotations

import os
from unittest import mock

import mpistrat as ms


class VariableHarness:
    """A strategy over all ranks, whose variables are shared by the ranks of a node or private."""

    def __init__(self, devices=("cpu:0",), *, comm=None, shared_memory=True):
        with mock.patch.dict(os.environ, MPISTRAT_SHARED_MEMORY=str(int(shared_memory))):
            self.strategy = ms.MultiWorkerMirroredStrategy(comm=comm, devices=devices)
        extended = self.strategy.extended
        self.topology, self.group, self.placement = extended.topology, extended.process_group, extended.placement
        self.run, self.scope, self.update = self.strategy.run, self.strategy.scope, extended.update

    def close(self):
        self.strategy.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()


def replica_id():
    return ms.get_replica_context().replica_id_in_sync_group


def pretend_nodes(MPI, node_of):
    """A communicator of the world whose shared-memory split gives these nodes."""

    class Pretended(MPI.Intracomm):
        def Split_type(self, split_type, key=0, info=MPI.INFO_NULL):
            return MPI.Intracomm(self.Split(node_of[self.rank], key))

    return Pretended(MPI.COMM_WORLD)
