"""Forked children of a rank: they may read data and variables; what would count as the rank's raises."""

import pytest

START = """
import multiprocessing, os, sys
import numpy as np
import mpistrat as ms

def in_child(act):
    \"\"\"Return the type and text of what an act raises in a forked child; ("", result) where it raises nothing.\"\"\"
    receive, send = multiprocessing.Pipe(False)
    if os.fork() == 0:
        try:
            send.send(("", act()))
        except BaseException as error:
            send.send((type(error).__name__, str(error)))
        os._exit(0)
    send.close()
    assert receive.poll(15), "the child waits"
    kind, text = receive.recv()
    os.wait()
    return kind, text

def refused(act, what=""):
    kind, text = in_child(act)
    assert kind == "ContextError" and what in text and "which a rank has forked" in text, (what, kind, text)
    assert "in the rank itself" in text, text
"""

COLLECTIVES = """
strategy = ms.MultiWorkerMirroredStrategy()
rank, size = strategy.rank, strategy.size
part = strategy.process_set(range(size))
with strategy.scope():
    v = ms.Variable(np.arange(3.0), name="v")
    optimizer = ms.optimizers.SGD(0.1)

def step():
    optimizer.apply_gradients([(np.ones(3), v)])

def reduce():
    return float(strategy.reduce("SUM", 1.0, axis=None))

assert reduce() == size  # from now on it has a plan
strategy.run(step)
request = strategy.all_reduce_async("SUM", np.ones(3))
for what, act in {
    "reduce": reduce,
    "step": lambda: strategy.run(step),
    "barrier": strategy.barrier,
    "all_gather_object": strategy.all_gather_object,
    "assign": lambda: v.assign(np.zeros(3)),
    "save": lambda: strategy.save("unwritten.h5"),
    "process set": lambda: part.all_reduce("SUM", 1.0),
    "the wait for": request.wait,
    "comm.Barrier": lambda: strategy.comm.Barrier(),
    "process_set": lambda: strategy.process_set([0]),
    "Strategy": ms.MultiWorkerMirroredStrategy,
}.items():
    refused(act, what)

def read():
    data = ms.data.from_arrays(np.arange(6.0)).batch(2)
    return v.numpy().tolist(), [batch.tolist() for batch in data]

expected = [-0.2, 0.8, 1.8], [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
assert np.allclose(in_child(read)[1][0], expected[0]) and in_child(read)[1][1] == expected[1], in_child(read)
assert in_child(lambda: (part.close(), strategy.close())) == ("", (None, None))
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, 2]) == [1, 2]
assert reduce() == size and request.wait().tolist() == [size] * 3
assert part.all_reduce("SUM", 1.0) == size
strategy.run(step)
assert np.allclose(v.numpy(), np.arange(3.0) - 0.1 * size * 2)
strategy.close()
print("all is well")
"""


@pytest.mark.parametrize("shared", ["1", "0"], ids=["shared", "private"])
def test_collectives_in_a_forked_child(mpi_run, tmp_path, shared):
    result = mpi_run(
        START + COLLECTIVES, 2, timeout=60, env={"MPISTRAT_SHARED_MEMORY": shared, "MPISTRAT_ABORT_AFTER": "12"}
    )
    assert result.returncode == 0 and result.stdout.count("all is well") == 2, result


SERVERS = """
strategy = ms.ParameterServerStrategy(num_ps=1, transport={transport!r})
with strategy.scope():
    v = ms.Variable(np.arange(3.0), name="v")
    optimizer = ms.optimizers.SGD(0.1)

def step():
    optimizer.apply_gradients([(np.ones(3), v)])

for act in (v.numpy, lambda: v.assign_add(np.ones(3)), strategy.barrier):
    refused(act)
if strategy.is_server:
    refused(strategy.serve, "serve")
else:
    refused(lambda: strategy.run(step))
    refused(strategy.flush)
assert in_child(strategy.close) == ("", None)
for _ in strategy.distribute_dataset(ms.data.from_arrays(np.arange(4.0)).batch(2)):
    strategy.run(step)
if not strategy.is_server:
    strategy.flush()
strategy.barrier()
assert np.allclose(v.numpy(), np.arange(3.0) - 0.2), v.numpy()
strategy.close()
print("all is well")
"""


@pytest.mark.parametrize("transport", ["", "messages"])
def test_parameter_servers_in_a_forked_child(mpi_run, transport):
    program = START + SERVERS.replace("{transport!r}", repr(transport))
    result = mpi_run(program, 2, timeout=60, env={"MPISTRAT_ABORT_AFTER": "12"})
    assert result.returncode == 0 and result.stdout.count("all is well") == 2, result


def test_a_rank_alone_counts_for_nobody_else(mpi_run):
    program = """
strategy = ms.MultiWorkerMirroredStrategy()
assert in_child(lambda: float(strategy.reduce("SUM", 2.0, axis=None))) == ("", 2.0)
"""
    assert mpi_run(START + program, 1).returncode == 0


COORDINATOR = """
strategy = ms.ParameterServerStrategy(num_ps=1)
coordinator = ms.coordinator.ClusterCoordinator(strategy)
if coordinator.is_chief:
    value = coordinator.schedule(abs, args=(-2,))
    for what in ("schedule", "join", "done", "fetch"):
        arguments = {"schedule": (abs, (1,)), "fetch": (value,)}.get(what, ())
        refused(lambda: getattr(coordinator, what)(*arguments), what)
    assert coordinator.fetch(value) == 2
else:
    refused(coordinator.serve, "message between ranks")
    coordinator.serve()
coordinator.close()
strategy.close()
print("all is well")
"""


def test_a_coordinator_in_a_forked_child(mpi_run):
    result = mpi_run(START + COORDINATOR, 3, timeout=60, env={"MPISTRAT_ABORT_AFTER": "12"})
    assert result.returncode == 0 and result.stdout.count("all is well") == 3, result


ENDS = """
import multiprocessing, os, signal, sys, threading
{start}

def fails_in_a_thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()

def caught():
    try:
        sys.exit(3)
    except SystemExit:
        pass

def own_hook():
    sys.excepthook = lambda *error: None
    raise ValueError("of the child")

def child_of_the_child():
    child = os.fork()
    if child == 0:
        raise SystemExit(7)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

def kill(number):
    os.kill(os.getpid(), number)

for act, status in {{  # as Python's documentation has them; a negative one is a signal
    "raise ValueError('of the child')": 1,
    "own_hook()": 1,
    "raise KeyboardInterrupt": -signal.SIGINT,
    "sys.exit(3)": 3,
    "sys.exit()": 0,
    "sys.exit('a text')": 1,
    "sys.exit(-1)": 255,
    "raise SystemExit(5)": 5,
    "quit(6)": 6,
    "os._exit(4)": 4,
    "caught()": 0,
    "fails_in_a_thread()": 0,
    "child_of_the_child()": 7,
    "kill(signal.SIGKILL)": -signal.SIGKILL,
    "kill(signal.SIGTERM)": -signal.SIGTERM,
}}.items():
    child = os.fork()
    if child == 0:
        exec(act)
        break
    got = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert got == status, (act, got, status)
    if not act.startswith(("own_hook", "quit")):  # a fork of multiprocessing prints what it raises itself, and has no quit
        process = multiprocessing.get_context("fork").Process(target=exec, args=(act, globals()))
        process.start()
        process.join()
        expected = 1 if act == "raise KeyboardInterrupt" else status
        assert process.exitcode == expected, (act, process.exitcode)
else:
    {go_on}
    print("all is well", flush=True)
"""
MOMENTS = {  # when children are forked
    "before MPI": ("import mpistrat as ms", "ms.MultiWorkerMirroredStrategy().close()"),
    "after MPI's start": ("from mpi4py import MPI; import mpistrat as ms", "ms.MultiWorkerMirroredStrategy().close()"),
    "within a strategy": (
        "import mpistrat as ms; strategy = ms.MultiWorkerMirroredStrategy()",
        "assert float(strategy.reduce('SUM', 1.0, axis=None)) == 2",
    ),
    "after a strategy": ("import mpistrat as ms; ms.MultiWorkerMirroredStrategy().close()", ""),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_parent_gets_the_status_of_a_child_and_the_job_goes_on(mpi_run, moment):
    start, go_on = MOMENTS[moment]
    result = mpi_run(ENDS.format(start=start, go_on=go_on or "pass"), 2, timeout=90)
    assert result.returncode == 0 and result.stdout.count("all is well") == 2, result
    assert "the job ends" not in result.stderr, result
