"""A block is updated in one compiled pass as by NumPy, whatever else happens to it: the same bits and the same errors."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.base import loops
from mpistrat.optimizers.hyperparameters import AVERAGE, GRADIENT_SUM
from mpistrat.optimizers.rule import BlockUpdate
from tests.single.base.test_loops import NEVER_NEGATIVE, RULES, assert_same_bits, compiled, errors_of, numbers

WIDE = {np.float16: np.float32, ml_dtypes.bfloat16: np.float32, np.float32: np.float32, np.float64: np.float64}


@st.composite
def blocks(draw):
    """A rule with settings, its arrays, and how they are updated."""
    dtype = draw(st.sampled_from(list(WIDE)))
    size, count = draw(st.one_of(st.integers(1, 70), st.integers(1, 9000))), draw(st.integers(1, 4))
    settings = {}
    if draw(st.booleans()):
        settings["clipvalue"] = draw(st.sampled_from([1e-3, 1.0]))
    if draw(st.booleans()):
        settings |= {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": draw(st.sampled_from([None, 2]))}
    if draw(st.booleans()):
        settings["gradient_accumulation_steps"] = 3
    cut = draw(st.integers(0, size))
    decays = draw(st.sampled_from([(), ((0, size, 0.1),), ((0, cut, 0.1), (cut, size, 0.3))]))
    scales = draw(st.sampled_from([(), ((0, size, 0.3),), ((cut, size, 1e-3),)]))
    odd, seed = draw(st.sampled_from([0.0, 0.0, 0.02])), draw(st.integers(0, 2**32 - 1))
    return draw(st.sampled_from(sorted(RULES))), settings, dtype, size, count, decays, scales, odd, seed


def arrays_of(optimizer, dtype, size: int, count: int, odd: float, seed: int):
    random = np.random.default_rng(seed)
    weights, wide = numbers(random, size, dtype, odd), WIDE[dtype]
    slots = {name: numbers(random, size, wide, odd) for name in optimizer.slot_names}
    slots |= {name: np.abs(slots[name]) for name in NEVER_NEGATIVE if name in slots}
    return weights, slots, [numbers(random, size, dtype, odd) for _ in range(count)]


def made(name: str, settings: dict) -> ms.optimizers.Optimizer:
    optimizer = RULES[name]()
    again = {
        key: getattr(optimizer, key)
        for key in ("momentum", "nesterov", "beta_1", "beta_2", "epsilon")
        if hasattr(optimizer, key)
    }
    again |= {key: getattr(optimizer, key) for key in ("amsgrad", "rho", "centered") if hasattr(optimizer, key)}
    return type(optimizer)(0.01, **again, **settings)


@compiled
@settings(max_examples=200, deadline=None)
@given(blocks(), st.booleans(), st.sampled_from([1, 3]), st.sampled_from([1.0, 2.0, 4 / 3]))
def test_all_that_happens_to_a_block_has_the_same_bits(block, updates, threads, factor) -> None:
    name, chosen, dtype, size, count, decays, scales, odd, seed = block
    optimizer, found = made(name, chosen), []
    sums = GRADIENT_SUM in optimizer.slot_names
    for patched in (False, True):
        weights, slots, parts = arrays_of(optimizer, dtype, size, count, odd, seed)
        before = [part.copy() for part in parts]
        update = BlockUpdate(optimizer, np.dtype(dtype), lambda: [np.empty(500, WIDE[dtype]) for _ in range(4)])
        update.begin(4, 0.01, factor)

        def step(update=update, weights=weights, slots=slots, parts=parts) -> None:
            if sums and not updates:
                update.accumulate(weights, parts, slots)
            else:
                update.update(weights, parts, slots, decays, 0, scales, 3 if sums else 0)

        with pytest.MonkeyPatch.context() as patch:
            if patched:
                patch.setattr(loops, "update", loops.leave_to_numpy)
            loops.set_threads(1 if patched else threads)
            errors = errors_of(step)
            loops.set_threads(1)
        for part, copy in zip(parts, before, strict=True):
            assert_same_bits(part, copy)
        found.append((weights, slots, errors))
    (weights, slots, errors), (expected, expected_slots, wanted) = found
    assert_same_bits(weights, expected)
    for slot in slots:
        assert_same_bits(slots[slot], expected_slots[slot])
    assert errors == wanted


@pytest.mark.parametrize("by_numpy", [False, True])
def test_a_sum_of_parts_times_a_factor_by_hand(by_numpy, monkeypatch) -> None:
    """Before it is accumulated, and before the mean of what was: 1.5 (1 + 2) and (3 + 1.5 (1 + 2)) / 3."""
    if by_numpy:
        monkeypatch.setattr(loops, "update", loops.leave_to_numpy)
    optimizer = ms.optimizers.SGD(1.0, gradient_accumulation_steps=3)
    update = BlockUpdate(optimizer, np.dtype(np.float64), lambda: [np.empty(4) for _ in range(4)])
    update.begin(2, 1.0, 1.5)
    weights, slots, parts = np.zeros(5), {GRADIENT_SUM: np.full(5, 3.0)}, [np.full(5, 1.0), np.full(5, 2.0)]
    update.accumulate(weights, parts, slots)
    np.testing.assert_array_equal(slots[GRADIENT_SUM], 3 + 4.5)
    slots[GRADIENT_SUM][...] = 3.0
    update.update(weights, parts, slots, (), 0, (), 3)
    np.testing.assert_array_equal(weights, -2.5)
    update.update(weights, parts[:1], slots)
    np.testing.assert_array_equal(weights, -2.5 - 1.5)


def test_what_happens_to_a_block_by_hand() -> None:
    """Mean of three calls, scaled, clipped; weights decay; SGD; the average, which overwrites them."""
    optimizer = ms.optimizers.SGD(
        0.5, clipvalue=2.0, use_ema=True, ema_momentum=0.75, ema_overwrite_frequency=2, gradient_accumulation_steps=3
    )
    update = BlockUpdate(optimizer, np.dtype(np.float64), lambda: [np.empty(4) for _ in range(4)])
    update.begin(2, 0.5)
    weights, slots = np.full(4, 8.0), {AVERAGE: np.full(4, 4.0), GRADIENT_SUM: np.array([3.0, 3.0, 30.0, -30.0])}
    parts = [np.full(4, 1.0), np.full(4, 2.0)]
    update.update(weights, parts, slots, [(0, 2, 0.25)], 0, [(1, 2, 0.5)], 3)
    # Gradients (3 + 3)/3 = 2, halved in the second, 11 and -9 clipped to 2 and -2; 8 less 1/8 is 7 in the first two.
    trained = np.array([7 - 1.0, 7 - 0.5, 8 - 1.0, 8 + 1.0])
    expected = 0.75 * 4.0 + 0.25 * trained
    np.testing.assert_array_equal(weights, expected)
    np.testing.assert_array_equal(slots[AVERAGE], expected)
    np.testing.assert_array_equal(slots[GRADIENT_SUM], 0)
    np.testing.assert_array_equal(parts, [np.full(4, 1.0), np.full(4, 2.0)])
