"""Memory for batches, used again when nobody holds it any more; and the copy of rows into it."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .._util.buffers import BufferPool

__all__ = ["RowBuffers", "take_rows"]

KEPT = 6  # batches of a field: those read ahead, the one in use, the one before


@final
class RowBuffers:
    """Gives out uninitialised arrays, from one pool for each field. Threads may share it."""

    def __init__(self) -> None:
        self._pools: dict[Hashable, BufferPool] = {}

    def empty(self, field: Hashable, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an array like `np.empty`; its memory is used again once no array or view of it is left."""
        pool = self._pools.get(field)
        if pool is None:
            pool = self._pools.setdefault(field, BufferPool(KEPT))
        return pool.empty(math.prod(shape), dtype).reshape(shape)


def take_rows(array: NDArray[Any], rows: NDArray[np.int64], out: NDArray[Any]) -> None:
    """Copy rows of an array, in range and in any order, into a buffer: one memory copy where they are consecutive."""
    if rows.size == 0 or out.nbytes == 0:
        return
    first, last = rows.item(0), rows.item(-1)
    if last - first == rows.size - 1 and (rows.size < 3 or bool((np.diff(rows) == 1).all())):
        out[...] = array[first : last + 1]
    elif array.flags.c_contiguous and array.flags.aligned:
        array.take(rows, axis=0, out=out, mode="clip")  # "raise" would go through a second buffer
    else:
        out[...] = array[rows]  # take would first copy the whole array
