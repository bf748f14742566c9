"""Checkpoints in an object store: an interrupted run resumes, on other ranks too, and incomplete files are not listed."""

import contextlib
import logging
import os

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data.files import remote as remotes
from tests.harness.interruptions import Interrupt, Stop
from tests.harness.linear_trainer import dataset, trainer
from tests.harness.object_store import s3_server

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def strategy():
    made = ms.MultiWorkerMirroredStrategy()
    yield made
    made.close()


def run(strategy, url, stop=None, epochs=4, **every):
    checkpoints = None if url is None else ms.train.Checkpoints(strategy, url, **every)
    work, w = trainer(strategy, callbacks=[] if stop is None else [Stop(stop)], checkpoints=checkpoints)
    history = work.fit(strategy.distribute_dataset(dataset()), epochs)
    return history, w.numpy(), work.loop.step


def one_variable(strategy, url, **options):
    with strategy.scope():
        w = ms.Variable(np.zeros(5), name="w")
    return w, ms.train.Checkpoints(strategy, url, **options)


def a_run_in(url: str, listed) -> None:
    """A run that is interrupted twice has a whole one's results; then one rank resumes from its file, and all from that."""
    from mpi4py import MPI

    with ms.MultiWorkerMirroredStrategy() as strategy:
        expected = run(strategy, None)
    for stop in (8, 13):
        with ms.MultiWorkerMirroredStrategy() as strategy, pytest.raises(Interrupt):
            run(strategy, url, stop, every_steps=3)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        history, weights, steps = run(strategy, url, every_steps=3)
    assert history == {"loss": pytest.approx(expected[0]["loss"], rel=1e-12)}
    np.testing.assert_array_equal(weights, expected[1])
    assert steps == expected[2] == 20
    MPI.COMM_WORLD.barrier()
    steps = [15, 18, 20]
    assert listed() == sorted(f"step-{step:010}.{end}" for step in steps for end in ("h5", "json"))  # keep=3
    MPI.COMM_WORLD.barrier()
    if MPI.COMM_WORLD.rank == 0:
        with ms.OneDeviceStrategy(comm=MPI.COMM_SELF) as alone:
            w, checkpoints = one_variable(alone, f"{url}-alone", asynchronous=False)
            w.assign(np.arange(5.0))
            assert checkpoints.save(7) == f"{url}-alone/step-0000000007.h5" == checkpoints.latest()
    MPI.COMM_WORLD.barrier()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        w, checkpoints = one_variable(strategy, f"{url}-alone")
        assert checkpoints.folder == f"{url}-alone"
        assert checkpoints.restore_latest() == {"step": 7}
        np.testing.assert_array_equal(w.numpy(), np.arange(5.0))
        w.assign(np.arange(5.0) * 2)
        checkpoints.save(8, {"note": "by all"})
        checkpoints.wait()
    if MPI.COMM_WORLD.rank == 0:
        with ms.OneDeviceStrategy(comm=MPI.COMM_SELF) as alone:
            w, checkpoints = one_variable(alone, f"{url}-alone/")
            assert checkpoints.restore_latest() == {"step": 8, "note": "by all"}
            np.testing.assert_array_equal(w.numpy(), np.arange(5.0) * 2)
    MPI.COMM_WORLD.barrier()


@pytest.mark.ranks(1, 2, 3)
def test_a_run_goes_on(mpi_tmp_path):
    folder = mpi_tmp_path / "run"
    a_run_in(f"file://{folder}", lambda: sorted(os.listdir(folder)))


@pytest.mark.ranks(1, 2)
def test_s3(mpi_tmp_path, monkeypatch):
    from mpi4py import MPI

    pytest.importorskip("s3fs")
    pytest.importorskip("moto.server")
    comm = MPI.COMM_WORLD
    with s3_server() if comm.rank == 0 else contextlib.nullcontext((None, None)) as (_, options):
        for name, value in zip(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "ab", strict=True):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_ENDPOINT_URL", comm.bcast(options and options["client_kwargs"]["endpoint_url"]))
        system = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
        try:
            a_run_in("s3://bucket/run", lambda: sorted(name.rpartition("/")[2] for name in system.ls("bucket/run")))
        finally:
            comm.barrier()


@pytest.mark.ranks(1, 2)
def test_what_is_not_whole_does_not_exist(strategy, mpi_tmp_path, caplog, monkeypatch):
    """A file without its small object, one that was cut, one that cannot be uploaded, a store that cannot be reached."""
    monkeypatch.setattr(remotes, "_PAUSE", 0.01)
    folder, barrier = mpi_tmp_path / "run", strategy.comm.barrier
    w, checkpoints = one_variable(strategy, f"file://{folder}", keep=0, asynchronous=False)
    assert checkpoints.steps() == []
    assert checkpoints.latest() is None
    assert checkpoints.restore_latest() is None
    for step in (1, 2, 3):
        w.assign(np.full(5, float(step)))
        checkpoints.save(step)
    barrier()
    if strategy.rank == 0:
        (folder / "step-0000000003.json").unlink()  # as if the upload had been cut before it
        path = folder / "step-0000000002.h5"
        path.write_bytes(path.read_bytes()[:-1])
    barrier()
    assert checkpoints.steps() == [1, 2]
    with caplog.at_level(logging.WARNING):
        assert checkpoints.restore_latest() == {"step": 1}
    np.testing.assert_array_equal(w.numpy(), np.ones(5))
    if strategy.rank == 0:
        assert "step 2 is skipped" in caplog.text
        assert "step-0000000002.h5: expected a file that can be read" in caplog.text
    w.assign(np.full(5, 9.0))

    def refuse(*args, **options):
        raise ConnectionError("the store is away")

    system = remotes.file_system("Checkpoints", f"file://{folder}", {})[0]
    with monkeypatch.context() as patched:
        patched.setattr(type(system), "put_file", refuse)
        with pytest.raises(OSError, match=r"step-0000000004\.h5: .*the store is away"):
            checkpoints.save(4)
        assert checkpoints.step(5) is None
    barrier()
    assert sorted(path.name for path in folder.glob("*4.*")) == []
    with monkeypatch.context() as patched:
        patched.setattr(type(system), "ls", refuse)
        with pytest.raises(OSError, match="the store is away"):
            checkpoints.restore_latest()
    checkpoints.save(6)
    w.assign(np.zeros(5))
    assert checkpoints.restore_latest() == {"step": 6}
    np.testing.assert_array_equal(w.numpy(), np.full(5, 9.0))
    with pytest.raises(
        ValueError, match="expected a folder, or a URL to which files can be written, got http://host/run"
    ):
        ms.train.Checkpoints(strategy, "http://host/run")
    with pytest.raises(ValueError, match=r"folder: expected a folder on this machine, got the URL s3://bucket/run"):
        ms.train.checkpoints_iterator("s3://bucket/run")


def test_best_weights_need_a_folder(mpi_tmp_path):
    """An object store has no place for them, and in memory a resumed run would lose them."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        checkpoints = ms.train.Checkpoints(strategy, f"file://{mpi_tmp_path}/run")
        best = ms.train.EarlyStopping("loss", restore_best_weights=True)
        work, _ = trainer(strategy, callbacks=[best], checkpoints=checkpoints)
        with pytest.raises(ValueError, match=r"EarlyStopping: restore_best_weights: .*file://"):
            work.fit(strategy.distribute_dataset(dataset()), 1)
