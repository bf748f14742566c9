"""Ranks of one node that give a strategy other settings, while the ranks of the other node agree."""

import pytest

import mpistrat as ms
from tests.harness.process_groups import set_layout


@pytest.mark.ranks(4)
@pytest.mark.parametrize("differing", [(1,), (2,), (1, 3)])
@pytest.mark.parametrize("setting", [{"local_steps": 2}, {"sharded_slots": False}])
def test_ranks_of_one_node_must_agree(setting, differing, monkeypatch):
    """The other nodes, whose ranks agree, are told; nobody waits, and all can make another strategy."""
    from mpi4py import MPI

    set_layout("nodes", monkeypatch)
    monkeypatch.setenv("MPISTRAT_ABORT_AFTER", "20")
    with pytest.raises(ms.errors.CollectiveMismatchError, match=next(iter(setting))):
        ms.MultiWorkerMirroredStrategy(**(setting if MPI.COMM_WORLD.rank in differing else {}))
    with ms.MultiWorkerMirroredStrategy(**setting) as strategy:
        assert strategy.all_gather_object(1) == [1] * 4
