"""jobscripts/tf-config.sh under real launchers: each rank's TF_CONFIG says what MPI says of it."""

from __future__ import annotations

import json

import pytest

from tests.launch.launcher import ROOT

PROGRAM = """
import json, os, sys
script = {script!r}
if "TF_CONFIG" not in os.environ:
    os.execv(script, [script, sys.executable, *sys.argv])
import mpistrat as ms
strategy = ms.strategy_from_environment()
print(json.dumps([type(strategy).__name__, strategy.rank, strategy.size, json.loads(os.environ["TF_CONFIG"])]))
strategy.close()
"""
WORKERS = ("MultiWorkerMirroredStrategy", {"worker": ["worker0:2222", "worker1:2222"]}, [("worker", 0), ("worker", 1)])
SERVER = ("ParameterServerStrategy", {"worker": ["worker0:2222"], "ps": ["ps0:2222"]}, [("worker", 0), ("ps", 0)])


@pytest.mark.parametrize(
    ("env", "expected"),
    [({}, WORKERS), ({"MPISTRAT_STRATEGY": "parameter_server", "MPISTRAT_NUM_PS": "1"}, SERVER)],
    ids=["workers", "server"],
)
def test_every_rank_has_its_task(mpi_run, env, expected):
    result = mpi_run(PROGRAM.format(script=str(ROOT / "jobscripts/tf-config.sh")), 2, timeout=60, env=env)
    assert result.returncode == 0, result
    strategy, cluster, tasks = expected
    assert [json.loads(text) for text in result.out] == [
        [strategy, rank, 2, {"cluster": cluster, "task": {"type": job, "index": index}}]
        for rank, (job, index) in enumerate(tasks)
    ]
