"""A rank that dies while sums that Optimizer.begin has started travel: the job ends, or goes on, as elsewhere."""

import re

import pytest

PROGRAM = """
import os, signal, sys, time
import numpy as np
import mpistrat as ms

def train(job=None):
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [ms.Variable(np.zeros(8_000_000, np.float32), name=f"v{i}") for i in range(2)]
        optimizer = ms.optimizers.Adam(0.1)

    def step(number):
        optimizer.begin([variables[1]])
        if number == 3 and strategy.rank == 1 and (job is None or job.generation == 0):
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.apply_gradients([(v.grad, v) for v in variables])

    for number in range(6):
        strategy.run(step, args=(number,))
    strategy.close()
    return strategy.size
"""
ENV = {"MPISTRAT_SHARED_MEMORY": "0"}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_job_ends(mpi_run, ranks):
    result = mpi_run(PROGRAM + "print('end of', train())", ranks, timeout=60, env=ENV)
    assert result.returncode not in (0, None), result
    assert "end of" not in result.stdout
    assert re.search(rf"mpistrat: rank 1 of {ranks} .* (was ended by SIGKILL|ended without a message)", result.stderr)


def test_the_others_go_on(mpi, mpistrat_run):
    if "Open MPI" not in mpi.vendor:
        pytest.skip("only Open MPI goes on when a rank dies")
    done = mpistrat_run(PROGRAM + "print('end of', ms.survive(train), flush=True)", 3, "--survive", **ENV)
    assert done.stdout.count("end of 2") == 2
    assert re.search(r"rank 1 lost: 2 ranks continue", done.stderr)


def test_a_rank_that_leaves(mpi_run):
    program = PROGRAM.replace("os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)")
    result = mpi_run(program + "print('end of', train())", 2, timeout=60, env=ENV)
    assert result.returncode not in (0, None), result
    assert "end of" not in result.stdout
