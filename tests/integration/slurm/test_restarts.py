"""A job of a real SLURM over two hosts whose ranks are killed, or that loses a host: it goes on."""

import time
from pathlib import Path

import pytest

from tests.harness.slurm_jobs import lost_host, render

pytestmark = pytest.mark.timeout(300)

TRAIN = """
import hashlib, os, signal, time
import numpy as np
import mpistrat as ms

generation = int(os.environ["MPISTRAT_GENERATION"])
strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = ms.Variable(np.zeros(100), name="w")
    optimizer = ms.optimizers.Adam(0.1)
rows = np.random.default_rng(0).normal(size=(80, 100))
data = strategy.distribute_dataset(ms.data.from_arrays(rows).shuffle(seed=1).batch(8))

def step(x):
    optimizer.apply_gradients([((w.numpy() - x).sum(0) / 8, w)])

class Kill(ms.train.Callback):
    def on_step_end(self, loop):
        time.sleep(0.02)
        if generation < KILLS and loop.step == 15 + 10 * generation and strategy.rank == (3, 0, 2)[generation]:
            os.kill(os.getpid(), signal.SIGKILL)

checkpoints = ms.train.Checkpoints(strategy, "checkpoints-KILLS", snapshot_seconds=0.05)
trainer = ms.train.Trainer(strategy, step, callbacks=[Kill()], checkpoints=checkpoints)
trainer.fit(data, 5)
if strategy.rank == 0:
    print("bits", hashlib.sha256(w.numpy().tobytes()).hexdigest(), trainer.loop.step, flush=True)
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2
{python} -m mpistrat run --restarts 5 undisturbed.py
{python} -m mpistrat run --restarts 5 killed.py
echo status $?
srun --ntasks=2 --ntasks-per-node=1 ls /dev/shm | grep -c mpistrat-job
"""


def test_killed_ranks_of_two_hosts(slurm, slurm_mpi, tmp_path):
    (tmp_path / "undisturbed.py").write_text(TRAIN.replace("KILLS", "0"))
    (tmp_path / "killed.py").write_text(TRAIN.replace("KILLS", "3"))
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT.format(python=slurm_mpi.python))
    job = slurm.submit(script)
    job.wait()
    out = job.output()
    bits = [line.split() for line in out.splitlines() if line.startswith("bits")]
    assert len(bits) == 2, job.tell("not both have ended")
    assert bits[0] == bits[1] and bits[0][2] == "50"
    assert "status 0" in out, job.tell("status")
    assert out.count("started again from step") == 3, job.tell("how often")
    assert out.splitlines()[-1] == "0", job.tell("files are left")


SLOW = """
import os, time
import numpy as np
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy(replicas=4)
with strategy.scope():
    w = ms.Variable(np.zeros(100), name="w")
    optimizer = ms.optimizers.SGD(0.01)
data = strategy.distribute_dataset(ms.data.from_arrays(np.ones((80, 100))).batch(8))

class Wait(ms.train.Callback):
    def on_step_end(self, loop):
        if loop.step == 20 and os.environ["MPISTRAT_GENERATION"] == "0":
            if strategy.rank == 0:
                open("lose a host", "w").close()
            time.sleep(120)

checkpoints = ms.train.Checkpoints(strategy, "checkpoints", snapshot_seconds=0.02)
step = lambda x: optimizer.apply_gradients([((w.numpy() - x).sum(0) / 8, w)])
trainer = ms.train.Trainer(strategy, step, callbacks=[Wait()], checkpoints=checkpoints)
trainer.fit(data, 4)
if strategy.rank == 0:
    print("ended", trainer.loop.step, strategy.size, strategy.extended.topology.num_nodes, w.numpy()[0], flush=True)
"""


def test_a_lost_host_is_left_out(slurm, slurm_mpi, tmp_path):
    """`mpistrat job --restarts`: SLURM takes a host from the job, and the other one has its ranks from then on."""
    (tmp_path / "train.py").write_text(SLOW)
    environment = str(Path(slurm_mpi.python).parent.parent)
    words = ["--venv", environment, "--nodes", "2", "--ranks-per-node", "2", "--cpus-per-rank", "1", "--restarts", "5"]
    script = render(slurm_mpi, tmp_path, *words, "train.py")
    assert "#SBATCH --no-kill" in script.read_text()
    job = slurm.submit(script)
    job.wait_until("the twentieth step", (tmp_path / "lose a host").exists, 60)
    with lost_host(slurm) as lost:
        job.wait(120)
    out = job.output()
    ended = [line.split() for line in out.splitlines() if line.startswith("ended")]
    assert ended, job.tell("not ended")
    assert ended[0][1:4] == ["40", "2", "1"], job.tell("steps, ranks, nodes")
    assert float(ended[0][4]) == pytest.approx(1 - 0.99**40)
    assert f"node {lost} lost" in out, job.tell("what was said")
    assert job.fields()["JobState"] == "COMPLETED"


def test_a_cut_beyond_the_time_limit_of_a_collective(slurm, slurm_mpi, tmp_path):
    """The ranks that wait end, the others are ended when their host is back, and all are started again."""
    if slurm_mpi.name != "mpich":
        pytest.skip("one MPI is enough")
    (tmp_path / "train.py").write_text(SLOW.replace("time.sleep(120)", "time.sleep(3)"))
    environment = str(Path(slurm_mpi.python).parent.parent)
    words = ["--venv", environment, "--nodes", "2", "--ranks-per-node", "2", "--cpus-per-rank", "1", "--restarts", "5"]
    script = render(slurm_mpi, tmp_path, *words, "--env", "MPISTRAT_ABORT_AFTER=4", "train.py")
    job = slurm.submit(script)
    job.wait_until("the twentieth step", (tmp_path / "lose a host").exists, 60)
    slurm.hosts.inside("head", "ip", "link", "set", "veth2", "down")
    try:
        time.sleep(12)
    finally:
        slurm.hosts.inside("head", "ip", "link", "set", "veth2", "up")
    out = job.completed(120)
    assert "CollectiveTimeoutError" in out and "started again from step" in out, job.tell("what was said")
    (ended,) = [line.split() for line in out.splitlines() if line.startswith("ended")]
    assert ended[1:4] == ["40", "4", "2"], job.tell("steps, ranks, nodes")
    assert float(ended[4]) == pytest.approx(1 - 0.99**40)
