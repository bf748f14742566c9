"""A job of a real SLURM over two hosts whose ranks are killed: it goes on from the memory of either host."""

import pytest

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
