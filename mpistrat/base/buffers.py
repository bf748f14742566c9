"""Buffer pool for results: unreferenced memory of large arrays is reused, which saves page faults."""

from __future__ import annotations

import threading
import weakref
from typing import Any, final

import numpy as np

__all__ = ["BufferPool"]

ALIGNMENT = 64  # bytes of a cache line: rows are copied about 5 % faster to its beginning than to its middle
SMALLEST = 1 << 18  # bytes; malloc caches smaller blocks itself
LARGEST = 1 << 28


def _aligned(nbytes: int) -> np.ndarray:
    """Return uninitialised bytes."""
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + nbytes]


@final
class BufferPool:
    """A pool of arrays like those of `np.empty`, which caches the memory of the last few large ones.

    Memory is reused only when no array or view of it is left. A new array of 16 MB costs about as much in page faults as the sum
    that is written into it. Threads may share a pool.
    """

    def __init__(self, kept: int = 4) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        # Each memory with the last array made of it, which lives as long as any of its views.
        self._buffers: list[tuple[np.ndarray, weakref.ref[np.ndarray]]] = []

    def empty(self, size: int, dtype: np.dtype[Any]) -> np.ndarray:
        """Return an uninitialised flat array.

        Example:
            >>> BufferPool().empty(3, np.dtype(np.float32)).shape
            (3,)
        """
        nbytes = size * dtype.itemsize
        if not SMALLEST <= nbytes <= LARGEST or dtype.hasobject:
            return np.empty(size, dtype)
        with self._lock:
            memory = self._take(nbytes)
            if memory is None:
                memory = _aligned(nbytes)
            root = np.frombuffer(memory.data, np.uint8)  # over a buffer: views of it refer to it, not to `memory`
            self._buffers.append((memory, weakref.ref(root)))
            del self._buffers[: -self._kept]
        return root.view(dtype)

    def _take(self, nbytes: int) -> np.ndarray | None:
        """Return the free memory of that size that was used last: it may still be in the caches."""
        for index in reversed(range(len(self._buffers))):
            memory, root = self._buffers[index]
            if memory.nbytes == nbytes and root() is None:
                del self._buffers[index]
                return memory
        return None
