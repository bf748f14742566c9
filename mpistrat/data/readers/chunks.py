"""Where the chunks of a dataset lie in its file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .codecs import Pipeline

if TYPE_CHECKING:
    import h5py

__all__ = ["Chunks"]

_ASKED_FOR = 4096  # chunks at most that are asked for one by one: each answer takes HDF5 longer than the one before
_FAR = 1 << 61  # behind the end of every file: what a damaged one says may not even fit an integer


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunks of whole rows with filters that we undo ourselves.

    Attributes:
        rows: rows of a chunk; the last one is stored whole, too.
        row_bytes: bytes of a row.
        pipeline: the filters.
        offsets: of each chunk in the file; -1 for one that was never written.
        sizes: bytes of each chunk in the file.
        masks: for each chunk, which filters were left out.
        fill: the bytes of a row that was never written.
    """

    rows: int
    row_bytes: int
    pipeline: Pipeline
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    masks: NDArray[np.uint32]
    fill: NDArray[np.uint8]

    @staticmethod
    def of(dataset: h5py.Dataset, row_bytes: int) -> Chunks | str:
        """Return where a chunked dataset's chunks lie, or why only HDF5 can read it."""
        import h5py

        if dataset.chunks[1:] != dataset.shape[1:] or not dataset.shape[0]:
            return f"chunks of shape {dataset.chunks}, not of whole rows"
        pipeline = Pipeline.of(dataset)
        if isinstance(pipeline, str):
            return pipeline
        rows = int(dataset.chunks[0])
        count = -(-int(dataset.shape[0]) // rows)
        if not hasattr(dataset.id, "chunk_iter") and (count > _ASKED_FOR or not hasattr(dataset.id, "get_chunk_info")):
            return f"{count} chunks, which this HDF5 does not list"
        if dataset.file.userblock_size:  # in some versions of HDF5 only, addresses of chunks count from behind it
            return "a user block"
        if dataset.id.get_type() != h5py.h5t.py_create(dataset.dtype, logical=True):
            return "a type that NumPy has not"
        offsets, sizes = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        masks = np.zeros(count, np.uint32)

        def note(chunk: Any) -> None:
            place = chunk.chunk_offset[0] // rows
            if place < count and chunk.byte_offset is not None:
                offsets[place] = min(chunk.byte_offset, _FAR)
                sizes[place], masks[place] = min(chunk.size, _FAR), chunk.filter_mask

        if hasattr(dataset.id, "chunk_iter"):
            dataset.id.chunk_iter(note)
        else:
            for number in range(dataset.id.get_num_chunks()):
                note(dataset.id.get_chunk_info(number))
        partial = dataset.shape[0] % rows
        if pipeline.filters and partial and sizes[-1] == rows * row_bytes and not masks[-1]:
            # A file may say that its last, partial chunk is not filtered; h5py does not tell us.
            return "a last chunk that may be unfiltered"
        fill = np.zeros(row_bytes, np.uint8)  # where rows are pointers, they point nowhere
        if not dataset.dtype.hasobject:
            fill.view(dataset.dtype)[:] = dataset.fillvalue
        return Chunks(rows, row_bytes, pipeline, offsets, sizes, masks, fill)
