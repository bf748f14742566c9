"""Output and arguments of commands: tables, progress bars, pictures, numbers, lists of names."""

from __future__ import annotations

import argparse
import contextlib
import csv
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.environment import not_by_name
from ..base.errors import explain
from ..base.terminal import WithBar, progress_bar, reaches_terminal
from ..base.text import decimal_size, displayable, printable
from .command import DONE, PROBLEM

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

__all__ = [
    "Meter", "check_folders", "complain", "console", "draw_or_tell", "names", "not_negative", "positive", "read_or_not",
    "strategy_name", "whole",
]  # fmt: skip

_WIDTH = 160  # of what is written into a file or a pipe
_LINE_EVERY = 10  # seconds


def console(*, plain: bool) -> Console:
    """Return the console of stdout; not confined to 80 columns where that is no terminal.

    Args:
        plain: take stdout for no terminal. Open MPI shows its ranks one, whatever becomes of what they print.
    """
    from rich.console import Console

    plain = plain or not sys.stdout.isatty()
    return Console(
        highlight=False, markup=False, emoji=False, width=_WIDTH if plain else None, force_terminal=not plain
    )


def check_folders(files: Mapping[str, str | None]) -> None:
    """Check that output files can be written, before a command measures what goes into them.

    Args:
        files: by the option that names each. None and "-", which is stdout, are not checked. That of --plot is a picture.

    Raises:
        OSError: the folder of a file does not exist, or cannot be written; the text names the option.
        ValueError: a picture's name has an ending that is not known.
    """
    for option, file in files.items():
        if file is None or file == "-":
            continue
        path = Path(file)
        if path.is_dir():
            raise IsADirectoryError(explain(option, file, expected="a file", got="a directory"))
        if not path.parent.is_dir():
            remedy = f"Make it first: mkdir -p {path.parent}."
            text = explain(option, file, expected="a file in a folder that exists", got="no such folder", remedy=remedy)
            raise FileNotFoundError(text)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(explain(option, file, expected="a file that can be written", got="no permission"))
        if option == "--plot":
            from ..bench.plot import check_ending

            check_ending(option, file)


def strategy_name(text: str) -> str:
    """Return the argument of --strategy.

    Raises:
        ArgumentTypeError: a strategy that needs more than a name, with what to do instead.
    """
    remedy = not_by_name(text)
    if remedy:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be chosen here. {remedy}")
    return text


def complain(error: object, *more: str) -> None:
    """Print an error on stderr: a line, and further lines below it."""
    print("\n  ".join(map(printable, [f"error: {error}", *more])), file=sys.stderr)


def draw_or_tell(file: str, draw: Callable[[Path], None]) -> int:
    """Draw a picture into a file, or say why there is none; return the exit status. Without matplotlib that is no problem."""
    try:
        draw(Path(file))
    except ImportError:
        print("no plot: matplotlib is not installed: pip install 'mpistrat[plot]'", file=sys.stderr)
        return DONE
    except OSError as error:
        complain(f"no plot: {error}")
        return PROBLEM
    print(f"plot: {printable(file)}", file=sys.stderr)
    return DONE


@contextlib.contextmanager
def read_or_not() -> Iterator[None]:
    """Let a command do its work and have its status whether or not its output is read to the end, as in `… | head`."""
    with contextlib.redirect_stdout(_ReadOrNot(sys.stdout)) as out, contextlib.redirect_stderr(_ReadOrNot(sys.stderr)):
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # a disk that is full has been reported
                out.flush()


class _ReadOrNot:
    """A stream that drops what is written after its reader has gone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream or open(os.devnull, "w")  # noqa: SIM115 - None where it was closed before the start

    def write(self, text: str) -> int:
        try:
            return int(self._stream.write(displayable(text, self._stream)))
        except BrokenPipeError:
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._give_up()

    def _give_up(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Meter(WithBar):
    """Shows on stderr how much is done: a bar on a terminal, elsewhere a line now and then. Use it in a `with`.

    Args:
        unit: what is counted; "bytes" are shown as sizes.
    """

    def __init__(self, what: str, total: int, unit: str, *, silent: bool) -> None:
        self._what, self._total, self._unit, self._silent = what, total, unit, silent
        self._done = 0
        self._shown = time.monotonic()
        self.bar = _bar(unit) if not silent and reaches_terminal("stderr") else None
        self._task = None if self.bar is None else self.bar.add_task(what, total=total)

    def advance(self, amount: int) -> None:
        """Count what was done."""
        self._done += amount
        if self.bar is not None and self._task is not None:
            self.bar.advance(self._task, amount)
        elif not self._silent and time.monotonic() - self._shown > _LINE_EVERY:
            self._shown = time.monotonic()
            done, total = self._count(self._done), self._count(self._total)
            print(f"{self._what}: {done} of {total}", file=sys.stderr, flush=True)

    def _count(self, amount: int) -> str:
        return decimal_size(amount) if self._unit == "bytes" else f"{amount} {self._unit}"


def _bar(unit: str) -> Progress:
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    count: list[ProgressColumn] = [MofNCompleteColumn(), TextColumn(unit)]
    if unit == "bytes":
        count = [DownloadColumn(), TransferSpeedColumn()]
    return progress_bar(TextColumn("{task.description}"), BarColumn(), *count, TimeRemainingColumn())


def names(text: str) -> list[str]:
    """Return the names of an argument "x,y". A name with a comma is quoted, as in CSV: '"x,1",y'."""
    try:
        return [
            name.strip() for name in next(csv.reader([text], skipinitialspace=True), []) or [""]
        ]  # of "" one, which is wrong
    except csv.Error as error:
        raise argparse.ArgumentTypeError(f"expected names, got {text!r:.80}: {error}") from error


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Return the `type` of an argument that is a whole number from `least` to `most`, both included."""
    bounds = f">= {least}" if most is None else f"from {least} to {most}"

    def number(text: str) -> int:
        if not (text.isascii() and text.isdigit() and least <= int(text) and (most is None or int(text) <= most)):
            raise argparse.ArgumentTypeError(f"expected a whole number {bounds}, got {text!r:.80}")
        return int(text)

    return number


def _number(bounds: str, legal: Callable[[float], bool]) -> Callable[[str], float]:
    """Return the `type` of an argument that is a finite number within bounds."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and legal(value)):
            raise argparse.ArgumentTypeError(f"expected a number {bounds}, got {text!r:.80}")
        return value

    return number


positive = _number("> 0", lambda value: value > 0)
not_negative = _number(">= 0", lambda value: value >= 0)
