"""Parts of batches: which rows of each are one worker's, by arithmetic on its own rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["Part", "rows_of_parts"]

Part = Callable[[int], tuple[int, int]]  # which rows of a batch of so many are ours


def rows_of_parts(firsts: NDArray[np.int64], counts: Sequence[int], part: Part) -> tuple[NDArray[np.int64], list[int]]:
    """Return the numbers of the rows that are ours, and behind which of them our part of each batch ends.

    Args:
        firsts: the number of each batch's first row.
        counts: how many rows each has.
        part: which of so many are ours.

    Example:
        >>> rows, ends = rows_of_parts(np.array([10, 14]), [4, 2], lambda count: (count // 2, count))
        >>> rows.tolist(), ends
        ([12, 13, 15], [2, 3])
    """
    ranges = {count: part(count) for count in set(counts)}
    if len(ranges) == 1:
        low, high = ranges[counts[0]]
        size, number = high - low, len(counts)
        return (firsts[:, None] + np.arange(low, high)).reshape(-1), [size * n for n in range(1, number + 1)]
    lows, highs = np.array([ranges[count] for count in counts], np.int64).T
    sizes = highs - lows
    ends = np.cumsum(sizes)
    return np.arange(ends[-1]) + np.repeat(firsts + lows - (ends - sizes), sizes), ends.tolist()
