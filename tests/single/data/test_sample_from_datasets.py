"""Sampling from several datasets: exact proportions, every row once, in one order however it is read."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.data import INFINITE, UNKNOWN, ArraySpec, Dataset, from_generator, sample_from_datasets
from mpistrat.data.nodes.sample import BLOCK, quotas

weight = st.one_of(st.integers(0, 5).map(float), st.floats(1e-6, 1.0))
cases = st.lists(st.tuples(weight, st.integers(0, 40)), min_size=1, max_size=4).filter(lambda c: any(w for w, _ in c))


def sources(lengths: list[int]) -> list[Dataset]:
    """Row i of dataset k is 1000 k + i."""
    return [Dataset.range(1000 * k, 1000 * k + n) for k, n in enumerate(lengths)]


def in_order(datasets: list[Dataset]) -> list[Dataset]:
    return [from_generator(lambda d=d: iter([int(x) for x in d]), ArraySpec((), np.int64)) for d in datasets]


@settings(deadline=None, max_examples=100)
@given(case=cases, seed=st.integers(0, 3), stop=st.booleans(), epoch=st.integers(0, 2))
def test_every_row_comes_once_and_each_dataset_in_its_order(case: Any, seed: int, stop: bool, epoch: int) -> None:
    weights, lengths = [w for w, _ in case], [n for _, n in case]
    dataset = sample_from_datasets(sources(lengths), weights, seed=seed, stop_on_empty_dataset=stop)
    dataset.set_epoch(epoch)
    drawn = [int(x) for x in dataset]
    assert len(drawn) == len(dataset)
    each = [[x - 1000 * k for x in drawn if x // 1000 == k] for k in range(len(case))]
    for rows, w, n in zip(each, weights, lengths, strict=True):
        assert rows == list(range(len(rows)))
        assert len(rows) <= n
        assert len(rows) == (n if w and not stop else len(rows) if w else 0)
    if stop:  # one more draw would find some dataset empty
        more = quotas([Fraction(w) for w in weights], len(drawn) + 1)
        assert any(count > n for count, n in zip(more, lengths, strict=True))
    order = np.random.default_rng(0).permutation(len(drawn))
    assert dataset.rows(order, epoch=epoch).tolist() == [drawn[i] for i in order]


@settings(deadline=None, max_examples=100)
@given(weights=st.lists(weight, min_size=1, max_size=5).filter(any), draws=st.integers(0, 10**12))
def test_quotas_are_the_weights_rounded(weights: list[float], draws: int) -> None:
    shares = [Fraction(w) for w in weights]
    counts, following = quotas(shares, draws), quotas(shares, draws + 1)
    assert sum(counts) == draws
    assert sorted(b - a for a, b in zip(counts, following, strict=True)) == [0] * (len(weights) - 1) + [1]
    for count, share in zip(counts, shares, strict=True):
        assert abs(count - draws * share / sum(shares)) < len(weights)


def test_proportions_hold_in_every_block_and_the_order_is_mixed() -> None:
    endless = [Dataset.range(k, k + 1).repeat() for k in range(3)]
    drawn = sample_from_datasets(endless, [0.5, 0.3, 0.2], seed=1)
    assert drawn.cardinality() == INFINITE
    blocks = drawn.rows(np.arange(40 * BLOCK)).reshape(40, BLOCK)
    counts = np.stack([(blocks == k).sum(axis=1) for k in range(3)])
    assert np.abs(counts - BLOCK * np.array([[0.5], [0.3], [0.2]])).max() <= 3
    assert np.abs(counts.sum(axis=1) - 40 * BLOCK * np.array([0.5, 0.3, 0.2])).max() <= 2
    assert len({row.tobytes() for row in blocks}) == 40
    # Each place of a block sees all datasets: 40 draws of each of 256 places, the rarest with probability 0.2.
    assert all((blocks == k).any(axis=0).mean() > 0.99 for k in range(3))
    assert not np.array_equal(drawn.rows(np.arange(99), epoch=1), drawn.rows(np.arange(99)))
    far = 10**14
    assert np.array_equal(drawn.rows([far, far + 1]), drawn.rows([far, far + 1]))


@settings(deadline=None, max_examples=60)
@given(case=cases, seed=st.integers(0, 3), stop=st.booleans(), start=st.integers(0, 50))
def test_datasets_that_read_in_order(case: Any, seed: int, stop: bool, start: int) -> None:
    weights, lengths = [max(w, 0.05) if w else 0.0 for w, _ in case], [n for _, n in case]
    dataset = sample_from_datasets(in_order(sources(lengths)), weights, seed=seed, stop_on_empty_dataset=stop)
    assert dataset.cardinality() == UNKNOWN
    drawn = [int(x) for x in dataset]
    for k, (w, n) in enumerate(zip(weights, lengths, strict=True)):
        rows = [x - 1000 * k for x in drawn if x // 1000 == k]
        assert rows == list(range(len(rows)))
        if not stop:
            assert len(rows) == (n if w else 0)
    assert [int(x) for x in dataset.node.elements(0, start)] == drawn[start:]


def test_the_first_draws_do_not_depend_on_how_datasets_are_read() -> None:
    known = sources([300, 300])
    one = sample_from_datasets(known, [0.9, 0.1], seed=2)
    other = sample_from_datasets(in_order(known), [0.9, 0.1], seed=2)
    assert one.rows(np.arange(256)).tolist() == [int(x) for x in other.take(256)]


@pytest.mark.parametrize("stop", [False, True])
def test_a_dataset_of_weight_0_changes_nothing(stop: bool) -> None:
    two = sources([30, 8])
    drawn = [int(x) for x in sample_from_datasets(two, [2, 1], seed=3, stop_on_empty_dataset=stop)]
    for third in (Dataset.range(0), Dataset.range(5).repeat(), *in_order([Dataset.range(5)])):
        dataset = sample_from_datasets([*two, third], [2, 1, 0], seed=3, stop_on_empty_dataset=stop)
        assert dataset.cardinality() == len(drawn)
        assert [int(x) for x in dataset] == drawn


def test_batches_are_drawn_whole() -> None:
    parts = [Dataset.range(10).batch(4), Dataset.range(100, 106).batch(3)]
    drawn = [x.tolist() for x in sample_from_datasets(parts, seed=1)]
    assert sorted(drawn) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [100, 101, 102], [103, 104, 105]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "one weight for each of the 2 datasets"),
        ([-1.0, 2.0], "at least 0"),
        ([0.0, 0.0], "not all 0"),
        ([float("nan"), 1.0], "finite"),
        ([float("inf"), 1.0], "finite"),
    ],
)
def test_impossible_weights(weights: list[float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_from_datasets(sources([1, 1]), weights, seed=1)


def test_wrong_datasets() -> None:
    with pytest.raises(ValueError, match="at least one"):
        sample_from_datasets([], seed=1)
    with pytest.raises(TypeError, match="Datasets"):
        sample_from_datasets([np.arange(3)], seed=1)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="seed: expected an integer"):
        sample_from_datasets(sources([1]), seed="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="in dataset 1"):
        list(sample_from_datasets([Dataset.range(3), Dataset.range(3).map(float)], seed=1))


def test_without_a_seed_it_is_0() -> None:
    found = [
        list(sample_from_datasets([Dataset.range(20), Dataset.range(100, 120)], seed=seed)) for seed in (None, 0, 1)
    ]
    assert found[0] == found[1] != found[2]
