"""The sum of large arrays through shared memory: chunk by chunk, each rank sums its slice, all copy the sums out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from ..buffer_pool import BufferPool
from ..comm.buffers import all_reduce
from ..comm.process_group import ProcessGroup
from ..partition import aligned_bounds
from .arithmetic import Arithmetic, combine

__all__ = ["StagedSum"]

# Constants, never tuned at run time: other chunks would give other bits. Bytes of a rank that are summed at a time.
NODE_CHUNK = 1 << 21  # on one node: few barriers, which cost most where other programs run
SLICE_CHUNK = 1 << 20  # for each slice between nodes: what crosses the network at a time
MEMORY = 1 << 25  # of the ranks of a node together, half of what is allocated
SMALLEST_CHUNK = 1 << 18


@final
class StagedSum:
    """Sums arrays of any size over all ranks by way of shared memory of its own.

    The work is a pipeline with one barrier a turn: in turn t a rank copies chunk t into its memory, sums its slice of
    chunk t - 1 over the ranks of the node (and over the other nodes), and copies the sums of chunk t - 2 out. What is
    written before one barrier is read before the next and lies in one of two halves, which alternate.
    """

    def __init__(self, group: ProcessGroup, results: BufferPool) -> None:
        """Collective over all ranks: allocates."""
        self._group, self._results = group, results
        node = group.node
        slices = group.slices
        wanted = NODE_CHUNK if group.num_nodes == 1 else SLICE_CHUNK * slices
        # The same on every node, also where nodes have different numbers of ranks.
        self._chunk = min(wanted, max(SMALLEST_CHUNK, MEMORY // max(group.topology.ranks_per_node) // 64 * 64))
        self._slice = (
            -(-self._chunk // slices) // 64 + 16
        ) * 64  # with room for the alignment of a slice at any item size
        half = self._chunk + self._slice
        self._block = node.allocate([2 * half] * node.size, "the staging memory of all-reduce")
        self._inputs = [[s[h * half : h * half + self._chunk] for s in self._block.segments] for h in (0, 1)]
        self._sums = [[s[h * half + self._chunk : (h + 1) * half] for s in self._block.segments] for h in (0, 1)]
        self._turn = 0

    def sum(self, parts: Sequence[np.ndarray], how: Arithmetic, call: Any) -> np.ndarray:
        """Return the reduction, a new array. Collective over all ranks.

        Args:
            parts: the local replicas' flat arrays.
            how: see `arithmetic`.
            call: what the barriers carry and compare.
        """
        size = parts[0].size
        out = self._results.empty(size, how.result)
        step = self._chunk // how.accumulate.itemsize
        chunks = [(low, min(low + step, size)) for low in range(0, size, step)]
        for turn in range(len(chunks) + 2):
            half, before = self._turn % 2, (self._turn + 1) % 2
            if turn < len(chunks):
                self._copy_in(parts, chunks[turn], how, half)
            if 0 < turn <= len(chunks):
                self._sum_slice(chunks[turn - 1], how, before, half)
            if turn >= 2:
                self._copy_out(out, chunks[turn - 2], how, before)
            if turn <= len(chunks):
                self._group.node.barrier(call)
                self._turn += 1
        return out

    def _copy_in(self, parts: Sequence[np.ndarray], chunk: tuple[int, int], how: Arithmetic, half: int) -> None:
        low, high = chunk
        mine = self._inputs[half][self._group.node.rank].view(how.accumulate)[: high - low]
        combine(how.ufunc, [part[low:high] for part in parts], mine)

    def _sum_slice(self, chunk: tuple[int, int], how: Arithmetic, source: int, target: int) -> None:
        index = self._group.slice_index
        if index is None:
            return
        low, high = self._bounds(chunk)[index]
        if low == high:
            return
        inputs = [memory.view(how.accumulate)[low:high] for memory in self._inputs[source]]
        total = self._sums[target][self._group.node.rank][: (high - low) * how.accumulate.itemsize]
        total = total.view(how.accumulate)
        combine(how.ufunc, inputs, total)
        if self._group.inter is not None:
            all_reduce(self._group.inter, total, ufunc=how.ufunc)
        if how.divisor != 1:
            total /= how.divisor

    def _copy_out(self, out: np.ndarray, chunk: tuple[int, int], how: Arithmetic, half: int) -> None:
        start = chunk[0]
        for owner, (low, high) in enumerate(self._bounds(chunk)):
            sums = self._sums[half][owner][: (high - low) * how.accumulate.itemsize].view(how.accumulate)
            np.copyto(out[start + low : start + high], sums, casting="unsafe")

    def _bounds(self, chunk: tuple[int, int]) -> list[tuple[int, int]]:
        return aligned_bounds(chunk[1] - chunk[0], self._group.slices)
