"""Progress of a training job: a bar on a terminal, or a line for each epoch; where its time went; at the end a picture."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mpistrat as ms

from .._util.terminal import WithBar, progress_bar, reaches_terminal

__all__ = ["PARTS", "Clock", "Progress", "training_curves"]

PARTS = ("input", "compute", "communication")
WORDS = {"input": "input-bound"}


class Clock:
    """Adds up the seconds that go into each part of a training loop's steps, and the samples seen.

    Args:
        data: the distributed dataset that the loop reads; what it says of its waiting is the part "input".
        traffic: returns the bytes that were pulled from parameter servers, and pushed to them, so far.
    """

    def __init__(self, data: ms.data.DistributedDataset, traffic: Callable[[], tuple[int, int]] | None = None) -> None:
        self._data, self._traffic = data, traffic
        self._pulled, self._pushed = traffic() if traffic else (0, 0)
        self._before = data.stats()
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self.samples = 0
        self.started = time.perf_counter()
        self._elapsed: float | None = None
        self._moved: tuple[int, int] | None = None

    def stop(self) -> None:
        """Count no more time: what comes now is no training."""
        self._elapsed, self._moved = self.elapsed(), self._traffic and self._traffic()

    def elapsed(self) -> float:
        """Return the seconds since the clock was made, until it was stopped."""
        return time.perf_counter() - self.started if self._elapsed is None else self._elapsed

    @contextlib.contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Count the time of a `with` block for a part."""
        before = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] += time.perf_counter() - before

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part."""
        waited = self._data.stats().wait_seconds - self._before.wait_seconds
        return self._seconds | {"input": self._seconds["input"] + waited}

    def state(self) -> dict[str, Any]:
        """Return what was counted so far, for `restore`."""
        return {"seconds": self.seconds(), "samples": self.samples, "elapsed": self.elapsed()}

    def restore(self, state: dict[str, Any]) -> None:
        """Count on from where another clock was."""
        for part, seconds in state["seconds"].items():
            self._seconds[part] += seconds
        self.samples += state["samples"]
        self.started -= state["elapsed"]

    def rate(self) -> float:
        """Return the samples a second since the clock was made."""
        return self.samples / max(self.elapsed(), 1e-9)

    def shares(self) -> str:
        """Return where the time went, in words."""
        seconds = self.seconds()
        total = max(sum(seconds.values()), 1e-9)
        shares = ", ".join(f"{WORDS.get(part, part)} {seconds[part] / total:.0%}" for part in PARTS)
        if self._traffic is None:
            return shares
        spent = max(self.elapsed(), 1e-9)
        pulled, pushed = self._moved or self._traffic()
        rates = (pulled - self._pulled) / 1e6 / spent, (pushed - self._pushed) / 1e6 / spent
        return f"{shares}; pulled {rates[0]:,.0f} MB/s, pushed {rates[1]:,.0f} MB/s"


class Progress(WithBar):
    """Shows steps and epochs on stderr; use it as a context manager. On other ranks than the first it shows nothing.

    Args:
        steps: of the whole job.
        style: "bar", "lines" or "none"; "auto" is a bar on a terminal and lines elsewhere.
        done: how many steps were done before.
    """

    def __init__(self, steps: int, style: str = "auto", done: int = 0) -> None:
        if style == "auto":
            style = "bar" if reaches_terminal("stderr") else "lines"
        self._lines = style == "lines"
        self.bar = self._make_bar(steps, done) if style == "bar" else None

    def _make_bar(self, steps: int, done: int) -> Any:
        from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
        from rich.table import Column

        what = "loss {task.fields[loss]:.4f}, {task.fields[rate]:,.0f} samples/s, {task.fields[shares]}"
        bar = progress_bar(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.completed}/{task.total}"),
            TimeRemainingColumn(),
            TextColumn(what, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),  # the rest of the line
            expand=True,
        )
        bar.add_task("train", total=steps, completed=done, epoch=0, loss=float("nan"), rate=0.0, shares="")
        return bar

    def step(self, epoch: int, loss: float, clock: Clock) -> None:
        """Say that one more step is done."""
        if self.bar is not None:
            task = self.bar.task_ids[0]
            self.bar.update(task, advance=1, epoch=epoch, loss=loss, rate=clock.rate(), shares=clock.shares())

    def epoch(self, epoch: int, loss: float, accuracy: float, clock: Clock) -> None:
        """Say that an epoch is done."""
        text = f"epoch {epoch}: loss {loss:.4f}, test accuracy {accuracy:.4f}, {clock.rate():,.0f} samples/s ({clock.shares()})"
        if self.bar is not None:
            self.bar.console.print(text, highlight=False)
        elif self._lines:
            print(text, file=sys.stderr, flush=True)


def training_curves(path: Path, losses: Sequence[float], accuracies: Sequence[float], title: str) -> bool:
    """Write the curves as a PNG; return False, and write nothing, without matplotlib.

    Args:
        losses: one a step.
        accuracies: one an epoch, between 0 and 1.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    steps_an_epoch = len(losses) / max(len(accuracies), 1)
    left.plot([(i + 1) / max(steps_an_epoch, 1) for i in range(len(losses))], losses, color="#08519c", linewidth=1)
    left.set(xlabel="epoch", ylabel="loss of a step (mean over the global batch)", yscale="log")
    right.plot(range(1, len(accuracies) + 1), accuracies, color="#2ca02c", marker="o", markersize=4)
    right.set(xlabel="epoch", ylabel="test accuracy")
    if accuracies:
        right.annotate(
            f"{accuracies[-1]:.4f}",
            (len(accuracies), accuracies[-1]),
            textcoords="offset points",
            xytext=(-4, -16),
            ha="right",
        )
    right.xaxis.get_major_locator().set_params(integer=True)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=120)
    return True
