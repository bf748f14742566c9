"""Which transport is chosen, by ranks that share no memory."""

import pytest

from mpistrat.parameter_server.wire import choice

pytestmark = pytest.mark.ranks(2, 3)


def choose(monkeypatch, knows):
    """What each rank chooses for rank 0, a worker, and the last, a server; `knows(rank)`: what its environment says."""
    from mpistrat.base.environment import Environment
    from mpistrat.cluster.topology import Topology
    from mpistrat.comm.process_group import ProcessGroup

    topology = Topology.create()
    group = ProcessGroup.create(topology, Environment(shared_memory=False, abort_after=20.0))
    monkeypatch.setattr(choice, "known_to_finish", lambda: knows(topology.rank))
    monkeypatch.setattr(choice, "_probe", lambda *args: group.agree(1) == 1)
    with group.collective("choose"):
        found = choice.choose(group, [0], [topology.size - 1])
    group.close()
    topology.close()
    return found.of(0, 0)


def test_all_ranks_must_know_that_one_sided_calls_finish(monkeypatch):
    """Else some would be in the probe, which is collective, and others not."""
    assert choose(monkeypatch, lambda rank: rank != 1) == "messages"
    assert choose(monkeypatch, lambda rank: rank == 1) == "messages"


def test_if_all_know_and_the_probe_succeeds_it_is_one_sided_calls(monkeypatch):
    assert choose(monkeypatch, lambda rank: True) == "one_sided"
