"""Process groups for the tests of this folder."""

import pytest


@pytest.fixture
def make_group():
    """`make_group(shared_memory=..., abort_after=..., ...)` is a group over all ranks, closed after the test."""
    from mpistrat.base.environment import Environment
    from mpistrat.cluster.topology import Topology
    from mpistrat.comm.process_group import ProcessGroup

    made = []

    def make(**settings):
        settings = {"abort_after": 20.0, **settings}
        topology = Topology.create()
        made.append(topology)
        group = ProcessGroup.create(topology, Environment(**settings))
        made.append(group)
        return group

    yield make
    for thing in reversed(made):
        thing.close()


@pytest.fixture(params=[True, False], ids=["shared", "private"])
def group(request, make_group):
    """A group over all ranks, once with node-shared memory, once without."""
    return make_group(shared_memory=request.param)
