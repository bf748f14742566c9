"""One run at a time writes checkpoints into a folder; others may read, and a run that is started again is the same one."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.base.environment import Environment

HOLDER = """
import fcntl, json, os, sys, time
descriptor = os.open(os.path.join(sys.argv[1], ".owner"), os.O_RDWR | os.O_CREAT)
fcntl.lockf(descriptor, fcntl.LOCK_EX)
os.pwrite(descriptor, sys.argv[2].encode(), 0)
print("held", flush=True)
time.sleep(300)
"""


def trained(strategy, folder, **settings):
    with strategy.scope():
        ms.Variable(np.zeros(3), name="w")
    return ms.train.Checkpoints(strategy, folder, **settings)


@pytest.fixture
def holder(mpi_tmp_path):
    """Start a process on rank 0 that has a folder, with what it says of itself; it ends with the test."""
    from mpi4py import MPI

    children = []

    def start(**about):
        if MPI.COMM_WORLD.rank == 0:
            arguments = [sys.executable, "-c", HOLDER, str(mpi_tmp_path), json.dumps(about)]
            children.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True))
            assert children[-1].stdout.readline() == "held\n"
        MPI.COMM_WORLD.Barrier()
        return children

    yield start
    for child in children:
        child.kill()
        child.wait()
        child.stdout.close()


@pytest.mark.ranks(2, 4)
def test_two_groups_of_a_job(mpi_tmp_path):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    half = world.Split(world.rank % 2, world.rank)
    with ms.MultiWorkerMirroredStrategy(comm=half) as strategy:
        checkpoints = trained(strategy, mpi_tmp_path, every_steps=1)
        if world.rank % 2 == 0:
            checkpoints.step(1, {"group": 0})
            checkpoints.wait()
        world.Barrier()
        if world.rank % 2:
            words = rf"{mpi_tmp_path}: .* no other run writes into, got one that process \d+ on .* uses\. Give each run"
            with pytest.raises(ValueError, match=words):
                checkpoints.step(1)
            with pytest.raises(ValueError, match=words):
                checkpoints.save(2)
            assert checkpoints.restore_latest() == {"group": 0, "step": 1}, "to read is no conflict"
        world.Barrier()
        assert checkpoints.steps() == [1]
    world.Barrier()
    if world.rank % 2:  # the first group has closed its strategy
        with ms.MultiWorkerMirroredStrategy(comm=half) as strategy:
            trained(strategy, mpi_tmp_path).save(3)
    world.Barrier()
    assert (mpi_tmp_path / "step-0000000003.h5").exists()


@pytest.mark.ranks(1, 2)
def test_a_run_that_was_killed_is_not_in_the_way(mpi_tmp_path, holder):
    from mpi4py import MPI

    children = holder(process=1, host="there", since="then")
    with ms.MultiWorkerMirroredStrategy() as strategy:
        checkpoints = trained(strategy, mpi_tmp_path, every_steps=1)
        with pytest.raises(ValueError, match="got one that process 1 on there, since then, uses"):
            checkpoints.save(1)
        for child in children:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
        MPI.COMM_WORLD.Barrier()
        checkpoints.save(1)
        checkpoints.wait()
        assert checkpoints.steps() == [1]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("generation", [0, 1])
def test_a_job_that_was_started_again_succeeds_its_own_last_process(mpi_tmp_path, holder, monkeypatch, generation):
    monkeypatch.setenv("MPISTRAT_JOB", "0123456789abcdef")
    monkeypatch.setenv("MPISTRAT_GENERATION", "1")
    assert Environment.read().generation == 1
    holder(process=1, host="there", since="then", job="0123456789abcdef", generation=generation)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        checkpoints = trained(strategy, mpi_tmp_path, snapshot_seconds=None)
        if generation:  # of this start of the job: another group of it
            with pytest.raises(ValueError, match="got one that process 1 on there"):
                checkpoints.save(1)
        else:
            checkpoints.save(1)
            checkpoints.wait()
            assert checkpoints.steps() == [1]


@pytest.mark.ranks(1, 2)
def test_strategies_of_one_program_follow_each_other(mpi_tmp_path):
    """The newer one has the folder, also where the older one was not closed; then that one writes no more."""
    first = ms.MultiWorkerMirroredStrategy()
    older = trained(first, mpi_tmp_path)
    older.save(1)
    trained(first, mpi_tmp_path).save(2)  # by another object of the same strategy
    older.save(3)
    with ms.MultiWorkerMirroredStrategy() as second:
        trained(second, mpi_tmp_path).save(4)
        with pytest.raises(ValueError, match=r"uses a newer strategy|a newer strategy of process \d+ uses"):
            older.save(5)
    first.close()
    with ms.MultiWorkerMirroredStrategy() as third:
        checkpoints = trained(third, mpi_tmp_path)
        assert checkpoints.steps() == [2, 3, 4]
        checkpoints.save(6)
