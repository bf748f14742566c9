"""What each rank takes of a file: read by itself where it is the root's file, else sent; never more than its part."""

import os
import shutil

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.state import opened
from mpistrat.state.file import CheckpointFile
from mpistrat.state.opened import OpenState
from mpistrat.state.reading import FileSlices

SHAPE = (301, 217)


class Program:
    """Variables of several kinds and dtypes, and two optimizers, of which the program makes one behind the scope."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.w = ms.Variable(np.zeros(SHAPE), name="w")
            self.large = ms.Variable(np.zeros(1 << 19, np.float32), name="large")  # in pieces, where there are nodes
            self.n = ms.Variable(np.zeros((), np.int64), name="n", trainable=False)
            self.sum = ms.Variable(
                0.0,
                name="sum",
                synchronization=ms.VariableSynchronization.ON_READ,
                aggregation=ms.VariableAggregation.SUM,
            )
            self.adam = ms.optimizers.Adam(0.1)
        self.outside = ms.optimizers.SGD(0.1, momentum=0.5)

    def step(self):
        rng = np.random.default_rng(5)
        gradients = [(rng.normal(size=SHAPE), self.w), (rng.normal(size=1 << 19).astype(np.float32), self.large)]

        def step():
            for optimizer in (self.adam, self.outside):
                optimizer.apply_gradients(gradients)
            self.sum.assign_add(1.0)

        self.strategy.run(step)
        self.n.assign_add(1)

    def state(self):
        variables = [each.numpy() for each in (self.w, self.large, self.n, self.sum)]
        slots = [
            slots[name]
            for optimizer in (self.adam, self.outside)
            for variable in (self.w, self.large)
            for slots in [optimizer.slots(variable)]
            for name in sorted(slots)
        ]
        return [np.asarray(array).tobytes() for array in variables + slots], self.adam.iterations


@pytest.fixture
def sends(monkeypatch):
    """How often values were sent."""
    calls = []
    monkeypatch.setattr(opened, "send", lambda *args, send=opened.send: calls.append(1) or send(*args))
    return calls


def saved(path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        program = Program(strategy)
        program.step()
        program.step()
        strategy.save(path, {"epoch": 2})
        there = program.state()
        program.step()
        return there, program.state()


def restored(path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        program = Program(strategy)
        assert strategy.restore(path) == {"epoch": 2}
        assert not program.adam._core.slots.pending, "no rank holds slots whole"
        assert program.adam.iterations == 2
        program.outside._core.join(strategy)
        there = program.state()
        program.step()
        return there, program.state()


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("shared", ["1", "0"])
def test_each_rank_reads_its_own_part(mpi_tmp_path, monkeypatch, sends, shared):
    expected = saved(mpi_tmp_path / "x.h5")
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", shared)
    assert restored(mpi_tmp_path / "x.h5")[0] == expected[0]
    assert not sends


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.parametrize("other", ["none", "an older file"])
def test_what_only_rank_0_has_is_sent(mpi_tmp_path, monkeypatch, sends, shared, other):
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    expected = saved(mpi_tmp_path / "x.h5")
    elsewhere = mpi_tmp_path / "elsewhere"
    if rank == 0:
        elsewhere.mkdir()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        if other != "none":
            Program(strategy).step()
            strategy.save(elsewhere / "x.h5", {"epoch": 1})
        strategy.barrier()
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", shared)
    monkeypatch.chdir(elsewhere if rank else mpi_tmp_path)
    found = restored("x.h5")
    assert found[0] == expected[0]
    assert len(sends) == 1
    if shared == "1":
        assert found[1] == expected[1]


@pytest.mark.ranks(2, 3)
def test_a_copy_that_is_damaged_on_one_rank_changes_nothing_on_any(mpi_tmp_path, monkeypatch, sends):
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    saved(mpi_tmp_path / "x.h5")
    own = mpi_tmp_path / f"of-{rank}"
    own.mkdir()
    shutil.copy(mpi_tmp_path / "x.h5", own)
    if rank == 1:
        with open(own / "x.h5", "r+b") as file:  # all of the arrays, and no word of the digests
            file.seek(os.path.getsize(own / "x.h5") // 8)
            file.write(b"\x55" * (os.path.getsize(own / "x.h5") // 2))
    monkeypatch.chdir(own)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        program = Program(strategy)
        before = program.state()
        with pytest.raises(OSError, match="is not as it was saved: the file is damaged"):
            strategy.restore("x.h5")
        assert program.state() == before
        assert not sends


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("shared", ["1", "0"])
@pytest.mark.parametrize("sent", [False, True])
def test_a_file_that_cannot_be_read_any_more_is_told_on_all_ranks(mpi_tmp_path, monkeypatch, shared, sent):
    """After the comparison one rank reads in vain, the last or the one that sends: all raise, and a restore sets all right."""
    from mpi4py import MPI

    expected = saved(mpi_tmp_path / "x.h5")[0]
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", shared)
    fails = MPI.COMM_WORLD.rank == (0 if sent else MPI.COMM_WORLD.size - 1)
    reader, name = (CheckpointFile, "read_array") if sent else (FileSlices, "read")
    whole, compare = getattr(reader, name), OpenState._compare
    compared = []

    def read(self, *what):
        if fails and compared:
            raise OSError("the disk is gone")
        return whole(self, *what)

    def compare_first(self, *what):
        found = compare(self, *what)
        compared.append(1)
        return found

    with ms.MultiWorkerMirroredStrategy() as strategy:
        program = Program(strategy)
        with monkeypatch.context() as patch:
            patch.setattr(reader, name, read)
            patch.setattr(OpenState, "_compare", compare_first)
            if sent:
                patch.setattr(reader, "places", lambda self, keys: None)
            with pytest.raises(OSError, match="the disk is gone; .* changed in part"):
                strategy.restore(mpi_tmp_path / "x.h5")
        strategy.restore(mpi_tmp_path / "x.h5")
        program.outside._core.join(strategy)
        assert program.state() == expected


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("count", [0, 1, 8, 16, 17, 33])
def test_few_bytes_are_sent(mpi_tmp_path, tmp_path, monkeypatch, sends, count):
    """Less than the alignment of what is sent, for each rank, and none at all."""
    from mpi4py import MPI

    rank, values = MPI.COMM_WORLD.rank, np.arange(count, dtype=np.float64)
    paths = [mpi_tmp_path / "x.h5", tmp_path / "none.h5"]
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(values, name="w")
        strategy.save(paths[0])
        w.assign(np.full(count, -1.0))
        monkeypatch.chdir(paths[bool(rank)].parent)
        strategy.restore("x.h5")
        assert np.array_equal(w.numpy(), values)
    assert sends
