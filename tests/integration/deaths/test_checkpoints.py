"""Jobs that are killed again and again while they save: each finds a whole checkpoint, never older than the last complete one.

`MPISTRAT_KILLS` says how many there are; a campaign of 500 takes a quarter of an hour.
"""

import os
import random

import pytest

PROGRAM = """
import itertools, os, signal, sys, threading
import numpy as np
import mpistrat as ms

FOLDER, VICTIM, DELAY, CALL, SIZE = {folder!r}, {victim}, {delay}, {call}, 1 << 17
strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    w = ms.Variable(np.zeros(SIZE), name="w")
    optimizer = ms.optimizers.SGD(1.0, momentum=0.0 + 1e-9)
checkpoints = ms.train.Checkpoints(strategy, FOLDER)
notes = checkpoints.restore_latest() or {{"step": 0}}
done, log = notes["step"], os.path.join(FOLDER, "completed")
completed = int(open(log).read().split()[-1]) if os.path.exists(log) else 0
assert np.array_equal(w.numpy(), np.full(SIZE, float(done))), (done, w.numpy())
assert done >= completed, (done, completed)
if strategy.rank == 0:
    print("found", done, len([name for name in os.listdir(FOLDER) if name.endswith(".part")]), flush=True)
strategy.barrier()
if strategy.rank == VICTIM and not CALL:
    threading.Timer(DELAY, os.kill, (os.getpid(), signal.SIGKILL)).start()
elif strategy.rank == VICTIM:  # before that call of the system, in whatever thread
    calls = itertools.count(1)

    def counted(call):
        def wrapped(*args, **kwargs):
            if next(calls) == CALL:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)
        return wrapped

    for name in ("open", "close", "pwrite", "fsync", "truncate", "replace", "rename", "unlink"):
        setattr(os, name, counted(getattr(os, name)))
while True:
    done += 1
    w.assign(np.full(SIZE, float(done)))
    checkpoints.save(done)
    w.assign(np.full(SIZE, -1.0))  # while it is written
    if done % 2:
        checkpoints.wait()
        if strategy.rank == 0:
            with open(log, "a") as file:
                file.write(f"{{done}}\\n")
                file.flush()
                os.fsync(file.fileno())
"""


def next_run(mpi_run, folder, **how):
    """Go on in a job that is killed in the end; return which step it has found, and how many files of killed writers."""
    program = PROGRAM.format(folder=str(folder), **{"delay": 0.0, "call": 0, **how})
    result = mpi_run(program, 2, 60)
    assert "AssertionError" not in result.stderr, result
    line = [line for line in result.stdout.splitlines() if line.startswith("found")]
    assert line, result
    return tuple(map(int, line[0].split()[1:]))


@pytest.mark.timeout(3600)
def test_kills_at_random_moments(mpi_run, tmp_path):
    kills = int(os.environ.get("MPISTRAT_KILLS", "3"))
    rng, found, parts = random.Random(14), [], 0
    for number in range(kills):
        delay = rng.uniform(0.0, 0.25) if number else 1.0  # the first comes to something on a busy machine, too
        step, left = next_run(mpi_run, tmp_path, victim=rng.randrange(2), delay=delay)
        found.append(step)
        parts += left
    assert found == sorted(found)
    assert found[-1] > 0
    assert kills < 50 or parts > 10


@pytest.mark.timeout(3600)
def test_kills_before_each_call_of_the_system(mpi_run, tmp_path):
    """One of two ranks dies before a call that it makes in its saves: with MPISTRAT_KILLS=50 before each of the first 50."""
    every = 1 if int(os.environ.get("MPISTRAT_KILLS", "3")) >= 50 else 20
    found = [
        next_run(mpi_run, tmp_path, victim=victim, call=call)[0] for victim in (0, 1) for call in range(3, 51, every)
    ]
    assert found == sorted(found)
    assert found[-1] > 0
