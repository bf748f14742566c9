"""Ranks wait for each other without a call of MPI, and without guessing a time: by files of a folder, or the flags of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpistrat.base.waiting import wait_until


def wait_for_files(folder: Path, count: int, pattern: str = "*") -> None:
    """Wait until a folder has so many files."""
    assert wait_until(lambda: len(list(folder.glob(pattern))) >= count, 25), (
        f"{count} files {pattern!r} did not come: {sorted(path.name for path in folder.iterdir())}"
    )


def wait_for_the_others(strategy: Any) -> None:
    """Wait until all other ranks of this node wait for this one, in the next collective."""
    node = strategy.extended.process_group.node
    assert wait_until(lambda: all(node._flags[other] > node.barriers for other in node._others), 25)
