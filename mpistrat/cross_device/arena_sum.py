"""The reduction of arenas that all replicas of a node can see: block by block in cache, then over the other nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import numpy as np

from ..comm.buffers import all_reduce
from ..comm.process_group import ProcessGroup
from ..partition import blocks
from .arithmetic import Arithmetic, combine
from .cross_device_ops import BLOCK

__all__ = ["ArenaSum"]

CHUNK_BYTES = 1 << 20  # that cross the network at a time; a constant: other chunks give other bits


@final
class ArenaSum:
    """Sums flat arrays of all replicas of a node, slice by slice, over all nodes; owns the scratch memory."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._scratch: dict[np.dtype, np.ndarray] = {}

    def sum(
        self,
        parts: Sequence[np.ndarray],
        ranges: Sequence[tuple[int, int]],
        how: Arithmetic,
        consume: Callable[[int, int, np.ndarray], None],
    ) -> None:
        """Hand out the sums of this rank's ranges as consume(low, high, block). Collective over `group.inter`.

        Args:
            parts: the arrays of all replicas of the node, in replica order.
            ranges: element ranges that this rank owns; its peers on other nodes own the same.
            how: the function and the dtype; the divisor is left to `consume`.
            consume: gets blocks of at most 64 K elements; a block is scratch, valid in the call only.
        """
        inter, accumulate = self._group.inter, how.accumulate
        chunk = BLOCK if inter is None else max(BLOCK, CHUNK_BYTES // accumulate.itemsize)
        scratch = self._scratch_of(accumulate, chunk)
        for low, high in blocks(ranges, chunk):
            for begin, end in blocks([(low, high)], BLOCK):
                combine(how.ufunc, [part[begin:end] for part in parts], scratch[begin - low : end - low])
            if inter is not None:
                all_reduce(inter, scratch[: high - low], ufunc=how.ufunc)
            for begin, end in blocks([(low, high)], BLOCK):
                consume(begin, end, scratch[begin - low : end - low])

    def sum_in_place(self, parts: Sequence[np.ndarray], ranges: Sequence[tuple[int, int]], ufunc: np.ufunc) -> None:
        """Write the sums of this rank's ranges into the first part. Collective over `group.inter`.

        Args:
            parts: the arrays of all replicas of the node, in replica order, of a dtype that is summed as it is.
            ranges: element ranges that this rank owns; its peers on other nodes own the same.
            ufunc: combines two of them.
        """
        inter, total = self._group.inter, parts[0]
        chunk = BLOCK if inter is None else max(BLOCK, CHUNK_BYTES // total.itemsize)
        for low, high in blocks(ranges, chunk):
            for begin, end in blocks([(low, high)], BLOCK):
                mine = total[begin:end]
                for part in parts[1:]:
                    ufunc(mine, part[begin:end], out=mine)
            if inter is not None:
                all_reduce(inter, total[low:high], ufunc=ufunc)

    def _scratch_of(self, dtype: np.dtype, size: int) -> np.ndarray:
        scratch = self._scratch.get(dtype)
        if scratch is None:
            scratch = self._scratch[dtype] = np.empty(size, dtype)
        return scratch
