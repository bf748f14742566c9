"""Block-split arithmetic: n things over p owners in contiguous blocks whose sizes differ by at most one."""

from __future__ import annotations

__all__ = ["aligned_bounds", "block", "bounds"]


def block(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return the half-open range that owner `index` of `parts` gets of `length` things. Not collective.

    The first `length % parts` owners get one more.

    Example:
        >>> [block(13, 5, i) for i in range(5)]
        [(0, 3), (3, 6), (6, 9), (9, 11), (11, 13)]
    """
    size, extra = divmod(length, parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def bounds(length: int, parts: int) -> list[tuple[int, int]]:
    """Return the ranges of all owners, in order. Not collective.

    Example:
        >>> bounds(4, 3)
        [(0, 2), (2, 3), (3, 4)]
    """
    return [block(length, parts, index) for index in range(parts)]


def aligned_bounds(length: int, parts: int, alignment: int) -> list[tuple[int, int]]:
    """Return ranges of all owners whose inner borders are multiples of `alignment`. Not collective.

    Example:
        >>> aligned_bounds(100, 3, 16)
        [(0, 48), (48, 80), (80, 100)]
    """
    units = -(-length // alignment)
    return [(min(low * alignment, length), min(high * alignment, length)) for low, high in bounds(units, parts)]
