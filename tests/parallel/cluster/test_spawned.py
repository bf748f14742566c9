"""Processes that multiprocessing starts for a rank by spawn or forkserver: they import MPI at their top, and are no ranks."""

import pytest

PROGRAM = """
from mpi4py import MPI
import mpi4py.MPI
import multiprocessing, os, pickle, sys
from concurrent.futures import ProcessPoolExecutor

import mpistrat as ms

{top}

def variables(_):
    return sorted(name for name in os.environ if name.startswith(("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "MPI_")))

def used(_):
    return MPI.COMM_WORLD.rank

def nowhere(): ...

nowhere.__module__ = None  # as of functions of compiled libraries; pickle asks all modules for it

def pickled(_):
    return b"nowhere" in pickle.dumps(nowhere)

def strategy_in_child(_):
    return ms.MultiWorkerMirroredStrategy().rank

if __name__ == "__main__":
    context = multiprocessing.get_context("{how}")
    strategy = ms.MultiWorkerMirroredStrategy()
    total = strategy.reduce("SUM", 1.0, axis=None)
    with ProcessPoolExecutor(2, mp_context=context) as pool:
        print(list(pool.map(variables, range(4))))
        print(list(pool.map(pickled, [0])))
        for function in (used, strategy_in_child):
            try:
                print("no error", list(pool.map(function, [0])))
            except Exception as error:
                print(type(error).__name__, error)
    with context.Pool(1) as pool:
        print(pool.map(abs, [-2]))
    assert "{how}" == "spawn" or os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
    print(strategy.reduce("SUM", 1.0, axis=None) == total == strategy.num_replicas_in_sync, MPI.COMM_WORLD.size)
    strategy.close()
"""


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_they_are_no_ranks(mpi_run, tmp_path, how, ranks):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(how=how, top=""))
    result = mpi_run([str(path)], ranks)
    assert result.returncode == 0, result
    for rank in range(ranks):
        lines = result.out[rank].splitlines()
        assert lines[0] == "[[], [], [], []]", result
        assert lines[1] == "[True]", result
        assert lines[2].startswith("RuntimeError mpi4py.MPI cannot be used in a process that multiprocessing"), result
        assert lines[3].startswith("ContextError MultiWorkerMirroredStrategy: expected a call by a rank"), result
        assert lines[4:] == ["[2]", f"True {ranks}"], result


@pytest.mark.parametrize("how", ["spawn", "forkserver"])
def test_a_use_at_the_top_is_an_error(mpi_run, tmp_path, how):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(how=how, top="rank = MPI.COMM_WORLD.rank"))
    result = mpi_run([str(path)], 2)
    assert result.returncode != 0, result
    assert any("it is not a rank, and would hang (MPI.COMM_WORLD)" in err for err in result.err), result
    assert any("BrokenProcessPool" in err for err in result.err), result
