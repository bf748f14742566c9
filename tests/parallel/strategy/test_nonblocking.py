"""Collectives that are started now and waited for later: how a wait, a program and a strategy end with them, and in sets."""

import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError, ContextError

START = """
import os, sys, time
import numpy as np
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy()
last = strategy.rank == strategy.size - 1
"""
LIMIT = {"MPISTRAT_WARN_AFTER": "2", "MPISTRAT_ABORT_AFTER": "8"}


@pytest.mark.ranks(3, 4)
@pytest.mark.hosts(2, ranks_per_host=2)
def test_of_process_sets_and_of_all():
    """Two overlapping sets and all ranks at once, waited for in another order on each."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        rank, size = strategy.rank, strategy.size
        sets = [strategy.process_set(range(size - 1)), strategy.process_set(range(1, size)), strategy]
        requests = {}
        for index, some in enumerate(sets):
            if index == 2 or some.included:
                requests[index] = some.all_reduce_async("SUM", {"r": np.full(50_000, rank), "one": np.float16(1)})
        for index in sorted(requests, reverse=bool(rank % 2)):
            ranks = range(size) if index == 2 else sets[index].ranks
            found = requests[index].wait()
            assert set(found["r"].tolist()) == {sum(ranks)} and found["one"] == len(ranks)
        if sets[1].included:
            assert sets[1].broadcast_async(np.array([rank, 7]), root=size - 1).wait().tolist() == [size - 1, 7]
            with pytest.raises(ValueError, match="root"):
                sets[1].broadcast_async(1, root=0)
        else:
            with pytest.raises(ContextError, match="outside of the set"):
                sets[1].all_reduce_async("SUM", 1)


@pytest.mark.hosts(2, ranks_per_host=2)
def test_hosts_that_differ_are_told():
    """Also of starts that all know, whose order differs: at the latest where the strategy is closed."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        odd = strategy.extended.topology.node_index == 1
        with pytest.raises(CollectiveMismatchError, match="rank"):
            strategy.all_reduce_async("MAX" if odd else "SUM", np.zeros(5))
        with pytest.raises(CollectiveMismatchError, match="rank"):
            strategy.broadcast_async(1, root=0) if odd else strategy.barrier()
        kinds = [
            strategy.all_reduce_async(op, np.full(30_000, 1.0 + strategy.rank)) for op in ("SUM", "MAX", "MIN", "PROD")
        ]
        assert [request.wait()[7] for request in kinds[::-1]] == [24, 1, 4, 10]
        assert strategy.all_gather_object(strategy.rank) == [0, 1, 2, 3]


@pytest.mark.ranks(2, 3)
def test_larger_than_one_call_of_mpi(monkeypatch):
    from mpistrat.cross_device import nonblocking

    monkeypatch.setattr(nonblocking, "CHUNK_ELEMENTS", 1000)
    monkeypatch.setattr(nonblocking, "_CHUNK", 1000)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        value = np.arange(4001.0) * (1 + strategy.rank)
        total = strategy.all_reduce_async("SUM", value)
        sent = strategy.broadcast_async(value, root=1)
        assert np.array_equal(sent.wait(), 2 * np.arange(4001.0))
        assert np.array_equal(total.wait(), np.arange(4001.0) * strategy.size * (strategy.size + 1) / 2)


@pytest.mark.ranks(2)
def test_a_late_rank_is_waited_for_without_using_the_core():
    """The first second is spent looking."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        some = strategy.process_set([0, 1])
        strategy.barrier()
        if strategy.rank == 0:
            request = some.all_reduce_async("SUM", np.ones(1 << 22))
            begun, used = time.perf_counter(), time.process_time()
            assert request.wait()[-1] == 2
            assert time.process_time() - used < time.perf_counter() - begun + 0.1
        else:
            request = some.all_reduce_async("SUM", np.ones(1 << 22))
            time.sleep(2)
            assert request.wait()[-1] == 2
        ring = ms.timeline.trace.RECORDER.ring()
        waits = [ring.names[name] for name in ring.name if ring.names[name][1].startswith("wait of")]
        assert ("c", "wait of ProcessSet.all_reduce_async") in waits


def test_a_program_that_ends_without_waiting(mpi_run):
    """It ends, is completed, and told where it was started."""
    program = START + "strategy.all_reduce_async('SUM', np.ones(2_000_000))\nprint('end')\n"
    result = mpi_run(program, 3, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("was never waited for") == 3 and ":8, was never waited for" in result.stderr
    closed = mpi_run(program + "strategy.close()\n", 3, timeout=60)
    assert closed.returncode == 0 and closed.stderr.count("was never waited for") == 3


def test_a_wait_that_never_ends(mpi_run):
    """Where a rank has not posted what it should: who waits says where the others are, and ends the job."""
    program = START + (
        "from mpistrat.cross_device.nonblocking import NonblockingCollectives\n"
        "if last:\n    NonblockingCollectives._post_all_reduce = lambda self, *more: self._own_comm() and []\n"
        "request = strategy.all_reduce_async('SUM', np.ones(3))\n"
        "if last:\n    time.sleep(50)\n"
        "request.wait()\n"
    )
    result = mpi_run(program, 2, timeout=60, env=LIMIT)
    assert result.returncode != 0
    assert "CollectiveTimeoutError: the wait for Strategy.all_reduce_async" in result.stderr
    assert "rank 1 not in a collective" in result.stderr and "at program.py:13" in result.stderr
    assert "All ranks must have started it" in result.stderr


def test_an_error_of_another_rank_ends_a_wait(mpi_run):
    program = START + (
        "request = strategy.all_reduce_async('SUM', np.ones(8_000_000))\n"
        "if last:\n    raise KeyError('lost')\ntime.sleep(1)\nrequest.wait()\ntime.sleep(30)\n"
    )
    result = mpi_run(program, 3, timeout=60)
    assert result.returncode != 0 and "KeyError: 'lost'" in result.stderr


def test_a_start_without_others_is_a_collective_without_them(mpi_run):
    program = START + "if not last:\n    strategy.all_reduce_async('SUM', 1.0)\nelse:\n    time.sleep(40)\n"
    result = mpi_run(program, 2, timeout=60, env=LIMIT)
    assert result.returncode != 0
    assert "CollectiveTimeoutError: Strategy.all_reduce_async" in result.stderr


@pytest.mark.ranks(2)
def test_after_the_end():
    strategy = ms.MultiWorkerMirroredStrategy()
    request = strategy.all_reduce_async("SUM", 1.0)
    request.wait()
    strategy.close()
    assert request.wait() == 2 and request.done()
    assert repr(request).startswith("<CollectiveRequest of Strategy.all_reduce_async")
    with pytest.raises(ms.errors.ClosedError):
        strategy.all_reduce_async("SUM", 1.0)


@pytest.mark.ranks(1)
def test_the_default_strategy_copies_what_is_sent_too():
    value = np.ones(3)
    request = ms.get_strategy().all_reduce_async("SUM", value)
    value[:] = 0
    assert request.wait().tolist() == [1, 1, 1]
