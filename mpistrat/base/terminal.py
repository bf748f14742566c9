"""Whether what a process prints reaches a terminal, also through a launcher's pipes; and progress bars for both."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from .environment import Environment

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from typing_extensions import Self

__all__ = ["WithBar", "progress_bar", "reaches_terminal"]


def reaches_terminal(stream: str) -> bool:
    """Return whether what is written to "stdout" or "stderr" reaches a terminal: it is one, or the launcher's is."""
    own = getattr(sys, stream)
    if own is not None and not own.closed and own.isatty():
        return True
    return stream in Environment.read().terminal


def progress_bar(*columns: ProgressColumn, expand: bool = False, auto_refresh: bool = True) -> Progress:
    """Return a bar on stderr, of the terminal's width or COLUMNS.

    Args:
        columns: of the bar.
        expand: whether a column with a ratio fills the line.
        auto_refresh: whether a thread draws the bar. An error in it, as where the terminal is gone, ends the job.
    """
    from rich.console import Console
    from rich.progress import Progress

    return Progress(
        *columns, expand=expand, auto_refresh=auto_refresh, console=Console(stderr=True, force_terminal=True)
    )


class WithBar:
    """An object that shows a bar, or none, while a `with` lasts.

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
