"""Loggers: what each gets of a run, errors that end no run, and the files of Prometheus and Weights & Biases."""

from __future__ import annotations

import time

import pytest

import mpistrat as ms
from mpistrat.base.waiting import wait_until

t = ms.train


class Record(t.Logger):
    """Keeps all calls; those of some names fail."""

    def __init__(self, *failing):
        super().__init__("the record")
        self.calls, self.failing = [], failing

    def _note(self, name, *args):
        if name in self.failing:
            raise ConnectionError(f"no {name}")
        self.calls.append((name, *args))

    def open(self, loop):
        self._note("open", loop.step)

    def params(self, values):
        self._note("params", dict(values))

    def metrics(self, values, step, epoch):
        self._note(
            "metrics", {name: value for name, value in values.items() if name != "samples_per_second"}, step, epoch
        )

    def artifact(self, path):
        self._note("artifact", path.name, path.exists())

    def close(self, error):
        self._note("close", repr(error))


def watched(folder, logger, error=None):
    with ms.OneDeviceStrategy() as strategy:
        settings = {"tensorboard": False, "progress": False, "config": {"rate": 0.5}}
        with ms.monitor(folder, strategy, loggers=[logger], **settings) as run:
            for loss in (2.0, 1.0):
                run.step()
                run.step()
                run.scalar("norm", 4.0 * loss)
                run.epoch({"loss": loss})
            if error is not None:
                raise error


def test_a_monitor_gives_a_logger_settings_numbers_and_the_page(tmp_path):
    logger = Record()
    watched(tmp_path, logger)
    assert logger.calls == [
        ("open", 0),
        ("params", {"rate": 0.5}),
        ("metrics", {"norm": 8.0}, 2, None),
        ("metrics", {"loss": 2.0}, 2, 0),
        ("metrics", {"norm": 4.0}, 4, None),
        ("metrics", {"loss": 1.0}, 4, 1),
        ("artifact", "run.html", True),
        ("close", "None"),
    ]


def test_a_logger_learns_how_a_run_ended(tmp_path):
    logger = Record()
    with pytest.raises(KeyError):
        watched(tmp_path, logger, KeyError("rows"))
    assert logger.calls[-1] == ("close", "KeyError('rows')")


@pytest.mark.parametrize("name", ["params", "metrics", "artifact", "close"])
def test_the_first_error_of_a_logger_is_a_warning(tmp_path, caplog, name):
    logger = Record(name)
    watched(tmp_path, logger)
    found = [record.getMessage() for record in caplog.records if "the record" in record.getMessage()]
    assert found == [
        f"the record: ConnectionError: no {name}; training continues, and later errors of it are not reported"
    ]
    assert {"open", "params", "metrics", "artifact", "close"} - {call[0] for call in logger.calls} == {name}


def test_an_error_at_the_start_ends_the_run(tmp_path):
    with pytest.raises(ConnectionError, match="no open"):
        watched(tmp_path, Record("open"))


def test_an_error_that_the_program_handles_is_not_the_end_of_the_run(tmp_path):
    logger, alone = Record(), Record()
    try:
        raise KeyError("an earlier try")
    except KeyError:
        watched(tmp_path, logger)
        loop = t.Loop(ms.get_strategy())
        alone.on_epoch_end(loop, {"loss": 0.5})
        alone.on_train_end(loop)
    assert logger.calls[-1] == alone.calls[-1] == ("close", "None")
    assert "an earlier try" not in (tmp_path / "run.html").read_text()


def test_a_logger_is_a_callback_of_a_loop_of_your_own():
    logger, loop = Record(), t.Loop(ms.get_strategy(), ms.optimizers.SGD(0.25))
    loop.step = 7
    logger.on_epoch_end(loop, {"loss": 0.5, "words": "no number"})
    logger.on_train_end(loop)
    logger.on_train_end(loop)
    assert logger.calls == [("open", 7), ("metrics", {"loss": 0.5, "learning_rate": 0.25}, 7, 0), ("close", "None")]


def test_only_the_rank_that_writes_records():
    logger, loop = Record(), t.Loop(ms.get_strategy())
    loop.tells = False
    logger.on_train_begin(loop)
    logger.on_epoch_end(loop, {"loss": 0.5})
    logger.on_train_end(loop)
    assert not logger.calls


def test_prometheus_reads_the_file(tmp_path):
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    before = time.time()
    watched(tmp_path / "run", t.Prometheus(tmp_path / "metrics" / "first.prom"))
    text = (tmp_path / "metrics" / "first.prom").read_text()
    found = {
        (sample.name, sample.labels["run"], sample.labels.get("name")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert found.pop(("mpistrat_result", "first", "samples_per_second")) >= 0
    assert before <= found.pop(("mpistrat_time_seconds", "first", None)) <= time.time()
    assert found == {
        ("mpistrat_result", "first", "loss"): 1.0,
        ("mpistrat_result", "first", "norm"): 4.0,
        ("mpistrat_step", "first", None): 4.0,
        ("mpistrat_epoch", "first", None): 2.0,
    }
    assert [path.name for path in (tmp_path / "metrics").iterdir()] == ["first.prom"]


def test_a_file_that_no_collector_reads_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Prometheus: path: expected a name that ends in \.prom, got .*run\.txt"):
        t.Prometheus(tmp_path / "run.txt")


def test_weights_and_biases_without_a_network(tmp_path, capfd):
    pytest.importorskip("wandb", reason="pip install wandb")
    logger = t.WandB(project="mpistrat", mode="offline", dir=str(tmp_path))
    watched(tmp_path / "run", logger)
    summary = capfd.readouterr().err.partition("Run summary:")[2]  # of wandb itself
    found = {words[1]: float(words[2]) for words in map(str.split, summary.splitlines()) if len(words) == 3}
    assert found.pop("samples_per_second") >= 0
    assert found == {"loss": 1.0, "norm": 4.0, "epoch": 1.0}
    (data,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert wait_until(lambda: b"rate" in data.read_bytes(), 10), "wandb's own process writes it"
    assert (data.parent / "files" / "run.html").exists()
    assert logger.run is None


@pytest.mark.parametrize("make", [t.MLflow, t.WandB])
def test_a_tracker_that_is_not_installed_is_named(make, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, make.__name__.lower(), None)
    with pytest.raises(ms.errors.MissingDependencyError, match=f"pip install {make.__name__.lower()}"):
        make()
