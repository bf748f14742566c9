"""Monitor: progress of a run while it trains, and its page afterwards."""

from __future__ import annotations

import getpass
import importlib.util
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from ..base import context
from ..base.errors import ContextError, MissingDependencyError, explain
from ..base.files import read_whole, replacing
from ..base.global_batch import global_batch_size
from ..base.log import logger
from ..base.masks import plain_array
from ..base.text import counted, duration, encoded
from ..base.version import __version__
from ..timeline import times
from ..timeline.trace import process_group_of
from .callbacks import Callback, Logs, Loop, plain
from .loggers import Logger, MLflow
from .logs import JSONLogger, Progress, TensorBoard
from .machine import commit, peak_memory, place_of
from .run_page import RunRecord, files_of, page
from .warn_once import RunError, WarnOnce

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Monitor"]

_WARNINGS = 200  # kept at most
_SELDOM = 200  # the least ratio of the time between two runs of a task to the time that it takes


@final
class Monitor(Callback):
    """The folder of a run: results of each epoch, and a page, `run.html`. Short name: `ms.monitor`.

    A callback for `ms.train.Trainer`, or a context for a loop of your own.

    One rank writes into the folder: `metrics.jsonl`, one line per epoch; event files of TensorBoard if tensorboardX is
    installed; and `run.html`, a self-contained page, updated after epochs: results, samples per second, the time of each rank
    by activity, stragglers, hosts with the memory of their ranks, files, warnings of all ranks, commit, configuration. A
    terminal shows a bar, also under mpiexec and srun.

    Attributes:
        folder: the folder.
        loop: in a `with` block the Loop that counts `epoch` and `step`.
        record: the contents of the page.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        strategy: Any = None,
        *,
        config: Mapping[str, Any] | None = None,
        tensorboard: bool | None = None,
        loggers: Sequence[Logger] = (),
        mlflow: bool = False,
        progress: bool = True,
        steps: int | None = None,
        plan: str | os.PathLike[str] | None = None,
    ) -> None:
        """Create a monitor. Local.

        Args:
            folder: of this run.
            strategy: for a `with` block: a strategy, or a process group of torch.distributed; default the current strategy,
                or outside of scopes the default group.
            config: names and values for the page's configuration.
            tensorboard: True to require event files, False for none.
            loggers: trackers that get config, results, `scalar` and the page, too, such as `ms.train.WandB(project="mine")`.
            mlflow: True for one more logger, `ms.train.MLflow`, whose run has the name of the folder.
            progress: True to print a line per epoch, and a bar on a terminal.
            steps: of an epoch, for the bar.
            plan: a file of `mpistrat plan --json`: the page compares steps with its prediction for this layout.

        Raises:
            OSError, ValueError: the plan cannot be read.
            MissingDependencyError: a required tensorboardX or mlflow is not installed.

        Example:
            >>> import tempfile, pathlib
            >>> with tempfile.TemporaryDirectory() as folder, ms.OneDeviceStrategy() as strategy:
            ...     with ms.monitor(folder, strategy, progress=False) as run:
            ...         for _ in range(3):
            ...             run.step()
            ...         run.epoch({"loss": 0.5})
            ...     pathlib.Path(folder, "metrics.jsonl").read_text()[:22]
            '{"epoch": 0, "step": 3'
        """
        self.folder, self._strategy = Path(folder).absolute(), strategy
        self._config = dict(config or {})
        self.loop: Loop | None = None
        self.record = RunRecord(self.folder.resolve().name)
        self._board: TensorBoard | None = None
        if _there("tensorboardX") if tensorboard is None else tensorboard:
            self._board = TensorBoard(self.folder / "tensorboard")
        board = [] if self._board is None else [self._board]
        self._loggers = [*board, *([MLflow(self.record.title)] if mlflow else []), *loggers]
        lines = [JSONLogger(self.folder / "metrics.jsonl", append=True), *([Progress(steps)] if progress else [])]
        self._callbacks: list[Callback] = [*lines, *self._loggers]
        self._paging = WarnOnce(f"the page in {self.folder}", Exception)
        self._samples, self._rows, self._begun, self._training, self._started = 0, 0, 0.0, 0.0, False
        self._plan = [] if plan is None else _steps_of(plan)
        self._planned = ""
        self._looks, self._pages = _Seldom(), _Seldom()  # for all ranks' times, and for the page
        self._warnings = _Warnings()
        self._error = RunError()

    # as a callback

    def on_train_begin(self, loop: Loop) -> None:
        if self._started:
            return
        self.loop, self._started = loop, True
        self._error.start()
        logger.addHandler(self._warnings)
        strategy = loop.strategy
        topology = process_group_of(strategy, "monitor").topology
        self.record.places = strategy.all_gather_object(place_of(topology))
        self.record.facts = {
            "strategy": repr(strategy),
            "ranks": str(strategy.size),
            "nodes": str(topology.num_nodes),
            "replicas": str(strategy.num_replicas_in_sync if loop.in_step else topology.num_replicas),
            "program": " ".join(sys.argv),
            **({"commit": version} if (version := commit() if loop.tells else "") else {}),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
            "user": _user(),
            "versions": f"mpistrat {__version__}, Python {platform.python_version()}, NumPy {np.__version__}",
            **{str(name): str(value) for name, value in self._config.items()},
        }
        if self._plan:
            self._planned = _planned(self._plan, topology.ranks_per_node)
        for callback in self._callbacks:
            callback.on_train_begin(loop)
        for tracker in self._loggers if loop.tells else ():
            with tracker.recording:
                tracker.params(self._config)
        self._write()
        strategy.barrier(name="the monitor is ready")  # startup is not part of training

    def on_epoch_begin(self, loop: Loop) -> None:
        self.on_train_begin(loop)
        self._samples, self._rows, self._begun = 0, 0, time.perf_counter()
        self._training = self._training or self._begun
        for callback in self._callbacks:
            callback.on_epoch_begin(loop)

    def on_step_end(self, loop: Loop) -> None:
        self._samples += global_batch_size() or 0
        for callback in self._callbacks:
            callback.on_step_end(loop)

    def on_epoch_end(self, loop: Loop, logs: Logs) -> None:
        strategy, record = loop.strategy, self.record
        now = time.perf_counter()
        due = self._looks.due()
        mine = (
            loop.step,
            now - self._begun if self._begun else 0.0,
            self._samples,
            due,
            self._warnings.take(),
            self._rows,
            peak_memory(),
        )
        every = strategy.all_gather_object(mine)
        step, seconds, samples, due, *_ = every[loop.first]
        if not loop.in_step:  # each worker has its own batches
            samples = sum(one[2] for one in every)
        samples += sum(one[5] for one in every)
        record.memory = [one[6] for one in every]
        rate = samples / seconds if seconds else 0.0
        if due:
            with self._looks:
                record.ranks = times(strategy, now - self._training)
        for rank, one in enumerate(every):
            record.warnings += [f"rank {rank}: {text}" for text in one[4]]
        del record.warnings[_WARNINGS:]
        found = {
            "epoch": loop.epoch, "step": step, **plain(logs), "seconds": seconds, "samples_per_second": rate,
        }  # fmt: skip
        record.epochs = [one for one in record.epochs if one["epoch"] < loop.epoch]
        steps = step - (record.epochs[-1]["step"] if record.epochs else 0)
        if self._planned and steps > 0:
            record.facts["a step"] = f"{duration(seconds / steps)} in epoch {loop.epoch + 1}; {self._planned}"
        record.epochs.append(found)
        shown = {**logs, "samples_per_second": rate}
        for callback in self._callbacks:
            callback.on_epoch_end(loop, shown)
        if self._pages.due():
            with self._pages, self._paging:
                self._write()

    def on_train_end(self, loop: Loop) -> None:
        error = self._error.at_end()
        self.record.state = "ended" if error is None else f"ended by {type(error).__name__}: {error}"[:300]
        self.record.warnings += [f"rank {loop.strategy.rank}: {text}" for text in self._warnings.take()]
        logger.removeHandler(self._warnings)
        with self._paging:
            self._write()
        for tracker in self._loggers if loop.tells else ():
            with tracker.recording:
                tracker.artifact(self.folder / "run.html")
        for callback in self._callbacks:
            callback.on_train_end(loop)
        self._started = False

    def state(self) -> dict[str, Any]:
        return {"epochs": self.record.epochs}

    def load(self, state: dict[str, Any]) -> None:
        self.record.epochs = list(state["epochs"])

    def _write(self) -> None:
        if self.loop is not None and self.loop.tells:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.record.files = files_of(self.folder, self.record.places)
            with replacing(self.folder / "run.html") as beside:
                Path(beside).write_bytes(encoded(page(self.record)))

    # in a loop of your own

    def __enter__(self) -> Self:
        self.on_train_begin(Loop(context.ranks_of(self._strategy, "monitor")))
        self.on_epoch_begin(self._running("Monitor"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.on_train_end(self._running("Monitor"))

    def step(self, rows: int = 0) -> None:
        """Count a step. Local; in a `with` block.

        Args:
            rows: rows that this rank used of other data than a distributed dataset, for the samples per second.
        """
        loop = self._running("Monitor.step")
        loop.step += 1
        self._rows += rows
        self.on_step_end(loop)

    def epoch(self, logs: Logs) -> None:
        """Record an epoch's results, equal on all ranks, and start the next. Collective; in a `with` block."""
        loop = self._running("Monitor.epoch")
        self.on_epoch_end(loop, logs)
        loop.epoch += 1
        self.on_epoch_begin(loop)

    def _running(self, function: str) -> Loop:
        if self.loop is None:
            remedy = "with ms.monitor(folder) as run: ..., or callbacks=[ms.monitor(folder)]"
            raise ContextError(explain(function, "", expected="a started run", got="no run", remedy=remedy))
        return self.loop

    # beyond results

    def histogram(self, name: str, values: Any) -> None:
        """Add a histogram to TensorBoard's files at this step. Local; one rank writes.

        Args:
            name: of the histogram.
            values: an array of any shape.
        """
        self._add("add_histogram", name, plain_array(values, "Monitor.histogram", "values"))

    def text(self, name: str, text: str) -> None:
        """Add a text to TensorBoard's files at this step. Local; one rank writes."""
        self._add("add_text", name, encoded(text).decode())

    def image(self, name: str, image: Any) -> None:
        """Add an image to TensorBoard's files at this step. Local; one rank writes.

        Args:
            name: of the image.
            image: height × width, or height × width × channels; floats between 0 and 1, or uint8.
        """
        array = plain_array(image, "Monitor.image", "image")
        self._add("add_image", name, array if array.ndim == 3 else array[..., None], dataformats="HWC")

    def scalar(self, name: str, value: float) -> None:
        """Record a number of this step in TensorBoard's files and all loggers; on one rank. Local.

        Raises:
            MissingDependencyError: there is neither.
        """
        loop = self._running("Monitor.scalar")
        if loop.tells and not self._loggers:
            self._refuse("Monitor.scalar")
        for tracker in self._loggers:
            tracker.record({encoded(name).decode(): float(value)}, loop)

    def _add(self, method: str, name: str, value: Any, **settings: Any) -> None:
        loop = self._running(f"Monitor.{method[4:]}")
        if not loop.tells:
            return
        if self._board is None or self._board.writer is None:
            self._refuse(f"Monitor.{method[4:]}")
        with self._board.recording:
            getattr(self._board.writer, method)(encoded(name).decode(), value, loop.step, **settings)

    def _refuse(self, function: str) -> NoReturn:
        remedy = "pip install 'mpistrat[tensorboard]', and leave tensorboard=False out"
        raise MissingDependencyError(
            explain(function, "", expected="TensorBoard's files", got="no files", remedy=remedy)
        )


@final
class _Seldom:
    """A limit on the time of a task, a `with` block."""

    def __init__(self) -> None:
        self._began = self._ended = 0.0

    def due(self) -> bool:
        """Return whether the task may run now, by this rank's clock."""
        return time.perf_counter() - self._ended >= _SELDOM * (self._ended - self._began)

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exc_info: object) -> None:
        self._ended = time.perf_counter()


@final
class _Warnings(logging.Handler):
    """A handler that collects the warnings of the package's log."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if len(self._texts) < _WARNINGS:
            self._texts.append(record.getMessage()[:1000])

    def take(self) -> list[str]:
        taken, self._texts = self._texts, []
        return taken


def _steps_of(plan: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return the predictions of a plan.

    Raises:
        ValueError: the file is not a plan.
    """
    try:
        steps = json.loads(read_whole(plan))["steps"]
        return [{key: step[key] for key in ("nodes", "ranks", "step")} for step in steps]
    except (KeyError, TypeError, ValueError) as error:
        expected, got = "a file of mpistrat plan --json", f"{plan}: {error!r}"
        raise ValueError(explain("monitor", "plan", expected=expected, got=got)) from error


def _planned(steps: Sequence[Mapping[str, Any]], ranks_per_node: Sequence[int]) -> str:
    """Describe a plan's prediction for a step on this layout."""
    nodes, ranks = len(ranks_per_node), max(ranks_per_node)
    where = f"{counted(nodes, 'node')} with {counted(ranks, 'rank')}"
    for each in steps:
        if (each["nodes"], each["ranks"]) == (nodes, ranks):
            low, high = map(duration, each["step"])
            return f"{low} to {high} planned for {where}"
    return f"nothing planned for {where}"


def _there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name
        return str(os.getuid()) if hasattr(os, "getuid") else ""
