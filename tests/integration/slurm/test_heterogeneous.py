"""A heterogeneous job: one component's tasks come after the other's, although SLURM lists hosts by their names."""

from __future__ import annotations

import json

import pytest

# The first component is on h2: its tasks come first, and SLURM_STEP_NODELIST still says h[1-2].
SCRIPT = """#!/bin/bash
#SBATCH --output=job.out
#SBATCH --nodes=1 --ntasks=3 --nodelist=h2
#SBATCH hetjob
#SBATCH --nodes=1 --ntasks=2 --nodelist=h1
set -e
echo both; srun --label --het-group=0,1 "$@"
echo second; srun --label --het-group=1 "$@"
echo few; srun --label --het-group=1 -n1 "$@" : --het-group=0 -n2 "$@"
"""
PROGRAM = """
import json, os
from mpistrat.cluster_resolver import SlurmClusterResolver
resolver = SlurmClusterResolver(port_base=0)
said = [os.environ["SLURM_STEP_NODELIST"], os.environ["SLURM_STEP_TASKS_PER_NODE"]]
print(json.dumps([resolver.cluster_spec().job_tasks("worker"), resolver.task_id, os.uname().nodename, *said]))
"""
RANKS = """
import numpy as np
from mpi4py import MPI
import mpistrat as ms
from mpistrat.cluster_resolver import SlurmClusterResolver
from tests.harness.whole_lines import print
resolver = SlurmClusterResolver({"worker": 3, "ps": 2})
comm = MPI.COMM_WORLD
assert resolver.master().split(":")[0] == MPI.Get_processor_name()
assert (resolver.task_type, resolver.task_id) == (("worker", comm.rank) if comm.rank < 3 else ("ps", comm.rank - 3))
strategy = ms.MultiWorkerMirroredStrategy()
total = strategy.reduce("SUM", np.array([comm.rank + 1.0]), axis=None)
print(comm.rank, MPI.Get_processor_name(), float(np.asarray(total)[0]))
strategy.close()
"""
EXPECTED = ["h2:0", "h2:1", "h2:2", "h1:0", "h1:1"]


def test_tasks_of_components(slurm, tmp_path) -> None:
    import sys

    from tests.launch.slurm import by_task

    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "job.sh").write_text(SCRIPT.replace('"$@"', f"{sys.executable} program.py"))
    steps = slurm.submit(tmp_path / "job.sh").completed().split("both\n")[1]
    both, rest = steps.split("second\n")
    second, few = ([json.loads(text) for text in by_task(part)] for part in rest.split("few\n"))
    both = [json.loads(text) for text in by_task(both)]
    assert [line[0] for line in both] == [EXPECTED] * 5
    assert [line[1:3] for line in both] == [[task, address[:2]] for task, address in enumerate(EXPECTED)]
    assert {tuple(line[3:]) for line in both} == {("h[1-2]", "2,3")}  # by name: what would mislead
    assert second == [[["h1:0", "h1:1"], task, "h1", "h1", "2"] for task in (0, 1)]
    assert [line[:3] for line in few] == [
        [["h2:0", "h2:1", "h1:0"], task, host] for task, host in enumerate(["h2", "h2", "h1"])
    ]


@pytest.mark.timeout(300)
def test_ranks_of_components(slurm, slurm_mpi, tmp_path) -> None:
    """With the components' hosts in the order of their names: otherwise SLURM 22.05 itself starts no MPI (PMI2 hangs)."""
    from tests.launch.slurm import exported, mpi_type

    (tmp_path / "program.py").write_text(RANKS)
    script = SCRIPT[: SCRIPT.index("echo second")].replace('"$@"', f"{slurm_mpi.python} program.py")
    script = script.replace("nodelist=h2", "nodelist=h0").replace("nodelist=h1", "nodelist=h2").replace("h0", "h1")
    (tmp_path / "job.sh").write_text(script.replace("--label", f"--mpi={mpi_type(slurm_mpi)} --kill-on-bad-exit=1"))
    job = slurm.submit(tmp_path / "job.sh", env=exported(slurm_mpi))
    lines = [line for line in job.completed().splitlines() if line[:1].isdigit()]
    assert sorted(lines) == [f"{rank} {host} 15.0" for rank, host in enumerate(["h1", "h1", "h1", "h2", "h2"])]
