"""Ranks that are left go on in place: `ms.survive` under Open MPI with ULFM, started by `mpistrat run --survive`."""

import re
import time

import numpy as np
import pytest

from tests.campaign.kills import sample
from tests.launch.launcher import job_environment

HEAD = """
import os, signal, sys, time
import numpy as np
import mpistrat as ms
from mpistrat.errors import RanksLostError

def die():
    os.kill(os.getpid(), signal.SIGKILL)

import mpistrat.train.checkpoints
mpistrat.train.checkpoints._SHARE = 1.0  # as often as it says

def make(job):
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = ms.Variable(np.zeros(4), name="w", aggregation=ms.VariableAggregation.SUM)
    return strategy, w, ms.train.Checkpoints(strategy, "checkpoints", snapshot_seconds=0.005)

def say(*words):
    print(*words, flush=True)
"""
STEPS = """
def train(job):
    strategy, w, checkpoints = make(job)
    notes = checkpoints.restore_latest() or {"step": 0}
    if strategy.rank == 0:
        say("from", job.generation, notes["step"], strategy.size, *job.lost)
    for step in range(notes["step"] + 1, 61):
        strategy.run(lambda: w.assign_add(np.ones(4)))
        checkpoints.step(step)
        time.sleep(0.005)
        at(job, strategy, step)
    value = w.numpy()[0]
    strategy.close()
    return value

value = ms.survive(train)
say("end", value)
"""


pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def run(mpi, mpistrat_run):
    """Run a program under `mpistrat run --survive`."""
    if "Open MPI" not in mpi.vendor:
        pytest.skip("only Open MPI goes on when a rank dies")
    return lambda program, ranks=3, *options, **how: mpistrat_run(HEAD + program, ranks, "--survive", *options, **how)


def froms(done):
    return [[int(word) for word in line.split()[1:]] for line in done.stdout.splitlines() if line.startswith("from")]


def ends(done):
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("end")]


@pytest.mark.timeout(300)
def test_jobs_end_with_the_bits_of_an_undisturbed_one(mpi):
    if "Open MPI" not in mpi.vendor:
        pytest.skip("only Open MPI goes on when a rank dies")
    seed = int(time.time()) // 86400
    outcome = sample(mpi.python, kills=6, seed=seed, ranks=4, survive=True)
    assert len(outcome.kills) >= 4
    assert not outcome.wrong


def test_two_ranks_die_one_after_the_other(run):
    done = run(
        """
def at(job, strategy, step):
    if (step, job.generation) in ((20, 0), (40, 1)) and strategy.rank == 1:
        die()
"""
        + STEPS,
        4,
    )
    first, second, third = froms(done)
    assert first == [0, 0, 4]
    assert second[0:3:2] == [1, 3] and 0 < second[1] <= 20 and second[3:] == [1]
    assert third[0:3:2] == [2, 2] and 20 < third[1] <= 40 and third[3:] == [1, 2]
    steps = [second[1], third[1] - second[1], 60 - third[1]]
    assert ends(done) == [4.0 * steps[0] + 3.0 * steps[1] + 2.0 * steps[2]] * 2
    assert re.search(r"rank 1 lost: 3 ranks continue, after 0\.\d\d s", done.stderr)
    assert re.search(r"rank 1 of 4 .* (was ended by SIGKILL|ended without a message)", done.stderr)
    assert re.search(r"rank 1 of 3 .* (was ended by SIGKILL|ended without a message)", done.stderr)


def test_an_error_without_a_cause_after_a_loss(run):
    """As that of a backward pass in C++, of which Python gets the text alone."""
    done = run(
        """
def at(job, strategy, step):
    if step == 20 and job.generation == 0:
        if strategy.rank == 1:
            die()
        met = False
        while not met:
            try:
                strategy.barrier()
            except RanksLostError:
                met = True
        raise RuntimeError("Got the following error when running the callback")
"""
        + STEPS
    )
    first, second = froms(done)
    assert first == [0, 0, 3] and second[0:3:2] == [1, 2] and len(ends(done)) == 2


def test_a_mesh_goes_on_as_another_one(run):
    """Of 2 × 2 ranks one dies, of those that are left another one: each time parts of variables and slots are divided anew."""
    done = run(
        """
def make(job):
    model = 1 if job.comm.size == 3 else 2
    strategy = ms.MeshStrategy(axes={"data": -1, "model": model})
    with strategy.scope():
        w = ms.Variable(np.zeros((4, 6)), name="w", layout=(None, "model"))
        optimizer = ms.optimizers.SGD(1.0, momentum=0.5)
    return strategy, w, optimizer, ms.train.Checkpoints(strategy, "checkpoints", snapshot_seconds=0.005)

def train(job):
    strategy, w, optimizer, checkpoints = make(job)
    notes = checkpoints.restore_latest() or {"step": 0}
    if strategy.rank == 0:
        say("from", job.generation, notes["step"], strategy.size, w.shape[1])
    data = strategy.distribute_dataset(ms.data.from_arrays(np.ones((12, 6))).batch(12))
    for step in range(notes["step"] + 1, 41):
        for rows in data:
            part = strategy.mesh.shard(rows, axis=1, mesh_axis="model")
            strategy.run(lambda: optimizer.apply_gradients([(np.full(w.shape, len(part) / 12), w)]))
        checkpoints.step(step)
        time.sleep(0.005)
        if (step, job.generation) in ((15, 0), (30, 1)) and strategy.rank == 1:
            die()
    value = w.gathered()
    strategy.close()
    return value

say("ends", *set(ms.survive(train).ravel().tolist()))
""",
        4,
    )
    first, second, third = froms(done)
    assert first == [0, 0, 4, 3]
    assert second[0::2] == [1, 3] and second[3] == 6 and 0 < second[1] <= 15
    assert third[0::2] == [2, 2] and third[3] == 3 and 15 < third[1] <= 30
    velocity = value = 0.0
    for _ in range(40):
        velocity = 0.5 * velocity - 1.0
        value += velocity
    found = [float(word) for line in done.stdout.splitlines() if line.startswith("ends") for word in line.split()[1:]]
    assert len(found) >= 2 and np.allclose(found, value, rtol=1e-12)


def test_rank_0_dies(run):
    done = run(
        """
def at(job, strategy, step):
    if step == 20 and job.generation == 0 and strategy.rank == 0:
        die()
"""
        + STEPS,
    )
    assert [words[0:3:2] + words[3:] for words in froms(done)] == [[0, 3], [1, 2, 0]]
    assert len(ends(done)) == 2


def test_while_ranks_come_back_another_dies(run):
    done = run(
        """
generations = []
def at(job, strategy, step):
    if step == 20 and job.generation == 0 and strategy.rank == 1:
        die()

before = make
def make(job):
    if job.generation == 1 and job.comm.rank == 2:
        die()
    return before(job)
"""
        + STEPS,
        4,
    )
    assert froms(done)[-1][2] == 2
    assert len(ends(done)) == 2


def test_all_ranks_die_and_the_job_is_started_again(run):
    done = run(
        """
def at(job, strategy, step):
    if step == 20 and job.generation == 0 and strategy.rank == 1:
        die()
    if step == 40 and job.generation == 1:
        die()
"""
        + STEPS,
        3,
        "--restarts",
        "2",
    )
    assert [words[0] for words in froms(done)] == [0, 1, 2]
    assert [words[2] for words in froms(done)] == [3, 2, 3]
    assert froms(done)[2][1] > 20
    assert len(ends(done)) == 3
    assert "started again from step" in done.stderr


def test_without_restarts_the_status_tells_that_all_have_died(run):
    done = run("def at(job, strategy, step):\n    step == 20 and die()\n" + STEPS, 2, status=-1)
    assert "the ranks have ended with status" in done.stderr


def test_an_error_of_the_program_ends_the_job(run):
    done = run(
        """
def at(job, strategy, step):
    if step == 20 and strategy.rank == 1:
        raise ValueError("this is wrong")
"""
        + STEPS,
        status=-1,
    )
    assert "ValueError: this is wrong" in done.stderr
    assert len(froms(done)) == 1 and not ends(done)


def test_a_rank_that_exits_with_an_error_ends_the_job(run):
    done = run(
        "def at(job, strategy, step):\n    step == 20 and strategy.rank == 1 and os._exit(5)\n" + STEPS, status=-1
    )
    assert re.search(r"rank 1 of 3 .* ended with status 5: the others cannot continue", done.stderr)
    assert len(froms(done)) == 1 and not ends(done)


def test_an_error_after_a_loss_ends_the_job(run):
    done = run(
        """
def at(job, strategy, step):
    if step == 20 and job.generation == 0 and strategy.rank == 1:
        die()
    if step == 40 and strategy.rank == 1:
        raise ValueError("this is wrong")
"""
        + STEPS,
        status=-1,
    )
    assert "ValueError: this is wrong" in done.stderr
    assert len(froms(done)) == 2 and not ends(done)


def test_an_error_of_mpi_without_a_loss_ends_the_job(run):
    done = run(
        """
from mpi4py import MPI
def at(job, strategy, step):
    if step == 20 and strategy.rank == 1:
        job.comm.Recv(np.zeros(1), source=17)
"""
        + STEPS,
        status=-1,
    )
    assert "an error that was no loss of ranks" in done.stderr
    assert "MPI_ERR_RANK" in done.stderr
    assert len(froms(done)) == 1 and not ends(done)


def test_who_catches_the_error_gets_it_again(run):
    done = run(
        """
def at(job, strategy, step):
    if step == 20 and job.generation == 0:
        if strategy.rank == 1:
            die()
        for attempt in range(3):
            try:
                strategy.barrier()
            except RanksLostError as error:
                print("caught", flush=True)
                if attempt == 2:
                    strategy.close()
                    raise
"""
        + STEPS,
    )
    assert done.stdout.count("caught") == 2 * 3
    assert [words[0] for words in froms(done)] == [0, 1]
    assert len(ends(done)) == 2


def test_who_waits_in_a_communicator_of_the_program_s_is_freed(run):
    """Made of the strategy's; rank 2, for which rank 1 waits there, has left."""
    done = run(
        """
def at(job, strategy, step):
    if step == 20 and job.generation == 0:
        own = strategy.comm.Dup()
        if strategy.rank == 0:
            die()
        if strategy.rank == 1:
            own.Recv(np.zeros(1), source=2)
"""
        + STEPS,
    )
    assert [words[0] for words in froms(done)] == [0, 1]
    assert len(ends(done)) == 2


def test_a_rank_that_only_computes_comes_later(run):
    done = run(
        """
def at(job, strategy, step):
    if step == 20 and job.generation == 0:
        if strategy.rank == 1:
            die()
        if strategy.rank == 2:
            time.sleep(2)
"""
        + STEPS,
    )
    assert [words[0] for words in froms(done)] == [0, 1]
    assert len(ends(done)) == 2


def test_an_asynchronous_save_is_given_up(run, tmp_path):
    done = run(
        """
from mpistrat.state.writing import Saving
write = Saving.write
def slow(self):
    time.sleep(60 if os.environ["MPISTRAT_GENERATION"] == "0" and self._rank == 1 else 0)
    write(self)
Saving.write = slow
before = make
def make(job):
    strategy, w, checkpoints = before(job)
    checkpoints._every = 15
    return strategy, w, checkpoints
def at(job, strategy, step):
    if step == 20 and job.generation == 0 and strategy.rank == 1:
        die()
"""
        + STEPS,
    )
    assert len(ends(done)) == 2
    assert (
        sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.suffix == ".h5")[-1]
        == "step-0000000060.h5"
    )


def test_a_rank_dies_in_its_end(run):
    done = run(
        """
import atexit
def train(job):
    return make(job)[0].rank

if ms.survive(train) == 2:
    atexit.register(lambda: (time.sleep(0.5), die()))
say("end", 1)
"""
    )
    assert ends(done) == [1.0] * 3
    assert re.search(r"rank 2 of 3 .* (was ended by SIGKILL|ended without a message)", done.stderr)


def test_a_rank_that_ends_with_an_error_ends_the_job(run):
    """After all that is common, and though its launcher says 0."""
    done = run(
        "def at(job, strategy, step):\n    pass\n"
        + STEPS
        + "from mpi4py import MPI\nsys.exit(3 if MPI.COMM_WORLD.rank == 1 else 0)\n",
        status=-1,
    )
    assert len(ends(done)) == 3
    assert "given up" in done.stderr or "have ended with status" in done.stderr


def test_ranks_stop_together_after_a_loss(run):
    done = run(
        """
def at(job, strategy, step):
    if step == 20 and job.generation == 0 and strategy.rank == 1:
        die()
    if step == 40:
        sys.exit(ms.RESTART_EXIT_CODE)
"""
        + STEPS,
        status=42,
    )
    assert len(froms(done)) == 2 and not ends(done)


def test_collectives_that_miss_deaths_are_refused(mpi, tmp_path, to_the_end):
    if "Open MPI" not in mpi.vendor:
        pytest.skip("only Open MPI goes on when a rank dies")
    (tmp_path / "train.py").write_text("import mpistrat as ms\nms.survive(print)\n")
    command = [
        *mpi.mpiexec,
        "--allow-run-as-root",
        "--oversubscribe",
        "--with-ft",
        "ulfm",
        "-n",
        "2",
        mpi.python,
        "train.py",
    ]
    environment = job_environment("openmpi", tmp_path, {})
    done = to_the_end(command, environment, tmp_path)
    assert done.returncode
    assert "expected OMPI_MCA_coll=^han,hcoll,portals4" in done.stderr
    assert "mpistrat run --survive sets it" in done.stderr


def test_other_mpis_are_refused(mpi, tmp_path, to_the_end):
    if "MPICH" not in mpi.vendor:
        pytest.skip("Open MPI can")
    words = [mpi.python, "-m", "mpistrat", "run", "-n", "2", "--survive", "train.py"]
    (tmp_path / "train.py").write_text("import mpistrat as ms\nms.survive(print)\n")
    environment = job_environment("none", tmp_path, {"PATH": "/usr/bin:/bin"})
    done = to_the_end(words, environment, tmp_path)
    assert done.returncode == 1
    assert "--survive: expected Open MPI 5" in done.stderr and "--restarts" in done.stderr
    words.remove("--survive")
    done = to_the_end(words, environment, tmp_path)
    assert done.returncode == 0
    assert done.stdout.count("generation=0, lost=()") == 2
