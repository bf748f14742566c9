"""Weights that should be equal and are not: told by what writes them to files, and at the end."""

import ctypes

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError

DIFFER = r"Strategy.%s: expected the same weights on all nodes, got .*rank 1: odd #"


def overwrite(variable, value):
    """Write past the package, as a library does that ignores that an array is read-only."""
    ctypes.cast(variable.array.ctypes.data, ctypes.POINTER(ctypes.c_double))[0] = value


def made(strategy, shape=(4,)):
    with strategy.scope():
        same = ms.Variable(np.ones(shape), name="same")
        return same, ms.Variable(np.ones(shape), name="odd", trainable=False)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("value", [77.0, -1.0, np.nan])
def test_nodes_that_differ_write_no_file_and_do_not_end_in_silence(mpi_tmp_path, monkeypatch, value):
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")  # each rank counts as a node
    strategy = ms.MultiWorkerMirroredStrategy()
    _, odd = made(strategy)
    path = mpi_tmp_path / "file.h5"
    strategy.save(path)
    if strategy.rank == 1:
        overwrite(odd, value)
    writes = {
        "save": lambda: strategy.save(mpi_tmp_path / "other.h5"),
        "begin_save": lambda: strategy.begin_save(mpi_tmp_path / "other.h5").wait(),
        "export": lambda: strategy.export(mpi_tmp_path / "other.safetensors"),
    }
    for function, write in writes.items():
        with pytest.raises(CollectiveMismatchError, match=DIFFER % function):
            write()
    strategy.barrier()
    assert [each.name for each in mpi_tmp_path.iterdir()] == ["file.h5"]
    strategy.restore(path)  # as the error says
    strategy.save(path)
    if strategy.rank == 1:
        overwrite(odd, value)
    with pytest.raises(CollectiveMismatchError, match=DIFFER % "close"):
        strategy.close()
    with pytest.raises(ms.errors.ClosedError):
        strategy.barrier()  # it is closed all the same


@pytest.mark.ranks(2)
def test_what_was_told_is_not_told_again_at_the_end(mpi_tmp_path, monkeypatch):
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    with ms.MultiWorkerMirroredStrategy() as strategy:
        _, odd = made(strategy)
        if strategy.rank == 1:
            overwrite(odd, 2.0)
        with pytest.raises(CollectiveMismatchError, match=DIFFER % "save"):
            strategy.save(mpi_tmp_path / "file.h5")


@pytest.mark.ranks(2)
def test_nodes_may_differ_between_outer_steps(monkeypatch):
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    with ms.MultiWorkerMirroredStrategy(local_steps=4) as strategy:
        same, _ = made(strategy)
        optimizer = ms.optimizers.SGD(0.5)
        strategy.run(lambda: optimizer.apply_gradients([(np.full(4, float(strategy.rank)), same)]))
        assert strategy.nodes_differ


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("shared_memory", ["0", "1"])
def test_ranks_of_a_replica_that_differ_are_told(mpi_tmp_path, monkeypatch, shared_memory):
    """By all ranks, those of other replicas too."""
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", shared_memory)
    strategy = ms.MeshStrategy(axes={"data": -1, "model": 2})
    with strategy.scope():
        whole = ms.Variable(np.ones((2, 4)), name="whole")
        parts = ms.Variable(np.arange(8.0).reshape(2, 4), name="parts", layout=(None, "model"))
    strategy.save(mpi_tmp_path / "file.h5")
    if strategy.rank in (1, strategy.size - 1):  # the second rank of each replica
        overwrite(whole, 3.0)
    for function, act in {"save": lambda: strategy.save(mpi_tmp_path / "other.h5"), "close": strategy.close}.items():
        words = rf"Strategy.{function}: whole: expected the same value on the ranks of a replica .*rank 1: #"
        with pytest.raises(CollectiveMismatchError, match=words):
            strategy.extended.placement.told_apart = False
            act()
    assert parts.closed


ALONE = """
import sys
import numpy as np
import mpistrat as ms

with ms.MultiWorkerMirroredStrategy() as strategy:
    with strategy.scope():
        v = ms.Variable(np.ones(4), name="v")
    if strategy.rank == 1:
        {act}
print("closed", flush=True)
"""


@pytest.mark.parametrize(
    "act", ["sys.exit()", "sys.exit(3)", "raise ValueError('mine')", "import os; os.kill(os.getpid(), 9)"]
)
def test_the_end_waits_for_no_rank_that_has_gone(mpi_run, act):
    env = {"MPISTRAT_SHARED_MEMORY": "0", "MPISTRAT_ABORT_AFTER": "20"}
    result = mpi_run(ALONE.format(act=act), 2, timeout=60, env=env)
    assert result.returncode != 0 and result.seconds < 40
    assert "closed" not in result.out[0]
