"""Programs that a client runs on all ranks of a job that serves: values, output, errors, interruptions, and ranks that die."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.coordinator import RemoteTraceback
from tests.launch.launcher import Job

pytest.importorskip("zmq")
pytestmark = pytest.mark.timeout(120)
RANKS = 4
x = np.random.default_rng(0).normal(size=(100, 3))
y = x @ [1.0, -2.0, 0.5]


@pytest.fixture
def job(mpi, tmp_path):
    """A job of 4 ranks that serves: a chief, two workers, a server."""
    folder = tmp_path / "job"
    folder.mkdir()
    made = Job([mpi.python, "-m", "mpistrat", "serve", str(tmp_path / "serve.json")], RANKS, mpi, folder)
    yield made
    made.end()


def descent(epochs):
    """Return the weights of gradient descent, by NumPy alone."""
    w = np.zeros(3)
    for _ in range(epochs):
        for first in range(0, 100, 20):
            a, b = x[first : first + 20], y[first : first + 20]
            w -= 0.1 * 2 * (a @ w - b) @ a / 20
    return w


def train(epochs):
    strategy = ms.get_strategy()
    w, optimizer = ms.Variable(np.zeros(3), name="w"), ms.optimizers.SGD(0.1)
    data = strategy.distribute_dataset(ms.data.from_arrays((x, y)).batch(20))

    def step(x, y):
        optimizer.apply_gradients([(2 * (x @ w.array - y) @ x / ms.global_batch_size(), w)])

    for epoch in range(epochs):
        for batch in data:
            strategy.run(step, args=batch)
        if strategy.rank == 0:
            print("epoch", epoch)
    logging.getLogger("mpistrat").warning("all epochs")
    return strategy.rank, w


def together():
    """A collective that all ranks make."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        return float(strategy.reduce("SUM", strategy.rank + 1.0))


def leaves_things_open():
    ms.MultiWorkerMirroredStrategy().scope().__enter__()


def fail_on(ranks):
    strategy = ms.MultiWorkerMirroredStrategy()
    if strategy.rank in ranks:
        raise ValueError(f"no good on {strategy.rank}")
    while True:
        strategy.reduce("SUM", 1.0)


def fail_before_the_others_arrive():
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("early")
    ms.MultiWorkerMirroredStrategy()


def check_sum(cluster):
    assert cluster.run(together) == [10.0] * RANKS


def dies():
    strategy = ms.MultiWorkerMirroredStrategy()
    if strategy.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.barrier()


def stubborn():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        if strategy.rank == 1:
            raise ValueError("no good")
        while strategy.rank == 2:
            try:
                time.sleep(100)
            except KeyboardInterrupt:
                pass
        strategy.barrier()


def model_fn(features, labels, mode):
    w, optimizer = ms.Variable(np.zeros(3), name="w"), ms.optimizers.Adam(0.05)
    loss = ms.train.MeanSquaredError("loss")

    def test_step(x, y):
        loss.update_state(y, x @ w.array)

    def train_step(x, y):
        test_step(x, y)
        optimizer.apply_gradients([(2 * (x @ w.array - y) @ x / ms.global_batch_size(), w)])

    return ms.estimator.EstimatorSpec(mode, train_step, test_step, optimizer=optimizer, metrics=[loss])


def estimate(folder, strategy=None):
    config = ms.estimator.RunConfig(folder, save_checkpoints_steps=10, train_distribute=strategy)
    estimator = ms.estimator.Estimator(model_fn, config=config)
    rows = ms.data.from_arrays((x, y))
    results, _ = ms.estimator.train_and_evaluate(
        estimator,
        ms.estimator.TrainSpec(lambda: rows.take(80).shuffle(seed=1).batch(24).repeat(), max_steps=30),
        ms.estimator.EvalSpec(lambda: rows.skip(80).batch(24), steps=None, throttle_secs=0),
    )
    w = estimator.get_variable_value("w")
    estimator.close()
    return results["global_step"], results["loss"], w


def synchronous(comm):
    return ms.MultiWorkerMirroredStrategy(comm=comm)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_values_output_and_errors(job, tmp_path, capsys, monkeypatch):
    with ms.connect(tmp_path / "serve.json", timeout=60) as cluster:
        kept = cluster.call(lambda: ms.Variable(np.ones(2), name="kept"))
        before = cluster.schedule(lambda: kept.assign_add([1.0, 2.0]))
        check_sum(cluster)
        assert before.status.name == "READY"
        results = cluster.run(train, (2,), strategy=ms.MultiWorkerMirroredStrategy)
        assert [rank for rank, _ in results] == list(range(RANKS))
        for _, w in results:
            np.testing.assert_allclose(w, descent(2), rtol=1e-12)
        shown = capsys.readouterr()
        assert shown.out == "epoch 0\nepoch 1\n"
        assert [shown.err.count(f"WARNING rank {rank}: all epochs\n") for rank in range(RANKS)] == [1] * RANKS
        assert cluster.run(lambda *a, **k: (a, k), (1,), {"b": 2}) == [((1,), {"b": 2})] * RANKS
        assert cluster.run(lambda: (sys.stdout.isatty(), sys.stderr.isatty())) == [(False, False)] * RANKS
        monkeypatch.setattr(sys, "stderr", Terminal())
        assert cluster.run(lambda: (sys.stdout.isatty(), sys.stderr.isatty())) == [(False, True)] * RANKS
        monkeypatch.undo()
        assert kept.get().tolist() == [2.0, 3.0]

        for ranks in ([1], [0], [3], [0, 1, 2, 3]):
            began = time.monotonic()
            with pytest.raises(ValueError, match=r"no good on \d") as raised:
                cluster.run(fail_on, (ranks,))
            cause, rank = raised.value.__cause__, str(raised.value)[-1]
            assert isinstance(cause, RemoteTraceback) and int(rank) in ranks
            assert f"rank {rank} of 4" in str(cause) and "in fail_on" in str(cause)
            assert time.monotonic() - began < 9  # no limit ended it
            check_sum(cluster)
        with pytest.raises(ValueError, match="early"):
            cluster.run(fail_before_the_others_arrive)
        with pytest.raises(SystemExit):
            cluster.run(sys.exit, (3,))
        with pytest.raises(TypeError, match="pickle"):
            cluster.run(threading.Lock)
        cluster.run(leaves_things_open)
        check_sum(cluster)
        with pytest.raises(TypeError, match=r"RemoteValue, .* pass its value"):
            cluster.run(lambda: kept)
        with pytest.raises(TypeError, match="strategy: expected a function that creates"):
            cluster.run(together, strategy=ms.get_strategy())
        with pytest.raises(ms.errors.ContextError, match=r"in the coordinator's service.*run\(\)"):
            cluster.call(ms.MultiWorkerMirroredStrategy)
        cluster.schedule(fail_on, ([],))  # on one worker alone
        with pytest.raises(ms.errors.ContextError):
            cluster.run(together)  # an earlier function's error
        assert cluster.schedule(lambda: 5).get() == 5
        steps, loss, w = estimate(tmp_path / "one")  # in this process alone
        for found in cluster.run(estimate, (tmp_path / "all", synchronous)):
            assert found[0] == steps == 30
            np.testing.assert_allclose(found[1], loss, rtol=1e-9)
            np.testing.assert_allclose(found[2], w, rtol=1e-9)
        check_sum(cluster)
        cluster.shutdown()
    assert job.wait(30) == 0, job.outputs()
    assert "epoch 1" in job.outputs()[0][0]  # in the job's log too


CLIENT = """
import sys, time
import mpistrat as ms

def together():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        return float(strategy.reduce("SUM", strategy.rank + 1.0))

def endless(sleeps):
    strategy = ms.MultiWorkerMirroredStrategy()
    print("begun", strategy.rank, flush=True)
    while True:
        time.sleep(1000) if strategy.rank in sleeps else strategy.reduce("SUM", 1.0)

with ms.connect(sys.argv[1]) as cluster:
    for sleeps in ([], [0], [2]):
        try:
            cluster.run(endless, (sleeps,))
        except KeyboardInterrupt as error:
            print("interrupted", error.__cause__, flush=True)
        print(cluster.run(together), flush=True)
    cluster.run(endless, ([1],))
"""


def test_a_client_that_is_interrupted_or_dies_and_a_program_that_does_not_stop(job, tmp_path):
    program = tmp_path / "client.py"
    program.write_text(CLIENT)
    command = [sys.executable, str(program), str(tmp_path / "serve.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as client:
        try:
            assert client.stdout is not None
            for turn in range(4):
                assert sorted(client.stdout.readline() for _ in range(RANKS)) == [
                    f"begun {rank}\n" for rank in range(RANKS)
                ]
                with pytest.raises(
                    ms.errors.ClusterError, match=rf"expected a job that is free, .*process {client.pid}"
                ):
                    ms.connect(tmp_path / "serve.json")
                client.send_signal(signal.SIGINT if turn < 3 else signal.SIGKILL)
                if turn < 3:
                    assert client.stdout.readline() == "interrupted None\n"
                    assert client.stdout.readline() == f"{[10.0] * RANKS}\n"
        finally:
            client.kill()
    end = time.monotonic() + 60
    while True:  # the job notices within some seconds, and stops the program
        try:
            cluster = ms.connect(tmp_path / "serve.json")
            break
        except ms.errors.ClusterError:
            assert time.monotonic() < end
            time.sleep(0.5)
    with cluster:
        check_sum(cluster)


def test_a_rank_that_dies_is_an_error(mpi, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    job = Job([mpi.python, "-m", "mpistrat", "serve", str(tmp_path / "serve.json")], 3, mpi, folder)
    try:
        cluster = ms.connect(tmp_path / "serve.json", timeout=60)
        with cluster, pytest.raises(ms.errors.ClosedError, match="has ended, or cannot be reached"):
            cluster.run(dies)
    finally:
        job.end()
