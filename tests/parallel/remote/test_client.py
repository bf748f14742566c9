"""A client outside of a job that serves: functions, variables, datasets, errors, cancellation, and clients that go."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.coordinator import ClosureCancelledError, RemoteTraceback
from tests.harness.coordinators import hold
from tests.launch.launcher import Job

pytest.importorskip("zmq")


@pytest.fixture
def job(mpi, tmp_path):
    """A job of 4 ranks that serves: a chief, two workers, a server."""
    folder = tmp_path / "job"
    folder.mkdir()
    made = Job([mpi.python, "-m", "mpistrat", "serve", str(tmp_path / "serve.json")], 4, mpi, folder)
    yield made
    made.end()


def connect(tmp_path: Path) -> ms.coordinator.RemoteCluster:
    return ms.connect(tmp_path / "serve.json", timeout=60)


def fail(text):
    raise ValueError(text)


class Untold(Exception):
    def __str__(self):
        raise SystemExit(0)


class Ends(Exception):
    def __reduce__(self):
        return sys.exit, (0,)


def throw(kind):
    raise kind


def test_functions_variables_and_datasets(job, tmp_path):
    with connect(tmp_path) as cluster:
        assert cluster.num_workers == 2
        assert cluster.schedule(lambda x, y=1: x + y, (1,), {"y": 5}).get() == 6
        w = cluster.call(lambda: ms.Variable(np.zeros(3), name="w"))
        for _ in range(20):
            cluster.schedule(lambda value: w.assign_add(value), (np.ones(3),))
        cluster.join()
        assert cluster.done() and cluster.progress() == (21, 21)
        assert w.get().tolist() == [20.0] * 3
        first = cluster.schedule(lambda: np.arange(1000))
        second = cluster.schedule(lambda array: array.sum(), (first,))  # which waits for the first, on any worker
        assert cluster.fetch({"sums": [second, 1]}) == {"sums": [499500, 1]}
        iterator = iter(cluster.create_per_worker_dataset(lambda: ms.data.from_arrays(np.arange(6.0)).batch(2)))
        batches = [cluster.schedule(lambda each: next(each).tolist(), (iterator,), worker=1) for _ in range(3)]
        assert cluster.fetch(batches) == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
        number = cluster.create_per_worker_resource(ms.coordinator.get_current_worker_index)
        assert [cluster.schedule(lambda own: own, (number,), worker=index).get() for index in (0, 1)] == [0, 1]
        assert number.get() == (0, 1)
        optimizer = cluster.call(lambda: ms.optimizers.SGD(0.5))

        def step(gradient):
            ms.get_strategy().run(lambda: optimizer.apply_gradients([(gradient, w)]))

        cluster.schedule(step, (np.ones(3),))
        cluster.join()
        assert w.get().tolist() == [19.5] * 3
        cluster.shutdown()
    assert job.wait(30) == 0, job.outputs()
    assert not (tmp_path / "serve.json").exists()


def test_errors_have_their_traceback_in_the_job(job, tmp_path):
    with connect(tmp_path) as cluster:
        value = cluster.schedule(fail, ("on a worker",))
        with pytest.raises(ValueError, match="on a worker") as raised:
            value.get()
        cause = raised.value.__cause__
        assert isinstance(cause, RemoteTraceback) and "worker" in str(cause) and "in fail" in str(cause)
        cluster.join()  # the error was told
        with pytest.raises(ValueError, match="on the chief") as raised:
            cluster.call(fail, ("on the chief",))
        assert "the chief (rank 0)" in str(raised.value.__cause__)
        for exits in (
            cluster.call,
            lambda fn: cluster.schedule(fn, worker=0).get(),
            lambda fn: cluster.schedule(fn).get(),
        ):
            with pytest.raises(SystemExit):
                exits(sys.exit)
        with pytest.raises(ms.errors.ContextError, match="in the coordinator's service"):
            cluster.call(lambda: ms.MultiWorkerMirroredStrategy())  # of ranks that serve
        cluster.schedule(fail, ("of many",))
        with pytest.raises(ValueError, match="of many"):
            cluster.join()
        assert cluster.schedule(lambda: 1).get() == 1  # everything goes on
        with pytest.raises(TypeError, match="pickle"):
            cluster.schedule(lambda: lock.locked(), (lock := threading.Lock(),))
        with pytest.raises(ValueError, match=r"worker: expected None or 0 <= worker < 2, got 7"):
            cluster.schedule(lambda: 1, worker=7).get()
        with pytest.raises(TypeError):
            cluster.schedule(threading.Lock).get()  # a value that cannot be sent
        for run in (cluster.call, lambda fn: cluster.schedule(fn).get()):
            with pytest.raises(Untold):
                run(lambda: throw(Untold))
            with pytest.raises(ms.coordinator.RemoteError, match="Ends"):
                run(lambda: throw(Ends))
        assert cluster.schedule(lambda: 2).get() == 2
        strategy = cluster.call(ms.get_strategy)
        with pytest.raises(TypeError):
            strategy.get()  # nor can this, which functions still find
        assert cluster.schedule(lambda: strategy.size).get() == 4


def test_a_failure_and_a_cancellation_cancel_what_waits(job, tmp_path):
    with connect(tmp_path) as cluster:
        go, again = str(tmp_path / "go"), str(tmp_path / "again")
        slow = [cluster.schedule(hold, (go,)) for _ in range(2)]  # both workers
        waiting = [cluster.schedule(lambda: 1) for _ in range(50)]
        cluster.cancel()
        with pytest.raises(ClosureCancelledError):
            waiting[-1].get()
        Path(go).touch()
        for each in slow:
            assert each.get() is None  # what runs is not interrupted
        cluster.join()
        first = cluster.schedule(lambda: (hold(again), 1 / 0))
        cluster.schedule(lambda: (hold(again), time.sleep(1.0)))
        waiting = [cluster.schedule(time.sleep, (0.2,)) for _ in range(50)]
        Path(again).touch()
        with pytest.raises(ZeroDivisionError):
            cluster.join()
        with pytest.raises(ClosureCancelledError):
            waiting[-1].get()
        with pytest.raises(ZeroDivisionError):
            first.get()


CLIENT = """
import sys, time
import mpistrat as ms
with ms.connect(sys.argv[1]) as cluster:
    v = cluster.call(lambda: ms.Variable(5.0, name="kept"))
    for _ in range(1000):
        cluster.schedule(lambda: __import__("time").sleep(0.1))
    print("scheduled", flush=True)
    try:
        cluster.join()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        began = time.monotonic()
        cluster.join()
        print("joined", time.monotonic() - began < 5, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_client_that_is_interrupted_or_dies(job, tmp_path, number):
    program = tmp_path / "client.py"
    program.write_text(CLIENT)
    command = [sys.executable, str(program), str(tmp_path / "serve.json")]
    client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    try:
        assert client.stdout is not None and client.stdout.readline() == "scheduled\n"
        with pytest.raises(ms.errors.ClusterError, match=rf"expected a job that is free, .*process {client.pid}"):
            connect(tmp_path)
        os.kill(client.pid, number)
        rest = client.stdout.read()
        if number == signal.SIGINT:
            assert rest == "interrupted\njoined True\n" and client.wait(20) == 0
    finally:
        client.kill()
        client.wait()
    end = time.monotonic() + 40
    while True:  # the job finds out within some seconds
        try:
            cluster = connect(tmp_path)
            break
        except ms.errors.ClusterError:
            assert time.monotonic() < end
            time.sleep(0.5)
    with cluster:
        began = time.monotonic()
        assert cluster.schedule(lambda: 3).get() == 3
        assert time.monotonic() - began < 10  # nothing of the other client waits before it
        kept = cluster.call(lambda: next(v for v in ms.get_strategy().extended.variables if v.name == "kept"))
        assert float(kept.get()) == 5.0


def test_the_end_of_the_job_is_told(job, tmp_path):
    with connect(tmp_path) as cluster:
        value = cluster.schedule(time.sleep, (60,))
        job.end()
        with pytest.raises(ms.errors.ClosedError, match="has ended, or cannot be reached"):
            value.get()


def test_too_few_ranks_are_told_once(mpi, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    small = Job([mpi.python, "-m", "mpistrat", "serve", str(tmp_path / "serve.json")], 2, mpi, folder)
    try:
        assert small.wait(60) == 2
        _, err, said = small.outputs()
        text = "".join(err) + said
        assert text.count("expected at least 3 ranks: a chief, a worker, and 1 for variables, got 2") == 1
        assert not (tmp_path / "serve.json").exists()
    finally:
        small.end()
