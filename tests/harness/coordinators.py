"""Coordinators on all ranks, for tests: of a strategy without variables, or of any; and functions that take as long as wanted."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace


def hold(path, value=None):
    """Return a value once a file is there: on a worker, in a function of a test that goes on meanwhile."""
    from mpistrat.base.waiting import wait_until

    if not wait_until(Path(path).exists, 25):
        raise TimeoutError(f"{path} did not come")
    return value


class BareStrategy:
    """The roles and ranks of a ParameterServerStrategy, and nothing else of it."""

    def __init__(self, servers=0, **settings):
        from mpistrat.base.environment import Environment
        from mpistrat.cluster.topology import Topology
        from mpistrat.comm.process_group import ProcessGroup
        from mpistrat.strategy.extended import CommonObjects

        self.topology = Topology.create()
        group = ProcessGroup.create(self.topology, Environment(**{"abort_after": 20.0, **settings}))
        self.extended = SimpleNamespace(
            process_group=group, variables=(), models=CommonObjects(), coordinate=lambda coordination: None
        )
        first = self.topology.size - servers
        self.workers, self.servers = tuple(range(first)), tuple(range(first, self.topology.size))

    def flush(self):
        pass

    def scope(self):
        return contextlib.nullcontext()

    def close(self):
        self.extended.process_group.close()
        self.topology.close()


@contextlib.contextmanager
def coordinator(servers=0, queue_size=10_000, **settings):
    """A coordinator on every rank: `if c.is_chief: ...` in the block, which all ranks leave together."""
    with coordinated(BareStrategy(servers, **settings), queue_size=queue_size) as made:
        yield made


@contextlib.contextmanager
def coordinated(strategy, **settings):
    """A strategy's coordinator; both are closed at the end, for a test that fails must not leave the others serving."""
    import mpistrat as ms

    made = ms.coordinator.ClusterCoordinator(strategy, **settings)
    try:
        yield made
    finally:
        made.close()
        strategy.close()
