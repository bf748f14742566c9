"""Jobs that are killed again and again while they save: each finds a whole checkpoint, never older than the last complete one.

`MPISTRAT_KILLS` says how many there are; a campaign of 500 takes a quarter of an hour.
"""

import os
import random

import pytest

PROGRAM = """
import os, signal, sys, threading
import numpy as np
import mpistrat as ms

FOLDER, VICTIM, DELAY, SIZE = {folder!r}, {victim}, {delay}, 1 << 17
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
if strategy.rank == VICTIM:
    threading.Timer(DELAY, os.kill, (os.getpid(), signal.SIGKILL)).start()
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


@pytest.mark.timeout(3600)
def test_kills_at_random_moments(mpi_run, tmp_path):
    kills = int(os.environ.get("MPISTRAT_KILLS", "3"))
    rng, found, parts = random.Random(14), [], 0
    for _ in range(kills):
        program = PROGRAM.format(folder=str(tmp_path), victim=rng.randrange(2), delay=rng.uniform(0.0, 0.25))
        result = mpi_run(program, 2, 60)
        assert "AssertionError" not in result.stderr, result
        line = [line for line in result.stdout.splitlines() if line.startswith("found")]
        assert line, result
        found.append(int(line[0].split()[1]))
        parts += int(line[0].split()[2])
    assert found == sorted(found)
    assert found[-1] > 0
    assert kills < 50 or parts > 10
