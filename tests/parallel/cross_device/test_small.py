"""Small collectives: one barrier of the node compares the call and moves the data, whatever each rank knows from before."""

import time

import numpy as np
import pytest

from mpistrat.base import loops
from mpistrat.cross_device.collectives import Collectives
from mpistrat.errors import CollectiveMismatchError
from tests.harness.process_groups import open_group

SMALL = 1 << 16  # bytes of a rank


@pytest.fixture(params=["shared", "nodes", "private"])
def group(request):
    with open_group(request.param) as group:
        yield group


@pytest.fixture
def of(group):
    collectives = Collectives(group, "Test")
    yield collectives
    collectives.close()


@pytest.fixture
def node():
    """Collectives of the ranks of one node."""
    with open_group("shared") as group:
        collectives = Collectives(group, "Test")
        yield collectives
        collectives.close()


def rows(rank, turn, length, width=3, dtype="f4"):
    return np.random.default_rng([rank, turn]).integers(-99, 99, (length, width)).astype(dtype)


@pytest.mark.ranks(2, 3, 4)
def test_gather_of_lengths_that_change(of):
    """Some lengths come again, others do not; some ranks have more than a small message has room for."""
    size, rank = of.group.topology.size, of.group.topology.rank
    kept = []
    for turn in range(60):
        random = np.random.default_rng(turn)
        lengths = random.integers(0, 4, size) if turn % 3 else np.full(size, 2)
        if turn % 20 == 19:
            lengths[turn % size] = SMALL // 12 + turn % 2
        if turn % 10 == rank:
            time.sleep(0.001)
        dtype = "f4" if turn % 7 else "i2"
        every = [rows(r, turn, lengths[r], dtype=dtype) for r in range(size)]
        for axis in (0, 1):
            parts = [part if axis == 0 else part.T for part in every]
            found = of.all_gather(parts[rank], axis=axis)
            assert found.dtype == dtype and np.array_equal(found, np.concatenate(parts, axis))
            kept.append((found, found.tobytes()))
        nest = of.all_gather({"a": every[rank], "b": np.arange(rank + turn % 2)})
        assert np.array_equal(nest["a"], np.concatenate(every))
        assert nest["b"].tolist() == [n for r in range(size) for n in range(r + turn % 2)]
    assert all(found.tobytes() == before for found, before in kept)  # which are in no memory that is used again


@pytest.mark.ranks(2, 3)
def test_a_gather_that_differs_on_one_rank_is_an_error_on_all(of):
    """Also of a form that this rank has gathered before, and of one that the others have."""
    odd = of.group.topology.rank == 1
    for _ in range(2):
        assert len(of.all_gather(np.ones((2, 2)))) == 2 * of.group.topology.size
        assert of.all_gather(np.ones((2, 3)), axis=1).shape == (2, 3 * of.group.topology.size)
        for wrong in (np.ones((2, 3)), np.ones((2, 2), "f4"), np.ones(2), np.ones(()), np.ones((9999, 9))):
            with pytest.raises(CollectiveMismatchError, match=r"rank 1|rank 0"):
                of.all_gather(wrong if odd else np.ones((2, 2)))
        if of.group.num_nodes == 1:  # between nodes, where the last call was the other one, the watchdogs end the job
            with pytest.raises(CollectiveMismatchError, match="rank"):
                of.all_gather(np.ones((2, 2)), axis=int(odd))
        for value, text in ((np.ones(()), "a scalar"), (np.ones(2), "axis < 1")):
            with pytest.raises(ValueError, match=text):
                of.all_gather(value, axis=1)
        with pytest.raises(TypeError):
            of.all_gather(np.zeros(2, "i4,i4"))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("way", ["compiled", "python"])
def test_a_small_call_takes_one_barrier(node, way, monkeypatch):
    if way == "python":
        monkeypatch.setattr(loops, "meet", loops.leave_to_numpy)
    size = node.group.topology.size
    value = np.arange(8.0 * size)
    calls = {
        "all_reduce": lambda: node.all_reduce("SUM", value),
        "all_gather": lambda: node.all_gather(value),
        "all_gather, equal": lambda: node.all_gather(value, equal=True),
        "all_gather of a nest": lambda: node.all_gather([value, value]),
        "barrier": node.barrier,
    }
    for name, call in calls.items():
        for _ in range(3):
            before = node.group.node.barriers
            call()
            assert node.group.node.barriers == before + 1, name
