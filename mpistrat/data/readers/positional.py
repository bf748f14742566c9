"""Contiguous, unfiltered data through reads at given positions: for files that may be cut while they are read."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from ...errors import ShardError, explain
from .open_files import open_bytes
from .reader import Contiguous, ContiguousReader, Storage

__all__ = ["PositionalReader"]

_BUFFERS = 1024  # that one call may fill, on Linux and macOS


@final
class PositionalReader(ContiguousReader):
    """Rows of contiguous data. Rows that are neighbours in a file are one read, each into its own place.

    Args:
        storages: the field in each file.
        reason: why the files are not mapped.
    """

    kind = "pread"

    def __init__(self, storages: Sequence[Storage], reason: str = "") -> None:
        super().__init__(storages)
        self._files = open_bytes()
        self.reason = reason

    def _copy(self, rows: NDArray[np.int64], flat: NDArray[np.uint8]) -> None:
        order = np.argsort(rows, kind="stable")
        ordered = rows[order]
        again = np.flatnonzero(np.diff(ordered) == 0) + 1  # rows that were asked for more than once
        if again.size:
            firsts = np.searchsorted(ordered, ordered[again])
            wanted = np.delete(order, again)
            self._read_increasing(rows[wanted], wanted, flat)
            flat[order[again]] = flat[order[firsts]]
        else:
            self._read_increasing(ordered, order, flat)

    def _read_increasing(self, rows: NDArray[np.int64], places: NDArray[np.int64], flat: NDArray[np.uint8]) -> None:
        """Read increasing rows, each to its place."""
        for shard, own in self._index.by_shard(rows):
            storage = self._storages[shard]
            with self._files.lend(storage.file) as file:
                for first, buffers in _runs(rows[own] - self._index.starts[shard], places[own], flat):
                    self._fill(storage, first * self._row_bytes, buffers, file.fileno())

    def _fill(self, storage: Storage, start: int, buffers: list[memoryview], descriptor: int) -> None:
        """Read one piece of a dataset, from a byte on, into several buffers."""
        assert isinstance(storage.layout, Contiguous)
        position = storage.layout.offset + start
        while buffers:
            try:
                count = os.preadv(descriptor, buffers, position)
            except OSError as error:
                raise self._error(storage, position, str(error)) from error
            if not count:
                raise self._error(storage, position, f"the end of the file at {os.fstat(descriptor).st_size}")
            position += count
            while buffers and count >= buffers[0].nbytes:
                count -= buffers.pop(0).nbytes
            if count:
                buffers[0] = buffers[0][count:]

    @staticmethod
    def _error(storage: Storage, position: int, got: str) -> ShardError:
        remedy = "The file was cut while it was read: copy it again, or write the shards again."
        expected = f"bytes at {position}"
        return ShardError(explain("HDF5Dataset", storage.where, expected=expected, got=got, remedy=remedy))


def _runs(
    rows: NDArray[np.int64], places: NDArray[np.int64], flat: NDArray[np.uint8]
) -> Iterator[tuple[int, list[memoryview]]]:
    """Runs of neighbouring rows: the first row, and the buffers that the run goes to, which are pieces of `flat`."""
    new_run = np.diff(rows) != 1
    cuts = np.flatnonzero(new_run | (np.diff(places) != 1)) + 1
    begins = [True, *new_run[cuts - 1].tolist()]
    first, buffers = int(rows[0]), list[memoryview]()
    for new, (start, stop) in zip(begins, itertools.pairwise([0, *cuts.tolist(), rows.size]), strict=True):
        if buffers and (new or len(buffers) == _BUFFERS):
            yield first, buffers
            first, buffers = int(rows[start]), []
        place = int(places[start])
        buffers.append(flat[place : place + stop - start].reshape(-1).data)
    yield first, buffers
