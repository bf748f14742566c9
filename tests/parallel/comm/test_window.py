"""Windows: what is written arrives, whole words, atomic sums, and memory that outlives its window."""

import gc

import numpy as np
import pytest

from mpistrat.comm import window as windows
from mpistrat.comm.window import RemoteWindow, SharedWindow, has_asynchronous_progress
from tests.harness.clock import Clock

pytestmark = pytest.mark.ranks(1, 3)
over_hosts = pytest.mark.hosts(2, ranks_per_host=2)
KINDS = ["shared", "remote", "over"]


def make(group, kind, nbytes):
    """A window with a segment of `nbytes` bytes on each rank, its communicator, and what else is to be closed after it."""
    topology = group.topology
    if kind == "remote":
        return RemoteWindow.allocate(topology.comm, nbytes, "test"), topology.comm, []
    shared = SharedWindow(topology.intra, topology.comm, [nbytes] * topology.local_size, "test")
    if kind == "shared":
        return shared, topology.intra, []
    return RemoteWindow.over(topology.comm, shared.own, "test"), topology.comm, [shared]


@pytest.fixture
def group(make_group):
    return make_group()


@pytest.fixture
def window(group, request):
    made, comm, others = make(group, request.param, 1 << 16)
    made.comm = comm
    yield made
    for one in (made, *others):
        one.close()


every_kind = pytest.mark.parametrize("window", KINDS, indirect=True)


@every_kind
def test_bytes_and_words_arrive(window):
    comm = window.comm
    assert window.own.nbytes == 1 << 16
    assert not window.own.any()
    target = (comm.rank + 1) % comm.size
    data = np.full(1000, comm.rank + 1, np.uint8)
    comm.Barrier()
    window.put(target, [(64, data), (5000, data[:3])])
    window.put_word(target, 8, comm.rank - 100)
    comm.Barrier()
    window.sync()
    source = (comm.rank - 1) % comm.size
    assert (window.own[64:1064] == source + 1).all()
    assert window.own[5000:5004].tolist() == [source + 1] * 3 + [0]
    assert window.words[1] == source - 100
    out = np.zeros(1000, np.uint8)
    window.get(target, 64, out)
    assert (out == comm.rank + 1).all()
    assert window.get_word(target, 8) == comm.rank - 100
    comm.Barrier()


@over_hosts
@every_kind
def test_large_copies_are_cut(window, monkeypatch):
    monkeypatch.setattr("mpistrat.comm.window.CHUNK", 7)
    monkeypatch.setattr("mpistrat.comm.window.ROWS", 2)
    comm = window.comm
    data = np.arange(100, dtype=np.uint8)
    target = (comm.rank + 1) % comm.size
    comm.Barrier()
    window.put(target, [(3, data)])
    out = np.zeros(100, np.uint8)
    window.get(target, 3, out)
    np.testing.assert_array_equal(out, data)
    rows = np.array([7, 0, 7, 19, 4])
    picked = np.zeros((5, 5), np.uint8)
    window.get_rows(target, 3, rows, picked)
    np.testing.assert_array_equal(picked, data.reshape(20, 5)[rows])
    window.get_rows(target, 3, rows[:0], picked[:0])
    window.get_rows(target, 3, rows, np.zeros((5, 0), np.uint8))
    comm.Barrier()


@over_hosts
@every_kind
def test_sums_of_words_are_exact(window):
    comm, times = window.comm, 500
    comm.Barrier()
    before = [window.fetch_and_add(0, 16, 3) for _ in range(times)]
    assert before == sorted(set(before))  # nobody gets a number twice
    comm.Barrier()
    assert window.fetch_and_add(0, 16, 0) == 3 * times * comm.size
    comm.Barrier()


@pytest.mark.parametrize("kind", KINDS)
def test_views_outlive_the_window(group, kind):
    window, comm, others = make(group, kind, 4096)
    view = window.own[8:16].view(np.int64) if comm.rank == 0 else None
    if view is not None:
        view[0] = 7
    for one in (window, *others):
        one.close()
        assert one.closed
        one.close()
    gc.collect()
    assert view is None or view.tolist() == [7]


def test_ranks_without_a_segment(group):
    topology = group.topology
    last = topology.size - 1
    window = RemoteWindow.allocate(topology.comm, 64 if topology.rank == last else 0, "test")
    assert (window.own.nbytes, len(window.words)) == ((64, 8) if topology.rank == last else (0, 0))
    window.fetch_and_add(last, 56, 1)
    topology.comm.Barrier()
    assert window.fetch_and_add(last, 56, 0) == topology.size
    topology.comm.Barrier()
    window.close()


@pytest.mark.parametrize(("seconds", "progresses"), [(0.0, True), (0.04, False)])
def test_a_read_that_takes_long_needs_its_target(group, seconds, progresses, monkeypatch):
    comm, quiet, clock = group.topology.comm, group.quiet(), Clock()
    clock.replace_time(monkeypatch, windows)
    assert has_asynchronous_progress(comm, comm.size - 1, lambda: clock.sleep(seconds), quiet) is progresses
