"""Jobs that `mpistrat run --restarts` starts again: a sample of the campaign, and how it ends."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mpistrat.base.programs import program
from mpistrat.comm import job_files
from tests.campaign.kills import sample
from tests.launch.launcher import job_environment

PROGRAM = """
import os, signal, sys, time
os.environ["OPENBLAS_NUM_THREADS"] = "2"  # a program's own, before it imports what looks at it
waited = os.environ.get("MPISTRAT_STANDBY"), os.environ.pop("FROM_ELSEWHERE", None)
os.environ["FROM_ELSEWHERE"] = "no"
import numpy as np
import mpistrat as ms
from threadpoolctl import threadpool_info
ms.catch_stop_signals()
strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = ms.Variable(np.zeros(4), name="w", aggregation=ms.VariableAggregation.SUM)
checkpoints = ms.train.Checkpoints(strategy, "checkpoints", snapshot_seconds=0.01)
notes = checkpoints.restore_latest() or {"step": 0}
how, generation = sys.argv[1], int(os.environ["MPISTRAT_GENERATION"])
if strategy.rank == 0:
    print("from", generation, notes["step"], w.numpy()[0], strategy.size, flush=True)
    print("waited", *waited, *{pool["num_threads"] for pool in threadpool_info()}, flush=True)
for step in range(notes["step"] + 1, 41):
    if how == "same" and step == 7 and strategy.rank == 1:
        raise ValueError("it always fails here")
    strategy.run(lambda: w.assign_add(np.ones(4)))
    checkpoints.step(step)
    time.sleep(0.01)
    if how == "stop" and step == 5:
        print("ready", flush=True)
        while not strategy.should_stop():
            time.sleep(0.01)
        sys.exit(ms.RESTART_EXIT_CODE)
    if how == "resize" and generation == 0 and step > 4:
        print("ready" if step == 5 else "", flush=True)
        time.sleep(0.05)
        if strategy.should_stop():
            checkpoints.save(step)
            checkpoints.wait()
            sys.exit(ms.RESTART_EXIT_CODE)
    if how == "often" and strategy.rank == 0 and step > notes["step"] + 4 + generation:
        os._exit(3)
    if how == "slow":
        time.sleep(0.15)
        if generation < 2 and step == 13 * (generation + 1) and strategy.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
    if how == "shared" and generation == 0 and step == 20:
        os.kill(os.getpid(), signal.SIGKILL)
if strategy.rank == 0:
    print("end", w.numpy()[0] / strategy.size, flush=True)
if how == "late":
    sys.exit(17)
"""


pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def start(mpi, tmp_path, left_files):
    """Start `mpistrat run --restarts` on the program; it is killed at the end."""
    (tmp_path / "train.py").write_text(PROGRAM)
    started = []

    def run(how, restarts="9", options=(), folder=tmp_path, ranks="2", **env):
        words = [*program("mpistrat", "run", "-n", ranks, "--restarts", restarts, python=mpi.python), *options]
        words += [str(tmp_path / "train.py"), how]
        environment = job_environment("none", tmp_path, {"PATH": "/usr/bin:/bin", **env})
        pipe = subprocess.PIPE
        process = subprocess.Popen(words, env=environment, cwd=folder, stdout=pipe, stderr=pipe, text=True)
        started.append(left_files.watch(process))
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@pytest.mark.timeout(300)
def test_jobs_end_with_the_bits_of_an_undisturbed_one(mpi):
    outcome = sample(mpi.python, kills=6, seed=int(time.time()) // 86400)
    assert len(outcome.kills) >= 4
    assert not outcome.wrong


def test_a_step_that_always_fails_is_given_up(start):
    process = start("same")
    out, err = process.communicate(timeout=60)
    assert process.returncode not in (0, 42)
    assert "it always fails here" in err
    assert "3 times after step 6: given up" in err
    assert out.count("from ") == 3


def test_it_is_started_so_often_and_not_more(start):
    process = start("often", restarts="2")
    out, err = process.communicate(timeout=60)
    assert process.returncode not in (0, 42)
    assert "were started again 2 times: given up" in err
    froms = [line.split() for line in out.splitlines() if line.startswith("from")]
    assert [int(words[1]) for words in froms] == [0, 1, 2]
    steps = [int(words[2]) for words in froms]
    assert 0 < steps[1] < steps[2]
    assert [float(words[3]) for words in froms] == [2.0 * step for step in steps]


def test_ranks_wait_to_be_the_next_ones(start, tmp_path):
    (folder := tmp_path / "data").mkdir()
    for name in (
        "json",
        "runpy",
        "threadpoolctl",
        "mpi4py",
        "numpy",
        "mpistrat",
    ):  # nobody's: the program lies elsewhere
        (folder / f"{name}.py").write_text(f"open({str(tmp_path)!r} + '/ran_{name}', 'w')\nraise SystemExit(77)\n")
    process = start("slow", options=["--standby"], folder=folder)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and not list(tmp_path.glob("ran_*")), err
    assert out.splitlines()[-1] == "end 40.0"
    waited = [line.split()[1:] for line in out.splitlines() if line.startswith("waited")]
    assert waited == [
        ["None", "None", "2"],
        ["1", "None", "2"],
        ["2", "None", "2"],
    ]  # the environment is the first one's
    assert err.count("started again from step") == 2
    assert "Traceback" not in err


FOLDS = """
import os, signal, sys, time
import numpy as np
import mpistrat as ms
import mpistrat.train.checkpoints
mpistrat.train.checkpoints._SHARE = 1.0  # snapshots as often as it says
for fold in range(2):
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = ms.Variable(np.zeros(4), name="w", aggregation=ms.VariableAggregation.SUM)
    checkpoints = ms.train.Checkpoints(strategy, f"folds/{fold}", snapshot_seconds=0.01)
    data = strategy.distribute_dataset(ms.data.from_arrays(np.ones((40, 1))).batch(2))
    for x in checkpoints.batches(data, 2):
        strategy.run(lambda: w.assign_add(np.ones(4)))
        time.sleep(0.01)
        if w.numpy()[0] == 60 and fold == 1 and strategy.rank == 1 and os.environ["MPISTRAT_GENERATION"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    if strategy.rank == 0:
        print("end", fold, w.numpy()[0], flush=True)
    if "close" in sys.argv:
        strategy.close()
"""


@pytest.mark.parametrize("close", ["close", "leave"])
def test_two_runs_of_a_program(start, tmp_path, close):
    """The second does not go on from the first one's snapshot, though it has more steps."""
    (tmp_path / "train.py").write_text(FOLDS)
    process = start(close)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    ends = [line.split()[1:] for line in out.splitlines() if line.startswith("end")]
    assert ends[0] == ["0", "80.0"] and ends[-1] == ["1", "80.0"], out
    assert err.count("started again from step") == 1


def test_both_ranks_die_and_the_job_goes_on(start):
    process = start("shared")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "end 40.0"
    assert re.search(r"started again from (step \d+ in memory|the newest checkpoint) \(1 of 9\)", err)


def test_nobody_is_started_again_after_a_stop(start):
    process = start("stop")
    while "ready" not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGUSR1)  # which MPICH and Open MPI forward
    _, err = process.communicate(timeout=30)
    assert process.returncode == 42, err
    assert "started again" not in err


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_job_goes_on_with_more_ranks_or_fewer(start, ranks):
    process = start("resize")
    while "ready" not in process.stdout.readline():
        pass
    words = [sys.executable, "-m", "mpistrat", "resize", str(process.pid), str(ranks)]
    assert subprocess.run(words, capture_output=True, text=True, timeout=30).returncode == 0
    out, err = process.communicate(timeout=40)
    assert process.returncode == 0, err
    assert f"started again on {ranks} rank" in err
    _, generation, step, value, size = next(line.split() for line in out.splitlines() if line.startswith("from"))
    assert (generation, size) == ("1", str(ranks))
    assert int(step) >= 5 and float(value) == 2 * int(step)
    steps = 40 - int(step)
    assert out.splitlines()[-1] == f"end {(2 * int(step) + ranks * steps) / ranks}"


def test_an_error_after_the_end_is_told(start):
    process = start("late", restarts="3")
    _, err = process.communicate(timeout=60)
    assert process.returncode not in (0, 42)
    assert "given up" in err


def test_a_full_dev_shm_leaves_training_to_go_on(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import errno, os\n"
        "def full(*args):\n"
        "    raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "if 'MPISTRAT_GENERATION' in os.environ:\n"
        "    os.posix_fallocate = full\n"
    )
    path = os.pathsep.join([str(tmp_path), job_environment("none", tmp_path, {})["PYTHONPATH"]])
    process = start("none", PYTHONPATH=path)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "end 40.0"
    assert err.count("training continues without snapshots") == 1
    assert "No space left on device" in err
    assert Path("/dev/shm").is_dir()


def test_ranks_that_a_launcher_leaves_waiting_are_ended(mpi, tmp_path):
    if "MPICH" not in mpi.vendor:
        pytest.skip("only MPICH's mpiexec can be told to leave them")
    (tmp_path / "waits.py").write_text(
        "import os, time\n"
        "import mpistrat as ms\n"
        "strategy = ms.MultiWorkerMirroredStrategy()\n"
        "strategy.barrier()\n"
        "if strategy.rank == 0:\n"
        "    os._exit(3)\n"
        "time.sleep(50)\n"
    )
    environment = job_environment("none", tmp_path, {"MPISTRAT_JOB": "0123456789abcdef"})
    command = [*mpi.mpiexec, "-disable-auto-cleanup", "-n", "2", mpi.python, "waits.py"]
    began = time.monotonic()
    process = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=45)
    job_files.remove("0123456789abcdef")
    assert process.returncode
    assert time.monotonic() - began < 20
    assert "rank 0 of 2" in process.stderr


SWITCHES = """
import sys, time
import numpy as np
import mpistrat as ms
ms.catch_stop_signals()
strategy = ms.strategy_from_environment()
with strategy.scope():
    w = ms.Variable(np.ones(4), name="w")
    optimizer = ms.optimizers.Adam(0.01)
checkpoints = ms.train.Checkpoints(strategy, "checkpoints")
notes = checkpoints.restore_latest() or {"step": 0}
works = not getattr(strategy, "is_server", False)
if strategy.rank == 0:
    print("from", notes["step"], type(strategy).__name__, strategy.size, flush=True)
for step in range(notes["step"] + 1, 61):
    if works:
        gradient = np.sin(step + np.arange(4.0)) / strategy.num_replicas_in_sync
        strategy.run(lambda: optimizer.apply_gradients([(gradient, w)]))
    checkpoints.step(step)
    if step in (15, 35):
        print("ready" if strategy.rank == 0 else "", flush=True)
        while not strategy.should_stop():
            time.sleep(0.01)
        checkpoints.save(step)
        checkpoints.wait()
        sys.exit(ms.RESTART_EXIT_CODE)
checkpoints.wait()
if strategy.rank == 0:
    print("end", *w.numpy(), flush=True)
strategy.close()  # a server waits here for what workers still read
"""


def test_a_job_goes_on_under_another_strategy(start, tmp_path):
    """On one rank, then on three, then with a server: the numbers are those of one process without a break."""
    (tmp_path / "train.py").write_text(SWITCHES)
    process = start("", ranks="1", options=["--strategy", "one_device"])
    for words in (["3", "--strategy", "multi_worker_mirrored"], ["2", "--ps", "1"]):
        while "ready" not in process.stdout.readline():
            assert process.poll() is None
        asked = [sys.executable, "-m", "mpistrat", "resize", str(process.pid), *words]
        assert subprocess.run(asked, capture_output=True, text=True, timeout=30).returncode == 0
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "started again on 3 ranks under multi_worker_mirrored" in err
    assert "started again on 2 ranks under parameter_server" in err
    w, momentum, velocity = np.ones(4), np.zeros(4), np.zeros(4)
    for step in range(1, 61):
        gradient = np.sin(step + np.arange(4.0))
        momentum, velocity = 0.9 * momentum + 0.1 * gradient, 0.999 * velocity + 0.001 * gradient**2
        w -= 0.01 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step) * momentum / (np.sqrt(velocity) + 1e-7)
    found = out.splitlines()[-1].split()
    assert found[0] == "end"
    assert np.allclose([float(each) for each in found[1:]], w, rtol=1e-12)
