"""What the ranks of a group do together."""

import itertools
import time

import numpy as np
import pytest

from mpistrat.errors import ClosedError, CollectiveMismatchError

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def test_layout(group):
    size, shared = group.topology.size, group.environment.shared_memory
    assert group.num_nodes == (1 if shared else size)
    assert group.slices == (size if shared else 1)
    assert group.slice_index == (group.topology.rank if shared else 0)
    assert group.replicas_of_node == [1] * (size if shared else 1)
    assert (group.inter is None) == (shared or size == 1)
    assert (group.node.rank, group.node.size) == ((group.topology.rank, size) if shared else (0, 1))


def test_broadcast(group):
    root = group.topology.size - 1
    for dtype, shape in itertools.product(["float32", "complex128", "bool", "V12"], [(), (0, 3), (5, 7)]):
        values = np.arange(np.prod(shape, dtype=int) * np.dtype(dtype).itemsize, dtype=np.uint8) % 2
        expected = np.frombuffer(values.tobytes(), dtype).reshape(shape)
        array = expected.copy() if group.topology.rank == root else np.zeros(shape, dtype)
        with group.collective("broadcast", "a", array.dtype, array.shape):
            group.broadcast(array, root)
        assert array.tobytes() == expected.tobytes()


def test_broadcast_in_pieces(group, monkeypatch):
    from mpistrat.comm import process_group

    monkeypatch.setattr(process_group, "_CHUNK", 24)
    array = np.arange(10.0) if group.topology.rank == 0 else np.zeros(10)
    with group.collective("broadcast"):
        group.broadcast(array)
    assert array.tolist() == list(range(10))


def test_numbers_and_texts_of_every_rank(group):
    rank, size = group.topology.rank, group.topology.size
    with group.collective("gather"):
        assert group.all_gather_int([rank, -(2**62)]).tolist() == [[r, -(2**62)] for r in range(size)]
        assert group.sum_int([rank, -(2**40)]).tolist() == [size * (size - 1) // 2, -size * 2**40]
        assert group.all_gather_text("é" * rank) == ["é" * r for r in range(size)]
        assert group.agree(rank) == 0
        assert group.agree(rank, "max") == size - 1


def test_closed_group_refuses(group):
    group.close()
    group.close()
    assert group.closed
    with (
        pytest.raises(ClosedError, match="all_reduce 'w': the strategy is closed"),
        group.collective("all_reduce", "w"),
    ):
        pass
    with pytest.raises(ClosedError):
        group.barrier()


def test_the_next_group_does_not_hear_the_one_before():
    """MPI may give it the same context; what was still on its way then reached it."""
    from mpistrat.cluster.topology import Topology
    from mpistrat.comm.process_group import ProcessGroup

    for turn in range(6):
        topology = Topology.create()
        group = ProcessGroup.create(topology)
        tell = turn % 2 == 0
        group.monitor.stop = tell
        time.sleep(0.12)  # the watchdog looks every tenth of a second, and then tells all others
        heard = group.monitor.stop
        group.close()
        topology.close()
        assert heard == tell, turn


def test_place_is_kept_while_inside(group):
    if group.topology.size == 1:
        return
    with group.collective("outer") as outer:
        with group.collective("inner"):
            assert group.monitor.current[1].text == "inner"
        assert group.monitor.current[1] is outer
    assert group.monitor.current is None


def test_settings_must_agree(make_group):
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if size == 1:
        return
    with pytest.raises(CollectiveMismatchError, match=rf"rank {size - 1}: Environment\(.*check_every=7"):
        make_group(check_every=7 if rank == size - 1 else 64)
