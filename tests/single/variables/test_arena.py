"""Arenas by themselves: places, slices, and the size of slabs."""

import numpy as np

from mpistrat.comm.process_group import ProcessGroup
from mpistrat.variables import Arena, ArenaAllocator


def test_places_are_aligned_and_never_overlap():
    arena = Arena(ProcessGroup.single(), "k", [np.zeros(100, np.float32)], shared=True)
    assert [arena.take(n) for n in (1, 20, 16, 0)] == [0, 16, 48, 64]
    assert arena.take(37) is None
    assert arena.take(36) == 64
    assert arena.used == 100


def test_nothing_is_given_after_the_slices_are_fixed():
    arena = Arena(ProcessGroup.single(), "k", [np.zeros(100)], shared=True)
    arena.take(10)
    assert arena.bounds() == [(0, 10)]
    assert arena.take(1) is None
    assert arena.owned([(0, 4), (4, 4), (8, 100)]) == [(0, 4), (8, 10)]
    assert arena.writes(7) == (0, 7)


def test_an_allocator_has_arenas_by_dtype_and_use():
    allocator = ArenaAllocator(ProcessGroup.single())
    made = [allocator.allocate(10, np.dtype(dtype), trainable, "v") for dtype, trainable in
            (("f4", True), ("f8", True), ("f4", False), ("f4", True))]  # fmt: skip
    first, double, fixed, last = (arena for arena, _ in made)
    assert first is last and len({id(arena) for arena in (first, double, fixed)}) == 3
    assert made[3][1] == 16
    assert fixed.gradients is None
    assert first.gradients.dtype == np.float32 and first.gradients.size == first.size == 16 << 20
    assert [len(first.gradients.local), first.gradients.node] == [1, None]
    large, offset = allocator.allocate(40 << 20, np.dtype("f4"), True, "large")
    assert (large.size, offset) == (40 << 20, 0)
    assert len({arena.key for arena in allocator.arenas}) == 4
    allocator.close()
    assert allocator.arenas == []
