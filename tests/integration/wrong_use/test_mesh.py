"""Ranks of a mesh that take different axes: an error that names the calls, at the end of the step, or after the time limit."""

import pytest

PROGRAM = """
import numpy as np
import mpistrat as ms

strategy = ms.MeshStrategy(axes={"data": 2, "model": 2})
with strategy.scope():
    w = ms.Variable(np.zeros(4), name="w")
    optimizer = ms.optimizers.SGD(0.1)


def step():
    ms.get_replica_context().mesh.all_reduce("SUM", np.ones(3), mesh_axis="data" if strategy.rank in WRONG else "model")
    optimizer.apply_gradients([(np.ones(4), w)])


strategy.run(step)
strategy.run(step)
print("end", flush=True)
"""


@pytest.mark.parametrize("wrong", [(1,), (1, 3)])
def test_another_axis_on_some_ranks(mpi_run, wrong):
    result = mpi_run(PROGRAM.replace("WRONG", repr(wrong)), 4, timeout=60)
    assert result.returncode != 0
    assert "end" not in result.stdout
    assert "CollectiveMismatchError: the ranks entered different collectives" in result.stderr
    assert "apply_gradients of w" in result.stderr
    assert "reduce 'axis " in result.stderr


def test_ranks_that_wait_in_a_circle(mpi_run):
    """Rank 0 for 1, that for 3, that for 2, that for 0: no group sees two calls."""
    limits = {"MPISTRAT_WARN_AFTER": "2", "MPISTRAT_ABORT_AFTER": "6"}
    result = mpi_run(PROGRAM.replace("WRONG", "(1, 2)"), 4, timeout=60, env=limits)
    assert result.returncode != 0
    assert "CollectiveTimeoutError: Mesh.all_reduce 'axis " in result.stderr
    assert "of another group" in result.stderr
