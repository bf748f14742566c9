"""The chunks of one field by number, over all files: read raw, and decoded."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ...errors import ShardError, explain
from .chunks import Chunks
from .codecs import DecodeError
from .open_files import open_bytes
from .reader import Storage

__all__ = ["ChunkFiles"]


class ChunkFiles:
    """Reads and decodes chunks, in as many threads as like. It keeps none of them.

    Args:
        storages: the field in each file that has rows, in order; its layout is Chunks.

    Attributes:
        layouts: each file's chunks.
        row_starts: the row at which each chunk begins, then the number of rows.

    Raises:
        ShardError: for a chunk that lies outside its file.
    """

    def __init__(self, storages: Sequence[Storage]) -> None:
        self._storages = storages
        self.layouts = [_chunks(storage) for storage in storages]
        counts = [len(layout.offsets) for layout in self.layouts]
        self._first_chunk = np.cumsum([0, *counts])[:-1]
        first_rows = np.cumsum([0, *(storage.rows for storage in storages)])
        starts = [
            np.arange(count, dtype=np.int64) * layout.rows + first
            for layout, count, first in zip(self.layouts, counts, first_rows[:-1], strict=True)
        ]
        self.row_starts = np.concatenate([*starts, first_rows[-1:]])
        self.row_starts.setflags(write=False)
        self._largest = max(int(layout.sizes.max()) for layout in self.layouts)
        self._files = open_bytes()
        self._scratch = threading.local()

    def __len__(self) -> int:
        return len(self.row_starts) - 1

    def decode(self, chunk: int, slot: NDArray[np.uint8]) -> int:
        """Put a chunk's bytes at the beginning of a slot; return how many bytes of its file were read.

        Raises:
            ShardError: naming the file, the dataset and the chunk.
        """
        index = int(np.searchsorted(self._first_chunk, chunk, side="right")) - 1
        storage, layout = self._storages[index], self.layouts[index]
        chunk -= int(self._first_chunk[index])
        offset, out = int(layout.offsets[chunk]), slot[: layout.rows * layout.row_bytes]
        if offset < 0:
            out.reshape(layout.rows, -1)[...] = layout.fill
            return 0
        scratch = getattr(self._scratch, "raw", None)
        if scratch is None:
            scratch = self._scratch.raw = np.empty(self._largest, np.uint8)
        raw, read = scratch[: int(layout.sizes[chunk])], 0
        with self._files.lend(storage.file) as file:
            while read < raw.size:
                count = os.preadv(file.fileno(), [raw.data[read:]], offset + read)
                if not count:
                    raise _error(storage, chunk, f"{read} bytes: the file was truncated")
                read += count
        try:
            layout.pipeline.decode(raw, int(layout.masks[chunk]), out)
        except DecodeError as error:
            raise _error(storage, chunk, str(error)) from error
        return read


def _chunks(storage: Storage) -> Chunks:
    layout = storage.layout
    assert isinstance(layout, Chunks)
    outside = np.flatnonzero(layout.offsets + layout.sizes > storage.file.bytes)
    if outside.size:
        raise _error(storage, int(outside[0]), f"a file of {storage.file.bytes} bytes, in which it does not lie")
    return layout


def _error(storage: Storage, chunk: int, got: str) -> ShardError:
    layout = storage.layout
    assert isinstance(layout, Chunks)
    first = chunk * layout.rows
    last = min(first + layout.rows, storage.rows) - 1
    expected = f"chunk {chunk} (rows {first} to {last}), {layout.sizes[chunk]} bytes at {layout.offsets[chunk]}"
    remedy = "The file is damaged: copy it again, or write the shards again."
    return ShardError(explain("HDF5Dataset", storage.where, expected=expected, got=got, remedy=remedy))
