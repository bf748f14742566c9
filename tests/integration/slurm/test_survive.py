"""A job of a real SLURM over two hosts that goes on in place, without a rank of either, or without all of one."""

import pytest

pytestmark = pytest.mark.timeout(300)

TRAIN = """
import hashlib, os, signal, time
import numpy as np
import mpistrat as ms

VICTIMS = {victims}

def train(job):
    strategy = ms.MultiWorkerMirroredStrategy(replicas=4)
    with strategy.scope():
        w = ms.Variable(np.zeros(100_000), name="w")
        optimizer = ms.optimizers.Adam(0.1)
    rows = np.random.default_rng(0).normal(size=(80, 100))
    data = strategy.distribute_dataset(ms.data.from_arrays(rows).shuffle(seed=1).batch(8))

    def step(x):
        optimizer.apply_gradients([(np.resize(x.sum(0), w.shape) / 8 - w.numpy(), w)])

    class Kill(ms.train.Callback):
        def on_step_end(self, loop):
            time.sleep(0.02)
            if job.generation < len(VICTIMS) and loop.step == 15 + 10 * job.generation:
                if strategy.rank in VICTIMS[job.generation]:
                    os.kill(os.getpid(), signal.SIGKILL)

    checkpoints = ms.train.Checkpoints(strategy, "checkpoints-{name}", snapshot_seconds=0.05)
    trainer = ms.train.Trainer(strategy, step, callbacks=[Kill()], checkpoints=checkpoints)
    trainer.fit(data, 5)
    if "{name}" == "error" and strategy.rank == 0:
        raise ValueError("my own mistake")
    if strategy.rank == 0:
        bits = hashlib.sha256(w.numpy().tobytes()).hexdigest()
        print("bits", bits, trainer.loop.step, strategy.size, strategy.extended.topology.num_nodes, job.lost, flush=True)

ms.survive(train)
"""
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2
srun --ntasks=2 --ntasks-per-node=1 ls /dev/shm | grep -c mpistrat-job
{python} -m mpistrat run --restarts 5 undisturbed.py
{python} -m mpistrat run --survive one.py
echo status $?
{python} -m mpistrat run --survive host.py
echo status $?
timeout 60 {python} -m mpistrat run --survive error.py
echo status $?
srun --ntasks=2 --ntasks-per-node=1 ls /dev/shm | grep -c mpistrat-job
"""


def test_killed_ranks_of_two_hosts(slurm, slurm_mpi, tmp_path):
    if slurm_mpi.name != "openmpi":
        pytest.skip("only Open MPI goes on when a rank dies")
    for name, victims in (("undisturbed", []), ("one", [[3], [0]]), ("host", [[2, 3]]), ("error", [[2, 3]])):
        (tmp_path / f"{name}.py").write_text(TRAIN.replace("{victims}", repr(victims)).replace("{name}", name))
    script = tmp_path / "job.sh"
    script.write_text(SCRIPT.format(python=slurm_mpi.python))
    job = slurm.submit(script)
    job.wait()
    out = job.output()
    lines = [line.split(maxsplit=5) for line in out.splitlines() if line.startswith("bits")]
    assert len(lines) == 3, job.tell("not all have ended")
    assert len({bits for _, bits, *_ in lines}) == 1, job.tell("bits")
    assert [words[2:] for words in lines] == [
        ["50", "4", "2", "()"],
        ["50", "2", "2", "(0, 3)"],
        ["50", "2", "1", "(2, 3)"],
    ], job.tell("ranks")
    assert [line for line in out.splitlines() if line.startswith("status")] == ["status 0"] * 2 + ["status 1"], (
        job.tell("status")
    )
    assert "ValueError: my own mistake" in out
    assert "started again" not in out, job.tell("how often")
    assert out.splitlines()[-1] == out.splitlines()[0], job.tell("files are left")
