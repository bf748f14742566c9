"""Arithmetic of ranges: n things divided over p owners in contiguous blocks of nearly equal size; ranges cut and merged."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

__all__ = [
    "ALIGNMENT",
    "aligned_block",
    "aligned_bounds",
    "block",
    "blocks",
    "bounds",
    "cut",
    "inside",
    "merge",
    "spans_within",
    "without",
]

T = TypeVar("T")
ALIGNMENT = 16  # elements, of borders between two ranks' ranges, so that no two ranks write one cache line


def block(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return the half-open range of `length` things for owner `index` of `parts`.

    The first `length % parts` owners get one more.

    Example:
        >>> [block(13, 5, i) for i in range(5)]
        [(0, 3), (3, 6), (6, 9), (9, 11), (11, 13)]
    """
    size, extra = divmod(length, parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Return the ranges of all owners, in order.

    Example:
        >>> bounds(4, 3)
        [(0, 2), (2, 3), (3, 4)]
    """
    return [block(length, parts, index) for index in range(parts)]


def aligned_block(length: int, parts: int, index: int, alignment: int = ALIGNMENT) -> tuple[int, int]:
    """Return the range of one owner; inner borders are multiples of `alignment`.

    Example:
        >>> aligned_block(100, 3, 1, 16)
        (48, 80)
    """
    low, high = block(-(-length // alignment), parts, index)
    return min(low * alignment, length), min(high * alignment, length)


def aligned_bounds(length: int, parts: int, alignment: int = ALIGNMENT) -> list[tuple[int, int]]:
    """Return ranges of all owners whose inner borders are multiples of `alignment`.

    Example:
        >>> aligned_bounds(100, 3, 16)
        [(0, 48), (48, 80), (80, 100)]
    """
    return [aligned_block(length, parts, index, alignment) for index in range(parts)]


def blocks(ranges: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return the ranges cut into blocks of at most `size`.

    Example:
        >>> blocks([(0, 5), (8, 9)], 3)
        [(0, 3), (3, 5), (8, 9)]
    """
    return [(begin, min(begin + size, high)) for low, high in ranges for begin in range(low, high, size)]


def merge(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges in order, merging those that touch.

    Example:
        >>> merge([(8, 9), (0, 3), (3, 5)])
        [(0, 5), (8, 9)]
    """
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return merged


def spans_within(spans: Sequence[tuple[int, Any, T]], low: int, high: int) -> Iterator[tuple[int, int, T]]:
    """Yield the parts of sorted spans (begin, end, value) inside [low, high), relative to `low`.

    Example:
        >>> list(spans_within([(0, 4, "a"), (4, 9, "b")], 2, 6))
        [(0, 2, 'a'), (2, 4, 'b')]
    """
    first = max(0, bisect_right(spans, low, key=lambda span: span[0]) - 1)
    for begin, end, what in spans[first:]:
        if begin >= high:
            break
        if end > low:
            yield max(begin - low, 0), min(int(end), high) - low, what


def inside(ranges: Sequence[tuple[int, int]], low: int, high: int) -> list[tuple[int, int]]:
    """Return the parts of ranges inside [low, high).

    Example:
        >>> inside([(0, 3), (4, 9)], 2, 6)
        [(2, 3), (4, 6)]
    """
    parts = ((max(low, start), min(high, stop)) for start, stop in ranges)
    return [(start, stop) for start, stop in parts if start < stop]


def without(ranges: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the parts of ranges outside `others`, which are in order and do not overlap.

    Example:
        >>> without([(0, 5), (8, 9)], [(1, 2), (4, 9)])
        [(0, 1), (2, 4)]
    """
    left = []
    for low, high in ranges:
        for start, stop in inside(others, low, high):
            if low < start:
                left.append((low, start))
            low = stop
        if low < high:
            left.append((low, high))
    return left


def cut(ranges: Sequence[tuple[int, int]], first: int, last: int) -> list[tuple[int, int]]:
    """Return the ranges of elements [first, last), counted through all of `ranges`.

    Example:
        >>> cut([(0, 5), (8, 12)], 3, 7)
        [(3, 5), (8, 10)]
    """
    parts, before = [], 0
    for low, high in ranges:
        parts.extend(inside([(low, high)], low + first - before, low + last - before))
        before += high - low
    return parts
