"""Random numbers keyed by seed, step and sample: equal keys, equal numbers; any other key, other numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpistrat.random import rng


def test_equal_keys_give_equal_numbers() -> None:
    first = rng(seed=7, step=3, sample=11).standard_normal(100)
    assert np.array_equal(first, rng(seed=7, step=3, sample=11).standard_normal(100))


def test_every_other_key_gives_other_numbers() -> None:
    keys = [{"seed": seed, "step": step} for seed, step in itertools.product((0, 1, -1, 2**80), (0, 1))]
    keys += [
        {"seed": 0, "step": step, name: index} for step in (0, 1) for name in ("sample", "replica") for index in (0, 1)
    ]
    streams = {rng(**key).bytes(64) for key in keys}
    assert len(streams) == len(keys)


def test_samples_drawn_by_any_rank_are_the_same() -> None:
    whole = [rng(seed=1, step=5, sample=index).random() for index in range(10)]
    parts = [rng(seed=1, step=5, sample=index).random() for rank in range(3) for index in range(rank, 10, 3)]
    assert sorted(whole) == sorted(parts)


def test_numbers_of_neighbouring_samples_are_uncorrelated() -> None:
    draws = np.array([rng(seed=1, sample=index).random() for index in range(4000)])
    # Uniform on [0, 1): mean 1/2, variance 1/12; correlation of neighbours 0. Bounds are five standard errors.
    assert abs(draws.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 4000)
    assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 5 / np.sqrt(4000)


@pytest.mark.parametrize("wrong", [{"step": -1}, {"sample": -1}, {"replica": -1}, {"sample": 2**64}])
def test_a_number_out_of_range_is_named(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        rng(seed=0, **wrong)


def test_a_sample_and_a_replica_together_are_refused() -> None:
    with pytest.raises(ValueError, match="got both"):
        rng(seed=0, sample=1, replica=1)
