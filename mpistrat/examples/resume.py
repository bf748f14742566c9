"""Where a training job that was told to stop goes on: variables, slots and its notes in one file, which is whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

import mpistrat as ms

__all__ = ["first_reader", "read", "save"]

_NOTES, _TAKEN = "notes", "taken"  # datasets beside those of Strategy.save


def save(strategy: Any, path: Path, notes: dict[str, Any], taken: int) -> None:
    """Write variables, optimizer slots, notes, and how many batches of its epoch each reader has taken. Collective.

    Args:
        strategy: whose variables these are.
        path: the file; one that exists is replaced.
        notes: what JSON can hold; the first reader's are written.
        taken: the batches that this rank has taken.
    """
    import h5py

    everybody = np.empty(strategy.size, np.int64)
    strategy.comm.Allgather(np.array([taken], np.int64), everybody)
    aside = path.with_name(f".{path.name}.aside")
    strategy.save(aside)
    if strategy.rank == first_reader(strategy):
        with h5py.File(aside, "r+") as file:
            file[_NOTES] = np.frombuffer(json.dumps(notes).encode(), np.uint8)
            file[_TAKEN] = everybody[list(_readers(strategy))]
        with aside.open("rb") as written:
            os.fsync(written.fileno())
        aside.replace(path)
    strategy.comm.Barrier()  # nobody says that it is saved before it is


def read(strategy: Any, path: Path) -> tuple[dict[str, Any], int]:
    """Restore variables and slots; return the notes, and how many batches this rank has taken. Collective.

    Without a file nothing is changed, and ({}, 0) returned. Where there are more or fewer readers than when it was written, which
    only parameter servers have, each has taken an equal share: what was read in this epoch may then be read again, or left out.
    """
    import h5py

    notes, taken = np.empty(0, np.uint8), np.empty(0, np.int64)
    if strategy.rank == 0 and path.exists():
        with h5py.File(path) as file:
            notes, taken = file[_NOTES][()], file[_TAKEN][()]
    sizes = np.array([notes.size, taken.size], np.int64)
    strategy.comm.Bcast(sizes)
    if not sizes[0]:
        return {}, 0
    if strategy.rank:
        notes, taken = np.empty(sizes[0], np.uint8), np.empty(sizes[1], np.int64)
    strategy.comm.Bcast(notes)
    strategy.comm.Bcast(taken)
    strategy.restore(path)
    readers = _readers(strategy)
    index = readers.index(strategy.rank) if strategy.rank in readers else 0
    mine = taken[index] if taken.size == len(readers) else taken.sum() // len(readers)
    return json.loads(notes.tobytes()), int(mine)


def first_reader(strategy: Any) -> int:
    """Return the rank that tells what the job does: the first one, or the first worker. Not collective."""
    return _readers(strategy)[0]


def _readers(strategy: Any) -> tuple[int, ...]:
    """The ranks that read: workers read batches of their own, else all read the same ones, and the first stands for them."""
    return strategy.workers if isinstance(strategy, ms.ParameterServerStrategy) else (0,)
