"""Ranks wait for each other by files of a folder: no MPI is called meanwhile, and no time is guessed."""

from __future__ import annotations

from pathlib import Path

from mpistrat.base.waiting import wait_until


def wait_for_files(folder: Path, count: int, pattern: str = "*") -> None:
    """Wait until a folder has so many files."""
    assert wait_until(lambda: len(list(folder.glob(pattern))) >= count, 25), (
        f"{count} files {pattern!r} did not come: {sorted(path.name for path in folder.iterdir())}"
    )
