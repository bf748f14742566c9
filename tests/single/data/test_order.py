"""The keyed permutation: a bijection for every n, fair, and quick."""

from __future__ import annotations

import collections
import math
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import permutation
from mpistrat.data.permutation import permute

# Chi-square's 1 - 1e-6 quantile, by degrees of freedom (tables: 1, 5, 23, 119).
QUANTILE = {1: 23.9, 5: 35.9, 23: 67.5, 119: 203.0}


def whole(n: int, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return permute(np.arange(n), n, seed=seed, epoch=epoch)


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 7, 8, 9, 4095, 4096, 4097, 8191, 8192, 8193, 65537])
def test_every_sample_once(n: int) -> None:
    assert np.array_equal(np.sort(whole(n)), np.arange(n))


@settings(deadline=None, max_examples=40)
@given(n=st.integers(0, 30_000), seed=st.integers(), epoch=st.integers(0, 10**6))
def test_every_sample_once_for_any_key(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(whole(n, seed, epoch)), np.arange(n))


@settings(deadline=None, max_examples=40)
@given(n=st.integers(4097, 10**12), seed=st.integers(), data=st.data())
def test_any_part_of_a_large_order_is_injective_and_in_range(n: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, n - 1), unique=True, min_size=1, max_size=50)))
    result = permute(positions, n, seed=seed, epoch=0)
    assert len(set(result.tolist())) == len(positions)
    assert result.min() >= 0
    assert result.max() < n
    # Any subset in any order gives the same samples.
    assert np.array_equal(permute(positions[::-1], n, seed=seed, epoch=0), result[::-1])


@pytest.mark.parametrize("n", [100, 5000])
def test_seed_and_epoch_both_change_the_order(n: int) -> None:
    orders = {whole(n, seed, epoch).tobytes() for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_permutations_of_few_are_equally_likely(n: int) -> None:
    possible = math.factorial(n)
    draws = 100 * possible
    counts = collections.Counter(whole(n, seed).tobytes() for seed in range(draws))
    statistic = sum((count - 100) ** 2 / 100 for count in counts.values()) + 100 * (possible - len(counts))
    assert statistic < QUANTILE[possible - 1]


def test_positions_are_fair_in_the_network() -> None:
    n, buckets = 5000, 24  # above the tables of small n; 24 cells: 23 degrees of freedom
    assert n > permutation._SMALL
    first = np.array([permute(np.array([0]), n, seed=seed, epoch=0)[0] for seed in range(2400)])
    counts = np.bincount(first * buckets // n, minlength=buckets)
    assert ((counts - 100) ** 2 / 100).sum() < QUANTILE[23]


@pytest.mark.parametrize("distance", [1, 2, 64, 4096])
def test_differences_are_fair_in_the_network(distance: int) -> None:
    n, buckets = 1 << 16, 24
    shuffled = whole(n, seed=5)
    differences = (shuffled[distance:] - shuffled[:-distance]) % n
    counts = np.bincount(differences * buckets // n, minlength=buckets)
    expected = len(differences) / buckets
    assert ((counts - expected) ** 2 / expected).sum() < QUANTILE[23]


def test_parts_of_any_size_agree_with_the_whole() -> None:
    n = 100_000
    everything = whole(n, seed=8)
    for low, high in ((0, 5), (16_380, 16_390), (16_384, 32_768), (10_000, 90_000), (99_999, 100_000)):
        positions = np.arange(low, high)
        assert np.array_equal(permute(positions, n, seed=8, epoch=0), everything[low:high])
        assert np.array_equal(permute(positions[::-1], n, seed=8, epoch=0), everything[low:high][::-1])


def test_the_order_never_changes_between_versions() -> None:
    """Saved positions must mean the same samples in a later release; the numbers are those of the definition below."""
    import hashlib

    n = 10
    digest = hashlib.shake_128(b"mpistrat.order/1:3:2:10").digest(8 * n)
    words = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(n)]
    assert whole(n, seed=3, epoch=2).tolist() == sorted(range(n), key=words.__getitem__)


def test_a_position_out_of_range_is_an_error() -> None:
    with pytest.raises(IndexError, match=r"\[0, 5\)"):
        permute(np.array([5]), 5, seed=0, epoch=0)


def test_a_million_positions_take_well_under_a_second() -> None:
    """In processor time, beside what NumPy takes to sort as many numbers, a tenth of a second."""

    def processor_seconds(work: Callable[[], object]) -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    numbers = np.random.default_rng(0).random(1_000_000)
    sorting = processor_seconds(lambda: np.argsort(numbers))
    whole(1_000_000)
    assert processor_seconds(lambda: whole(1_000_000, seed=1)) < 8 * sorting
