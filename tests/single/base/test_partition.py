"""Block splits cover everything once, in order, with sizes that differ by at most one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.base.partition import aligned_bounds, block, blocks, bounds, merge


@pytest.mark.parametrize(
    ("length", "parts", "sizes"), [(13, 5, [3, 3, 3, 2, 2]), (10, 4, [3, 3, 2, 2]), (2, 4, [1, 1, 0, 0])]
)
def test_sizes(length: int, parts: int, sizes: list[int]) -> None:
    assert [high - low for low, high in bounds(length, parts)] == sizes


@given(st.integers(0, 10_000), st.integers(1, 70))
def test_blocks_cover_in_order(length: int, parts: int) -> None:
    ranges = bounds(length, parts)
    assert [i for low, high in ranges for i in range(low, high)] == list(range(length))
    sizes = [high - low for low, high in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert ranges == [block(length, parts, i) for i in range(parts)]


@given(st.integers(0, 10_000), st.integers(1, 70), st.sampled_from([1, 2, 16, 64]))
def test_aligned_bounds_cover_in_order(length: int, parts: int, alignment: int) -> None:
    ranges = aligned_bounds(length, parts, alignment)
    assert len(ranges) == parts
    assert [i for low, high in ranges for i in range(low, high)] == list(range(length))
    assert all(low % alignment == 0 or low == length for low, _ in ranges)


RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 9)).map(lambda pair: (pair[0], sum(pair))), max_size=6)


@given(RANGES, st.integers(1, 7))
def test_ranges_are_cut_into_blocks(ranges: list[tuple[int, int]], size: int) -> None:
    cut = blocks(ranges, size)
    assert [i for low, high in cut for i in range(low, high)] == [i for low, high in ranges for i in range(low, high)]
    assert all(0 < high - low <= size for low, high in cut)


@given(RANGES)
def test_merged_ranges_cover_the_same_and_do_not_touch(ranges: list[tuple[int, int]]) -> None:
    merged = merge(ranges)
    assert {i for low, high in merged for i in range(low, high)} == {
        i for low, high in ranges for i in range(low, high)
    }
    assert all(high < low for (_, high), (low, _) in itertools.pairwise(merged))
