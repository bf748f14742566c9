"""Logs of a loop, also of your own: files of results, event files of TensorBoard, a progress bar. One rank writes.

The first error of a log or a tracker is a warning, and training continues.
"""

from __future__ import annotations

import abc
import contextlib
import csv
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, final

from ..base.errors import MissingDependencyError, explain
from ..base.files import replacing
from ..base.global_batch import global_batch_size
from ..base.log import logger
from ..base.terminal import progress_bar, reaches_terminal
from ..base.text import displayable
from ..timeline import save
from .callbacks import Callback, Logs, Loop, number_of, plain
from .loggers import Logger, named_in_utf8
from .warn_once import WarnOnce

__all__ = [
    "CSVLogger",
    "JSONLogger",
    "Progress",
    "TensorBoard",
    "Timeline",
]


_SPEED = "samples_per_second"  # a result of `Monitor`
_SHOWN = 0.1  # seconds between two changes of the bar
_NONE = "NA"  # for a result that an epoch does not have


class _File(Logger):
    """A file of one rank with a line per epoch, and one for each call of `record`, as `Monitor.scalar` makes it."""

    def __init__(self, path: str | os.PathLike[str], append: bool = False) -> None:
        super().__init__(f"{type(self).__name__}: {path}")
        self._path, self._append, self._removed = Path(path).absolute(), append, False

    def open(self, loop: Loop) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if loop.step and self._path.exists():  # resumed, perhaps before the last lines
            with self._path.open(encoding="utf-8", errors="replace") as file:  # the end may be incomplete
                kept = "".join(line for line in file if self._precedes(line, loop))
            self._path.write_text(kept, encoding="utf-8")
        self._path.open("a" if self._append or loop.step else "w", encoding="utf-8").close()

    def _precedes(self, line: str, loop: Loop) -> bool:
        try:
            epoch, step = self.moment_of(line)
        except (ValueError, KeyError, TypeError, IndexError):  # an incomplete line
            return False
        return epoch < loop.epoch if epoch is not None else step is None or step <= loop.step

    @abc.abstractmethod
    def moment_of(self, line: str) -> tuple[int | None, int | None]:
        """Return the epoch of a line, or None and its step; None and None for a heading."""

    @abc.abstractmethod
    def write(self, path: Path, logs: Logs, step: int, epoch: int | None) -> None:
        """Add a line to the file: of an epoch, or of a step."""

    def metrics(self, values: Logs, step: int, epoch: int | None) -> None:
        if not self._path.exists():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if not self._removed:
                text = "%s: %s was removed; it starts again with %s"
                where = f"step {step}" if epoch is None else f"epoch {epoch}"
                logger.warning(text, type(self).__name__, self._path, where)
            self._removed = True
        self.write(self._path, values, step, epoch)

    def on_epoch_end(self, loop: Loop, logs: Logs) -> None:
        self.on_train_begin(loop)
        self.record(logs, loop, loop.epoch)  # arrays and texts, too


@final
class CSVLogger(_File):
    """A CSV file with one line of results per epoch, written by one rank, like Keras's CSVLogger.

    A missing result is NA, as `val_loss` with `validation_freq=2`. Numbers of a step, by `ms.monitor(loggers=[...]).scalar`, are
    lines without an epoch, and then there is a column `step`.
    """

    _names: Sequence[str] = ()  # of the columns of a file that is resumed

    def moment_of(self, line: str) -> tuple[int | None, int | None]:
        cells = next(csv.reader([line]))
        if cells[0] == "epoch":
            self._names = cells
            return None, None
        return (int(cells[0]), None) if cells[0] != _NONE else (None, int(cells[self._names.index("step")]))

    def write(self, path: Path, logs: Logs, step: int, epoch: int | None) -> None:
        known = self._heading(path)
        steps = {"step": step} if epoch is None or "step" in known else {}
        results = {"epoch": _NONE if epoch is None else epoch, **steps, **named_in_utf8(logs)}
        names = [*known, *(name for name in results if name not in known)]
        if known and names != known:
            self._widen(path, names)
        with path.open("a", newline="", encoding="utf-8", errors="backslashreplace") as file:
            csv.writer(file).writerows([*([] if known else [names]), [results.get(name, _NONE) for name in names]])

    def _heading(self, path: Path) -> list[str]:
        """Return the names of the file's columns; none for an empty file."""
        with path.open("a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            return next(csv.reader(file), [])

    def _widen(self, path: Path, names: Sequence[str]) -> None:
        """Add columns to all rows of the file for results that earlier epochs did not have."""
        with path.open(newline="", encoding="utf-8") as file:
            _, *rows = csv.reader(file)
        with replacing(path) as beside, open(beside, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([names, *([*row, *[_NONE] * (len(names) - len(row))] for row in rows)])


@final
class JSONLogger(_File):
    """A file with one line of JSON per epoch, written by one rank: results, epoch, steps so far and seconds since 1970.

    Numbers of a step, by `ms.monitor(loggers=[...]).scalar`, are lines without an epoch.
    """

    def moment_of(self, line: str) -> tuple[int | None, int | None]:
        found = json.loads(line)
        return (int(found["epoch"]), None) if "epoch" in found else (None, int(found["step"]))

    def write(self, path: Path, logs: Logs, step: int, epoch: int | None) -> None:
        when = {"step": step} if epoch is None else {"epoch": epoch, "step": step}
        line = {**when, "time": round(time.time(), 3), **plain(logs)}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@final
class Progress(Callback):
    """A line of results per epoch, printed by one rank; a terminal, also under mpiexec and srun, shows a bar."""

    def __init__(self, steps: int | None = None, file: IO[str] | None = None) -> None:
        """Create the callback.

        Args:
            steps: per epoch, if known; default those of the epoch before.
            file: for the lines only; default standard error, which also gets the bar.
        """
        self._steps, self._file = steps, file
        self._bar: Any = None
        self._begun = self._shown = 0.0
        self._first = self._samples = 0
        self._results = ""
        self._recording = WarnOnce("Progress", Exception)

    def on_train_begin(self, loop: Loop) -> None:
        if self._bar is None and self._file is None and loop.tells and reaches_terminal("stderr"):
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.table import Column

            rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)
            self._bar = progress_bar(
                TextColumn("epoch {task.fields[epoch]}"), BarColumn(bar_width=20), TextColumn("{task.completed}/{task.total}"),
                TimeRemainingColumn(), TextColumn("{task.fields[text]}", table_column=rest),
                expand=True, auto_refresh=False,
            )  # fmt: skip
            self._bar.add_task("train", total=self._steps, epoch=loop.epoch + 1, text="")
            self._draw(self._bar.start)

    def _draw(self, call: Callable[[], None]) -> None:
        """Draw the bar with a call. After an error there is no bar until the next epoch."""
        with self._recording:
            call()
            return
        bar, self._bar = self._bar, None
        with contextlib.suppress(Exception):  # already reported
            bar.stop()

    def on_epoch_begin(self, loop: Loop) -> None:
        self.on_train_begin(loop)
        self._begun = self._shown = time.monotonic()
        self._first, self._samples = loop.step, 0
        if self._bar is not None:
            fields: dict[str, Any] = {"epoch": loop.epoch + 1, "text": self._results}
            self._bar.reset(self._bar.task_ids[0], total=self._steps, **fields)
            self._draw(self._bar.refresh)

    def on_step_end(self, loop: Loop) -> None:
        if self._bar is None:
            return
        self._samples += global_batch_size() or 0
        now, done = time.monotonic(), loop.step - self._first
        if now - self._shown > _SHOWN or done == self._steps:
            self._shown = now
            words = f"{self._samples / max(now - self._begun, 1e-9):,.0f} samples/s", self._results
            self._bar.update(self._bar.task_ids[0], completed=done, text=", ".join(filter(None, words)))
            self._draw(self._bar.refresh)

    def on_epoch_end(self, loop: Loop, logs: Logs) -> None:
        if not loop.tells:
            return
        self._steps = self._steps or loop.step - self._first
        seconds = time.monotonic() - self._begun
        with self._recording:
            shown = [_word(name, value) for name, value in logs.items()]
            self._results = ", ".join(word for name, word in zip(logs, shown, strict=True) if name != _SPEED)
            text = f"epoch {loop.epoch + 1}: {', '.join([*shown, f'{seconds:.1f} s'])}"
            if self._bar is not None:
                self._draw(partial(self._bar.console.print, text, highlight=False))
            else:
                file = self._file or sys.stderr
                print(displayable(text, file), file=file, flush=True)

    def on_train_end(self, loop: Loop) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            with self._recording:
                bar.stop()


def _word(name: str, value: Any) -> str:
    if name == _SPEED:
        return f"{value:,.0f} samples/s"
    number = number_of(value)
    return f"{name} {value}" if number is None else f"{name} {number:.4g}"


@final
class TensorBoard(Logger):
    """Event files of TensorBoard, written by one rank. Needs the extra `tensorboard` (tensorboardX).

    Attributes:
        writer: tensorboardX's SummaryWriter, for images, text or histograms of your own; None on the other ranks.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Create the callback.

        Args:
            folder: one per run; TensorBoard shows all runs of a folder together.
        """
        self._folder = str(Path(folder).absolute())
        super().__init__(f"TensorBoard: {self._folder}")
        self.writer: Any = None

    def open(self, loop: Loop) -> None:
        # Hides what an interrupted run wrote after this step. Epochs have smaller numbers.
        self.writer = _summary_writer(self.recording)(self._folder, purge_step=loop.step + 1 if loop.step else None)

    def metrics(self, values: Mapping[str, float], step: int, epoch: int | None) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step if epoch is None else epoch)
        if epoch is not None:
            self.writer.flush()

    def close(self, error: BaseException | None) -> None:
        writer, self.writer = self.writer, None
        writer.close()


def _summary_writer(recording: WarnOnce) -> Any:
    """Return a SummaryWriter class of tensorboardX whose writing errors `recording` handles.

    tensorboardX imports an installed torch for a type hint. That takes seconds on one rank, while others wait, so it is
    hidden from programs that have not imported it.
    """
    hidden = "torch" not in sys.modules
    if hidden:
        sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError as error:
        remedy = "pip install 'mpistrat[tensorboard]'"
        text = explain("TensorBoard", "", expected="tensorboardX", got=f"no module {error.name}", remedy=remedy)
        raise MissingDependencyError(text) from error
    finally:
        if hidden:
            del sys.modules["torch"]

    @final
    class Writer(SummaryWriter):
        def __init__(self, *args: Any, **settings: Any) -> None:
            with _guarded(recording):
                super().__init__(*args, **settings)

        # each of these creates files

        def add_scalars(self, *args: Any, **settings: Any) -> None:
            with _guarded(recording):
                super().add_scalars(*args, **settings)

        def add_hparams(self, *args: Any, **settings: Any) -> None:
            with _guarded(recording):
                super().add_hparams(*args, **settings)

    return Writer


@contextlib.contextmanager
def _guarded(recording: WarnOnce) -> Iterator[None]:
    """Make `recording` handle writing errors of event files created in a `with` block.

    An error in tensorboardX's writing thread would end the job.
    """
    from tensorboardX import event_file_writer

    before = event_file_writer.EventsWriter

    class Events(before):  # type: ignore[misc, valid-type]
        def write_event(self, event: Any) -> None:
            with recording:
                super().write_event(event)

        def flush(self) -> None:
            with recording:
                super().flush()

        def close(self) -> None:
            with recording:
                super().close()

    event_file_writer.EventsWriter = Events
    try:
        yield
    finally:
        event_file_writer.EventsWriter = before


@final
class Timeline(Callback):
    """A trace of all ranks (`ms.timeline.save`), written after a step."""

    def __init__(self, path: str | os.PathLike[str], step: int = 100, ranks: Sequence[int] | None = None) -> None:
        """Create the callback.

        Args:
            path: the file.
            step: counted over all epochs. Earlier, and with parameter servers, a trace is written after each epoch.
            ranks: which; default all, of more than 64 the first of each node.
        """
        self._path, self._step, self._ranks = Path(path).absolute(), step, ranks
        self._done = False
        self._recording = WarnOnce(f"Timeline: {os.fspath(path)}", OSError)

    def on_step_end(self, loop: Loop) -> None:
        if loop.step == self._step and loop.in_step:
            self._done = True
            self._save(loop)

    def on_epoch_end(self, loop: Loop, logs: Logs) -> None:
        if not self._done:
            self._save(loop)

    def _save(self, loop: Loop) -> None:
        with self._recording:
            save(
                loop.strategy.broadcast_object(self._path), loop.strategy, self._ranks
            )  # ranks may be in other folders
