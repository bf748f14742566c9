"""A field whose files are stored in different ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..stats import StageStats
from .reader import FieldReader, RowIndex

__all__ = ["MixedReader"]


class MixedReader:
    """Shares rows out to several readers, each of which reads some of the files.

    Args:
        rows: the number of rows of each file.
        parts: for each reader the numbers of its files, in order.
        readers: the readers; each numbers the rows of its own files.
    """

    def __init__(self, rows: Sequence[int], parts: Sequence[Sequence[int]], readers: Sequence[FieldReader]) -> None:
        self._index = RowIndex(rows)
        self._parts = parts
        self._readers = readers
        self._reader_of = np.zeros(len(rows), np.int64)
        self._shift = np.zeros(len(rows), np.int64)  # what takes a row's number to its reader's number of it
        for number, part in enumerate(parts):
            own = np.concatenate(([0], np.cumsum([rows[shard] for shard in part])))
            self._reader_of[list(part)] = number
            self._shift[list(part)] = own[:-1] - self._index.starts[list(part)]
        counts = ", ".join(
            f"{r.kind} for {len(p)} file{'s' * (len(p) != 1)}" for r, p in zip(readers, parts, strict=True)
        )
        self.kind = f"mixed: {counts}"
        self.reason = "; ".join(dict.fromkeys(reader.reason for reader in readers if reader.reason))

    @property
    def counters(self) -> StageStats:
        return StageStats.reading(reader.counters for reader in self._readers)

    def _shares(self, rows: NDArray[np.int64]) -> list[tuple[FieldReader, NDArray[np.int64], NDArray[np.int64]]]:
        """Each reader that has some of the rows, where they stand among the rows, and its own numbers of them."""
        shards = self._index.shard_of(rows)
        reader_of, own = self._reader_of[shards], rows + self._shift[shards]
        chosen = ((reader, np.flatnonzero(reader_of == number)) for number, reader in enumerate(self._readers))
        return [(reader, at, own[at]) for reader, at in chosen if at.size]

    def read(self, rows: NDArray[np.int64], out: NDArray[Any]) -> None:
        for reader, at, own in self._shares(rows):
            first, last = int(at[0]), int(at[-1])
            if last - first == at.size - 1:
                reader.read(own, out[first : last + 1])
            else:
                grouped = np.empty((at.size, *out.shape[1:]), out.dtype)
                reader.read(own, grouped)
                out[at] = grouped

    def expect(self, rows: NDArray[np.int64]) -> None:
        for reader, _, own in self._shares(rows):
            reader.expect(own)

    def keep(self, rows: int) -> None:
        for reader in self._readers:
            reader.keep(rows)
