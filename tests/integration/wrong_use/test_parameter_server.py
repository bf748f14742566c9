"""Wrong use of parameter servers, and ranks that fail, stop or die: an error on every rank, no hang, no process left."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

SETUP = """
import os, signal, subprocess, sys, threading, time
import numpy as np
import mpistrat as ms

def make(shape=(3,), name="w", rate=0.5, **settings):
    global strategy, optimizer
    strategy = ms.ParameterServerStrategy(**settings)
    with strategy.scope():
        optimizer = ms.optimizers.SGD(rate)
        return ms.Variable(np.zeros(shape, "f4"), name=name)

def train(v, steps=3, gradient=lambda: np.ones(3, "f4"), before=lambda number: None):
    '''Steps of a worker in a pass, which ends for a server when all workers have left it.'''
    if strategy.is_server:
        strategy.serve()
    for number in range(0 if strategy.is_server else steps):
        before(number)
        strategy.run(lambda: optimizer.apply_gradients([(gradient(), v)]))
        v.numpy()
    if not strategy.is_server:
        strategy.leave()
    strategy.close()

def rank():
    from mpi4py import MPI
    return MPI.COMM_WORLD.rank
"""

# What every rank of three is told, in a program that goes on.
EVERYBODY = {
    "no worker": ("ms.ParameterServerStrategy(num_ps=3)", ["ClusterError", "num_ps", "worker"]),
    "no server": ("ms.ParameterServerStrategy(num_ps=0)", ["ClusterError", "num_ps"]),
    "roles without a server": (
        "ms.ParameterServerStrategy(ms.cluster_resolver.MPIClusterResolver(jobs={'worker': 3}))",
        ["ClusterError", "ps"],
    ),
    "roles without a worker": (
        "ms.ParameterServerStrategy(ms.cluster_resolver.MPIClusterResolver(jobs={'ps': 3}))",
        ["ClusterError", "worker"],
    ),
    "num_ps and a resolver": (
        "ms.ParameterServerStrategy(ms.cluster_resolver.MPIClusterResolver(jobs={'worker': 2, 'ps': 1}), num_ps=1)",
        ["ValueError", "num_ps"],
    ),
    "settings that differ": ("ms.ParameterServerStrategy(num_ps=1 + (rank() == 0))", ["Mismatch|ClusterError"]),
    "an unknown transport": ("ms.ParameterServerStrategy(transport='pigeons')", ["ValueError", "pigeons", "messages"]),
    "more shards than rows": (
        "make(variable_partitioner=lambda shape, dtype, **_: [5])",
        ["ValueError", r"\b3\b", r"\[?5\]?", "'?w'?"],
    ),
    "a constraint on shards": (
        (
            "make(variable_partitioner=ms.partitioners.FixedShardsPartitioner(2))\n"
            "with strategy.scope(): ms.Variable(np.zeros(4), constraint=abs)"
        ),
        ["ValueError", "constraint"],
    ),
    "a variable of another shape": ("make((3,) if rank() else (4,))", ["Mismatch", r"\(3,\)", r"\(4,\)", "'w'"]),
    "a variable on some ranks only": (
        "make()\nwith strategy.scope():\n    if rank() == 1: ms.Variable(np.zeros(5), name='more')\nstrategy.stats()",
        ["Mismatch", "'more'", "rank 1"],
    ),
    "another dataset": (
        "make()\nstrategy.distribute_dataset(ms.data.from_arrays(np.zeros((8, 2 + rank()))).batch(2))",
        ["Mismatch", "dataset"],
    ),
}

ATTEMPTS = """
import traceback
for case, program in cases.items():
    try:
        exec(program, globals())
        print(f"==== {case}: no error", file=sys.stderr, flush=True)
    except Exception:
        print(f"==== {case}:\\n{traceback.format_exc()}", file=sys.stderr, flush=True)
"""


def test_every_rank_gets_the_error(mpi_run) -> None:
    cases = {name: program for name, (program, _) in EVERYBODY.items()}
    result = mpi_run(SETUP + f"cases = {cases!r}\n" + ATTEMPTS, 3, timeout=60)
    assert result.returncode == 0, result
    for name, (_, says) in EVERYBODY.items():
        for number, text in enumerate(result.err):
            (found,) = [part for part in text.split("==== ") if part.startswith(f"{name}:")]
            for words in says:
                assert re.search(words, found), f"{name}: rank {number} does not say {words!r}: {found}"


# Jobs that end: what somebody's text must hold, and what that of rank 0, the first of the node, must. Rank 2 is the server.
ENDS = {
    "another rate on the server": (
        "train(make(rate=0.5 if rank() < 2 else 0.25))",
        [r"on rank 2 the optimizer that a worker applies", r"learning_rate=0\.25"],
        "rank 2",
    ),
    "no optimizer on the server": (
        "v = make()\nif rank() < 2:\n    with strategy.scope(): optimizer = ms.optimizers.Adam(0.1)\ntrain(v)",
        [r"on rank 2 the optimizer that a worker applies", "got none"],
        "rank 2",
    ),
    "a gradient of another shape": (
        "train(make(), gradient=lambda: np.ones(3 + rank(), 'f4'))",
        ["ValueError", r"\(3,\)", r"\(4,\)", "w"],
        "rank 1",
    ),
    "an exception in a step": (
        "def before(number):\n    if rank() == 1 and number == 1: raise KeyError('lost key')\ntrain(make(), before=before)",
        ["KeyError: 'lost key'", "Traceback"],
        "rank 1",
    ),
    "an exception in a constraint": (
        (
            "v = make()\ndef wrong(w): raise KeyError('lost key')\n"
            "with strategy.scope(): u = ms.Variable(np.zeros(3, 'f4'), constraint=wrong)\ntrain(u)"
        ),
        ["KeyError: 'lost key'", "Traceback"],
        "rank 2",
    ),
    "an exception in a constraint while the server's program sleeps": (
        (
            "v = make()\ndef wrong(w): raise KeyError('lost key')\n"
            "with strategy.scope(): u = ms.Variable(np.zeros(3, 'f4'), constraint=wrong)\n"
            "if strategy.is_server: time.sleep(60)\ntrain(u)"
        ),
        ["KeyError: 'lost key'", "mpistrat-server-0"],
        "rank 2",
    ),
    "a constraint that gives another shape": (
        "v = make()\nwith strategy.scope(): u = ms.Variable(np.zeros(3, 'f4'), constraint=lambda w: w[:1])\ntrain(u)",
        ["ValueError", "Variable.constraint", r"\(3,\)", r"\(1,\)"],
        "rank 2",
    ),
    "a step on a server": (
        "v = make()\nif strategy.is_server: strategy.run(lambda: None)\ntrain(v)",
        ["ContextError", "rank 2, a parameter server"],
        "rank 2",
    ),
    "serving on a worker": (
        "v = make()\nif rank() == 0: strategy.serve()\ntrain(v)",
        ["ContextError", "rank 0, a worker"],
        "rank 0",
    ),
    "workers that save without leaving the pass that the server serves": (
        (
            "v = make()\nif strategy.is_server: strategy.serve()\n"
            "else: strategy.run(lambda: optimizer.apply_gradients([(np.ones(3, 'f4'), v)]))\nstrategy.save('unused.h5')"
        ),
        [
            r"rank 2, a parameter server, waits for workers to leave the pass",
            r"strategy\.leave\(\)",
            "rank [01] in .*save",
        ],
        "serve",
    ),
    "save on one worker only": (
        "v = make()\nif rank() == 0: strategy.save('unused.h5')\ntrain(v)",
        [r"rank 0 in save .*unused", r"rank 1 in close"],
        "",
    ),
    "a worker that leaves before all close": (
        "def before(number):\n    if rank() == 1 and number == 1: sys.exit(0)\ntrain(make(), before=before)",
        [r"rank 1 left the program while rank \d was in close"],
        "",
    ),
    "a server that leaves": (
        "v = make()\nif strategy.is_server: sys.exit(0)\ntime.sleep(0.5)\ntrain(v, 1000)",
        [r"rank 2 left the program"],
        "",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_job_ends(mpi_run, name: str) -> None:
    program, says, first = ENDS[name]
    result = mpi_run(SETUP + program, 3, timeout=40)
    assert result.returncode not in (0, None), result
    for words in says:
        assert re.search(words, result.stderr), f"nobody says {words!r}: {result}"
    assert first in result.err[0], f"rank 0, the first of the node, does not name {first}: {result}"
    assert result.seconds < 20, result


LONG = """
v = make()
if strategy.is_server:
    strategy.serve()
else:
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3, 'f4'), v)]))
    if rank() == 0:
        time.sleep(5)
    strategy.leave()
strategy.close()
"""


def test_a_pass_that_takes_long_is_told_and_goes_on(mpi_run) -> None:
    result = mpi_run(SETUP + LONG, 3, timeout=40, env={"MPISTRAT_WARN_AFTER": "1"})
    assert result.returncode == 0, result
    assert re.search(r"rank 2.*waits for workers to leave the pass; none has sent", result.err[2]), result
    assert re.search(r"rank 0 not in a collective.*\n.*strategy\.leave\(\)", result.err[2]), result
    assert "rank 1 " not in result.err[2], result


KILLED = """
v = make(transport=TRANSPORT)
if rank() == DEAD:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
train(v, 100000, before=lambda number: time.sleep(0.01))
"""


@pytest.mark.parametrize(("dead", "transport"), [(1, ""), (2, "messages")], ids=["worker", "server"])
def test_a_killed_rank_ends_the_job(mpi, mpi_run, dead: int, transport: str) -> None:
    """The launchers do it, before anybody else can say a word. Open MPI's names the rank, MPICH's only its process."""
    result = mpi_run(SETUP + KILLED.replace("TRANSPORT", repr(transport)).replace("DEAD", str(dead)), 3, timeout=40)
    assert result.returncode not in (0, None), result
    assert re.search(f"rank {dead}" if "Open MPI" in mpi.vendor else "(?i)killed", result.launcher), result
    assert result.seconds < 20, result


@pytest.mark.parametrize("dead", [0, 3], ids=["worker", "server"])
def test_a_killed_rank_ends_the_job_over_two_hosts(mpi_run, hosts, dead: int) -> None:
    result = mpi_run(SETUP + KILLED.replace("TRANSPORT", "''").replace("DEAD", str(dead)), 4, timeout=60, hosts=hosts)
    assert result.returncode not in (0, None), result
    assert result.seconds < 30, result


# Nobody else is stopped, nothing is lost.

STOPPED = """
def others_are_done():
    return all(os.path.exists(f"{FOLDER}/{worker}") for worker in (0, 2))

def stop():
    '''Stop this process until the others are done, or for 20 s.'''
    there, pid = " && ".join(f"[ -e {FOLDER}/{worker} ]" for worker in (0, 2)), os.getpid()
    subprocess.Popen(["sh", "-c", f"for i in $(seq 200); do sleep 0.1; {there} && break; done; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)
    print("others are done:", others_are_done(), flush=True)

v = make(transport=TRANSPORT)
if strategy.is_server:
    strategy.serve()
else:
    for number in range(40):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3, "f4"), v)]))
        if rank() == 1 and number == 3:
            stop()
        v.numpy()
    open(f"{FOLDER}/{rank()}", "w")
    strategy.leave()
strategy.comm.Barrier()
if not strategy.is_server:
    assert v.numpy().tolist() == [-0.5 * 40 * strategy.num_workers] * 3, v.numpy()
strategy.close()
"""


@pytest.mark.parametrize("transport", ["shared_window", "messages"])
def test_a_stopped_worker_does_not_stop_the_others(mpi_run, tmp_path: Path, transport: str) -> None:
    result = mpi_run(SETUP + f"TRANSPORT, FOLDER = {transport!r}, {str(tmp_path)!r}" + STOPPED, 4, timeout=60)
    assert result.returncode == 0, result
    assert "others are done: True" in result.out[1], result


SLOW = """
def slow(w):
    '''Takes until the quick server's worker has made three steps: four that a server is told of may wait there.'''
    until = time.monotonic() + 20
    while os.path.getsize(FOLDER + "/steps") < 3:
        assert time.monotonic() < until, "the quick server's worker does not get on"
        time.sleep(0.01)
    return w

strategy = ms.ParameterServerStrategy(num_ps=2)
made = open(FOLDER + "/steps", "ab")
strategy.comm.Barrier()
with strategy.scope():
    optimizers = [ms.optimizers.SGD(0.5) for _ in range(2)]
    quick, slow = (ms.Variable(np.zeros(3), constraint=c, name=f"v{i}") for i, c in enumerate((None, slow)))
if strategy.is_server:
    strategy.serve()
else:
    for _ in range(30):  # worker 0 with the quick server, worker 1 with the slow one, by an optimizer of its own
        v, optimizer = ((quick, optimizers[0]), (slow, optimizers[1]))[strategy.worker_index]
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), v)]))
        v.numpy()
        if strategy.worker_index == 0:
            made.write(b"+")
            made.flush()
    strategy.leave()
strategy.comm.Barrier()
if not strategy.is_server:
    assert quick.numpy().tolist() == slow.numpy().tolist() == [-15] * 3
strategy.close()
"""


def test_a_slow_server_does_not_slow_who_does_not_use_it(mpi_run, tmp_path: Path) -> None:
    result = mpi_run(SETUP + f"FOLDER = {str(tmp_path)!r}" + SLOW, 4, timeout=60)
    assert result.returncode == 0, result


EARLY = """
def main():
    v = make()
    data = strategy.distribute_dataset(ms.data.from_arrays(np.arange(40)).batch(1))
    done = 0
    for epoch in range(3):
        for _ in data:
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(3, "f4"), v)]))
            done += 1
            if rank() == 1 and done == 2:
                HOW
    # No barrier: rank 1 is not there. The last of the others sees all that was pushed.
    if strategy.is_server:
        strategy.serve(None)
        assert v.numpy().tolist() == [-0.5 * EXPECTED] * 3, v.numpy()
    print("done", done, flush=True)

main()
"""


@pytest.mark.parametrize("how", ["return", "sys.exit(0)", "break"])
def test_a_worker_that_ends_early_holds_nobody_up(mpi_run, how: str) -> None:
    """Of 40 batches workers 0, 1 and 2 get 14, 13 and 13; in each of 3 passes, or in the first alone."""
    others = 3 * (14 + 13)
    expected = others + (2 + 2 * 13 if how == "break" else 2)
    text = EARLY.replace("HOW", how).replace("EXPECTED", str(expected))
    result = mpi_run(SETUP + text, 4, timeout=60)
    assert result.returncode == 0, result
    assert all("done" in result.out[number] for number in (0, 2, 3)), result
