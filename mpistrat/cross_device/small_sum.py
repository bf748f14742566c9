"""The sum of small arrays on one node: every rank copies its own in, passes one barrier, and sums all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from ..comm.process_group import ProcessGroup
from .arithmetic import Arithmetic, add_all, finish

__all__ = ["SmallSum"]

SMALL_BYTES = 1 << 15  # above, it pays that each rank sums a slice only
WIDEST = 8  # bytes per byte of input that accumulation may take: the mean of int8 is summed in float64
_CACHED_VIEWS = 256


@final
class SmallSum:
    """Sums arrays of up to `limit` bytes over the ranks of a node by way of the node's staging memory.

    One barrier is enough: the staging memory of consecutive barriers alternates between two halves, so nobody writes
    where somebody may still read.
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Not collective."""
        self._node = group.node
        self._views: dict[tuple[int, np.dtype, int], tuple[Any, list[np.ndarray]]] = {}
        self.limit = min(SMALL_BYTES, self._node.staging()[0].nbytes // WIDEST)

    def sum(self, parts: Sequence[np.ndarray], how: Arithmetic, call: Any) -> np.ndarray:
        """Return the reduction, a new array. Collective on the node.

        Args:
            parts: the local replicas' flat arrays.
            how: see `arithmetic`.
            call: what the barrier carries and compares.
        """
        views = self._staged(how.accumulate, parts[0].size)
        add_all(parts, views[self._node.rank])
        self._node.barrier(call)
        total = np.empty(parts[0].size, how.accumulate)
        add_all(views, total)
        return finish(total, how)

    def _staged(self, dtype: np.dtype, size: int) -> list[np.ndarray]:
        """Every rank's piece of the staging half that the next barrier publishes."""
        half = self._node.staging()
        key = (id(half), dtype, size)
        cached = self._views.get(key)
        if cached is None or cached[0] is not half:
            if len(self._views) >= _CACHED_VIEWS:
                self._views.clear()
            cached = half, [memory[: size * dtype.itemsize].view(dtype) for memory in half]
            self._views[key] = cached
        return cached[1]
