"""Reused buffers of batches, the copy of rows into them, and a cache of values read last."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from ..base import loops
from ..base.buffers import BufferPool

__all__ = ["LastRead", "RowBuffers", "take_rows"]

T = TypeVar("T")

KEPT = 6  # batches of a field: those read ahead, the one in use, the one before


@final
class RowBuffers:
    """A source of uninitialised arrays, with one pool for each field. Thread-safe."""

    def __init__(self) -> None:
        self._pools: dict[Hashable, BufferPool] = {}

    def empty(self, field: Hashable, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array like `np.empty`; its memory is reused when no array or view of it is left."""
        pool = self._pools.get(field)
        if pool is None:
            pool = self._pools.setdefault(field, BufferPool(KEPT))
        return pool.empty(math.prod(shape), dtype).reshape(shape)


def take_rows(array: NDArray[Any], rows: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy rows of an array, in range and in any order, into a buffer; consecutive rows in one memory copy."""
    if rows.size == 0 or out.nbytes == 0 or loops.gather(out, array, rows):
        return
    first, last = rows.item(0), rows.item(-1)
    if last - first == rows.size - 1 and (rows.size < 3 or bool((np.diff(rows) == 1).all())):
        out[...] = array[first : last + 1]
    elif array.flags.c_contiguous and array.flags.aligned:
        array.take(rows, axis=0, out=out, mode="clip")  # "raise" would go through a second buffer
    else:
        out[...] = array[rows]  # take would first copy the whole array


@final
class LastRead(Generic[T]):
    """A cache that evicts the least recently used values. Thread-safe.

    Args:
        limit: the bytes to cache; the newest value is cached whatever its size.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[T, int]] = (
            OrderedDict()
        )  # each with its bytes; most recently used last
        self._bytes = 0

    def get(self, key: Hashable) -> T | None:
        """Return a value; None if it is not cached."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: T, nbytes: int) -> None:
        """Cache a value, unless its key is cached, and drop the least recently used ones."""
        with self._lock:
            if key not in self._values:
                self._values[key] = value, nbytes
                self._bytes += nbytes
            while self._bytes > self.limit and len(self._values) > 1:
                self._bytes -= self._values.popitem(last=False)[1][1]
