"""The order of rows as a pure function of (seed, epoch, position), so ranks need no communication.

`permute` is a keyed bijection of [0, n) without a table. An alternating Feistel network permutes the smallest power of
two of at least n; results outside [0, n) are permuted again until they are inside ("cycle walking", less than twice on
average). Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002. On few bits a Feistel network
is visibly unfair between whole permutations, so small n sort hashes instead.

`BlockOrder` permutes chunks, and the rows within each window of chunks. It depends on the chunks' lengths too; per epoch
it stores one integer per chunk, none per row. Rows of one chunk are never more than a window and a chunk apart.

The locality of a row is its chunk's position among the mixed ones. Every rank sorts the whole batch by it before taking
its slice, and so decodes few chunks. The batch has the same rows in the same order for any number of ranks.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base import loops

__all__ = ["DEFAULT_SEED", "LOCALITIES", "BlockOrder", "by_locality", "localities", "permute", "random_words",
           "random_words_at"]  # fmt: skip

DEFAULT_SEED = 0  # the default, the same on all ranks and in a resumed job

_ROUNDS = 12
_SMALL = 4096  # for n up to this, an order is a sorted table of hashes
_WORDS = 512  # random words generated at a time
_BLOCK = 16384  # indices at a time, so that temporaries stay in the CPU's cache
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


_Key = tuple[int, ...]  # seed, epoch and n, then the window if there is one


def _digest(key: _Key, words: int) -> NDArray[np.uint64]:
    """Return words that depend on a key only. From hashlib, since NumPy does not promise stable streams."""
    text = ":".join(["mpistrat.order/1", *map(str, key)])
    return np.frombuffer(hashlib.shake_128(text.encode()).digest(8 * words), "<u8").astype(np.uint64)


@functools.lru_cache(maxsize=64)
def _keys(key: _Key) -> NDArray[np.uint64]:
    return _digest(key, _ROUNDS)


@functools.lru_cache(maxsize=16)
def _small_order(key: _Key, n: int) -> NDArray[np.int64]:
    """Sort independent hashes: every permutation is equally likely."""
    return np.argsort(_digest(key, n), kind="stable").astype(np.int64)


def _mix(half: NDArray[np.uint64], key: np.uint64, bits: int) -> NDArray[np.uint64]:
    """Return a hash of one half under a round's key, `bits` wide: the product's high bits, which are mixed best."""
    mixed = half + key
    mixed *= _MIX_1
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX_2
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIX_1
    mixed >>= np.uint64(64 - bits)
    return mixed


def _encrypt(values: NDArray[np.uint64], bits: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Run the Feistel network once over [0, 2**bits)."""
    low_bits = (bits + 1) // 2
    high_bits = bits - low_bits
    low = values & np.uint64((1 << low_bits) - 1)
    high = values >> np.uint64(low_bits)
    for number, key in enumerate(keys):
        if number % 2:
            high ^= _mix(low, key, high_bits)
        else:
            low ^= _mix(high, key, low_bits)
    high <<= np.uint64(low_bits)
    high |= low
    return high


def _permute_block(positions: NDArray[np.int64], n: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    in_place = positions.copy()
    if loops.permute(in_place, keys, n):
        return in_place
    bits = (n - 1).bit_length()
    limit = np.uint64(n)
    result = _encrypt(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(result >= limit)
    while outside.size:
        walked = _encrypt(result[outside], bits, keys)
        result[outside] = walked
        outside = outside[walked >= limit]
    return result.astype(np.int64)


@functools.lru_cache(maxsize=8)
def _aligned_block(key: _Key, n: int, block: int) -> NDArray[np.int64]:
    positions = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, n))
    return _permute_block(positions, n, _keys(key))


def permute(
    positions: NDArray[np.int64], n: int, *, seed: int, epoch: int, window: int | None = None
) -> NDArray[np.int64]:
    """Return the sample, of n, at each position of an epoch's order.

    Args:
        positions: int64 indices in [0, n), any number of them in any order.
        n: the number of samples.
        seed, epoch: any integers; each pair gives another order.
        window: any integer, for several orders in an epoch; each value gives another order.

    Returns:
        int64 sample indices of the same shape; over all positions each sample appears once.

    Raises:
        IndexError: for a position outside [0, n).

    Example:
        >>> sorted(permute(np.arange(5), 5, seed=1, epoch=0).tolist())
        [0, 1, 2, 3, 4]
    """
    flat = np.asarray(positions, np.int64).reshape(-1)
    if flat.size == 0:
        return np.empty(np.shape(positions), np.int64)
    low, high = int(flat.min()), int(flat.max())
    if low < 0 or high >= n:
        raise IndexError(f"permute: positions: expected integers in [0, {n}), got {low} to {high}")
    key = (seed, epoch, n) if window is None else (seed, epoch, n, window)
    if n <= _SMALL:
        return _small_order(key, n)[flat].reshape(np.shape(positions))
    first, last = low // _BLOCK, high // _BLOCK
    if last - first <= 1:  # successive batches: compute their indices in blocks
        blocks = [_aligned_block(key, n, block) for block in range(first, last + 1)]
        table = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        return table[flat - first * _BLOCK].reshape(np.shape(positions))
    keys = _keys(key)
    result = np.empty(flat.size, np.int64)
    for start in range(0, flat.size, _BLOCK):
        result[start : start + _BLOCK] = _permute_block(flat[start : start + _BLOCK], n, keys)
    return result.reshape(np.shape(positions))


def random_words(key: _Key) -> Iterator[int]:
    """Yield 64-bit words without end; they depend on the key only.

    Example:
        >>> list(itertools.islice(random_words((1, 0)), 2)) == list(itertools.islice(random_words((1, 0)), 2))
        True
    """
    for block in itertools.count():
        yield from _random_block(key, block).tolist()


@functools.lru_cache(maxsize=64)
def _random_block(key: _Key, block: int) -> NDArray[np.uint64]:
    text = ":".join(["mpistrat.words/1", *map(str, key), str(block)])
    return np.frombuffer(hashlib.shake_128(text.encode()).digest(8 * _WORDS), "<u8").astype(np.uint64)


def random_words_at(key: _Key, positions: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the words of `random_words` at given positions, counted from 0.

    Example:
        >>> first = list(itertools.islice(random_words((1, 0)), 600))
        >>> random_words_at((1, 0), np.array([599, 3])).tolist() == [first[599], first[3]]
        True
    """
    words = np.empty(positions.shape, np.uint64)
    blocks, inside = np.divmod(positions, _WORDS)
    for block in np.unique(blocks).tolist():
        here = blocks == block
        words[here] = _random_block(key, block)[inside[here]]
    return words


LOCALITIES = 1 << 24  # locality, batch number and row number together fit into 64 bits


def localities(places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the localities of positions in [0, count), in their order."""
    return places * LOCALITIES // max(1, count)


def by_locality(numbers: NDArray[np.int64], counts: Sequence[int]) -> NDArray[np.int64]:
    """Return the order of the rows of successive batches when each batch is sorted by locality (stable).

    Example:
        >>> by_locality(np.array([7, 3, 7, 5, 4]), [3, 2]).tolist()
        [1, 0, 2, 4, 3]
    """
    batch = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    bits = numbers.size.bit_length()
    keys = ((batch * LOCALITIES + numbers) << bits) | np.arange(numbers.size)
    keys.sort()  # all differ; NumPy's sort of integers is several times as fast as argsort
    return keys & ((1 << bits) - 1)


_EPOCHS_HELD = 4  # the current and next epoch of two iterators
_BLOCKS_HELD = 8


class _Epoch(NamedTuple):
    """One epoch's order of chunks."""

    chunks: NDArray[np.int64]  # the chunk at each position
    starts: NDArray[np.int64]  # the position of each chunk's first row, then the number of rows
    windows: NDArray[np.int64]  # the first chunk of each window, then the number of chunks
    window_starts: NDArray[np.int64]  # the position of each window's first row, then the number of rows
    bounds: list[int]  # window_starts as a list

    def window(self, position: int) -> int:
        return bisect_right(self.bounds, position) - 1


class _Mixed(NamedTuple):
    """Rows of a window and their localities."""

    rows: NDArray[np.int64]
    localities: NDArray[np.int64]


class BlockOrder:
    """The order of rows in the epochs of a block shuffle.

    Args:
        chunk_starts: the first row of each chunk, then the number of rows.
        window_rows: the rows that are mixed. A window consists of whole chunks: a chunk is in the window of its first
            row, so windows differ by up to a chunk and have at least one.
        seed: any integer.

    Attributes:
        chunk_rows: the average number of rows of a chunk.

    Example:
        >>> order = BlockOrder(np.array([0, 4, 8, 10]), window_rows=5, seed=1)
        >>> sorted(order.rows(0, np.arange(10)).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(self, chunk_starts: NDArray[np.int64], window_rows: int, seed: int) -> None:
        starts = np.asarray(chunk_starts, np.int64)
        keep = np.append(np.diff(starts) > 0, True)  # drop chunks without rows
        self._chunk_starts = starts[keep]
        self.chunk_rows = max(1, len(self) // max(1, len(self._chunk_starts) - 1))
        self._window_rows = window_rows
        self._seed = seed
        # Recent results. Threads replace the whole dict, and lose at most another thread's latest one.
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
        """Return the rows at given positions in [0, len), in any order.

        Raises:
            IndexError: for a position outside.
        """
        return self._mixed(epoch, positions).rows

    def localities(self, epoch: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a number in [0, LOCALITIES) for each position: its row's place in the window before mixing.

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
        """Return the rows at positions of a window, the lowest and highest of which are given."""
        start = self._epoch(epoch).bounds[window]
        first, last = (low - start) // _BLOCK, (high - start) // _BLOCK
        if last - first > 1:
            return self._mix(epoch, window, positions - start)
        # Successive batches: compute their rows in blocks.
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
        """Return the end position of a window; that of the last window for later ones."""
        ends = self._epoch(epoch).bounds
        return ends[min(window + 1, len(ends) - 1)]

    def ahead(
        self, epoch: int, position: int, near: tuple[int, int] = (0, LOCALITIES - 1)
    ) -> tuple[int, int, NDArray[np.int64]]:
        """Return the chunks of the next window to read while the window of a position is read.

        Their number grows with the position, to spread reading ahead over the window.

        Args:
            epoch, position: the epoch and position being read.
            near: the lowest and the highest locality of the rows being read; such rows of the next window will be read too.

        Returns:
            The window, the index of the first of these chunks in the epoch's order, and the chunks' first rows; none in
            the last window.
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
