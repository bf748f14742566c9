"""Memory for batches, used again when nobody holds it any more."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from .._util.buffers import BufferPool

__all__ = ["RowBuffers"]

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
