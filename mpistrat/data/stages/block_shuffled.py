"""Elements in the order of a block shuffle: chunks in a random order, and rows in a random order inside a window."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ... import nest
from ..block_order import BlockOrder
from ..dataset import Addresses, Dataset
from ..spec import ArraySpec
from .reindexed import Reordered, ShuffleSettings

__all__ = ["PSEUDO_CHUNK", "WINDOW_BYTES", "BlockShuffle", "BlockShuffled"]

WINDOW_BYTES = 1 << 26  # rows that are mixed, where nothing else is said
PSEUDO_CHUNK = 64  # rows that stay together in a window where the data has no chunks


@dataclass(frozen=True)
class BlockShuffle(ShuffleSettings):
    """A block shuffle."""

    window_rows: int | None  # elements that are mixed; None for as many as the bytes hold
    window_bytes: int

    def __str__(self) -> str:
        window = f"{self.window_bytes:,} bytes" if self.window_rows is None else f"{self.window_rows:,} elements"
        return f"{super().__str__()}: in blocks, mixed in windows of {window}: {self.why}"


@final
class BlockShuffled(Reordered):
    """Elements in the order of a block shuffle."""

    def __init__(self, parent: Dataset, shuffle: BlockShuffle) -> None:
        super().__init__(parent)
        self._shuffle = shuffle
        self._made: BlockOrder | None = None
        self._of_chunks = False  # whether what is mixed are the chunks of the data; known once the order is made
        self._lock = threading.Lock()
        self._in_turn = False  # whether somebody tells what is read next: then the windows come in turn
        # Epoch, window, and from which to which place of the next one's chunks the source has heard of them.
        self._told = (-1, -1, 0, 0)
        self._until = (-1, 0, 0)  # epoch, and from which to which position it need not hear of more

    @property
    def _order(self) -> BlockOrder:
        with self._lock:
            if self._made is None:
                rows = self._parent.cardinality()
                starts = self._parent.chunk_starts() if self.batching is None else None
                self._of_chunks = starts is not None
                if starts is None:
                    starts = np.append(np.arange(0, rows, PSEUDO_CHUNK), rows)
                window = self._shuffle.window_rows
                if window is None:
                    window = max(1, self._shuffle.window_bytes // max(1, _element_bytes(self._parent)))
                self._parent.keep(window)
                self._made = BlockOrder(starts, window, self._shuffle.seed)
            return self._made

    def _source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Addresses:
        return self._shuffle.rows(epochs, positions, self._order.rows)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        rows = super().gather(epochs, positions)
        if self._in_turn and positions.size:
            self._expect_window(epochs, positions)
        return rows

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        if self.batching is None:
            self._in_turn = True
            near = self._near(epochs, positions)
            if not near.any():
                return
            epochs, positions = epochs[near], positions[near]
        super().expect(epochs, positions)

    def _near(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which positions lie in the window that is read or in the next: for more there is no room."""
        epoch, window = self._told[:2]
        bound = self._order.window_end(self._shuffle.key(epoch), window + 1) if epoch >= 0 else 0
        return (epochs == epoch) & (positions < bound)

    def locality(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        order = self._order
        if not self._of_chunks:
            return super().locality(epochs, positions)
        return self._shuffle.rows(epochs, positions, order.localities)[1]

    def _expect_window(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """While a window is read, have the next one read ahead, chunk by chunk: two windows are held, no third.

        Where ranks divide batches by locality, this one reads as much of the next window as of this.
        """
        epoch = int(epochs.max())
        here = positions[epochs == epoch]
        last, order = int(here.max()), self._order
        if self._until[0] == epoch and self._until[1] <= last < self._until[2]:
            return
        numbers = order.localities(self._shuffle.key(epoch), here)
        near = int(numbers.min()), int(numbers.max())
        window, low, rows = order.ahead(self._shuffle.key(epoch), last, near)
        self._until = epoch, last, last + order.chunk_rows
        high = low + rows.size
        told_from, told_to = self._told[2:] if self._told[:2] == (epoch, window) else (low, low)
        new = np.concatenate((rows[: max(0, told_from - low)], rows[max(0, told_to - low) :]))
        self._told = (epoch, window, min(low, told_from), max(high, told_to))
        if new.size:
            self._parent.expect(np.full(new.size, epoch, np.int64), new)

    def chunk_starts(self) -> None:
        return None

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return BlockShuffled(parents[0], self._shuffle)

    def describe(self) -> str:
        return str(self._shuffle)


def _element_bytes(dataset: Dataset) -> int:
    """The bytes of an element; what varies counts as one."""

    def size(spec: ArraySpec) -> int:
        return spec.dtype.itemsize * int(np.prod([length or 1 for length in spec.shape], dtype=np.int64))

    rows = dataset.batching.size if dataset.batching is not None else 1
    return rows * sum(size(spec) for spec in nest.flatten(dataset.row_spec))
