"""Parameter servers as what started the ranks says: a number in the environment, or one program for each job."""

import os
import subprocess

import pytest

import mpistrat as ms


@pytest.mark.ranks(3, 4)
def test_the_last_ranks_are_servers(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("MPISTRAT_STRATEGY", "parameter_server")
    monkeypatch.setenv("MPISTRAT_NUM_PS", "2")
    with_two = ms.strategy_from_environment()
    ranks = tuple(range(with_two.size))
    assert with_two.servers == ranks[-2:]
    with_two.close()
    with_one = ms.strategy_from_environment(num_ps=1)
    assert with_one.servers == ranks[-1:]
    with_one.close()


SHARED = """
import pathlib, sys
import numpy as np
import mpistrat as ms

resolver = ms.cluster_resolver.MPIClusterResolver(jobs=["ps", "worker"])
strategy = ms.ParameterServerStrategy(resolver)
assert (strategy.workers, strategy.servers) == ((1, 2), (0,)), (strategy.workers, strategy.servers)
with strategy.scope():
    v = ms.Variable(np.zeros(2), aggregation=ms.VariableAggregation.SUM)

def end(value):
    assert value.tolist() == [2, 2], value
    strategy.comm.Barrier()
    strategy.close()
    pathlib.Path(f"{sys.argv[0]} as {resolver.task_type} {resolver.task_id}").touch()
"""
PROGRAMS = {
    "server": """
from shared import end, strategy, v
strategy.serve()
strategy.comm.Barrier()
end(v.numpy())
""",
    "worker": """
from shared import end, np, strategy, v
strategy.run(lambda: v.assign_add(np.ones(2)))
v.numpy()  # behind its own write
strategy.leave()
strategy.comm.Barrier()
end(v.numpy())
""",
}


def test_the_programs_of_an_mpmd_launch(mpi, tmp_path):
    from tests.launch.launcher import ROOT

    for name, text in (("shared", SHARED), *PROGRAMS.items()):
        (tmp_path / f"{name}.py").write_text(text)
    words = [*mpi.mpiexec, *mpi.flags, "-n", "1", mpi.python, "server.py", ":", "-n", "2", mpi.python, "worker.py"]
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout + result.stderr
    ended = sorted(path.name for path in tmp_path.glob("*.py as *"))
    assert ended == ["server.py as ps 0", "worker.py as worker 0", "worker.py as worker 1"]
