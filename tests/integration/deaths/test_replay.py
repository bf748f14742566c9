"""`mpistrat replay`: a run that went on with fewer ranks is repeated with the same layouts, to the last bit."""

import re
import subprocess

import pytest

from tests.launch.launcher import job_environment

pytestmark = pytest.mark.timeout(120)

TRAIN = """
import hashlib, os, signal, sys, time
import numpy as np
import mpistrat as ms

folder, at = sys.argv[1], int(sys.argv[2])

def train(job):
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = ms.Variable(np.zeros(1000), name="w")
        optimizer = ms.optimizers.Adam(0.1)
    rows = np.random.default_rng(0).normal(size=(60, 1000)) * 10.0 ** np.arange(60).reshape(60, 1) ** 0.7
    data = strategy.distribute_dataset(ms.data.from_arrays(rows).shuffle(seed=1).batch(12))

    def step(x):
        optimizer.apply_gradients([((w.numpy() - x).sum(0) / 12, w)])

    class Kill(ms.train.Callback):
        def on_step_end(self, loop):
            time.sleep(0.01)
            if loop.step == at and job.generation == 0 and strategy.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoints = ms.train.Checkpoints(strategy, folder, snapshot_seconds=0.05)
    ms.train.Trainer(strategy, step, callbacks=[Kill()], checkpoints=checkpoints).fit(data, 10)
    if strategy.rank == 0:
        bits = hashlib.sha256(w.numpy().tobytes() + b"".join(optimizer.slots(w).values())).hexdigest()
        print("bits", bits, checkpoints.layouts, flush=True)
    else:
        optimizer.slots(w)

ms.survive(train)
"""


def bits_of(done):
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("bits")]
    return line.split(maxsplit=2)[1:]


@pytest.fixture
def mpistrat(mpi, tmp_path, to_the_end):
    def run(*words, status=0):
        (tmp_path / "train.py").write_text(TRAIN)
        environment = job_environment("none", tmp_path, {"PATH": "/usr/bin:/bin"})
        done = to_the_end([mpi.python, "-m", "mpistrat", *words], environment, tmp_path)
        assert done.returncode == status, done.stderr
        return done

    return run


def test_a_run_that_lost_a_rank_is_repeated(mpi, mpistrat, tmp_path):
    if "Open MPI" not in mpi.vendor:
        pytest.skip("only Open MPI goes on when a rank dies")
    survived = mpistrat("run", "-n", "3", "--survive", "train.py", "first", "25")
    bits, layouts = bits_of(survived)
    match = re.fullmatch(r"\[\(0, \(3,\)\), \((\d+), \(2,\)\)\]", layouts)
    assert match and 0 < int(match[1]) <= 25
    newest = sorted((tmp_path / "first").iterdir())[-1]
    again = mpistrat("replay", str(newest), "train.py", "again", "0")
    assert bits_of(again) == [bits, layouts]
    assert f"3 ranks from step 0 to step {match[1]}" in again.stderr
    undisturbed = mpistrat("run", "-n", "3", "train.py", "undisturbed", "0")
    assert bits_of(undisturbed)[0] != bits  # else the test would show nothing


def test_what_cannot_be_repeated_is_said(mpi, mpistrat, tmp_path):
    code = """
import numpy as np, mpistrat as ms
with ms.OneDeviceStrategy() as strategy:
    with strategy.scope():
        w = ms.Variable(np.zeros(3), name="w")
    strategy.save("plain.h5")
    strategy.save("nodes.h5", {"step": 9, "layouts": [[0, [2, 2]]]})
"""
    subprocess.run([mpi.python, "-c", code], cwd=tmp_path, check=True, timeout=60)
    assert (
        "which notes the layouts, got a file without layouts"
        in mpistrat("replay", "plain.h5", "train.py", status=1).stderr
    )
    assert (
        "a run on one node, got 2 nodes with 2, 2 ranks" in mpistrat("replay", "nodes.h5", "train.py", status=1).stderr
    )
    assert "error:" in mpistrat("replay", "none.h5", "train.py", status=1).stderr
