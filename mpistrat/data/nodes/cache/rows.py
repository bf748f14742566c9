"""Building blocks of row caches: rows by number, memory for them, and the chunks in which they are read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ....base import nest
from ....base.errors import explain
from ....base.waiting import Backoff
from ...buffers import RowBuffers, take_rows
from ...spec import ArraySpec, is_ragged, stacked_nbytes
from ..node import Addresses, Node

__all__ = ["RowChunks", "RowMemory", "ParentRows", "row_backoff"]

_ALIGNMENT = 64  # bytes, of each array in shared memory
READ_BYTES = 8 << 20  # approximate size of one read


def row_backoff() -> Backoff:
    """Return the pauses of a wait for another rank's rows: 50 µs, growing to 1 ms within a tenth of a second."""
    return Backoff(yields=20, start=5e-5, growth=1.01)


@final
class ParentRows:
    """The rows of a dataset's epoch 0 by number. After `batch`, batch i starts at number i × batch size.

    Attributes:
        slot: numbers per element: 1, or the batch size.
        count: the total of numbers. A batch smaller than the batch size leaves its last ones unused.
    """

    def __init__(self, dataset: Node) -> None:
        self.dataset = dataset
        self.row_spec = dataset.row_spec
        self.slot = 1 if dataset.batching is None else dataset.batching.size
        self.count = dataset.cardinality() * self.slot

    @property
    def row_bytes(self) -> int:
        """Bytes of a row without parts that vary, at least 1."""
        return max(1, sum(stacked_nbytes(spec) for spec in nest.flatten(self.row_spec)))

    def numbers(self, element: int) -> NDArray[np.int64]:
        """Return the numbers of one element's rows."""
        if self.dataset.batching is None:
            return np.array([element], np.int64)
        return element * self.slot + np.arange(self.dataset.locate(0, element)[0].size)

    def between(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the used numbers from low to high, which are borders of elements."""
        if self.dataset.batching is None:
            return np.arange(low, high, dtype=np.int64)
        elements = range(low // self.slot, -(-high // self.slot))
        return np.concatenate([np.empty(0, np.int64), *map(self.numbers, elements)])

    def read(self, numbers: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], Any]]:
        """Read rows with ascending numbers; yield them in groups, each with its numbers.

        Raises:
            ValueError: for rows that differ from the first ones in shape, or whose dtype does not fit theirs.
        """
        for own, (epochs, positions) in self._addresses(numbers):
            rows = self.dataset.gather(epochs, positions)
            self._check(rows)
            yield own, rows

    def _check(self, rows: Any) -> None:
        specs, names = nest.flatten(self.row_spec), nest.paths(self.row_spec)
        for spec, name, leaf in zip(specs, names, nest.flatten(rows), strict=True):
            fits = is_ragged(spec) or (leaf.shape[1:] == spec.shape and np.can_cast(leaf.dtype, spec.dtype))
            if not fits:
                expected = f"rows like the first ones, {spec}{name and ' at ' + name}"
                got = str(ArraySpec(leaf.shape[1:], leaf.dtype))
                remedy = "If lengths vary, pass element_spec to map, with None for such an axis."
                raise ValueError(explain("Dataset.cache", "", expected=expected, got=got, remedy=remedy))

    def _addresses(self, numbers: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], Addresses]]:
        if self.dataset.batching is None:
            yield numbers, (np.zeros(numbers.size, np.int64), numbers)
            return
        elements = numbers // self.slot
        for element in np.unique(elements).tolist():
            own = numbers[elements == element]
            epochs, positions = self.dataset.locate(0, element)
            within = own - element * self.slot
            yield own, (epochs[within], positions[within])


@final
class RowMemory:
    """Memory for rows, one array per leaf: in this process, or in shared bytes.

    Args:
        row_spec: the specs of a row. In shared bytes every leaf has a fixed shape and is not a string.
        rows: the number of rows.
        shared: `RowMemory.nbytes(row_spec, rows)` bytes; None for memory of this process.
    """

    def __init__(self, row_spec: Any, rows: int, shared: NDArray[np.uint8] | None = None) -> None:
        self.row_spec = row_spec
        self.rows = rows
        self.arrays: list[NDArray[Any]] = []
        self.starts = self.starts_of(row_spec, rows)
        for start, spec in zip(self.starts, nest.flatten(row_spec), strict=True):
            shape = (rows,) if is_ragged(spec) else (rows, *spec.shape)
            dtype = np.dtype(object) if is_ragged(spec) else spec.dtype
            if shared is None:
                self.arrays.append(np.empty(shape, dtype))  # pages are allocated at the first write
            else:
                nbytes = rows * stacked_nbytes(spec)
                self.arrays.append(shared[start : start + nbytes].view(dtype).reshape(shape))

    @staticmethod
    def nbytes(row_spec: Any, rows: int) -> int:
        """Return the bytes of this number of rows, without parts that vary."""
        return sum(_aligned(rows * stacked_nbytes(spec)) for spec in nest.flatten(row_spec))

    @staticmethod
    def starts_of(row_spec: Any, rows: int) -> list[int]:
        """Return the offsets of the arrays in shared bytes for this number of rows."""
        ends = np.cumsum([_aligned(rows * stacked_nbytes(spec)) for spec in nest.flatten(row_spec)])
        return [0, *ends[:-1].tolist()]

    def ranges(self, places: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Return the byte ranges of rows at ascending indices."""
        low, high = int(places[0]), int(places[-1]) + 1
        sizes = [array.itemsize * (array.size // max(1, self.rows)) for array in self.arrays]
        return [(start + low * size, start + high * size) for start, size in zip(self.starts, sizes, strict=True)]

    def put(self, places: NDArray[np.int64], rows: Any) -> None:
        """Store stacked rows at ascending indices."""
        low, high = int(places[0]), int(places[-1]) + 1
        where: Any = slice(low, high) if high - low == places.size else places
        for array, leaf in zip(self.arrays, nest.flatten(rows), strict=True):
            array[where] = leaf

    def take(self, places: NDArray[np.int64], buffers: RowBuffers) -> list[NDArray[Any]]:
        """Return copies of the rows at given indices, one array per leaf."""
        taken = []
        for field, array in enumerate(self.arrays):
            out = buffers.empty(field, (places.size, *array.shape[1:]), array.dtype)
            take_rows(array, places, out)
            taken.append(out)
        return taken

    def take_into(self, places: NDArray[np.int64], other: RowMemory) -> None:
        """Copy the rows at given indices into another memory of this size."""
        for array, out in zip(self.arrays, other.arrays, strict=True):
            take_rows(array, places, out)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@final
class RowChunks:
    """Row numbers split into chunks that are read as a whole, of one size or with given starts.

    Example:
        >>> RowChunks(10, 4).bounds(2)
        (8, 10)
    """

    def __init__(self, count: int, size: int = 1, starts: NDArray[np.int64] | None = None) -> None:
        self.rows = count
        self._size = size
        self._starts = starts
        self.count = -(-count // size) if starts is None else len(starts) - 1

    @classmethod
    def of(cls, source: ParentRows, nbytes: int) -> RowChunks:
        """Return the chunks of a source, of at least about `nbytes`; with 0, the smallest that suit the source."""
        starts = source.dataset.chunk_starts() if source.dataset.batching is None else None
        least = max(1, nbytes // source.row_bytes)
        if starts is None or len(starts) < 2 or int(starts[-1]) != source.count or int(starts[0]) != 0:
            return cls(source.count, -(-least // source.slot) * source.slot if nbytes else 1)
        if least > 1:
            wanted = np.arange(0, source.count, least)
            starts = np.unique(np.append(starts[np.searchsorted(starts, wanted)], source.count))
        return cls(source.count, starts=starts)

    def reads(self, chunks: NDArray[np.int64]) -> int:
        """Return how many chunks are read as a whole: 0 if chunks are single rows."""
        return 0 if self._starts is None and self._size == 1 else int(chunks.size)

    def numbers(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the chunk of each row."""
        if self._starts is not None:
            return np.searchsorted(self._starts, rows, side="right") - 1
        return rows if self._size == 1 else rows // self._size

    def bounds(self, chunk: int) -> tuple[int, int]:
        """Return the range of a chunk's row numbers."""
        if self._starts is not None:
            return int(self._starts[chunk]), int(self._starts[chunk + 1])
        return chunk * self._size, min((chunk + 1) * self._size, self.rows)

    def border(self, row: int) -> int:
        """Return the start of a row's chunk; for the number of rows itself."""
        return self.rows if row >= self.rows else self.bounds(int(self.numbers(np.array([row]))[0]))[0]

    def runs(self, chunks: NDArray[np.int64], rows: int) -> Iterator[NDArray[np.int64]]:
        """Split ascending chunks into runs of about this number of rows."""
        if self._starts is None:
            step = max(1, rows // self._size)
            for first in range(0, len(chunks), step):
                yield chunks[first : first + step]
            return
        lengths = self._starts[chunks + 1] - self._starts[chunks]
        part = (np.cumsum(lengths) - 1) // rows
        yield from np.split(chunks, np.flatnonzero(np.diff(part)) + 1)

    def all_rows(self, chunks: NDArray[np.int64], source: ParentRows) -> NDArray[np.int64]:
        """Return the row numbers of ascending chunks."""
        if self._starts is None and self._size == 1:
            return chunks
        return np.concatenate([source.between(*self.bounds(chunk)) for chunk in chunks.tolist()])
