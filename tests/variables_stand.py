"""A bare strategy for tests of the variables: frames, threads and merge calls, without what a real strategy adds."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading

from mpistrat import context
from mpistrat.cluster.topology import Topology
from mpistrat.comm.process_group import ProcessGroup
from mpistrat.context import Frame
from mpistrat.cross_device.hierarchical_all_reduce import HierarchicalAllReduce
from mpistrat.distributed_values import regroup, select_replica
from mpistrat.options import Environment
from mpistrat.variables import ArenaAllocator, Placement, create_variable


class Replica:
    def __init__(self, strategy, local, everybody):
        self.strategy, self.local, self.everybody = strategy, local, everybody
        self.replica_id_in_sync_group = strategy.topology.replica_offset + local

    def merge_call(self, function, args=()):
        strategy = self.strategy
        strategy.handed[self.local] = args
        self.everybody.wait()
        if self.local == 0:
            columns = [regroup(list(column)) for column in zip(*strategy.handed, strict=True)]
            try:
                with context.entered(Frame(strategy)):
                    strategy.merged = function(strategy, *columns)
            except BaseException as error:
                strategy.merged = error
        self.everybody.wait()
        merged = strategy.merged
        self.everybody.wait()
        if isinstance(merged, BaseException):
            raise merged
        return select_replica(self.local, merged)


class Stand:
    """What variables need of a strategy."""

    def __init__(self, devices=("cpu:0",), *, comm=None, single=False, ops=None, **environment):
        if single:
            self.group = ProcessGroup.single()
            self.topology = self.group.topology
        else:
            self.topology = Topology.create(comm, devices)
            self.group = ProcessGroup.create(self.topology, dataclasses.replace(Environment.read(), **environment))
        ops = ops or HierarchicalAllReduce()
        ops.bind(self.group)
        arenas = ArenaAllocator(self.group)
        self.placement = Placement(self.group, ops, arenas, self, self.topology.devices, distributed=not single)
        self.extended = self
        self.handed = [None] * len(self.topology.devices)
        self.merged = None
        if context._default_factory is None and not single:
            context.set_default(lambda: Frame(object()))

    def create_variable(self, *args, **kwargs):
        return create_variable(self.placement, *args, **kwargs)

    def scope(self):
        return context.entered(Frame(self))

    def update(self, variable, function):
        for copy in range(variable.num_copies):
            with context.entered(Frame(self, update_replica_id=copy)):
                function(variable)

    def run(self, function, args=()):
        everybody = threading.Barrier(len(self.handed))
        results = [None] * len(self.handed)

        def replica(local):
            try:
                with context.entered(Frame(self, replica=Replica(self, local, everybody))):
                    results[local] = function(*select_replica(local, list(args)))
            except BaseException as error:
                results[local] = error
                everybody.abort()

        others = [
            threading.Thread(target=contextvars.copy_context().run, args=(replica, local))
            for local in range(1, len(self.handed))
        ]
        for thread in others:
            thread.start()
        replica(0)
        for thread in others:
            thread.join()
        for error in results:
            if isinstance(error, BaseException) and not isinstance(error, threading.BrokenBarrierError):
                raise error
        return regroup(results)

    def close(self):
        self.placement.close()
        self.group.close()
        self.topology.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        self.close()


def replica_id():
    return context.get_replica_context().replica_id_in_sync_group


@contextlib.contextmanager
def default_stand():
    """Make a stand of one replica what holds outside every scope."""
    stand = Stand(single=True)
    before = context._default_factory, context._default_frame
    frame = Frame(stand, replica=Replica(stand, 0, threading.Barrier(1)))
    context._default_factory, context._default_frame = (lambda: frame), frame
    try:
        yield stand
    finally:
        context._default_factory, context._default_frame = before
        stand.close()


def pretend_nodes(MPI, node_of):
    """A communicator of the world whose shared-memory split gives these nodes."""

    class Pretended(MPI.Intracomm):
        def Split_type(self, split_type, key=0, info=MPI.INFO_NULL):
            return MPI.Intracomm(self.Split(node_of[self.rank], key))

    return Pretended(MPI.COMM_WORLD)
