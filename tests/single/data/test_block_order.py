"""The order of a block shuffle: every row once, fair chunks, fair rows inside a window, and no further."""

from __future__ import annotations

import collections
import hashlib
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data.permutation import BlockOrder

# Chi-square's 1 - 1e-6 quantile, by degrees of freedom (tables: 1, 5, 23, 35, 119).
QUANTILE = {1: 23.9, 5: 35.9, 23: 67.5, 35: 84.5, 119: 203.0}


def starts_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


def whole(order: BlockOrder, epoch: int = 0) -> np.ndarray:
    return order.rows(epoch, np.arange(len(order)))


def chi_square(counts: collections.Counter, outcomes: int, draws: int) -> float:
    expected = draws / outcomes
    return sum((count - expected) ** 2 / expected for count in counts.values()) + expected * (outcomes - len(counts))


LENGTHS = st.lists(st.integers(0, 40), max_size=30)


@settings(deadline=None, max_examples=150)
@given(lengths=LENGTHS, window=st.integers(1, 400), seed=st.integers(), epoch=st.integers(0, 10**6))
def test_every_row_once_for_any_chunks(lengths: list[int], window: int, seed: int, epoch: int) -> None:
    order = BlockOrder(starts_of(lengths), window, seed)
    assert np.array_equal(np.sort(whole(order, epoch)), np.arange(sum(lengths)))


@settings(deadline=None, max_examples=100)
@given(lengths=LENGTHS.filter(any), window=st.integers(1, 400), seed=st.integers(0, 99), data=st.data())
def test_any_positions_in_any_order_give_the_same_rows(
    lengths: list[int], window: int, seed: int, data: st.DataObject
) -> None:
    order = BlockOrder(starts_of(lengths), window, seed)
    everything = whole(BlockOrder(starts_of(lengths), window, seed), 1)
    positions = np.array(data.draw(st.lists(st.integers(0, sum(lengths) - 1), max_size=60)), np.int64)
    assert np.array_equal(order.rows(1, positions), everything[positions])
    assert [order.rows(1, positions[i : i + 1])[0] for i in range(positions.size)] == everything[positions].tolist()


@settings(deadline=None, max_examples=100)
@given(lengths=LENGTHS.filter(any), window=st.integers(1, 400), seed=st.integers(0, 99))
def test_a_window_is_made_of_whole_successive_chunks(lengths: list[int], window: int, seed: int) -> None:
    order = BlockOrder(starts_of(lengths), window, seed)
    chunk_of = np.repeat(np.arange(len(lengths)), lengths)[whole(order)]
    bounds = order._epoch(0).window_starts.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == sum(lengths)
    seen: set[int] = set()
    longest = max(lengths)
    for low, high in itertools.pairwise(bounds):
        inside = set(chunk_of[low:high].tolist())
        assert high - low == sum(lengths[chunk] for chunk in inside)  # whole chunks
        assert not inside & seen
        seen |= inside
        assert high - low < window + longest
        if high != bounds[-1]:
            assert high - low > window - longest


def test_seed_and_epoch_both_change_the_order() -> None:
    starts = starts_of([7] * 20)
    orders = [BlockOrder(starts, 30, seed) for seed in (0, 1)]
    seen = [whole(order, epoch).tobytes() for epoch in (0, 1, 0) for order in orders]
    assert len(set(seen)) == 4
    assert seen[:2] == seen[4:]


def test_a_position_out_of_range_is_an_error() -> None:
    order = BlockOrder(starts_of([3, 2]), 4, 0)
    for position in (-1, 5):
        with pytest.raises(IndexError, match=r"\[0, 5\)"):
            order.rows(0, np.array([position]))


def test_all_orders_of_few_chunks_are_equally_likely() -> None:
    starts = starts_of([1, 1, 1, 1])  # windows of one row: only the chunks move
    counts = collections.Counter(whole(BlockOrder(starts, 1, seed)).tobytes() for seed in range(1200))
    assert chi_square(counts, math.factorial(4), 1200) < QUANTILE[23]


@pytest.mark.parametrize("lengths", [[5], [2, 3], [2, 1]])
def test_all_permutations_of_a_window_are_equally_likely(lengths: list[int]) -> None:
    possible = math.factorial(sum(lengths))
    counts = collections.Counter(
        whole(BlockOrder(starts_of(lengths), 5, seed)).tobytes() for seed in range(50 * possible)
    )
    assert chi_square(counts, possible, 50 * possible) < QUANTILE[possible - 1]


def test_equal_windows_of_an_epoch_are_independent() -> None:
    counts: collections.Counter = collections.Counter()
    for seed in range(1800):
        rows = whole(BlockOrder(starts_of([3, 3]), 3, seed)) % 3  # two windows of a chunk each
        counts[rows.tobytes()] += 1
    assert chi_square(counts, 36, 1800) < QUANTILE[35]


@pytest.mark.parametrize("chunk_rows", [64, 1000])
def test_positions_inside_a_large_window_are_fair(chunk_rows: int) -> None:
    # Where in its window does a chunk's row land? 24 cells; windows of some 6,000 rows are above the sorted tables.
    counts = np.zeros(24)
    for seed in range(4):
        order = BlockOrder(starts_of([chunk_rows] * (48_000 // chunk_rows)), 6000, seed)
        rows = whole(order)
        bounds = order._epoch(0).window_starts
        for low, high in itertools.pairwise(bounds.tolist()):
            first_of_chunk = np.flatnonzero(rows[low:high] % chunk_rows < 10)
            counts += np.bincount(first_of_chunk * 24 // (high - low), minlength=24)
    expected = counts.sum() / 24
    assert ((counts - expected) ** 2 / expected).sum() < QUANTILE[23]


def test_the_chunks_of_successive_rows_are_fair() -> None:
    """Differences: inside a window the chunk of the next row says nothing about this one's."""
    chunks = 24
    counts = np.zeros(chunks)
    for seed in range(10):
        order = BlockOrder(starts_of([300] * chunks), 300 * chunks, seed)
        chunk_of = whole(order) // 300
        counts += np.bincount((chunk_of[1:] - chunk_of[:-1]) % chunks, minlength=chunks)
    expected = counts.sum() / chunks
    assert ((counts - expected) ** 2 / expected).sum() < QUANTILE[23]


@pytest.mark.parametrize("window_chunks", [1, 4, 16])
def test_mixing_reaches_as_far_as_a_window(window_chunks: int) -> None:
    chunk_rows, chunks = 50, 320
    window = chunk_rows * window_chunks
    distances = []
    for seed in range(5):
        order = BlockOrder(starts_of([chunk_rows] * chunks), window, seed)
        at = np.empty(len(order), np.int64)
        at[whole(order)] = np.arange(len(order))
        epoch = order._epoch(0)
        before = epoch.starts[np.argsort(epoch.chunks)]  # where each chunk would begin without the windows
        unmixed = np.repeat(before, chunk_rows) + np.tile(np.arange(chunk_rows), chunks)
        distances.append(np.abs(at - unmixed))
        assert distances[-1].max() < window
    # Of two independent places in [0, w) the mean distance is (w*w - 1) / 3w.
    assert np.mean(distances) == pytest.approx((window**2 - 1) / (3 * window), rel=0.05)


def test_the_order_never_changes_between_versions() -> None:
    """Saved positions must mean the same rows in a later release; the numbers are those of the definition below."""

    def sorted_by_hash(text: str, n: int) -> list[int]:
        digest = hashlib.shake_128(f"mpistrat.order/1:{text}".encode()).digest(8 * n)
        words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(n)]
        return sorted(range(n), key=words.__getitem__)

    lengths, window_rows = [2, 5, 3, 4], 6
    chunks = sorted_by_hash("3:2:4", 4)  # seed, epoch and the number of chunks
    windows: dict[int, list[int]] = {}  # a chunk belongs to the window that its first row falls into
    place = 0
    for chunk in chunks:
        first = sum(lengths[:chunk])
        windows.setdefault(place // window_rows, []).extend(range(first, first + lengths[chunk]))
        place += lengths[chunk]
    expected: list[int] = []
    for number, rows in enumerate(windows.values()):
        expected += [rows[i] for i in sorted_by_hash(f"3:2:{len(rows)}:{number}", len(rows))]
    assert whole(BlockOrder(starts_of(lengths), window_rows, 3), 2).tolist() == expected


def test_what_is_read_ahead_is_the_next_window_in_step_with_this_one() -> None:
    lengths = [4, 7, 1, 5, 6, 3, 4, 4, 9, 2]
    starts = starts_of(lengths)
    order = BlockOrder(starts, 12, seed=5)
    bounds = order._epoch(0).window_starts.tolist()
    chunk_of = np.repeat(np.arange(len(lengths)), lengths)
    rows = whole(order)
    for number, (low, high) in enumerate(itertools.pairwise(bounds)):
        known: list[int] = []
        for position in range(low, high):
            window, _, ahead = order.ahead(0, position)
            assert window == number
            assert ahead[: len(known)].tolist() == known  # it only grows
            known = ahead.tolist()
        following = rows[high : bounds[number + 2]] if high < bounds[-1] else rows[:0]
        assert sorted(chunk_of[known].tolist()) == sorted(set(chunk_of[following].tolist()))
        halfway = order.ahead(0, (low + high) // 2)[2]
        assert len(halfway) <= len(known) / 2 + 1.5
