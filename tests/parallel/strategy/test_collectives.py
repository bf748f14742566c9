"""What all ranks do together beside steps: barriers, Python objects, and calls of MPI by the program itself."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms

START = """
import os, sys, time
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy()
last = strategy.rank == strategy.size - 1
"""
LIMIT = {"MPISTRAT_WARN_AFTER": "1", "MPISTRAT_ABORT_AFTER": "3"}


@pytest.fixture
def strategy():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        yield strategy


@pytest.mark.ranks(1, 2, 3)
def test_objects(strategy):
    rank, size = strategy.rank, strategy.size
    strategy.barrier()
    strategy.barrier(timeout=20, name="named")
    for root in range(size):
        assert (
            strategy.broadcast_object({"of": root, "x": np.arange(root)} if rank == root else None, root=root)["of"]
            == root
        )
    mine = object()
    assert strategy.broadcast_object(mine if size == 1 else "text", root=0) is not None
    assert strategy.all_gather_object(["a" * rank, rank]) == [["a" * r, r] for r in range(size)]
    assert strategy.all_gather_object() == [None] * size
    big = strategy.broadcast_object(np.arange(300_000) if rank == 0 else None)
    assert big.sum() == 300_000 * 299_999 // 2


@pytest.mark.ranks(2, 3)
def test_what_cannot_be_done_is_told_to_all(strategy):
    last = strategy.size - 1
    bad = (lambda: 1) if strategy.rank == last else 1
    with pytest.raises(TypeError, match=f"expected an object that can be pickled, got on rank {last}: "):
        strategy.all_gather_object(bad)
    with pytest.raises(TypeError, match=f"got on rank {last}: "):
        strategy.broadcast_object(bad, root=last)
    with pytest.raises(ValueError, match="root: expected 0 <= root < "):
        strategy.broadcast_object(1, root=strategy.size)
    with pytest.raises(ValueError, match="timeout: expected > 0 seconds, got 0"):
        strategy.barrier(timeout=0)
    with pytest.raises(ms.errors.CollectiveMismatchError, match=r"barrier 'b'.*barrier 'a'"):
        strategy.barrier(name="a" if strategy.rank else "b")
    assert strategy.all_gather_object(strategy.rank) == list(range(strategy.size))


@pytest.mark.ranks(2)
def test_the_programs_own_communicator_is_mpis(strategy):
    from mpi4py import MPI

    comm = strategy.comm
    assert isinstance(comm, MPI.Intracomm) and comm is strategy.comm
    assert comm.allgather(strategy.rank) == [0, 1]
    copy = comm.Dup()
    assert copy.allreduce(1) == 2
    copy.Free()
    other = ms.MultiWorkerMirroredStrategy(comm=comm)
    assert other.comm.size == 2
    other.close()
    assert not other.comm
    assert comm.bcast("x") == "x"


MISSED = {
    "a barrier that a rank does not come to": (
        "if last: time.sleep(30)\nstrategy.barrier(name='shards')",
        (
            "CollectiveTimeoutError: Strategy.barrier 'shards': rank 0 waited 3 s for rank 1; all ranks must call it",
            "rank 1 not in",
        ),
        1,
    ),
    "its own time": (
        "if last: time.sleep(30)\nstrategy.barrier(1.5)",
        ("CollectiveTimeoutError: Strategy.barrier: rank 0 waited 1.5 s for rank 1",),
        1,
    ),
    "a barrier of MPI, and a rank that has left": (
        "if last: sys.exit(0)\nstrategy.comm.Barrier()",
        (
            "comm.Barrier takes longer than 1 s",
            "PeerExitError: comm.Barrier takes longer than 3 s, and rank 1 can no longer",
        ),
        1,
    ),
    "a message that never comes": (
        "if not last: strategy.comm.recv(source=1)\nstrategy.reduce('SUM', 1.0, axis=None)",
        ("rank 0 in comm.recv for", "all ranks must call it"),
        1,
    ),
    "save under an if": (
        "if not last: strategy.save('/tmp/never.h5')\ntime.sleep(30)",
        ("rank 0 waited 3 s for rank 1; all ranks must call it:", "rank 1 not in a collective, after #"),
        1,
    ),
    "an exit status": (
        "if last: sys.exit(3)\nstrategy.reduce('SUM', 1.0, axis=None)",
        ("PeerExitError: rank 1 left the program with status 3 while rank 0 was in Strategy.reduce",),
        3,
    ),
}


@pytest.mark.parametrize("how", MISSED)
def test_a_rank_that_others_wait_for(mpi_run, how):
    program, says, status = MISSED[how]
    result = mpi_run(START + program, 2, timeout=60, env=LIMIT)
    assert result.returncode == status, result
    for words in says:
        assert words in result.stderr, result
    assert result.seconds < 35, result


def test_a_long_call_of_mpi_is_the_programs_own_affair(mpi_run):
    """It is told of once, and waited for, as long as all ranks live."""
    program = "for _ in range(2):\n    if last: time.sleep(5)\n    strategy.comm.Barrier()\nstrategy.close()"
    result = mpi_run(START + program, 2, timeout=60, env=LIMIT)
    assert result.returncode == 0, result
    assert result.stderr.count("comm.Barrier takes longer than 1 s") == 1, result


def test_a_forked_child_ends_by_itself(mpi_run):
    program = """
import multiprocessing, subprocess

def child(status, how):
    pid = os.fork()
    if pid == 0:
        how(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status, status

def fail(status):
    raise ValueError("in the child")

child(0, sys.exit)
child(3, sys.exit)
child(1, fail)
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, 2]) == [1, 2]
assert strategy.reduce("SUM", 1.0, axis=None) == 2
strategy.close()
print("all is well")
"""
    result = mpi_run(START + program, 2, timeout=60)
    assert result.returncode == 0 and result.stdout.count("all is well") == 2, result
    assert result.stderr.count("ValueError: in the child") == 2 and "the job ends" not in result.stderr, result
