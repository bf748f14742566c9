"""Ranks that call Optimizer.begin for other variables, in another order, or not at all, get an error: all of them, soon."""

import pytest

PROGRAM = """
import sys
import numpy as np
import mpistrat as ms

with ms.MultiWorkerMirroredStrategy(sharded_gradients=sys.argv[2:] == ["sharded"]) as strategy:
    with strategy.scope():
        variables = [ms.Variable(np.zeros(2_000_000, np.float32), name=f"v{i}") for i in range(2)]
        optimizer = ms.optimizers.Adam(0.1)

    def step(number):
        odd = number == 2 and strategy.rank == 1
        ways = {"others": [[1 - odd]], "another order": [[0, 1][:: 1 - 2 * odd]], "nothing": [[]] if odd else [[1]]}
        for chosen in ways[sys.argv[1]]:
            if chosen:
                optimizer.begin([variables[i] for i in chosen])
        optimizer.apply_gradients([(v.grad, v) for v in variables])

    for number in range(4):
        strategy.run(step, args=(number,))
print("not reached")
"""


def check(result):
    assert result.returncode != 0 and "not reached" not in result.stdout
    assert "CollectiveMismatchError" in result.stderr
    assert "begin of v" in result.stderr or "announced: v" in result.stderr


@pytest.mark.parametrize("fault", ["others", "another order", "nothing"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_between_nodes(mpi_run, fault, ranks):
    check(mpi_run(["-c", PROGRAM, fault], ranks, timeout=40, env={"MPISTRAT_SHARED_MEMORY": "0"}))


@pytest.mark.parametrize("fault", ["others", "another order", "nothing"])
def test_on_a_node(mpi_run, fault, hosts):
    check(mpi_run(["-c", PROGRAM, fault], 4, timeout=40, hosts=hosts))


@pytest.mark.parametrize("fault", ["others", "another order", "nothing"])
def test_on_the_only_node(mpi_run, fault):
    check(mpi_run(["-c", PROGRAM, fault], 2, timeout=40))


@pytest.mark.parametrize("fault", ["others", "another order", "nothing"])
def test_of_sharded_gradients(mpi_run, fault):
    check(mpi_run(["-c", PROGRAM, fault, "sharded"], 2, timeout=40))


@pytest.mark.parametrize("fault", ["others", "another order", "nothing"])
def test_of_sharded_gradients_between_nodes(mpi_run, fault):
    check(mpi_run(["-c", PROGRAM, fault, "sharded"], 2, timeout=40, env={"MPISTRAT_SHARED_MEMORY": "0"}))
