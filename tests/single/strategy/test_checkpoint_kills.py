"""A writer that is killed at any step of a save: there is a whole file, never older than the last that was completed."""

import os
import shutil
import signal

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.strategies import without_mpi

CALLS = ("open", "close", "pwrite", "fsync", "truncate", "replace", "rename", "unlink")


def save_and_be_killed(folder, at, asynchronous):
    """In a child: save steps 2 and 3 beside 1, and die before call `at` of the system, or after all."""
    count = 0

    def counted(call):
        def wrapped(*args, **kwargs):
            nonlocal count
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    with without_mpi() as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(3000), name="w")
        checkpoints = ms.train.Checkpoints(strategy, folder, keep=2, asynchronous=asynchronous)
        for name in CALLS:
            setattr(os, name, counted(getattr(os, name)))
        for step in (2, 3):
            w.assign(np.full(3000, float(step)))
            checkpoints.save(step)
            checkpoints.wait()
            (folder / f"completed-{step}").touch()
    os._exit(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_kill_before_each_call_of_the_system(tmp_path, asynchronous):
    with without_mpi() as strategy:
        with strategy.scope():
            w = ms.Variable(np.full(3000, 1.0), name="w")
        first = tmp_path / "first"
        ms.train.Checkpoints(strategy, first, asynchronous=False).save(1)
        killed, parts = 0, 0
        for at in range(1, 200):
            folder = tmp_path / str(at)
            shutil.copytree(first, folder)
            child = os.fork()
            if not child:
                try:
                    save_and_be_killed(folder, at, asynchronous)
                finally:
                    os._exit(1)
            _, status = os.waitpid(child, 0)
            completed = max([1, *(step for step in (2, 3) if (folder / f"completed-{step}").exists())])
            found = ms.train.Checkpoints(strategy, folder, keep=2, asynchronous=False)
            newest = found.steps()[-1]
            w.assign(np.zeros(3000))
            assert found.restore_latest() == {"step": newest}
            assert newest >= completed
            assert np.array_equal(w.numpy(), np.full(3000, float(newest)))
            parts += any(entry.name.endswith(".part") for entry in folder.iterdir())
            found.save(4)  # of the next run, which removes what is left
            assert not any(entry.name.endswith(".part") for entry in folder.iterdir())
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0
                break
            assert os.WTERMSIG(status) == signal.SIGKILL
            killed += 1
        assert 20 < killed < 199
        assert parts > 10
