"""HDF5 on the folder's file system: shards that all ranks write, reading them in order, and a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ...bench.measure import largest, total
from ...data import HDF5Dataset, write_shards
from ...strategy import MultiWorkerMirroredStrategy
from ...variables import Variable
from .trial import Trial

__all__ = ["run"]

_ROWS, _WIDTH, _BATCH = 1 << 13, 1 << 10, 1 << 8  # rows of a rank, bytes of a row, rows of a rank in a batch: 8 MB
_PARAMETERS = 1 << 23  # float32 of the checkpoint: 32 MB
_RATE = "bytes per second"


def run(trial: Trial) -> None:
    """Write shards, read them, save and restore a checkpoint; compare every value. Collective."""
    comm, rank, size = trial.comm, trial.topology.rank, trial.topology.size
    numbers = np.arange(rank * _ROWS, (rank + 1) * _ROWS)
    folder = trial.folder / "shards"
    trial.part("writing shards")
    spent = _timed(
        trial, lambda: write_shards(folder, {"row": _rows(numbers), "number": numbers}, num_shards=1, comm=comm)
    )
    trial.number("shards, all ranks", "write", _ROWS * _WIDTH * size / spent, _RATE)
    strategy = MultiWorkerMirroredStrategy(comm=comm, devices=["cpu:0"])
    trial.part("reading shards in order")
    spent = _timed(trial, lambda: _read(trial, strategy, folder))
    trial.number("shards, all ranks", "read", _ROWS * _WIDTH * size / spent, _RATE)
    trial.part("saving a checkpoint")
    values = np.resize(np.arange(1 << 16, dtype=np.float32), _PARAMETERS)
    with strategy.scope():
        variable = Variable(values, name="w")
    path = trial.folder / "checkpoint.h5"
    spent = _timed(trial, lambda: strategy.save(path))
    trial.number("checkpoint, 32 MB", "write", values.nbytes / spent, _RATE)
    variable.assign(np.zeros_like(values))
    trial.part("restoring the checkpoint")
    spent = _timed(trial, lambda: strategy.restore(path))
    trial.number("checkpoint, 32 MB", "read", values.nbytes / spent, _RATE)
    trial.same("the restored values", variable.numpy(), values)
    strategy.close()


def _rows(numbers: np.ndarray) -> np.ndarray:
    """Return the content of rows by their numbers."""
    return ((numbers[:, None] * 7 + np.arange(_WIDTH)) % 251).astype(np.uint8)


def _read(trial: Trial, strategy: MultiWorkerMirroredStrategy, folder: Path) -> None:
    """Read all rows once, in order, and compare each. Collective."""
    dataset = HDF5Dataset(folder, fields=("row", "number")).batch(_BATCH * strategy.size)
    rows = summed = 0
    for row, number in strategy.distribute_dataset(dataset):
        trial.same("the content of rows", row, _rows(number))
        rows, summed = rows + len(number), summed + int(number.sum())
    everything = _ROWS * strategy.size
    trial.same("the number of rows", total(trial.comm, rows), everything)
    trial.same("the sum of their numbers", total(trial.comm, summed), everything * (everything - 1) // 2)


def _timed(trial: Trial, action: Callable[[], object]) -> float:
    """Return the seconds of an action on the slowest rank. Collective."""
    trial.comm.Barrier()
    start = time.perf_counter()
    action()
    return largest(trial.comm, time.perf_counter() - start)
