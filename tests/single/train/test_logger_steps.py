"""Loggers of trackers, read back by the trackers: numbers of steps and of epochs, and a tracker that fails in the middle."""

from __future__ import annotations

import shutil
import struct

import pytest

import mpistrat as ms

t = ms.train


def watched(folder, logger, broken=None):
    """Record two epochs of two steps each, and a number of each step; `broken` is called after the first step."""
    settings = {"loggers": [logger], "tensorboard": False, "progress": False}
    with ms.OneDeviceStrategy() as strategy, ms.monitor(folder, strategy, **settings) as run:
        for loss in (2.0, 1.0):
            for _ in range(2):
                run.step()
                run.scalar("norm", 10.0 * run.loop.step)
                if broken is not None:
                    broken()
                    broken = None
            run.epoch({"loss": loss})


STEPS = {"norm": [(1, 10.0), (2, 20.0), (3, 30.0), (4, 40.0)], "loss": [(0, 2.0), (1, 1.0)]}


def test_tensorboard_has_steps_and_epochs(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    watched(tmp_path / "run", t.TensorBoard(tmp_path / "board"))
    (file,) = (tmp_path / "board").iterdir()
    data, found = file.read_bytes(), {}
    while data:  # records: length, its checksum, the event, its checksum
        (length,) = struct.unpack_from("<Q", data)
        event, data = Event.FromString(data[12 : 12 + length]), data[16 + length :]
        for value in event.summary.value:
            found.setdefault(value.tag, []).append((event.step, value.simple_value))
    assert {name: found[name] for name in STEPS} == STEPS


@pytest.fixture
def mlflow(tmp_path, monkeypatch):
    found = pytest.importorskip("mlflow", reason="pip install mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    found.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield found
    found.end_run()


def test_mlflow_has_steps_and_epochs(tmp_path, mlflow):
    watched(tmp_path / "run", t.MLflow("first"))
    client = mlflow.MlflowClient()
    (run,) = client.search_runs(["0"])
    history = {name: client.get_metric_history(run.info.run_id, name) for name in STEPS}
    assert {name: [(one.step, one.value) for one in each] for name, each in history.items()} == STEPS
    assert run.info.status == "FINISHED" and [one.path for one in client.list_artifacts(run.info.run_id)] == [
        "run.html"
    ]


def warnings(caplog, name):
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith(name)]


def test_a_text_file_that_cannot_be_written_is_one_warning(tmp_path, caplog):
    pytest.importorskip("prometheus_client")

    def broken():
        shutil.rmtree(tmp_path / "metrics")
        (tmp_path / "metrics").write_text("a file in place of the folder")

    watched(tmp_path / "run", t.Prometheus(tmp_path / "metrics" / "run.prom"), broken)
    assert len(warnings(caplog, "Prometheus: ")) == 1


def test_a_store_of_mlflow_that_is_gone_is_one_warning(tmp_path, caplog, mlflow):
    watched(tmp_path / "run", t.MLflow(), lambda: shutil.rmtree(tmp_path / "mlruns"))
    assert len(warnings(caplog, "MLflow: ")) == 1


def test_a_run_of_wandb_that_the_program_ends_is_one_warning(tmp_path, caplog):
    pytest.importorskip("wandb", reason="pip install wandb")
    logger = t.WandB(project="mpistrat", mode="offline", dir=str(tmp_path))
    watched(tmp_path / "run", logger, lambda: logger.run.finish())
    assert len(warnings(caplog, "Weights & Biases: ")) == 1
