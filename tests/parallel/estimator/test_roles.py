"""Who trains and who evaluates: ranks that are elsewhere are named, not waited for without end."""

import pytest

ELSEWHERE = """
import sys
import mpistrat as ms
from mpi4py import MPI

if MPI.COMM_WORLD.rank == 0:
    ms.estimator.Estimator(lambda: None, "run").split
elif sys.argv[1] == "strategy":
    ms.MultiWorkerMirroredStrategy()
else:
    MPI.COMM_WORLD.recv(source=0)
"""


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("strategy", "split_evaluator; rank 1: MultiWorkerMirroredStrategy"),
        ("receive", "split_evaluator: rank 0 of 2 waited 2 s for rank 1"),
    ],
)
def test_ranks_that_are_elsewhere_are_named(mpi_run, tmp_path, where, words):
    path = tmp_path / "program.py"
    path.write_text(ELSEWHERE)
    result = mpi_run([str(path), where], 2, timeout=30, env={"MPISTRAT_ABORT_AFTER": "2"})
    assert result.returncode != 0
    assert words in result.stderr
