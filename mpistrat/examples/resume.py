"""Where a training job that was told to stop goes on: variables, slots and its notes in one file, which is whole or not there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mpistrat as ms

__all__ = ["first_reader", "read", "save"]


def save(strategy: Any, path: Path, notes: dict[str, Any], taken: int) -> None:
    """Write variables, optimizer slots, notes, and how many batches of its epoch each reader has taken. Collective.

    Args:
        strategy: whose variables these are.
        path: the file; one that exists is replaced.
        notes: what JSON can hold; the first reader's are written.
        taken: the batches that this rank has taken.
    """
    everybody, readers = strategy.all_gather_object(taken), _readers(strategy)
    notes = strategy.broadcast_object(notes, root=readers[0])
    strategy.save(path, extra={"notes": notes, "taken": [everybody[rank] for rank in readers]})


def read(strategy: Any, path: Path) -> tuple[dict[str, Any], int]:
    """Restore variables and slots; return the notes, and how many batches this rank has taken. Collective.

    Without a file nothing is changed, and ({}, 0) returned. Where there are more or fewer readers than when it was written, which
    only parameter servers have, each has taken an equal share: what was read in this epoch may then be read again, or left out.
    """
    if not strategy.broadcast_object(path.exists()):  # rank 0 reads the file
        return {}, 0
    extra = strategy.restore(path)
    taken, readers = extra["taken"], _readers(strategy)
    index = readers.index(strategy.rank) if strategy.rank in readers else 0
    return extra["notes"], taken[index] if len(taken) == len(readers) else sum(taken) // len(readers)


def first_reader(strategy: Any) -> int:
    """Return the rank that tells what the job does: the first one, or the first worker."""
    return _readers(strategy)[0]


def _readers(strategy: Any) -> tuple[int, ...]:
    """The ranks that read: workers read batches of their own, else all read the same ones, and the first stands for them."""
    return strategy.workers if isinstance(strategy, ms.ParameterServerStrategy) else (0,)
