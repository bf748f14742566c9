"""What the tests of the coordinator share: a strategy without variables, and a coordinator on all ranks."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace


class Stand:
    """The roles and ranks of a ParameterServerStrategy, and nothing else of it."""

    def __init__(self, servers=0, **settings):
        from mpistrat.cluster.topology import Topology
        from mpistrat.comm.process_group import ProcessGroup
        from mpistrat.options import Environment

        self.topology = Topology.create()
        group = ProcessGroup.create(self.topology, Environment(**{"abort_after": 20.0, **settings}))
        self.extended = SimpleNamespace(process_group=group, variables=())
        first = self.topology.size - servers
        self.workers, self.servers = tuple(range(first)), tuple(range(first, self.topology.size))

    def scope(self):
        return contextlib.nullcontext()

    def close(self):
        self.extended.process_group.close()
        self.topology.close()


@contextlib.contextmanager
def coordinator(servers=0, queue_size=10_000, **settings):
    """A coordinator on every rank: `if c.is_chief: ...` in the block, which all ranks leave together."""
    import mpistrat as ms

    strategy = Stand(servers, **settings)
    made = ms.coordinator.ClusterCoordinator(strategy, queue_size=queue_size)
    try:
        yield made
    finally:  # a test that fails on the chief must not leave the others serving
        made.close()
        strategy.close()
