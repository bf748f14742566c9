"""A coordinator's program continues in place when workers are killed: Open MPI with ULFM, `mpistrat run --survive`.

Only the functions that a killed worker runs are run again, by another one; its chief's program and all variables stay.
"""

import contextlib
import os
import re
import signal
import subprocess
import time

import pytest

from tests.launch.launcher import job_environment

pytestmark = pytest.mark.timeout(120)

# Ranks 0 to 3 are workers, 0 is the chief; rank 4 is the server.
PROGRAM = """
import os, random, signal, sys, threading, time
import numpy as np
import mpistrat as ms
from mpistrat.coordinator import ClusterCoordinator
from mpistrat.errors import PeerExitError

COUNT = 60
LARGE = 1 << 19

def say(*words):
    print(*words, flush=True)

def kill(process):
    os.kill(process, signal.SIGKILL)

def train(job):
    strategy = ms.ParameterServerStrategy(num_ps=1, transport=TRANSPORT)
    with strategy.scope():
        w = ms.Variable(np.zeros(COUNT), name="w")
        large = ms.Variable(np.zeros(LARGE), name="large")
        own = ms.Variable(0, name="own", per_worker_variable=True)
        momentum = ms.optimizers.SGD(1.0, momentum=0.5)
    processes = strategy.all_gather_object(os.getpid())

    def function(i, seconds):
        own.assign_add(1)
        strategy.run(lambda: momentum.apply_gradients([(np.eye(COUNT)[i], w)]))
        time.sleep(seconds)
        large.assign_add(np.ones(LARGE))
        return i, os.getpid()

    with ClusterCoordinator(strategy) as coordinator:
        if coordinator.is_chief:
            say("start", job.generation)
            program(job, strategy, coordinator, processes, function, w, large, own, momentum)
    strategy.close()
    return job.generation

def twice(coordinator, values, w, large, victims=1):
    \"\"\"Check that each function has run, and at most one of each victim twice.\"\"\"
    found = coordinator.fetch(values)
    assert [i for i, _ in found] == list(range(len(found))), found
    moved = w.numpy() != 0
    assert moved[: len(found)].all(), w.numpy()
    again = large.numpy()[0] - len(found)
    assert 0 <= again <= victims and (large.numpy() == large.numpy()[0]).all(), large.numpy()
    return found
"""
END = """
value = ms.survive(train)
say("end", value)
"""


@pytest.fixture
def run(mpi, mpistrat_run):
    """Run a program under `mpistrat run --survive`."""
    if "Open MPI" not in mpi.vendor:
        pytest.skip("only Open MPI continues when a rank dies")

    def run(program, ranks=5, transport="", **how):
        whole = PROGRAM.replace("TRANSPORT", repr(transport)) + program + END
        return mpistrat_run(whole, ranks, "--survive", **how)

    return run


def ends(done):
    return [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("end")]


@pytest.mark.parametrize("transport", ["", "messages"])
def test_killed_workers_cost_their_own_functions_only(run, transport):
    """One is killed in a function, one while idle; then everything that the chief can do still works, as with fewer workers."""
    done = run(
        """
def program(job, strategy, coordinator, processes, function, w, large, own, momentum):
    assert coordinator.num_workers == 3
    resource = coordinator.create_per_worker_resource(os.getpid)
    values = [coordinator.schedule(function, (i, 0.01)) for i in range(COUNT)]
    fixed = coordinator.schedule(os.getpid, worker=2)
    while sum(value.status.name == "READY" for value in values) < 10:
        coordinator.done()
    kill(processes[1])
    coordinator.join()
    found = twice(coordinator, values, w, large)
    assert {process for _, process in found[20:]} <= {processes[2], processes[3]}
    assert fixed.fetch() == processes[3]
    assert coordinator.num_workers == 2
    assert sorted(coordinator.fetch(resource)) == sorted(processes[2:4])
    try:
        coordinator.schedule(os.getpid, worker=0).fetch()
    except PeerExitError as error:
        say(error)
    try:
        coordinator.join()
    except PeerExitError:
        pass

    with strategy.scope():  # collective calls: over the living ranks
        v = ms.Variable(np.zeros(LARGE), name="v")
        adam = ms.optimizers.Adam(0.5)
    coordinator.fetch([coordinator.schedule(lambda: v.assign_add(np.ones(LARGE))) for _ in range(8)])
    coordinator.schedule(lambda: strategy.run(lambda: adam.apply_gradients([(np.ones(LARGE), v)]))).fetch()
    assert np.allclose(v.numpy(), 7.5)
    counts = own.read_all()
    assert len(counts) == 2 and 20 < sum(counts) <= COUNT, counts
    before = w.numpy(), large.numpy(), v.numpy()
    strategy.save("state.h5")

    kill(processes[3])  # while idle
    deadline = time.monotonic() + 20
    while coordinator.num_workers == 2 and time.monotonic() < deadline:
        coordinator.done()
    assert coordinator.num_workers == 1
    assert coordinator.fetch(resource) == (processes[2],)
    w.assign(np.ones(COUNT))
    v.assign(np.ones(LARGE))
    strategy.restore("state.h5")
    for was, now in zip(before, (w.numpy(), large.numpy(), v.numpy())):
        assert (was == now).all()
    stats = strategy.stats()
    assert {exchange.worker for exchange in stats.exchanges} == {0, 2}, stats
    with coordinator.executor() as executor:
        assert list(executor.map(abs, range(-3, 0))) == [3, 2, 1]
    assert [len(processes), strategy.size, strategy.num_workers] == [5, 3, 2]
""",
        transport=transport,
    )
    assert ends(done) == [0, 0, 0], done.stderr
    assert "cannot be run: worker 0 (rank 1)" in done.stdout
    assert len(re.findall(r"worker \d \(rank \d\) died: \d of its functions are run by others", done.stderr)) == 2
    assert "Traceback" not in done.stderr, done.stderr


def test_all_workers_killed_is_an_error_of_the_chief(run):
    done = run(
        """
def program(job, strategy, coordinator, processes, function, w, large, own, momentum):
    values = [coordinator.schedule(function, (i, 0.02)) for i in range(COUNT)]
    values[5].get()
    for process in processes[1:4]:
        kill(process)
    try:
        coordinator.join()
    except PeerExitError as error:
        say("join:", error)
    assert coordinator.num_workers == 0
    for call in (coordinator.require_workers, lambda: coordinator.schedule(os.getpid)):
        try:
            call()
        except PeerExitError as error:
            say("then:", error)
    assert 6 <= (w.numpy() != 0).sum() < COUNT
    with strategy.scope():
        v = ms.Variable(2.0)
    say(strategy.size, v.numpy(), large.numpy()[0] >= 6)
"""
    )
    assert ends(done) == [0, 0], done.stderr
    assert re.search(
        r"join: .*function cannot be run: worker \d \(rank \d\) died|join: .*all workers are gone; worker \d .* died",
        done.stdout,
    )
    assert done.stdout.count("then:") == 2 and "2 2.0 True" in done.stdout


@pytest.mark.parametrize("victim", [0, 4], ids=["the chief", "a server"])
def test_a_killed_chief_or_server_starts_the_function_again(run, victim):
    """So does it after the death of a worker, which costs nothing by itself."""
    done = run(
        """
def program(job, strategy, coordinator, processes, function, w, large, own, momentum):
    values = [coordinator.schedule(function, (i, 0.01)) for i in range(COUNT)]
    if job.generation == 0:
        values[5].get()
        kill(processes[1])
        values[20].get()
        with strategy.scope():
            v = ms.Variable(1.0)
        values = [coordinator.schedule(function, (i, 0.01)) for i in range(COUNT)]
        values[5].get()
        kill(processes[VICTIM])
    coordinator.join()
    assert strategy.size == 3
    twice(coordinator, values, w, large, 0)
""".replace("VICTIM", str(victim))
    )
    assert ends(done) == [1, 1, 1], done.stderr


def test_a_worker_killed_in_a_collective_call_starts_the_function_again(run):
    """Here it waits for the initial value of a variable, which the chief creates; the chief can't know which ranks have it."""
    done = run(
        """
def program(job, strategy, coordinator, processes, function, w, large, own, momentum):
    def value():
        if job.generation == 0:
            kill(processes[2])
            time.sleep(1)
        return np.full(3, 5.0)

    values = [coordinator.schedule(function, (i, 0.0)) for i in range(COUNT)]
    coordinator.join()
    with strategy.scope():
        v = ms.Variable(value)
    twice(coordinator, values, w, large, 0)
    assert strategy.size == 4 and (v.numpy() == 5).all()
"""
    )
    assert ends(done) == [1] * 4, done.stderr


CLIENT = """
import os, signal, sys, time
import numpy as np
import mpistrat as ms

def function(w, i):
    w.assign_add(np.eye(30)[i])
    time.sleep(0.02)
    return i

def program(steps, victim=0):
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        v = ms.Variable(0.0, aggregation=ms.VariableAggregation.SUM)
    for step in range(steps):
        strategy.run(lambda: v.assign_add(1.0))
        if step == 20 and os.getpid() == victim:
            os.kill(victim, signal.SIGKILL)
    return strategy.size, float(v.numpy())

cluster = ms.connect(sys.argv[1], timeout=60)
w = cluster.call(lambda: ms.Variable(np.zeros(30)))
processes = cluster.fetch([cluster.schedule(os.getpid, worker=i) for i in range(3)])
values = [cluster.schedule(function, (w, i)) for i in range(30)]
values[3].get()
os.kill(processes[0], signal.SIGKILL)
print(cluster.fetch(values) == list(range(30)), (w.get() >= 1).all(), w.get().sum() - 30 in (0, 1))
print(cluster.run(program, (10,)))
try:
    cluster.run(program, (1000, processes[1]))
except Exception as error:
    print(type(error).__name__, str(error).splitlines()[0])
print(cluster.schedule(os.getpid).get() == processes[2], cluster.run(program, (10,)))
print((w.get() >= 1).all(), cluster.call(lambda: ms.Variable(7.0)).get())
os.kill(processes[2], signal.SIGKILL)
try:
    cluster.schedule(os.getpid).get(timeout=50)
except Exception as error:
    print(type(error).__name__)
"""


def test_a_client_of_a_job_whose_workers_are_killed(mpi, tmp_path):
    """Functions run again, a program fails with the dead rank's number, and the job serves until its last worker dies."""
    if "Open MPI" not in mpi.vendor:
        pytest.skip("only Open MPI continues when a rank dies")
    pytest.importorskip("zmq")
    (tmp_path / "client.py").write_text(CLIENT)
    words = [mpi.python, "-m", "mpistrat", "run", "-n", "5", "--survive", "-m", "mpistrat", "serve", "serve.json"]
    environment = job_environment("none", tmp_path, {"PATH": "/usr/bin:/bin"})
    how = {"env": environment, "cwd": tmp_path, "text": True, "errors": "replace"}
    with subprocess.Popen(words, stderr=subprocess.PIPE, start_new_session=True, **how) as job:
        try:
            while not (tmp_path / "serve.json").exists() and job.poll() is None:
                time.sleep(0.1)
            client = [mpi.python, "client.py", "serve.json"]
            done = subprocess.run(client, capture_output=True, timeout=90, **how)
            _, told = job.communicate(timeout=20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    lines = [
        "True True True",
        "[(4, 40.0), (4, 40.0), (4, 40.0), (4, 40.0)]",
        "PeerExitError rank 1 of 4 died or left the program",
        "True [(3, 30.0), (3, 30.0), (3, 30.0)]",
        "True 7.0",
    ]
    assert done.stdout.splitlines()[:5] == lines, done.stderr + told
    assert done.stdout.splitlines()[5] in ("PeerExitError", "ClosedError"), done.stderr
    assert "all workers have left the program or died" in told and job.returncode, told
