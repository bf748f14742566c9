"""A coordinator of a real SLURM's job over two hosts continues in place when workers of either are killed."""

import re

import pytest

from tests.integration.deaths.test_coordinator import END, PROGRAM

pytestmark = pytest.mark.timeout(300)

# Ranks 0 to 2 are on one host, worker 3 and the server on the other.
KILLS = """
def program(job, strategy, coordinator, processes, function, w, large, own, momentum):
    say("nodes", *strategy.extended.topology.node_of)
    values = [coordinator.schedule(function, (i, 0.01)) for i in range(COUNT)]
    for worker in (2, 0):
        values[20].get()
        coordinator.schedule(lambda: kill(os.getpid()), worker=worker)
        try:
            coordinator.join()
        except PeerExitError as error:
            say("join:", error)
    twice(coordinator, values, w, large, 2)
    assert coordinator.schedule(os.getpid).fetch() == processes[2]
    with strategy.scope():
        v = ms.Variable(np.zeros(LARGE), name="v")
    coordinator.fetch([coordinator.schedule(lambda: v.assign_add(np.ones(LARGE))) for _ in range(8)])
    assert (v.numpy() == 8).all()
    say("size", strategy.size, strategy.num_workers, coordinator.num_workers)
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=3
{python} -m mpistrat run -n 5 --survive train.py
echo status $?
"""


def test_killed_workers_of_two_hosts(slurm, slurm_mpi, tmp_path):
    if slurm_mpi.name != "openmpi":
        pytest.skip("only Open MPI goes on when a rank dies")
    (tmp_path / "train.py").write_text(PROGRAM.replace("TRANSPORT", repr("messages")) + KILLS + END)
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT.format(python=slurm_mpi.python))
    job = slurm.submit(script)
    job.wait()
    lines = job.output().splitlines()
    told = [line for line in lines if line.startswith(("nodes", "size", "end"))]
    assert told == ["nodes 0 0 0 1 1", "size 3 2 1", "end 0", "end 0", "end 0"], job.tell("not all have gone on")
    assert len([line for line in lines if re.search("join: .*worker [02] .* died", line)]) == 2, job.tell("join")
    assert [line.split()[-1] for line in lines if "status" in line] == ["0"], job.tell("status")
