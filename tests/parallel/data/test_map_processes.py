"""Processes of a map under mpiexec: they know nothing of MPI, and the job ends with them."""

import numpy as np
import pytest

from tests.launch.launcher import ROOT

PROGRAM = """
import sys
import numpy as np

def double(x):
    return 2 * x

def main():
    from mpi4py import MPI
    from tests.harness import map_functions
    from mpistrat.data import Dataset

    comm = MPI.COMM_WORLD
    batches = Dataset.range(10).map(double, num_parallel_calls=2, processes=True).batch(4)
    print([x.tolist() for x in batches])
    total = np.zeros(4, np.int64)
    comm.Allreduce(next(iter(batches)), total)
    print(total.tolist())
    print(Dataset.range(4).map(map_functions.launcher_variables, processes=True).rows([0, 3]).tolist())
    try:
        list(Dataset.range(4).map(map_functions.import_mpi, processes=True))
    except RuntimeError as error:
        print(error)
    if "{how}" == "midway":
        reading = iter(batches.repeat().prefetch(2))
        next(reading)
    if "{how}" == "error" and comm.rank == comm.size - 1:
        list(Dataset.range(9).map(map_functions.die_at_5, num_parallel_calls=2, processes=True))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize(("how", "ranks"), [("whole", 1), ("midway", 2), ("error", 2)])
def test_a_job_with_processes_ends(mpi_run, tmp_path, how, ranks):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.replace("{how}", how))
    result = mpi_run([str(path)], ranks, env={"PYTHONPATH": str(ROOT)})
    assert (result.returncode == 0) == (how != "error"), result
    for rank in range(ranks):
        lines = result.out[rank].splitlines()
        assert lines[0] == "[[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]", result
        assert lines[1:3] == [str([0, 2 * ranks, 4 * ranks, 6 * ranks]), "[0, 0]"], result
        assert lines[3].startswith("mpi4py.MPI cannot be used in a process that multiprocessing has started"), result
    if how == "error":
        assert "killed by signal 9" in result.err[ranks - 1], result


@pytest.mark.ranks(1, 2)
def test_ranks_read_through_processes():
    from mpi4py import MPI

    from mpistrat.data import Dataset
    from tests.harness import map_functions

    comm = MPI.COMM_WORLD
    rows = Dataset.range(32).map(map_functions.double, num_parallel_calls=2, processes=True)
    pids = Dataset.range(4).map(map_functions.process, num_parallel_calls=2, processes=True)
    mine = np.array(rows.batch(32).element(0, 0)[comm.rank :: comm.size].sum())
    total = np.zeros_like(mine)
    comm.Allreduce(mine, total)
    assert total == 2 * sum(range(32))
    assert len(set(pids.rows([0, 1, 2, 3]).tolist())) == 2
