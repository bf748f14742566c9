"""Reduction of gradient arenas that all ranks of a node see: block by block in cache, then over the other nodes.

A training step sums arenas and consumes the sums while they are in cache. `reduce_in_place` overwrites the gradients with the
sums, without copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np

from ..base.partition import aligned_bounds, blocks, merge
from ..base.types import ReduceOp
from ..comm.arrays import all_reduce, is_gpu
from ..comm.process_group import ProcessGroup
from .arena import Gradients
from .arithmetic import Arithmetic, arithmetic, combine, divide, round_into
from .pieces import PieceSum

__all__ = [
    "BLOCK",
    "GPU_BLOCK",
    "ArenaSum",
    "Consume",
    "Destination",
    "StartedSums",
    "block_of",
    "network_chunk",
    "node_gradients",
    "of_node",
]

BLOCK = 1 << 16  # elements that are summed and consumed while in cache
GPU_BLOCK = 1 << 24  # the same on a GPU, where starting a kernel takes as long as adding 64 K elements
NETWORK_CHUNK = 1 << 20  # bytes of one message between nodes; a constant, because other sizes give other bits

#: Called as consume(low, high, block); a block is scratch, valid in the call only.
Consume = Callable[[int, int, Any], None]


class StartedSums(Protocol):
    """Sums of arenas that start before the step, which takes them."""

    def begin(self, arena: Gradients, ranges: Sequence[tuple[int, int]]) -> None:
        """Start to sum ranges of an arena, whose gradients are final."""

    def forget(self, key: str, ranges: Sequence[tuple[int, int]]) -> None:
        """Discard the started sums of ranges of an arena. Every rank calls it."""


@final
@dataclass(frozen=True)
class Destination:
    """The destination of a reduction without copies: elements [low, high) of the gradient arena that holds its values."""

    arena: Gradients
    low: int
    high: int

    @classmethod
    def find(cls, group: ProcessGroup, values: Sequence[Any], variable: Any) -> Destination | None:
        """Return the location of the local replicas' values if they are a Variable's gradient memory, else None."""
        if not hasattr(variable, "arena") or type(values[0]) is not np.ndarray or group.node.locate(values[0]) is None:
            return None
        gradients: Gradients | None = getattr(variable.arena, "gradients", None)
        if gradients is None or len(values) != len(gradients.local):
            return None
        low = int(variable.offset)
        high = low + int(variable.size)
        for value, flat in zip(values, gradients.local, strict=True):
            if not value.flags.c_contiguous or value.size != high - low or value.dtype != flat.dtype:
                return None
            if value.ctypes.data != flat.ctypes.data + low * flat.itemsize:
                return None
        return cls(gradients, low, high)

    def view(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the elements of the node's first replica as a read-only view."""
        view = of_node(self.arena)[0][self.low : self.high].reshape(shape)
        view.flags.writeable = False
        return view


def node_gradients(group: ProcessGroup, arena: Gradients) -> Sequence[np.ndarray] | None:
    """Return the arenas of all replicas if this rank sees all: its own alone, or host memory of one node; else None."""
    if group.topology.num_replicas == 1:
        return arena.local
    return None if group.num_nodes > 1 or is_gpu(arena.local[0]) else of_node(arena)


def of_node(arena: Gradients) -> Sequence[np.ndarray]:
    """Return the arenas of all replicas whose memory this rank sees: the node's, or its own alone."""
    return arena.local if arena.node is None else arena.node


def block_of(array: Any) -> int:
    """Return the number of elements of a flat array that are summed and updated at a time."""
    return GPU_BLOCK if is_gpu(array) else BLOCK


def network_chunk(dtype: np.dtype) -> int:
    """Return the number of elements in one message between nodes if every node sums all; other sizes give other bits."""
    return max(BLOCK, NETWORK_CHUNK // dtype.itemsize)


@final
class ArenaSum:
    """The sums of the arenas of a node's replicas, slice by slice, over all nodes; owns the scratch memory."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._inter = group, group.inter
        self._scratch: dict[np.dtype, np.ndarray] = {}
        self._piece_sums: dict[tuple[np.dtype, Any], PieceSum] = {}

    def sum_owned(self, arena: Gradients, ranges: Sequence[tuple[int, int]], how: Arithmetic, consume: Consume) -> None:
        """Call consume(low, high, sum) for this rank's part of the ranges, in order. Collective over `group.inter`."""
        pieces = arena.pieces(ranges)
        if pieces is None:
            self.hand_out(arena, arena.owned(ranges), how, consume)
            return
        if self._inter is not None:
            self.pieces_of(how.accumulate, arena).hand_out(of_node(arena), pieces, how, consume, arena.form)

    def pieces_of(self, dtype: np.dtype, arena: Gradients) -> PieceSum:
        """Return the sum of the pieces of an arena that nodes share."""
        messages = arena.form.messages
        summed = self._piece_sums.get((dtype, messages))
        if summed is None:
            summed = self._piece_sums[dtype, messages] = PieceSum(self._inter, dtype, BLOCK, messages)
        return summed

    def hand_out(self, arena: Gradients, ranges: Sequence[tuple[int, int]], how: Arithmetic, consume: Consume) -> None:
        """Call consume(low, high, sum) for this rank's ranges. Collective over `group.inter`.

        Its peers on other nodes own the same ranges. Blocks have at most 64 K elements; `consume` applies the divisor.
        """
        arrays, inter = of_node(arena), self._inter
        chunk = self._chunk(how.accumulate)
        scratch = self._scratch.get(how.accumulate)
        if scratch is None:
            scratch = self._scratch[how.accumulate] = np.empty(chunk, how.accumulate)
        for low, high in blocks(ranges, chunk):
            cached = [(low, high)] if inter is None else list(blocks([(low, high)], BLOCK))
            for begin, end in cached:
                combine(how.ufunc, [array[begin:end] for array in arrays], scratch[begin - low : end - low])
            if inter is not None:
                all_reduce(inter, scratch[: high - low], ufunc=how.ufunc)
            for begin, end in cached:
                consume(begin, end, scratch[begin - low : end - low])

    def reduce_in_place(self, destinations: Sequence[Destination], reduce_op: ReduceOp, call: Any) -> None:
        """Write the reduction of gradients into the arena of the node's first replica. Collective, inside one.

        The destinations are equal on every rank, and the ranks of the node have arrived. The closing barrier compares `call`.
        """
        arenas = {id(destination.arena): destination.arena for destination in destinations}
        for key, arena in arenas.items():
            ranges = merge([(where.low, where.high) for where in destinations if id(where.arena) == key])
            self._reduce_ranges(arena, ranges, reduce_op)
        self._group.node.barrier(call)

    def _reduce_ranges(self, arena: Gradients, ranges: Sequence[tuple[int, int]], reduce_op: ReduceOp) -> None:
        index = self._group.slice_index
        if index is None:
            return
        how = arithmetic(reduce_op, arena.dtype, self._group.topology.num_replicas)
        mine = []
        for low, high in ranges:
            begin, end = aligned_bounds(high - low, self._group.slices)[index]
            mine.append((low + begin, low + end))
        if how.divisor == 1 and how.accumulate == arena.dtype:
            self._combine_in_place(of_node(arena), mine, how.ufunc)
            return
        target = of_node(arena)[0]

        def store(low: int, high: int, block: np.ndarray) -> None:
            if how.divisor != 1:
                divide(block, how.divisor)
            round_into(target[low:high], block)

        self.hand_out(arena, mine, how, store)

    def _combine_in_place(
        self, arrays: Sequence[np.ndarray], ranges: Sequence[tuple[int, int]], ufunc: np.ufunc
    ) -> None:
        """Reduce like `hand_out`, into the first array; for arrays without a wider dtype or a division."""
        total = arrays[0]
        for low, high in blocks(ranges, self._chunk(total.dtype)):
            for begin, end in blocks([(low, high)], BLOCK):
                mine = total[begin:end]
                for array in arrays[1:]:
                    ufunc(mine, array[begin:end], out=mine)
            if self._inter is not None:
                all_reduce(self._inter, total[low:high], ufunc=ufunc)

    def _chunk(self, dtype: np.dtype) -> int:
        return BLOCK if self._inter is None else network_chunk(dtype)
