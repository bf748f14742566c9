"""Detection of a terminal, also through a launcher's pipes; and progress bars for both."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .environment import Environment

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from typing_extensions import Self

__all__ = ["WithBar", "progress_bar", "reaches_terminal"]


def reaches_terminal(stream: str) -> bool:
    """Return True if output to "stdout" or "stderr" reaches a terminal: its own, or the launcher's."""
    own = getattr(sys, stream)
    if own is not None and not own.closed and own.isatty():
        return True
    return stream in Environment.read().terminal


def progress_bar(*columns: ProgressColumn, expand: bool = False, auto_refresh: bool = True) -> Progress:
    """Return a progress bar on stderr, of the terminal's width or COLUMNS.

    Args:
        columns: of the bar.
        expand: a column with a ratio fills the line.
        auto_refresh: a thread draws the bar. An error in it, as after a terminal is closed, ends the job.
    """
    from rich.console import Console
    from rich.progress import Progress

    return Progress(
        *columns, expand=expand, auto_refresh=auto_refresh, console=Console(stderr=True, force_terminal=True)
    )


class WithBar:
    """A context manager that shows a bar, or none.

    Attributes:
        bar: None for none.
    """

    bar: Progress | None

    def __enter__(self) -> Self:
        if self.bar is not None:
            self.bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.bar is not None:
            self.bar.stop()
