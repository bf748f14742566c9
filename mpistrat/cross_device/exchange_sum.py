"""The sum on one node where every rank sums everything: copy in, one barrier, add. Best for small arrays and two ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from ..buffer_pool import BufferPool
from ..comm.process_group import ProcessGroup
from .arithmetic import Arithmetic, combine, finish

__all__ = ["SMALL_BYTES", "ExchangeSum"]

# Constants, never tuned at run time.
SMALL_BYTES = 1 << 17  # up to here even gradients in shared memory are summed in this way rather than in place
# Of all ranks together: above, it pays that each rank sums a slice only, if there are more than two.
TOTAL_BYTES = 1 << 20
CHUNK_BYTES = 1 << 20  # of every rank that are summed at a time, so that they stay in cache
_CACHED_VIEWS = 256


@final
class ExchangeSum:
    """Sums arrays over the ranks of a node by way of the node's staging memory.

    One barrier a chunk is enough: the staging memory of consecutive barriers alternates between two halves, so nobody
    writes where somebody may still read. With P ranks each reads P - 1 others, where slices would take two copies and
    twice the barriers: so it is used for small arrays, and for all on two ranks.

    Attributes:
        limit: bytes of the largest array that should be summed in this way.
    """

    def __init__(self, group: ProcessGroup, results: BufferPool) -> None:
        self._node, self._results = group.node, results
        self._views: dict[tuple[int, np.dtype, int], tuple[Any, list[np.ndarray]]] = {}
        self._chunk = min(CHUNK_BYTES, self._node.staging()[0].nbytes)
        self.limit = TOTAL_BYTES // self._node.size if self._node.size > 2 else sys.maxsize

    def sum(self, parts: Sequence[np.ndarray], how: Arithmetic, call: Any) -> np.ndarray:
        """Return the reduction, a new array. Collective on the node.

        Args:
            parts: the local replicas' flat arrays.
            how: see `arithmetic`.
            call: what the barriers carry and compare.
        """
        size = parts[0].size
        step = self._chunk // how.accumulate.itemsize
        if size <= step:
            total = np.empty(size, how.accumulate)
            self._sum_chunk(parts, total, how.ufunc, call)
            return finish(total, how)
        out = self._results.empty(size, how.result)
        for low in range(0, size, step):
            chunk = out[low : low + step]
            total = chunk if how.accumulate == how.result else np.empty(chunk.size, how.accumulate)
            self._sum_chunk([part[low : low + step] for part in parts], total, how.ufunc, call)
            if how.divisor != 1:
                total /= how.divisor
            if total is not chunk:
                np.copyto(chunk, total, casting="unsafe")
        return out

    def _sum_chunk(self, parts: Sequence[np.ndarray], total: np.ndarray, ufunc: np.ufunc, call: Any) -> None:
        views = self._staged(total.dtype, total.size)
        node = self._node
        combine(ufunc, parts, views[node.rank])
        node.barrier(call)
        combine(ufunc, views, total)

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
