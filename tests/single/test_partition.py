"""Block splits cover everything once, in order, with sizes that differ by at most one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.partition import aligned_bounds, block, bounds


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
