"""Arenas by themselves: places, slices, and the size of slabs."""

from types import SimpleNamespace

import numpy as np
import pytest

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


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_pieces_begin_at_pages_of_slots_in_a_file(dtype):
    """Slots are float32, 1,024 of them in a page, whatever the weights are."""
    nodes, slices = 3, 2
    found = []
    for node in range(nodes):
        for index in range(slices):
            peers = SimpleNamespace(rank=node, size=nodes)
            group = SimpleNamespace(
                node=SimpleNamespace(rank=index, size=slices),
                num_nodes=nodes, slices=slices, slice_index=index, inter=peers,
            )  # fmt: skip
            arena = Arena(group, "k", [np.zeros(2_000_000, dtype)], shared=True, sharded=True)
            starts = [arena.take(size) for size in (5, 700_001, 17, 3000, 500_000)]
            assert arena.sharded
            [(low, high)] = arena.owned([(0, arena.size)])
            found.append((index, node, low, high))
            assert arena.pieces([(low, high)])[node] == [(low, high)]
            assert sum(map(len, arena.pieces([(low, high)]))) == 1
            [(first, last)] = arena.sliced([(0, arena.size)])
            assert first <= low < high <= last
            start = max(start for start in starts if start <= low)
            assert (low - start) % 1024 == 0
            assert abs(high - low - arena.used / 6) <= 1024
    found.sort()
    assert [low for _, _, low, _ in found] == [0, *(high for *_, high in found[:-1])] and found[-1][3] == arena.used


def test_small_slices_are_not_cut():
    group = SimpleNamespace(
        node=SimpleNamespace(rank=0, size=1),
        num_nodes=2,
        slices=1,
        slice_index=0,
        inter=SimpleNamespace(rank=1, size=2),
    )
    for size, cut in ((131_071, False), (131_072, True)):  # of 4 bytes: 256 KB for each node
        arena = Arena(group, "k", [np.zeros(size, np.float32)], shared=True, sharded=True)
        arena.take(size)
        assert arena.sharded == cut
        assert arena.owned([(0, size)]) == ([(65_536, size)] if cut else [(0, size)])
