"""The order of a block shuffle: chunks in a random order, and the rows of a window of chunks in a random order.

A row's place depends on (seed, epoch, position) and the lengths of the chunks, so no rank need ask another. Per epoch one
integer a chunk is held, none a row. Mixing reaches as far as a window: rows of one chunk never end up more than a window
and a chunk apart.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .locality import LOCALITIES, localities
from .order import permute

__all__ = ["BlockOrder"]

_EPOCHS_HELD = 4  # an epoch and the next, of two iterators
_BLOCKS_HELD = 8
_BLOCK = 16384  # rows made at a time


class _Epoch(NamedTuple):
    """One epoch's order of chunks."""

    chunks: NDArray[np.int64]  # which chunk stands where
    starts: NDArray[np.int64]  # the position of each one's first row, and the number of rows
    windows: NDArray[np.int64]  # at which chunk each window begins, and the number of chunks
    window_starts: NDArray[np.int64]  # the position of each window's first row, and the number of rows
    bounds: list[int]  # the same

    def window(self, position: int) -> int:
        """The window that a position lies in."""
        return bisect_right(self.bounds, position) - 1


class _Mixed(NamedTuple):
    """What stands at some places of a window."""

    rows: NDArray[np.int64]
    localities: NDArray[np.int64]


class BlockOrder:
    """Which row stands at each position of an epoch's block shuffle.

    Args:
        chunk_starts: the row at which each chunk begins, then the number of rows.
        window_rows: how many rows are mixed. A window is made of whole chunks: a chunk belongs to the window that its
            first row falls into, so windows differ by up to a chunk; one is at least a chunk.
        seed: any integer.

    Attributes:
        chunk_rows: how many rows a chunk has on average.

    Example:
        >>> order = BlockOrder(np.array([0, 4, 8, 10]), window_rows=5, seed=1)
        >>> sorted(order.rows(0, np.arange(10)).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, chunk_starts: NDArray[np.int64], window_rows: int, seed: int) -> None:
        starts = np.asarray(chunk_starts, np.int64)
        keep = np.append(np.diff(starts) > 0, True)  # a chunk without rows has no place
        self._chunk_starts = starts[keep]
        self.chunk_rows = max(1, len(self) // max(1, len(self._chunk_starts) - 1))
        self._window_rows = window_rows
        self._seed = seed
        # What was made last. Threads replace the whole dict, and lose at most what another one has just made.
        self._epochs: dict[int, _Epoch] = {}
        self._blocks: dict[tuple[int, int, int], _Mixed] = {}

    def __len__(self) -> int:
        return int(self._chunk_starts[-1])

    def _epoch(self, epoch: int) -> _Epoch:
        found = self._epochs.get(epoch)
        if found is None:
            found = self._make_epoch(epoch)
            self._epochs = dict([*self._epochs.items(), (epoch, found)][-_EPOCHS_HELD:])
        return found

    def _make_epoch(self, epoch: int) -> _Epoch:
        count = len(self._chunk_starts) - 1
        chunks = permute(np.arange(count), count, seed=self._seed, epoch=epoch)
        starts = np.concatenate(([0], np.cumsum(np.diff(self._chunk_starts)[chunks])))
        window_of = starts[:-1] // self._window_rows
        windows = np.concatenate(([0], np.flatnonzero(np.diff(window_of)) + 1, [count])) if count else np.zeros(1, int)
        return _Epoch(chunks, starts, windows.astype(np.int64), starts[windows], starts[windows].tolist())

    def rows(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the rows at some positions in [0, len), in any order.

        Raises:
            IndexError: for a position outside.
        """
        return self._mixed(epoch, positions).rows

    def localities(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a number in [0, LOCALITIES) for each: where its row stood in its window, unmixed.

        Raises:
            IndexError: for a position outside.
        """
        return self._mixed(epoch, positions).localities

    def _mixed(self, epoch: int, positions: NDArray[np.int64]) -> _Mixed:
        if not positions.size:
            return _Mixed(np.empty(0, np.int64), np.empty(0, np.int64))
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= len(self):
            raise IndexError(f"BlockOrder.rows: positions: expected integers in [0, {len(self)})")
        order = self._epoch(epoch)
        window = order.window(low)
        if high < order.bounds[window + 1]:
            return self._in_window(epoch, window, positions, low, high)
        windows = np.searchsorted(order.window_starts, positions, side="right") - 1
        mixed = _Mixed(np.empty_like(positions), np.empty_like(positions))
        for window in np.unique(windows).tolist():
            own = np.flatnonzero(windows == window)
            inside = positions[own]
            found = self._in_window(epoch, window, inside, int(inside.min()), int(inside.max()))
            mixed.rows[own], mixed.localities[own] = found
        return mixed

    def _in_window(self, epoch: int, window: int, positions: NDArray[np.int64], low: int, high: int) -> _Mixed:
        """What stands at some positions of a window, from the lowest to the highest of them."""
        start = self._epoch(epoch).bounds[window]
        first, last = (low - start) // _BLOCK, (high - start) // _BLOCK
        if last - first > 1:
            return self._mix(epoch, window, positions - start)
        # Successive batches: their rows are made many at a time.
        at = positions - (start + first * _BLOCK)
        block = self._block(epoch, window, first)
        if first == last:
            return _Mixed(block.rows[at], block.localities[at])
        both = zip(block, self._block(epoch, window, last), strict=True)
        return _Mixed(*(np.concatenate(tables)[at] for tables in both))

    def _block(self, epoch: int, window: int, block: int) -> _Mixed:
        key = (epoch, window, block)
        found = self._blocks.get(key)
        if found is None:
            start, stop = self._epoch(epoch).bounds[window : window + 2]
            offsets = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, stop - start))
            found = self._mix(epoch, window, offsets)
            self._blocks = dict([*self._blocks.items(), (key, found)][-_BLOCKS_HELD:])
        return found

    def _mix(self, epoch: int, window: int, offsets: NDArray[np.int64]) -> _Mixed:
        order = self._epoch(epoch)
        start, stop = order.bounds[window : window + 2]
        first, last = (int(bound) for bound in order.windows[window : window + 2])
        inside = permute(offsets, stop - start, seed=self._seed, epoch=epoch, window=window)
        places = start + inside
        at = first + np.searchsorted(order.starts[first:last], places, side="right") - 1
        rows = self._chunk_starts[order.chunks[at]] + (places - order.starts[at])
        return _Mixed(rows, localities(inside, stop - start))

    def window_end(self, epoch: int, window: int) -> int:
        """Return the position behind a window; behind the last one for those that come after it."""
        ends = self._epoch(epoch).bounds
        return ends[min(window + 1, len(ends) - 1)]

    def ahead(
        self, epoch: int, position: int, near: tuple[int, int] = (0, LOCALITIES - 1)
    ) -> tuple[int, int, NDArray[np.int64]]:
        """Return what to read while the window of a position is read: chunks of the next window.

        Their number grows with the position, so that reading ahead is spread over the window.

        Args:
            epoch, position: what is read.
            near: the lowest and the highest locality of what is read: such rows of the next window will be read, too.

        Returns:
            The window, at which place in the epoch's order those chunks begin, and their first rows; none in the last
            window.
        """
        order = self._epoch(epoch)
        window = order.window(position)
        if window + 2 >= len(order.windows):
            return window, 0, np.empty(0, np.int64)
        start, stop = order.bounds[window : window + 2]
        first, last = (int(bound) for bound in order.windows[window + 1 : window + 3])
        low, high = (first + number * (last - first) // LOCALITIES for number in near)
        count = -(-(position + 1 - start) * (high + 1 - low) // (stop - start))
        return window, low, self._chunk_starts[order.chunks[low : low + count]]
