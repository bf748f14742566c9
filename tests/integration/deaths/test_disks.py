"""Memory and disks that are full or slow while a job is killed and goes on: real ones, in a mount namespace of the job's own."""

import re

import pytest

from tests.launch.hosts import why_no_hosts
from tests.launch.launcher import job_environment

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts() or "isolated mounts"),
]

SIZE = 1 << 20  # float64: 8 MiB; a file or a snapshot has three of them
PROGRAM = """
import os, signal, sys, time
import numpy as np
import mpistrat as ms
import mpistrat.train.checkpoints
mpistrat.train.checkpoints._SHARE = 1.0  # snapshots as often as it says

generation = int(os.environ["MPISTRAT_GENERATION"])
strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = ms.Variable(np.zeros(SIZE), name="w")
    optimizer = ms.optimizers.Adam(0.1)
data = strategy.distribute_dataset(ms.data.from_arrays(np.ones((80, 1))).batch(2))
checkpoints = ms.train.Checkpoints(strategy, "checkpoints", every_steps=10, snapshot_seconds=0.1)
losses, longest, last = [], 0.0, 0.0
for step, x in enumerate(checkpoints.batches(data, losses=losses), 1):
    if last and step > 5:
        longest = max(longest, time.monotonic() - last)
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(SIZE), w)]))
    losses.append(len(losses) + 1)
    if strategy.rank == 1 and len(losses) == 27 and generation == 0:
        time.sleep(0.3)  # a snapshot may be taken before
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.02)
    last = time.monotonic()
if strategy.rank == 0:
    print("from", generation, len(losses) - step, f"{longest:.2f}")
    print("end", losses == list(range(1, 41)), w.numpy()[0], checkpoints.steps(), flush=True)
""".replace("SIZE", str(SIZE))


@pytest.fixture
def run(mpi, tmp_path, to_the_end):
    """Run the program behind commands of the shell, in a mount namespace; return what it said."""

    def run(setup, program=PROGRAM, **env):
        (tmp_path / "train.py").write_text(program)
        (tmp_path / "checkpoints").mkdir()
        words = f"{setup} && exec {mpi.python} -m mpistrat run -n 2 --restarts 3 train.py"
        command = ["unshare", "--mount", "sh", "-c", words]
        done = to_the_end(command, job_environment("none", tmp_path, {"PATH": "/usr/bin:/bin", **env}), tmp_path, 150)
        assert done.returncode == 0, done.stderr
        return done

    return run


def ended(done):
    """The weight at the end, which steps have files, from where it went on, and the longest step."""
    found = re.search(r"from 1 (\d+) (\S+)\nend True (\S+) \[(.*)\]", done.stdout)
    assert found, done.stdout + done.stderr
    files = [int(step) for step in found[4].split(",") if step]
    return float(found[3]), files, int(found[1]), float(found[2])


WEIGHT = pytest.approx(-4.0, rel=1e-6)  # 40 steps of Adam at the rate 0.1 along one gradient


def test_a_full_dev_shm(run):
    """Room for variables and slots, and none for snapshots: the newest file is what is left."""
    weight, files, begun, _ = ended(done := run("mount -t tmpfs -o size=72m shm /dev/shm"))
    assert weight == WEIGHT
    assert files == [20, 30, 40]
    assert begun in (10, 20)
    assert "training continues without snapshots" in done.stderr
    assert "No space left on device" in done.stderr and "Enlarge it" in done.stderr
    assert "started again from the newest checkpoint" in done.stderr


def test_a_full_disk(run):
    """Room for one file until somebody else's is gone: those between are warnings, and snapshots are what is left."""
    full = "mount -t tmpfs -o size=96m disk checkpoints && head -c 60M /dev/zero > checkpoints/others"
    freed = "    if len(losses) == 35 and strategy.rank == 0:\n        os.unlink('checkpoints/others')\n    time.sleep(0.02)"
    weight, files, begun, _ = ended(done := run(full, PROGRAM.replace("    time.sleep(0.02)", freed)))
    assert weight == WEIGHT
    assert files == [10, 40]
    assert 20 <= begun <= 27
    assert "step-0000000020.h5" in done.stderr and "No space left on device" in done.stderr
    assert "started again from step" in done.stderr


def test_a_slow_disk(run, tmp_path):
    """A rank dies while a file is written, which takes longer than many snapshots: steps go on, and so does the job."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\n"
        "def pwrite(*args, plain=os.pwrite):\n"
        "    time.sleep(0.3)\n"
        "    return plain(*args)\n"
        "if 'MPISTRAT_GENERATION' in os.environ:\n"
        "    os.pwrite = pwrite\n"
    )
    path = f"{tmp_path}:{job_environment('none', tmp_path, {})['PYTHONPATH']}"
    program = PROGRAM.replace("every_steps=10", "every_steps=20").replace("time.sleep(0.02)", "time.sleep(0.05)")
    weight, files, begun, longest = ended(
        done := run("true", program.replace("sleep(0.3)", "sleep(0)"), PYTHONPATH=path)
    )
    assert weight == WEIGHT
    assert files == [40]
    assert begun > 20
    assert "started again from step" in done.stderr
    assert longest < 0.3
