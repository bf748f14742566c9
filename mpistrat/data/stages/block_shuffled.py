"""Elements in the order of a block shuffle: chunks in a random order, and rows in a random order inside a window."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import nest
from ..block_order import BlockOrder
from ..dataset import Addresses, Dataset
from ..spec import ArraySpec
from .stage import Stage

__all__ = ["PSEUDO_CHUNK", "WINDOW_BYTES", "BlockShuffle", "BlockShuffled"]

WINDOW_BYTES = 1 << 26  # rows that are mixed, where nothing else is said
PSEUDO_CHUNK = 64  # rows that stay together in a window where the data has no chunks


@dataclass(frozen=True)
class BlockShuffle:
    """How to shuffle.

    Attributes:
        seed: of the order.
        reshuffle_each_epoch: whether every epoch has an order of its own.
        window_rows: elements that are mixed; None for as many as `window_bytes` hold.
        window_bytes: bytes that are mixed.
        why: why in blocks.
    """

    seed: int
    reshuffle_each_epoch: bool
    window_rows: int | None
    window_bytes: int
    why: str


class BlockShuffled(Stage):
    """Elements in the order of a block shuffle."""

    def __init__(self, parent: Dataset, shuffle: BlockShuffle) -> None:
        super().__init__(parent)
        self._shuffle = shuffle
        self._made: BlockOrder | None = None
        self._lock = threading.Lock()
        self._in_turn = False  # whether somebody tells what is read next: then the windows come in turn
        self._told = (-1, -1, 0)  # epoch, window, and how many chunks of the next one the source has heard of

    @property
    def _order(self) -> BlockOrder:
        with self._lock:
            if self._made is None:
                rows = self._parent.cardinality()
                starts = self._parent.chunk_starts() if self.batching is None else None
                if starts is None:
                    starts = np.append(np.arange(0, rows, PSEUDO_CHUNK), rows)
                window = self._shuffle.window_rows
                if window is None:
                    window = max(1, self._shuffle.window_bytes // max(1, _element_bytes(self._parent)))
                self._parent.keep(window)
                self._made = BlockOrder(starts, window, self._shuffle.seed)
            return self._made

    def _key(self, epoch: int) -> int:
        return epoch if self._shuffle.reshuffle_each_epoch else 0

    def _source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Addresses:
        if epochs.size == 0 or epochs.min() == epochs.max():
            return epochs, self._order.rows(self._key(int(epochs[0])) if epochs.size else 0, positions)
        rows = np.empty_like(positions)
        for epoch in np.unique(epochs):
            own = epochs == epoch
            rows[own] = self._order.rows(self._key(int(epoch)), positions[own])
        return epochs, rows

    def locate(self, epoch: int, position: int) -> Addresses:
        here = np.array([epoch], np.int64), np.array([position], np.int64)
        if self.batching is None:
            return here
        epochs, positions = self._source(*here)
        return self._parent.locate(int(epochs[0]), int(positions[0]))

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        if self.batching is not None:
            return self._parent.gather(epochs, positions)
        rows = self._parent.gather(*self._source(epochs, positions))
        if self._in_turn and positions.size:
            self._expect_window(int(epochs[-1]), int(positions[-1]))
        return rows

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        if self.batching is None:
            self._in_turn = True
            near = self._near(epochs, positions)
            if not near.any():
                return
            epochs, positions = self._source(epochs[near], positions[near])
        self._parent.expect(epochs, positions)

    def _near(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which positions lie in the window that is read or in the next: for more there is no room."""
        epoch, window, _ = self._told
        bound = self._order.window_end(self._key(epoch), window + 1) if epoch >= 0 else 0
        return (epochs == epoch) & (positions < bound)

    def _expect_window(self, epoch: int, position: int) -> None:
        """While a window is read, have the next one read ahead, chunk by chunk: two windows are held, no third."""
        window, rows = self._order.ahead(self._key(epoch), position)
        known = self._told[2] if self._told[:2] == (epoch, window) else 0
        self._told = (epoch, window, max(known, rows.size))
        if rows.size > known:
            self._parent.expect(np.full(rows.size - known, epoch, np.int64), rows[known:])

    def chunk_starts(self) -> None:
        return None

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return BlockShuffled(parents[0], self._shuffle)

    def describe(self) -> str:
        how = self._shuffle
        window = f"{how.window_bytes:,} bytes" if how.window_rows is None else f"{how.window_rows:,} elements"
        return (
            f"shuffle(seed={how.seed}, reshuffle_each_epoch={how.reshuffle_each_epoch}):"
            f" in blocks, mixed in windows of {window}: {how.why}"
        )


def _element_bytes(dataset: Dataset) -> int:
    """The bytes of an element; what varies counts as one."""

    def size(spec: ArraySpec) -> int:
        return spec.dtype.itemsize * int(np.prod([length or 1 for length in spec.shape], dtype=np.int64))

    rows = dataset.batching.size if dataset.batching is not None else 1
    return rows * sum(size(spec) for spec in nest.flatten(dataset.row_spec))
