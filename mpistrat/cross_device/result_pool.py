"""Memory for results: large arrays that nobody holds any more are used again, which saves the system's page faults."""

from __future__ import annotations

import weakref
from typing import final

import numpy as np

__all__ = ["ResultPool"]

SMALLEST = 1 << 18  # bytes; malloc keeps smaller pieces itself
LARGEST = 1 << 28
KEPT = 4


@final
class ResultPool:
    """Gives out arrays like `np.empty`, and keeps the memory of the last few large ones.

    Memory is given out again only when no array and no view on it is left. A fresh array of 16 MB costs about as much in
    page faults as the sum that is written into it.
    """

    def __init__(self) -> None:
        # Each memory with the array that was made of it last: that array lives as long as any view of it does.
        self._buffers: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def empty(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Return an uninitialised flat array. Not collective.

        Example:
            >>> ResultPool().empty(3, np.dtype(np.float32)).shape
            (3,)
        """
        nbytes = size * dtype.itemsize
        if not SMALLEST <= nbytes <= LARGEST:
            return np.empty(size, dtype)
        free = (i for i, (memory, root) in enumerate(self._buffers) if memory.nbytes == nbytes and root() is None)
        index = next(free, None)
        memory = np.empty(nbytes, np.uint8) if index is None else self._buffers.pop(index)[0]
        root = np.frombuffer(memory.data, np.uint8)  # over a buffer: views of it refer to it, not to `memory`
        self._buffers.append((memory, weakref.ref(root)))
        del self._buffers[:-KEPT]
        return root.view(dtype)
