"""Snapshots in memory: what any rank finds there, and files that somebody removes."""

import logging
import secrets

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.comm import job_files


@pytest.fixture
def job(monkeypatch):
    """A key of a job, the same on all ranks; its files are removed."""
    from mpi4py import MPI

    key = MPI.COMM_WORLD.bcast(secrets.token_hex(8))
    monkeypatch.setenv("MPISTRAT_JOB", key)
    yield key
    MPI.COMM_WORLD.Barrier()
    job_files.remove(key)


@pytest.mark.ranks(1, 2, 3)
def test_a_file_that_somebody_removes_is_made_again(job, caplog):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(1000), name="w")
        for step in range(1, 7):
            w.assign(np.full(1000, float(step)))
            with caplog.at_level(logging.WARNING):
                strategy.take_snapshot(step, {"step": step})
            strategy.barrier()
            if step == 3 and strategy.rank == 0:
                for path in job_files.paths(job):
                    path.unlink()
            strategy.barrier()
        assert caplog.text.count("was removed and is created again") == (strategy.rank == 0)
        w.assign(np.zeros(1000))
        snapshot = strategy.newest_snapshot()
        assert snapshot is not None and snapshot.step == 6
        assert strategy.restore_snapshot(snapshot) == {"step": 6}
        assert (w.numpy() == 6).all()


@pytest.mark.ranks(2, 3)
def test_servers_have_snapshots(job):
    with ms.ParameterServerStrategy(num_ps=1) as strategy:
        with strategy.scope():
            w = ms.Variable(np.zeros(1000), name="w")
            optimizer = ms.optimizers.Adagrad(0.5)
        data = strategy.distribute_dataset(ms.data.from_arrays(np.ones(8)).batch(1))
        for _ in data:
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(1000), w)]))
        strategy.take_snapshot(1, {"who": "servers"})
        if not strategy.is_server:
            value = w.numpy()
        strategy.barrier()  # before any worker pushes again
        for _ in data:
            strategy.run(lambda: optimizer.apply_gradients([(np.ones(1000), w)]))
        snapshot = strategy.newest_snapshot()
        assert strategy.restore_snapshot(snapshot) == {"who": "servers"}
        slots = optimizer.slots(w)
        assert (next(iter(slots.values())) == 8 + 0.1).all()  # Adagrad's accumulator begins with 0.1
        if not strategy.is_server:
            np.testing.assert_array_equal(w.numpy(), value)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("shared", ["0", "1"])
def test_each_run_has_its_own(job, monkeypatch, mpi_tmp_path, shared):
    """Also where each rank has memory of its own; closing gives back what a file has, and nothing else."""
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", shared)
    for fold, left in ((0, 0), (1, 1), (2, 1)):
        with ms.MultiWorkerMirroredStrategy() as strategy:
            with strategy.scope():
                w = ms.Variable(np.zeros(1000), name="w")
            checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path / f"{fold}", snapshot_seconds=1e-9)
            assert checkpoints.restore_latest() is None
            for step in (1, 2, 3):
                w.assign(np.full(1000, float(step)))
                checkpoints.step(step, {"fold": fold})
            strategy.save(mpi_tmp_path / "another.h5")
            w.assign(np.zeros(1000))
            assert strategy.newest_snapshot("another run") is None
            assert checkpoints.restore_latest() == {"fold": fold, "step": 3}
            assert (w.numpy() == 3).all()
            if fold != 1:
                checkpoints.save(3)
                checkpoints.wait()
            strategy.barrier()
            each = strategy.size if shared == "0" else 1
        ms.MultiWorkerMirroredStrategy().close()
        assert len(job_files.paths(job)) == left * each


def test_what_an_error_ends_is_kept(job):
    with pytest.raises(ValueError, match="mine"):
        try:
            strategy = ms.OneDeviceStrategy()
            with strategy.scope():
                ms.Variable(0.0, name="w")
            strategy.take_snapshot(1, {})
            raise ValueError("mine")
        finally:
            strategy.close()
    assert len(job_files.paths(job)) == 1


@pytest.mark.ranks(4)
@pytest.mark.hosts(2, ranks_per_host=2)
def test_a_mesh_has_snapshots(job):
    """Each node has wholes, also of what its ranks hold parts of, and reads its parts from there."""
    whole = np.random.default_rng(7).normal(size=(60, 40))
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        with strategy.scope():
            w = ms.Variable(whole, layout=(None, "model"), name="w")
            optimizer = ms.optimizers.Adagrad(0.5)
        strategy.run(lambda: optimizer.apply_gradients([(whole[w.part.slices] / 2, w)]))
        wanted, slots = w.gathered(), optimizer.slots(w)
        strategy.take_snapshot(1, {"mesh": 2})
        w.assign(np.zeros(w.shape))
        strategy.run(lambda: optimizer.apply_gradients([(w.array, w)]))
        snapshot = strategy.newest_snapshot()
        assert snapshot is not None
        assert strategy.restore_snapshot(snapshot) == {"mesh": 2}
        assert np.array_equal(w.gathered(), wanted)
        assert not np.array_equal(wanted, whole)
        for name, array in optimizer.slots(w).items():
            assert np.array_equal(array, slots[name])
