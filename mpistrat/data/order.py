"""The order of samples as a pure function of (seed, epoch, index): a keyed bijection of [0, n) without a table.

An alternating Feistel network permutes the smallest power of two that holds n; results outside [0, n) are permuted
again until they fall inside ("cycle walking", less than twice on average), which leaves a bijection of [0, n).
Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002.
A Feistel network on a few bits is visibly unfair between whole permutations, so small n sort hashes instead.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["DEFAULT_SEED", "permute", "random_words"]

DEFAULT_SEED = 0  # of orders for which none is named: the same on all ranks, and in a job that goes on after an end

_ROUNDS = 12
_SMALL = 4096  # up to here an order is a sorted table of hashes
_WORDS = 512  # random words made at a time
_BLOCK = 16384  # indices at a time: every temporary stays in the cache
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


_Key = tuple[int, ...]  # seed, epoch and n, then the window if there is one


def _digest(key: _Key, words: int) -> NDArray[np.uint64]:
    """Words that depend on a key only. hashlib, because NumPy does not promise that its streams stay the same."""
    text = ":".join(["mpistrat.order/1", *map(str, key)])
    return np.frombuffer(hashlib.shake_128(text.encode()).digest(8 * words), "<u8").astype(np.uint64)


@functools.lru_cache(maxsize=64)
def _keys(key: _Key) -> tuple[np.uint64, ...]:
    """One 64-bit key a round."""
    return tuple(_digest(key, _ROUNDS))


@functools.lru_cache(maxsize=16)
def _small_order(key: _Key, n: int) -> NDArray[np.int64]:
    """Sorting by independent hashes: every permutation is equally likely."""
    return np.argsort(_digest(key, n), kind="stable").astype(np.int64)


def _mix(half: NDArray[np.uint64], key: np.uint64, bits: int) -> NDArray[np.uint64]:
    """A hash of one half under a round's key, `bits` wide: the high bits of a product are its best mixed ones."""
    mixed = half + key
    mixed *= _MIX_1
    mixed ^= mixed >> np.uint64(29)
    mixed *= _MIX_2
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIX_1
    mixed >>= np.uint64(64 - bits)
    return mixed


def _encrypt(values: NDArray[np.uint64], bits: int, keys: tuple[np.uint64, ...]) -> NDArray[np.uint64]:
    """One pass of the Feistel network over [0, 2**bits)."""
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


def _permute_block(positions: NDArray[np.int64], n: int, keys: tuple[np.uint64, ...]) -> NDArray[np.int64]:
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
    """Return which of n samples stands at each position of an epoch's order.

    Args:
        positions: int64 indices in [0, n), any number of them in any order.
        n: the number of samples.
        seed, epoch: any integers; each pair gives another order.
        window: any integer, where an epoch has several orders; each has its own.

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
    if last - first <= 1:  # successive batches: their indices are made many at a time
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
        text = ":".join(["mpistrat.words/1", *map(str, key), str(block)])
        yield from np.frombuffer(hashlib.shake_128(text.encode()).digest(8 * _WORDS), "<u8").tolist()
