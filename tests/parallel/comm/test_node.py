"""The barrier of a node and its staging room."""

import contextlib
import os
import re
import signal
import time

import numpy as np
import pytest

from mpistrat.base import loops, waiting
from mpistrat.base.waiting import wait_until
from mpistrat.comm.recorder import RECORDER
from mpistrat.errors import CollectiveMismatchError, CollectiveTimeoutError
from tests.harness.files import wait_for_files

pytestmark = pytest.mark.ranks(2, 4)


def enter(group, *what, **options):
    with group.collective(*what, **options):
        pass


def wait_in(way, monkeypatch):
    """Let ranks wait for flags in C, in Python, or some so and some so. Without compiled loops all do it in Python."""
    from mpi4py import MPI

    if way == "python" or (way == "mixed" and MPI.COMM_WORLD.rank % 2):
        monkeypatch.setattr(loops, "meet", loops.leave_to_numpy)


@pytest.fixture(params=["compiled", "python", "mixed"])
def way(request, monkeypatch):
    wait_in(request.param, monkeypatch)


@pytest.fixture(params=["compiled", "python", "mixed", "mpi"])
def group(request, make_group, monkeypatch):
    """A group whose barrier goes through flags, in each way, and one whose barrier goes through MPI as on large nodes."""
    from mpistrat.comm import node

    wait_in(request.param, monkeypatch)
    if request.param == "mpi":
        monkeypatch.setattr(node, "FLAG_RANKS", 1)
    return make_group()


@pytest.mark.parametrize("cores", [1, 64])
def test_a_rank_sleeps_early_where_ranks_share_cores(make_group, monkeypatch, mpi_tmp_path, cores):
    """It yields a few times for each rank that is late, or for a millisecond. That one comes when all others sleep."""
    from mpistrat.comm import process_group

    plain, yields = process_group.Node, []
    monkeypatch.setattr(process_group, "Node", lambda *args: plain(*args[:4], cores))
    monkeypatch.setattr(loops, "meet", loops.leave_to_numpy)
    node = make_group().node
    monkeypatch.setattr(os, "sched_yield", lambda: yields.append(0))
    for late in range(node.size):
        if node.rank == late:
            wait_for_files(mpi_tmp_path, node.size - 1, f"* without {late}")
        else:

            def sleep(seconds, late=late):
                (mpi_tmp_path / f"{node.rank} without {late}").touch()
                time.sleep(seconds)

            monkeypatch.setattr(waiting, "sleep", sleep)
        node.barrier()
    most = 20 * node.size * node.size
    assert (len(yields) <= most) == (cores == 1), len(yields)


def test_nobody_passes_before_all_have_come(group):
    """Every rank raises its own number before the barrier; after it all numbers have been raised."""
    node = group.node
    block = node.allocate([8] * node.size, "numbers")
    numbers = [segment.view(np.int64) for segment in block.segments]
    numbers[node.rank][0] = 0
    node.barrier()
    for k in range(1, 120):
        if k % 30 == node.rank:
            time.sleep(0.002)
        numbers[node.rank][0] = k
        node.barrier()
        assert all(number[0] >= k for number in numbers)
        assert all(number[0] <= k + 1 for number in numbers)
        node.barrier()


def test_staging_is_safe_with_one_barrier(group):
    node = group.node
    for k in range(120):
        staging = node.staging()
        staging[node.rank][:16] = (k + node.rank) % 251
        if k % 30 == node.rank:
            time.sleep(0.002)
        node.barrier()
        assert [int(room[:16].sum()) for room in staging] == [16 * ((k + r) % 251) for r in range(node.size)]


def test_mismatch_names_every_rank(group):
    last = group.topology.size - 1
    others = "rank 0" if last == 1 else "ranks " + ", ".join(map(str, range(last)))
    shape = (4, 2) if group.topology.rank == last else (4, 3)
    expected = rf"{others}: all_reduce 'w' float32 \(4, 3\); rank {last}: all_reduce 'w' float32 \(4, 2\)$"
    for _ in range(3):  # all ranks get the error, so the group stays usable
        with pytest.raises(CollectiveMismatchError, match=expected):
            enter(group, "all_reduce", "w", np.float32, shape)
        group.barrier()


def test_mismatch_on_a_call_that_both_have_used(group):
    first = group.topology.rank == 0
    for _ in range(4):
        for name in "ab":
            with group.collective("assign", name):
                pass
    with pytest.raises(CollectiveMismatchError, match=r"rank 0: assign 'b'; ranks? 1.*: assign 'a'"):
        enter(group, "assign", "b" if first else "a")


def test_detail_is_compared(group):
    rank = group.topology.rank
    with pytest.raises(CollectiveMismatchError, match=r"checksum 0.*checksum 1"):
        enter(group, "assign", "w", detail=f"checksum {min(rank, 1)}")


def test_caller_may_synchronise_itself(group):
    rank = group.topology.rank
    with (
        group.collective("all_reduce", "w", np.float32, (rank,), synchronize=False) as call,
        pytest.raises(CollectiveMismatchError),
    ):
        group.node.barrier(call)


def test_long_texts(group):
    with group.collective("all_reduce", "é" * 900):
        pass
    with pytest.raises(CollectiveMismatchError, match=r"rank 0: all_reduce 'éé.*é0'; rank 1: .*é1'"):
        enter(group, "all_reduce", "é" * 900 + str(group.topology.rank))


@pytest.mark.usefixtures("way")
def test_missing_rank_is_named_with_its_place(make_group, mpi_tmp_path):
    """It comes when all others have given up. Where one of these is late, too, more ranks are named."""
    group = make_group(abort_after=0.5)
    rank, last = group.topology.rank, group.topology.size - 1
    group.barrier()
    if rank == last:
        assert wait_until(lambda: len(list(mpi_tmp_path.iterdir())) == last, 25)  # here
        with pytest.raises(CollectiveTimeoutError, match=r"arrived too late.*gave up"):
            group.barrier("late")
    else:
        with pytest.raises(CollectiveTimeoutError) as caught:
            group.barrier("late")
        (mpi_tmp_path / f"{rank} has given up").touch()
        text = str(caught.value)
        if "gave up waiting" not in text:  # another rank was quicker to give up, and told this one
            assert re.search(rf"barrier 'late': rank {rank} waited 0\.5 s for ranks? ([0-9]+, )*{last};", text), text
            assert f"rank {last} not in a collective, after #1, at test_node.py:" in text
    with pytest.raises(CollectiveTimeoutError, match="an earlier collective failed"):
        group.barrier("afterwards")


@pytest.mark.usefixtures("way")
def test_timeout_of_one_call(make_group, mpi_tmp_path):
    """The last rank comes when all others have given up, before the group's own time limit."""
    group = make_group(abort_after=60.0)
    if group.topology.rank == 0:
        wait_for_files(mpi_tmp_path, group.topology.size - 1)
    with pytest.raises(CollectiveTimeoutError):
        enter(group, "reduce", timeout=0.3)
    (mpi_tmp_path / str(group.topology.rank)).touch()


def test_waiting_is_counted(group):
    """In the recorder, in ns: what a rank waits for one that is late, and never more than it was in the barrier.

    Where a busy machine stops a rank, it waits less, once.
    """
    node, late, shares = group.node, group.topology.rank == 0, []
    for seconds in (0.0, 0.3, 0.3, 0.3, 0.3):
        node.barrier()
        if late:
            time.sleep(seconds)
        before, start = RECORDER.waited, time.perf_counter_ns()
        node.barrier()
        waited, took = RECORDER.waited - before, time.perf_counter_ns() - start
        assert 0 <= waited <= took
        shares.append(waited / took)
    assert late or max(shares[1:]) > 0.5, shares


@pytest.mark.usefixtures("way")
def test_a_signal_ends_the_wait(make_group, mpi_tmp_path):
    """Ctrl-C reaches a rank that waits for another; it has come to the barrier, so the next one works."""
    group = make_group()
    node, waiting_one = group.node, group.topology.comm.bcast(os.getpid())
    if node.rank == 0:
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        node.barrier()
        try:
            with pytest.raises(KeyboardInterrupt):
                node.barrier()
            (mpi_tmp_path / "the wait has ended").touch()
        finally:
            signal.signal(signal.SIGALRM, before)
    else:
        node.barrier()
        if node.rank == 1:
            assert wait_until(lambda: node._flags[0] > node.barriers, 20)
            os.kill(waiting_one, signal.SIGALRM)
        wait_for_files(mpi_tmp_path, 1)
        node.barrier()
    node.barrier()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs the right to choose a core")
@pytest.mark.usefixtures("way")
def test_all_ranks_on_one_core(make_group):
    """A rank that waits lets those that it waits for have the core."""
    node, cores = make_group().node, os.sched_getaffinity(0)
    with contextlib.ExitStack() as stack:
        stack.callback(os.sched_setaffinity, 0, cores)
        os.sched_setaffinity(0, {min(cores)})
        for k in range(300):
            staging = node.staging()
            staging[node.rank][:8] = (k + node.rank) % 251
            node.barrier()
            assert [int(room[:8].sum()) for room in staging] == [8 * ((k + r) % 251) for r in range(node.size)]
