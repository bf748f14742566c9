"""Which rows of a shuffled batch belong together: rows of the same chunks, so that each rank decodes few of them.

A shuffle gives each row a number, its locality: where its chunk stands among those that are mixed. Every rank sorts the
whole batch by it before taking its part. The batch keeps its rows, and their order is the same for any number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["LOCALITIES", "by_locality", "localities"]

LOCALITIES = 1 << 24  # with the number of a batch and of a row, one fits into 64 bits


def localities(places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return the localities of places in [0, count), in their order."""
    return places * LOCALITIES // max(1, count)


def by_locality(numbers: NDArray[np.int64], counts: Sequence[int]) -> NDArray[np.int64]:
    """Return how the rows of successive batches stand when each batch is sorted by locality, stable.

    Args:
        numbers: of the rows of all batches.
        counts: how many rows each batch has.

    Example:
        >>> by_locality(np.array([7, 3, 7, 5, 4]), [3, 2]).tolist()
        [1, 0, 2, 4, 3]
    """
    batch = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    bits = numbers.size.bit_length()
    keys = ((batch * LOCALITIES + numbers) << bits) | np.arange(numbers.size)
    keys.sort()  # all differ; NumPy sorts integers several times as fast as it sorts their places
    return keys & ((1 << bits) - 1)
