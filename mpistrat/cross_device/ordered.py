"""Sums in the order of replicas, the left fold ((v0 + v1) + v2) + …, with the same bits on any ranks and nodes.

Values are gathered, and folded by every rank. Gradients in arenas are not gathered. On a node each rank folds its slice of all
replicas. Between nodes a partial sum is sent from the first node to the last, each of which adds its own replicas, and the total
is sent back. Many blocks are in flight at once, so every link carries each slice once in each direction, as in a ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from ..arena.arithmetic import Arithmetic, combine, finish
from ..arena.pieces import leave
from ..arena.reduction import BLOCK, ArenaSum, Consume, Gradients, node_gradients
from ..base.partition import blocks, merge
from ..base.types import ReduceOp
from ..comm.arrays import is_gpu, mpi_datatype
from ..comm.process_group import ProcessGroup
from .flat import Array, Arrays, FlatAllReduce

__all__ = ["OrderedAllReduce"]

_CHUNK = 1 << 20  # bytes of all replicas together that are gathered at a time
_ONWARD, _BACK = 8, 9  # tags


@final
class OrderedAllReduce(FlatAllReduce):
    """An all-reduce in the order of replicas, so that the same replicas on other ranks and nodes give the same bits.

    Strategies with `replicas=` use it. Gradients of variables cost about as much as otherwise; other values are sent from each
    replica to every rank, and so are gradients if a node's ranks are not contiguous. float16 and bfloat16 are folded in float32.
    """

    sends_ahead = True

    def bind(self, group: ProcessGroup) -> None:
        super().bind(group)
        self._arenas = ArenaSum(group)
        nodes = group.topology.node_of
        self._chained = not group.environment.shared_memory or list(nodes) == sorted(nodes)

    def _sum_flat(self, arrays: Arrays, how: Arithmetic, out: Array | None = None) -> Array:
        size, replicas = arrays[0].size, self.group.topology.num_replicas
        total = np.empty(size, how.accumulate)
        step = max(1, _CHUNK // (replicas * how.accumulate.itemsize))
        for low in range(0, size, step):
            chunk = [array[low : low + step] for array in arrays]
            combine(how.ufunc, self._gathered(chunk, how.accumulate), total[low : low + step])
        return finish(total, how)

    def _gathered(self, arrays: Sequence[np.ndarray], dtype: np.dtype) -> Sequence[np.ndarray]:
        """Return the arrays of all replicas in their order. Collective."""
        topology, size = self.group.topology, arrays[0].size
        if topology.size == 1:
            return [array.astype(dtype, copy=False) for array in arrays]
        from ..comm.exchange import gather_parts

        out = np.empty((topology.num_replicas, size), dtype)
        first = topology.replica_offset
        for index, array in enumerate(arrays):
            out[first + index] = array
        gather_parts(topology.comm, out.reshape(-1), [replicas * size for replicas in topology.replicas_per_rank])
        return list(out)

    def node_gradients(self, arena: Gradients) -> Sequence[np.ndarray] | None:
        return node_gradients(self.group, arena)

    def reduce_arena(self, arena: Gradients, ranges: Sequence[tuple[int, int]], consume: Consume) -> None:
        if is_gpu(arena.local[0]) or not self._chained:
            super().reduce_arena(arena, ranges, consume)
            return
        how = self.arithmetic(ReduceOp.SUM, arena.dtype)
        if self.group.num_nodes == 1:
            self._arenas.hand_out(arena, arena.owned(ranges), how, consume)
        elif self.group.inter is not None:
            pieces = arena.pieces(ranges)
            if pieces is None:
                self._fold_over_nodes(arena, arena.owned(ranges), how, consume)
            else:  # all nodes receive the total of all pieces
                mine, every = pieces[self.group.inter.rank], merge([part for piece in pieces for part in piece])
                self._fold_over_nodes(arena, every, how, _only(mine, consume))

    def _fold_over_nodes(
        self, arena: Gradients, ranges: Sequence[tuple[int, int]], how: Arithmetic, consume: Consume
    ) -> None:
        """Continue the sum of the previous nodes, and pass the total to `consume`. Collective over `group.inter`."""
        inter: Any = self.group.inter
        kind = mpi_datatype(how.accumulate)
        arrays = arena.local if arena.node is None else arena.node
        node, last = inter.rank, inter.size - 1
        chunks = blocks(ranges, BLOCK)
        depth = min(2 * inter.size + 2, len(chunks))  # chunks in flight
        memory = np.empty((depth + 1, BLOCK), how.accumulate)
        scratch = memory[depth]
        sending: list[Any] = [None] * depth

        def hand_out(index: int, total: np.ndarray) -> None:
            low, high = chunks[index]
            if node > 0:
                sending[index % depth] = inter.Isend([total, kind], node - 1, _BACK)
                np.copyto(scratch[: high - low], total)
                total = scratch[: high - low]
            consume(low, high, total)

        try:
            for turn in range(len(chunks) + depth):
                if turn >= depth and sending[turn % depth] is not None:
                    sending[turn % depth].Wait()
                if turn >= depth and node < last:
                    low, high = chunks[turn - depth]
                    total = memory[turn % depth][: high - low]
                    inter.Recv([total, kind], node + 1, _BACK)
                    hand_out(turn - depth, total)
                    if node > 0:
                        sending[turn % depth].Wait()
                if turn >= len(chunks):
                    continue
                low, high = chunks[turn]
                total, own = memory[turn % depth][: high - low], [array[low:high] for array in arrays]
                if node == 0:
                    combine(how.ufunc, own, total)
                else:
                    inter.Recv([total, kind], node - 1, _ONWARD)
                    for part in own:
                        how.ufunc(total, part, out=total, dtype=total.dtype)
                if node < last:
                    sending[turn % depth] = inter.Isend([total, kind], node + 1, _ONWARD)
                else:
                    hand_out(turn, total)
        except BaseException:
            leave(sending)
            raise


def _only(ranges: Sequence[tuple[int, int]], consume: Consume) -> Consume:
    """Return a function that passes on the parts of blocks inside the ranges."""

    def hand_on(low: int, high: int, block: Any) -> None:
        for begin, end in ranges:
            first, last = max(begin, low), min(end, high)
            if first < last:
                consume(first, last, block[first - low : last - low])

    return hand_on
