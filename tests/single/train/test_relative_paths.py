"""Relative paths that a program gives before it goes to another directory."""

import os

import numpy as np
import pytest

import mpistrat as ms


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """Begin in one folder; return what goes to another one, and checks that nothing was written there."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    monkeypatch.chdir(tmp_path / "first")

    class Folders:
        first = tmp_path / "first"

        def go_on(self):
            monkeypatch.chdir(tmp_path / "second")

        def check(self):
            assert not os.listdir(tmp_path / "second")

    return Folders()


def test_checkpoints(folders):
    with ms.OneDeviceStrategy() as strategy:
        with strategy.scope():
            w = ms.Variable(1.0, name="w")
        checkpoints, newest = ms.train.Checkpoints(strategy, "run"), ms.train.checkpoints_iterator("run", timeout=1)
        folders.go_on()
        path = checkpoints.save(3)
        checkpoints.wait()
        assert path == checkpoints.latest() == next(newest) == folders.first / "run" / "step-0000000003.h5"
        w.assign(2.0)
        assert checkpoints.restore_latest()["step"] == 3
        assert w.numpy() == 1.0
        newest.close()
    folders.check()


def test_callbacks(folders):
    t = ms.train
    with ms.OneDeviceStrategy() as strategy:
        callbacks = [t.CSVLogger("a/log.csv"), t.JSONLogger("log.jsonl"), t.Timeline("trace.json.gz"),
                     t.ModelCheckpoint("{epoch}.h5"), t.Monitor("run", progress=False, tensorboard=False)]  # fmt: skip
        folders.go_on()
        loop = t.Loop(strategy)
        for callback in callbacks:
            callback.on_train_begin(loop)
            callback.on_epoch_begin(loop)
            callback.on_epoch_end(loop, {"loss": 1.0})
            callback.on_train_end(loop)
    found = {str(path.relative_to(folders.first)) for path in folders.first.rglob("*") if path.is_file()}
    assert found >= {"a/log.csv", "log.jsonl", "trace.json.gz", "1.h5", "run/metrics.jsonl", "run/run.html"}
    folders.check()


def test_braces_in_the_name_of_the_folder_are_no_results(tmp_path, monkeypatch):
    (tmp_path / "{x}").mkdir()
    monkeypatch.chdir(tmp_path / "{x}")
    with ms.OneDeviceStrategy() as strategy:
        ms.train.ModelCheckpoint("{epoch}.h5").on_epoch_end(ms.train.Loop(strategy), {})
    assert (tmp_path / "{x}" / "1.h5").exists()


def test_a_save_through_a_link(tmp_path):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run.h5").symlink_to("scratch/run.h5")
    with ms.OneDeviceStrategy() as strategy:
        with strategy.scope():
            ms.Variable(np.arange(3.0), name="w")
        for _ in range(2):
            strategy.save(tmp_path / "run.h5")
        strategy.restore(tmp_path / "run.h5")
    assert (tmp_path / "run.h5").is_symlink() and os.listdir(tmp_path / "scratch") == ["run.h5"]


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.5, TypeError), ("1", TypeError), (None, TypeError)])
def test_a_step_that_is_none(tmp_path, step, error):
    """Its file was found by nothing."""
    with ms.OneDeviceStrategy() as strategy:
        checkpoints = ms.train.Checkpoints(strategy, tmp_path / "run")
        for call in (checkpoints.save, checkpoints.step, checkpoints.path):
            with pytest.raises(error, match=f"Checkpoints.{call.__name__}: step: expected"):
                call(step)
        assert not (tmp_path / "run").exists()
        assert checkpoints.save(np.int64(0)).name == "step-0000000000.h5"
        checkpoints.wait()
        assert checkpoints.steps() == [0]
