"""`mpistrat top` and `stacks` of a job under a real SLURM, from the head node: the ranks of both hosts."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.timeout(300)

TRAIN = """
import time
import numpy as np
import mpistrat as ms

with ms.MultiWorkerMirroredStrategy() as strategy:
    with strategy.scope():
        w = ms.Variable(np.zeros(10), name="w")
        optimizer = ms.optimizers.SGD(0.1)

    def train_step():
        time.sleep(0.02 if strategy.rank == 2 else 0.001)
        optimizer.apply_gradients([(np.ones(10), w)])

    begun = time.time()
    for number in range(100_000):
        strategy.run(train_step)
        if number == 5 and strategy.rank == 0:
            print("runs", flush=True)
        if number % 50 == 0 and strategy.broadcast_object(time.time() - begun > 60):
            break
"""


def test_all_hosts_are_seen_by_the_number_of_the_job(slurm, slurm_mpi, tmp_path) -> None:
    from tests.harness import slurm_jobs as jobs

    (tmp_path / "train.py").write_text(TRAIN)
    job = jobs.submit(slurm, slurm_mpi, "srun", tmp_path, *jobs.TWO_BY_TWO, "train.py")
    job.wait_until("steps", lambda: "runs" in job.output())
    found = slurm.ok(slurm_mpi.python, "-m", "mpistrat", "top", job.number, "--json")
    rows = [json.loads(line) for line in found.splitlines()]
    assert [row["rank"].split(" (")[0] for row in rows] == [f"rank {rank} of 4" for rank in range(4)], found
    assert rows[2]["compute"] > 0.5 and all(rows[rank]["compute"] < 0.4 for rank in (0, 1, 3)), rows
    found = slurm.ok(slurm_mpi.python, "-m", "mpistrat", "stacks", job.number, "--json")
    answers = [json.loads(line) for line in found.splitlines()]
    assert len(answers) == 4 and all("train.py" in answer["threads"]["MainThread"] for answer in answers), found
    slurm.run("scancel", job.number)
