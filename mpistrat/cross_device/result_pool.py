"""Memory for results: large arrays that nobody holds any more are used again, which saves the system's page faults."""

from __future__ import annotations

import sys
from typing import final

import numpy as np

__all__ = ["ResultPool"]

SMALLEST = 1 << 18  # bytes; malloc keeps smaller pieces itself
LARGEST = 1 << 28
KEPT = 4

# References to a buffer while `empty` looks at it that are not a user's: the list, the loop variable, getrefcount.
_OWN_REFERENCES = 3


@final
class ResultPool:
    """Gives out arrays like `np.empty`, and keeps the memory of the last few large ones.

    Memory is given out again only when no array and no view on it is left. A fresh array of 16 MB costs about as much in
    page faults as the sum that is written into it.
    """

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []

    def empty(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised flat array. Not collective.

        Example:
            >>> ResultPool().empty(3, np.dtype(np.float32)).shape
            (3,)
        """
        nbytes = size * dtype.itemsize
        if not SMALLEST <= nbytes <= LARGEST:
            return np.empty(size, dtype)
        for buffer in self._buffers:
            if buffer.nbytes == nbytes and sys.getrefcount(buffer) <= _OWN_REFERENCES:
                return buffer.view(dtype)
        buffer = np.empty(nbytes, np.uint8)
        self._buffers.append(buffer)
        del self._buffers[:-KEPT]
        return buffer.view(dtype)
