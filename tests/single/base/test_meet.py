"""The barrier in C, called as one rank of three whose others have come, or not."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mpistrat.base import loops

pytestmark = pytest.mark.skipif(not loops.used()[0], reason=f"no compiled loops: {loops.used()[1]}")

PAGE = 512  # words
OWN, SPIN = 1, 2000


@pytest.fixture
def pages() -> np.ndarray:
    """The control pages of three ranks, of which the others are in barrier 6 with tags of their own."""
    pages = np.zeros((3, PAGE), np.int64)
    pages[:, 0] = 6
    pages[OWN, 0] = 5
    pages[:, 1:3] = -7
    return pages


def meet(pages: np.ndarray, tag: int, sequence: int = 6, spin: int = SPIN) -> int:
    return loops.meet(memoryview(pages).cast("B"), OWN, sequence, tag, spin)


@pytest.mark.parametrize("tag", [1, -7, (1 << 63) - 1, -1 << 63])
@pytest.mark.parametrize("sequence", [5, 6])
def test_the_flag_and_the_tag_of_this_barrier_are_written(pages: np.ndarray, tag: int, sequence: int) -> None:
    before = pages.copy()
    pages[[0, 2], 1 + sequence % 2] = tag
    before[[0, 2], 1 + sequence % 2] = tag
    assert meet(pages, tag, sequence) == 0  # it came last, and waited for nobody
    before[OWN, 0], before[OWN, 1 + sequence % 2] = sequence, tag
    assert np.array_equal(pages, before)


@pytest.mark.parametrize("other", [0, 2])
def test_one_different_tag_is_found(pages: np.ndarray, other: int) -> None:
    assert meet(pages, -7) == 0
    pages[OWN, 0] = 5
    pages[other, 1] = 8
    assert meet(pages, -7) == -1


@pytest.mark.parametrize("spin", [0, SPIN, 10**9])
@pytest.mark.parametrize("other", [0, 2])
def test_it_gives_up_soon(pages: np.ndarray, other: int, spin: int) -> None:
    pages[other, 0] = 5
    start = time.perf_counter_ns()
    result = meet(pages, -7, spin=spin)
    took = time.perf_counter_ns() - start
    waited = -2 - result
    assert max(10**6, spin) <= waited <= took
    assert pages[OWN, 0] == 6


def test_a_rank_ahead_has_come(pages: np.ndarray) -> None:
    pages[0, 0] = 7  # it wrote the other tag
    pages[0, 2] = 3
    assert meet(pages, -7) == 0


def test_what_is_no_page_is_refused(pages: np.ndarray) -> None:
    with pytest.raises(ValueError, match="no page of rank 3"):
        loops.meet(memoryview(pages).cast("B"), 3, 6, 1, SPIN)
    pages.flags.writeable = False
    with pytest.raises(BufferError):
        meet(pages, -7)
    with pytest.raises(TypeError):
        loops.meet(pages, 0, 1, 2)
