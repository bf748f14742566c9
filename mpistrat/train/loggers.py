"""Trackers of runs: MLflow, Weights & Biases, Prometheus, and the base class for one of your own.

One rank records. The first error of a tracker is a warning, and training continues.
"""

from __future__ import annotations

import abc
import importlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, final

from ..base.errors import MissingDependencyError, explain
from ..base.text import encoded
from .callbacks import Callback, Logs, Loop, item_of, number_of
from .warn_once import RunError, WarnOnce

__all__ = ["Logger", "MLflow", "Prometheus", "WandB", "named_in_utf8"]


class Logger(Callback, abc.ABC):
    """Records one run: its settings, numbers and files. A callback of a `Trainer`, or one of `ms.monitor(loggers=[...])`.

    Only the rank that writes calls the methods below. A logger of your own overrides `open` and `metrics`, and the others where
    it can record more. Errors of `open` end the run; of later errors the first is a warning.

    Attributes:
        recording: handles the errors.

    Example:
        >>> class Lines(ms.train.Logger):
        ...     def open(self, loop):
        ...         self.lines = []
        ...
        ...     def metrics(self, values, step, epoch):
        ...         self.lines.append((step, values))
        >>> loop, lines = ms.train.Loop(ms.get_strategy()), Lines("lines")
        >>> lines.on_epoch_end(loop, {"loss": 0.5})
        >>> lines.lines
        [(0, {'loss': 0.5})]
    """

    def __init__(self, name: str) -> None:
        """Create the logger; `name` is for warnings. Local."""
        self.recording = WarnOnce(name, Exception)
        self._opened, self._error = False, RunError()

    @abc.abstractmethod
    def open(self, loop: Loop) -> None:
        """Start to record. Local. After a restart `loop.step` and `loop.epoch` are where training resumes."""

    @abc.abstractmethod
    def metrics(self, values: Mapping[str, float], step: int, epoch: int | None) -> None:
        """Record numbers by name. Local.

        Args:
            values: the numbers.
            step: the number of steps in all epochs so far.
            epoch: the epoch that ended, from 0; None for numbers of a step.
        """

    def params(self, values: Mapping[str, Any]) -> None:
        """Record the settings of the run, by name. Local."""

    def artifact(self, path: Path) -> None:
        """Record a file. Local."""

    def close(self, error: BaseException | None) -> None:
        """Stop to record; `error` ended the run, if there is one. Local."""

    def on_train_begin(self, loop: Loop) -> None:
        if loop.tells and not self._opened:
            self.open(loop)
            self._opened = True
            self._error.start()

    def on_epoch_end(self, loop: Loop, logs: Logs) -> None:
        self.on_train_begin(loop)
        found = {name: number_of(value) for name, value in named_in_utf8(logs).items()}
        values = {name: value for name, value in found.items() if value is not None}
        rate = loop.rate()
        self.record(values if rate is None else {**values, "learning_rate": rate}, loop, loop.epoch)

    def record(self, values: Mapping[str, float], loop: Loop, epoch: int | None = None) -> None:
        """Call `metrics` on the rank that records; the first error is a warning. Local."""
        if self._opened:
            with self.recording:
                self.metrics(values, loop.step, epoch)

    def on_train_end(self, loop: Loop) -> None:
        opened, self._opened = self._opened, False
        if opened:
            with self.recording:
                self.close(self._error.at_end())


def named_in_utf8(logs: Logs) -> dict[str, Any]:
    """Return results with names that are valid UTF-8; arrays without dimensions as numbers."""
    return {encoded(name).decode(): item_of(value, name) for name, value in logs.items()}


def _module(owner: str, module: str, remedy: str) -> ModuleType:
    """Import the module that a logger needs.

    Raises:
        MissingDependencyError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        text = explain(owner, "", expected=module, got=f"no module {error.name}", remedy=remedy)
        raise MissingDependencyError(text) from error


@final
class MLflow(Logger):
    """Record in MLflow (https://mlflow.org): settings as parameters, results per epoch, numbers per step, files.

    MLflow's own variables, such as MLFLOW_TRACKING_URI, set where.
    """

    def __init__(self, run_name: str | None = None) -> None:
        """Create the logger. Local.

        Args:
            run_name: default MLflow's.

        Raises:
            MissingDependencyError: mlflow is not installed.
        """
        super().__init__("MLflow")
        self._mlflow, self._run_name = _module("MLflow", "mlflow", "pip install mlflow"), run_name

    def open(self, loop: Loop) -> None:
        self._mlflow.start_run(run_name=self._run_name)

    def params(self, values: Mapping[str, Any]) -> None:
        self._mlflow.log_params({name: str(value)[:500] for name, value in values.items()})

    def metrics(self, values: Mapping[str, float], step: int, epoch: int | None) -> None:
        self._mlflow.log_metrics(dict(values), step=step if epoch is None else epoch)

    def artifact(self, path: Path) -> None:
        self._mlflow.log_artifact(str(path))

    def close(self, error: BaseException | None) -> None:
        self._mlflow.end_run("FINISHED" if error is None else "FAILED")


@final
class WandB(Logger):
    """Record in Weights & Biases (https://docs.wandb.ai): settings, results and numbers by step, files.

    Attributes:
        run: the Run of wandb, for tables or images of your own; None on the other ranks.
    """

    def __init__(self, **settings: Any) -> None:
        """Create the logger. Local.

        Args:
            settings: arguments of `wandb.init`, such as project, name, mode or dir.

        Raises:
            MissingDependencyError: wandb is not installed.
        """
        super().__init__("Weights & Biases")
        self._wandb, self._settings = _module("WandB", "wandb", "pip install wandb"), settings
        self.run: Any = None

    def open(self, loop: Loop) -> None:
        self.run = self._wandb.init(**self._settings)

    def params(self, values: Mapping[str, Any]) -> None:
        self.run.config.update(dict(values), allow_val_change=True)

    def metrics(self, values: Mapping[str, float], step: int, epoch: int | None) -> None:
        self.run.log(dict(values) if epoch is None else {**values, "epoch": epoch}, step=step)

    def artifact(self, path: Path) -> None:
        self.run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self, error: BaseException | None) -> None:
        run, self.run = self.run, None
        run.finish(exit_code=0 if error is None else 1)


@final
class Prometheus(Logger):
    """Write the newest numbers into a text file for the textfile collector of Prometheus's node_exporter.

    Each number is one gauge, `mpistrat_result{run="first",name="loss"}`; `mpistrat_step`, `mpistrat_epoch` and
    `mpistrat_time_seconds` (since 1970) say of when. The file is replaced whole.

    Source: https://github.com/prometheus/node_exporter#textfile-collector
    """

    def __init__(self, path: str | os.PathLike[str], run: str | None = None) -> None:
        """Create the logger. Local.

        Args:
            path: the file, which must end in .prom.
            run: the label; default the name of the file.

        Raises:
            ValueError: another ending.
            MissingDependencyError: prometheus_client is not installed.
        """
        self._path = Path(path).absolute()
        super().__init__(f"Prometheus: {self._path}")
        if self._path.suffix != ".prom":
            remedy = "The collector reads no other files"
            raise ValueError(
                explain("Prometheus", "path", expected="a name that ends in .prom", got=str(path), remedy=remedy)
            )
        self._client = _module("Prometheus", "prometheus_client", "pip install 'mpistrat[prometheus]'")
        self._run = self._path.stem if run is None else run

    def open(self, loop: Loop) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._registry = self._client.CollectorRegistry()

        def gauge(name: str, text: str, *labels: str) -> Any:
            return self._client.Gauge(f"mpistrat_{name}", text, ["run", *labels], registry=self._registry)

        self._result = gauge("result", "Newest number of the training run", "name")
        self._moments = {
            "step": gauge("step", "Steps of the training run"),
            "epoch": gauge("epoch", "Epochs of the training run that ended"),
            "time": gauge("time_seconds", "Time of the newest number, in seconds since 1970"),
        }

    def metrics(self, values: Mapping[str, float], step: int, epoch: int | None) -> None:
        for name, value in values.items():
            self._result.labels(self._run, name).set(value)
        self._moments["step"].labels(self._run).set(step)
        self._moments["time"].labels(self._run).set(time.time())
        if epoch is not None:
            self._moments["epoch"].labels(self._run).set(epoch + 1)
        self._client.write_to_textfile(str(self._path), self._registry)
