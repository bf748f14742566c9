"""Reduction of gradients where they lie: in the arenas that all ranks of a node see, without a copy in or out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..comm.process_group import ProcessGroup
from ..partition import aligned_bounds, merge
from ..types import ReduceOp
from .arena_sum import ArenaSum
from .arithmetic import arithmetic
from .gradient_arena import GradientArena

__all__ = ["Place", "domain_parts", "find_place", "reduce_in_place"]


@final
@dataclass(frozen=True)
class Place:
    """Elements [low, high) of a gradient arena."""

    arena: GradientArena
    first: np.ndarray  # the arena of the first replica that shares memory with this rank
    low: int
    high: int

    def view(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return the elements of the node's first replica as a read-only view."""
        view = self.first[self.low : self.high].reshape(shape)
        view.flags.writeable = False
        return view


def find_place(group: ProcessGroup, values: Sequence[Any], destination: Any) -> Place | None:
    """Return where the values lie if they are the gradient memory of a Variable, else None.

    Args:
        group: the ranks.
        values: one array for each local replica.
        destination: what the caller named as destination of the reduction.
    """
    if not hasattr(destination, "arena") or type(values[0]) is not np.ndarray or group.node.locate(values[0]) is None:
        return None
    gradients: GradientArena | None = getattr(destination.arena, "gradients", None)
    if gradients is None or len(values) != len(gradients.local):
        return None
    low = int(destination.offset)
    high = low + int(destination.size)
    for value, flat in zip(values, gradients.local, strict=True):
        if not value.flags.c_contiguous or value.size != high - low or value.dtype != flat.dtype:
            return None
        if value.ctypes.data != flat.ctypes.data + low * flat.itemsize:
            return None
    return Place(gradients, domain_parts(gradients)[0], low, high)


def domain_parts(arena: GradientArena) -> Sequence[np.ndarray]:
    """Return the arenas of all replicas whose memory this rank sees: the node's, or its own alone."""
    return arena.local if arena.node is None else arena.node


def reduce_in_place(
    group: ProcessGroup, arena_sum: ArenaSum, places: Sequence[Place], reduce_op: ReduceOp, call: Any
) -> None:
    """Write the reduction of gradients into the arena of the node's first replica. Collective, inside one.

    Args:
        group: the ranks; those of the node have arrived.
        arena_sum: does the sums.
        places: the same on every rank.
        reduce_op: any.
        call: what the closing barrier carries and compares.
    """
    arenas = {id(place.arena): place.arena for place in places}
    for key, arena in arenas.items():
        ranges = merge([(place.low, place.high) for place in places if id(place.arena) == key])
        _reduce_ranges(group, arena_sum, arena, ranges, reduce_op)
    group.node.barrier(call)


def _reduce_ranges(
    group: ProcessGroup,
    arena_sum: ArenaSum,
    arena: GradientArena,
    ranges: Sequence[tuple[int, int]],
    reduce_op: ReduceOp,
) -> None:
    index = group.slice_index
    if index is None:
        return
    how = arithmetic(reduce_op, arena.dtype, group.topology.num_replicas)
    parts = domain_parts(arena)
    target = parts[0]
    mine = []
    for low, high in ranges:
        begin, end = aligned_bounds(high - low, group.slices)[index]
        mine.append((low + begin, low + end))

    if how.divisor == 1 and how.accumulate == arena.dtype:
        arena_sum.sum_in_place(parts, mine, how.ufunc)
        return

    def store(low: int, high: int, block: np.ndarray) -> None:
        if how.divisor != 1:
            block /= how.divisor
        np.copyto(target[low:high], block, casting="unsafe")

    arena_sum.sum(parts, mine, how, store)
