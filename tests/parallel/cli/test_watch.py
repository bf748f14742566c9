"""`mpistrat top` and `mpistrat stacks` of a job that runs: who is slow, what each rank does, and that it goes on."""

import contextlib
import json
import os
import signal
import subprocess
import textwrap
import time

import pytest

from tests.launch.launcher import ROOT

PROGRAM = """
import os, sys, time
import numpy as np
import mpistrat as ms
from mpistrat.base.waiting import wait_until
sys.path.append(os.getcwd())
from tests.harness.files import wait_for_the_others

STEPS, naps, go = 50, [], sys.argv[1:]  # the file, if any, that says when it goes on after so many steps, and halts in the next

def slow_part(rank):
    if rank == 1:
        wait_for_the_others(strategy)
        begun = time.perf_counter()
        time.sleep(0.02)
        naps.append(time.perf_counter() - begun)
        if go and len(naps) > STEPS:
            print("in a step", flush=True)
            time.sleep(60)

with ms.MultiWorkerMirroredStrategy() as strategy:
    with strategy.scope():
        w = ms.Variable(np.zeros(10), name="w")
        optimizer = ms.optimizers.SGD(0.1)

    def train_step():
        slow_part(strategy.rank)
        optimizer.apply_gradients([(np.ones(10), w)])

    for number in range(100_000):
        strategy.run(train_step)
        if number == 5 and strategy.rank == 0:
            print("runs", flush=True)
        if go and number == STEPS - 1:
            strategy.barrier()
            if strategy.rank == 1:
                print(sum(naps), flush=True)
            wait_until(lambda: os.path.exists(go[0]), 60)
"""


@contextlib.contextmanager
def started(mpi, tmp_path, *words):
    """A job of three ranks that has begun to train: its launcher."""
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    words = [mpi.python, "-m", "mpistrat", "run", "-n", "3", str(tmp_path / "train.py"), *words]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    try:
        assert "runs" in process.stdout.readline()
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
        process.stdout.close()


@pytest.fixture
def job(mpi, tmp_path):
    with started(mpi, tmp_path) as launcher:
        yield launcher


def call(mpi, *words):
    return subprocess.run(
        [mpi.python, "-m", "mpistrat", *map(str, words)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )


def lines(result):
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_top_shows_who_is_slow(mpi, tmp_path):
    """It has made 50 steps; in each of them the others have waited while rank 1 slept for a time that it says."""
    with started(mpi, tmp_path, str(tmp_path / "go")) as job:
        slept = float(job.stdout.readline())
        rows = lines(call(mpi, "top", job.pid, "--json", "--seconds", "1000"))
        assert [row["rank"].split(" (")[0] for row in rows] == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
        assert all(row["steps_per_second"] == pytest.approx(50 / 1000) for row in rows), rows
        assert rows[1]["compute"] * rows[1]["seconds"] >= 0.99 * slept >= 0.99, (rows, slept)
        assert all(rows[rank]["waiting"] * rows[rank]["seconds"] >= 0.99 * slept for rank in (0, 2)), (rows, slept)
        assert all(row["compute"] + row["waiting"] <= 1.01 for row in rows), rows
        (tmp_path / "go").touch()
        assert "in a step" in job.stdout.readline()
        table = call(mpi, "top", job.pid).stdout
        assert "wait" in table and table.count("train_step") == 3, table
        assert job.poll() is None


def test_stacks_show_where_each_rank_is(mpi, job):
    answers = lines(call(mpi, "stacks", job.pid, "--json"))
    assert len(answers) == 3
    for answer in answers:
        assert "in train_step" in answer["threads"]["MainThread"]
        assert "apply_gradients" in answer["position"]
    text = call(mpi, "stacks", job.pid).stdout
    assert text.count("train.py") >= 3 and "MainThread" in text
    assert job.poll() is None


def test_a_stopped_rank_is_said_so_and_the_others_answer(mpi, job):
    pid = lines(call(mpi, "top", job.pid, "--json"))[2]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(0.5)
        answers = lines(call(mpi, "stacks", job.pid, "--json"))
    finally:
        os.kill(pid, signal.SIGCONT)
    assert "is stopped" in answers[2]["position"] and answers[2]["threads"] == {}
    assert all("apply_gradients" in answer["position"] for answer in answers[:2])


def test_two_jobs_are_both_shown(mpi, tmp_path):
    """Other tests' jobs may run here, too. Without a number all of them have a table each."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    with started(mpi, folders[0]) as one, started(mpi, folders[1]) as two:
        names = {f"job {job.pid}" for job in (one, two)}
        for command in ("top", "stacks"):
            rows = lines(call(mpi, command, "--json"))
            for name in names:
                assert [row["rank"].split(" (")[0] for row in rows if row["job"] == name] == [
                    f"rank {rank} of 3" for rank in range(3)
                ]
            text = call(mpi, command).stdout
            assert all(f"{name}: 3 ranks here, " in text for name in names), text
            assert {row["job"] for row in lines(call(mpi, command, one.pid, "--json"))} == {f"job {one.pid}"}
            assert f"job {two.pid}" not in call(mpi, command, one.pid).stdout


def test_a_job_that_is_not_there(mpi):
    result = call(mpi, "top", "1")
    assert result.returncode == 1 and "no job 1 of yours runs here" in result.stderr
