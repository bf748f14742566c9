"""Forms of numbers between nodes: how far off they are, that nothing is lost, the same bytes with and without compiled loops."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.arena.wire import INT8_BLOCK, Wire, wire_named
from mpistrat.base import loops
from mpistrat.base.options import WIRES

NAMES = ("bfloat16", "int8")
SIZES = (1, 3, 64, INT8_BLOCK - 1, INT8_BLOCK, INT8_BLOCK + 1, 2 * INT8_BLOCK + 77)
ODD = [0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 3.4e38, -3.4e38, np.inf, -np.inf, np.nan]
some = st.builds(
    lambda seed, size, magnitude: (np.random.default_rng(seed).normal(size=size) * 10.0**magnitude).astype(np.float32),
    st.integers(0, 999),
    st.sampled_from(SIZES),
    st.integers(-44, 30),
)


def wire_of(name: str) -> Wire:
    wire = wire_named(name)
    assert wire is not None
    return wire


def encoded(wire: Wire, values: np.ndarray) -> np.ndarray:
    message = np.empty(wire.nbytes(values.size), np.uint8)
    wire.encode(values, message)
    return message


def decoded(wire: Wire, message: np.ndarray, size: int) -> np.ndarray:
    out = np.empty(size, np.float32)
    wire.decode(message, out)
    return out


def odd(size: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = (rng.normal(size=size) * 10.0 ** rng.integers(-6, 6, size)).astype(np.float32)
    where = rng.random(size) < 0.01
    values[where] = rng.choice(np.array(ODD, np.float32), int(where.sum()))
    return values


@pytest.fixture
def without_loops(monkeypatch: pytest.MonkeyPatch):
    """A function that switches the compiled loops off from its call on."""

    def switch() -> None:
        for name in ("add", "narrow", "encode_int8", "decode_int8", "rest"):
            monkeypatch.setattr(loops, name, loops.leave_to_numpy)

    return switch


def test_every_name_of_the_options_has_a_form() -> None:
    assert [wire_of(name).name for name in WIRES] == list(WIRES) == list(NAMES)
    assert [wire_of(name).feeds_back for name in NAMES] == [False, True]


def test_bytes_of_a_message() -> None:
    assert [wire_of("bfloat16").nbytes(n) for n in (0, 1, 5000)] == [0, 2, 10_000]
    assert [wire_of("int8").nbytes(n) for n in (0, 1, 4096, 4097)] == [0, 5, 4100, 4105]


@given(some)
@settings(deadline=None)
def test_bfloat16_is_that_of_ml_dtypes(values: np.ndarray) -> None:
    message = encoded(wire_of("bfloat16"), values)
    np.testing.assert_array_equal(message.view(np.uint16), values.astype(ml_dtypes.bfloat16).view(np.uint16))
    found = decoded(wire_of("bfloat16"), message, values.size)
    np.testing.assert_array_equal(found, values.astype(ml_dtypes.bfloat16).astype(np.float32))


@given(some)
@settings(deadline=None)
def test_int8_is_off_by_half_a_scale(values: np.ndarray) -> None:
    """And by the rounding of the scale, which counts where it is a subnormal number, or 0."""
    found = decoded(wire_of("int8"), encoded(wire_of("int8"), values), values.size)
    for low in range(0, values.size, INT8_BLOCK):
        part = values[low : low + INT8_BLOCK].astype(np.float64)
        largest = np.abs(part).max()
        bound = largest / 127 * 0.5 * (1 + 1e-4) + 127 * 2.0**-149
        assert np.abs(found[low : low + INT8_BLOCK] - part).max() <= bound


@given(some, some)
@settings(deadline=None)
def test_what_is_sent_and_what_is_kept_is_all(values: np.ndarray, before: np.ndarray) -> None:
    """Of sums and of changes, of several messages one after the other."""
    size = min(values.size, before.size)
    values, before = values[:size], before[:size]
    for wire in map(wire_of, NAMES):
        unsent, work = np.zeros(size, np.float32), np.empty(size, np.float32)
        message, sent = np.empty(wire.nbytes(size), np.uint8), np.zeros(size)
        for total in (values, before, values):
            meant = (total + unsent).astype(np.float32)  # the sum is rounded, once
            wire.encode_sum(total.copy(), message, unsent, work)
            sent = decoded(wire, message, size).astype(np.float64)
            assert np.all(np.abs(sent + unsent - meant) <= 2.0**-24 * np.abs(unsent))
        weights, meant = before.copy(), before.copy()
        others = before.copy()
        unsent[...] = 0
        for change in (values, before, values):
            meant = (weights + unsent + change).astype(np.float32)
            unsent[...] = meant - weights
            expected = weights + unsent
            wire.encode_change(weights, message, unsent, work)
            wire.decode(message, others, add=True)
            np.testing.assert_array_equal(weights, others)
            with np.errstate(all="ignore"):
                np.testing.assert_array_equal(unsent, expected - weights)


def test_many_small_changes_arrive() -> None:
    """Each is far below what the form can tell beside the large one, and without feedback would be lost for ever."""
    wire, size = wire_of("int8"), 2
    weights, unsent = np.zeros(size, np.float32), np.zeros(size, np.float32)
    message, work = np.empty(wire.nbytes(size), np.uint8), np.empty(size, np.float32)
    for _ in range(1000):
        unsent += np.array([1.0, 0.001], np.float32)
        wire.encode_change(weights, message, unsent, work)
    np.testing.assert_allclose(weights, [1000.0, 1.0], atol=1 / 127)
    np.testing.assert_allclose(weights.astype(float) + unsent, [1000.0, 1.0], rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_arrives_and_is_not_kept(name: str, bad: float) -> None:
    wire, size = wire_of(name), 2 * INT8_BLOCK
    total = np.ones(size, np.float32)
    total[5] = bad
    unsent, work = np.full(size, 0.25, np.float32), np.empty(size, np.float32)
    message = np.empty(wire.nbytes(size), np.uint8)
    wire.encode_sum(total, message, unsent, work)
    found = decoded(wire, message, size)
    assert not np.isfinite(found[5]) and np.isfinite(unsent).all()
    np.testing.assert_allclose(found[INT8_BLOCK:], 1.25, rtol=1e-6)
    wire.encode_sum(np.ones(size, np.float32), message, unsent, work)
    np.testing.assert_allclose(decoded(wire, message, size), 1.0, rtol=0.05)


@pytest.mark.skipif(not loops.used()[0], reason=f"no compiled loops: {loops.used()[1]}")
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bytes_without_compiled_loops(name: str, without_loops) -> None:
    wire = wire_of(name)
    cases = [(odd(size, seed), odd(size, seed + 1)) for seed, size in enumerate(SIZES * 3)]
    cases += [(values, values * np.float32(1e-43)) for values, _ in cases]

    def run() -> list[np.ndarray]:
        found = []
        with np.errstate(all="ignore"):
            for values, before in cases:
                message = encoded(wire, values)
                added, unsent, work = before.copy(), before.copy(), np.empty_like(values)
                wire.decode(message, added, add=True)
                changed, sent = values.copy(), message.copy()
                wire.encode_change(changed, sent, unsent, work)
                found += [message, decoded(wire, message, values.size), added, sent, changed, unsent.copy()]
                wire.encode_sum(values.copy(), sent, unsent, work)
                found += [sent, unsent]
        return found

    compiled = run()
    without_loops()
    for number, (first, second) in enumerate(zip(compiled, run(), strict=True)):
        if first.dtype == np.uint8 and name == "bfloat16":
            first, second = decoded(wire, first, first.size // 2), decoded(wire, second, second.size // 2)
        np.testing.assert_array_equal(first, second, err_msg=str(number))  # NaN is equal to NaN


def test_a_message_may_be_cut_between_blocks() -> None:
    values = odd(3 * INT8_BLOCK + 5, 7)
    for wire in map(wire_of, NAMES):
        whole = encoded(wire, values)
        cut = np.concatenate([encoded(wire, values[: 2 * INT8_BLOCK]), encoded(wire, values[2 * INT8_BLOCK :])])
        np.testing.assert_array_equal(whole, cut)


@pytest.mark.skipif(not loops.used()[0], reason=f"no compiled loops: {loops.used()[1]}")
def test_what_is_not_for_the_loops_is_left() -> None:
    values, message = np.ones(10, np.float32), np.empty(14, np.uint8)
    assert loops.encode_int8(message, values) and loops.decode_int8(values, message, False)
    assert not loops.encode_int8(message[:-1], values) and not loops.encode_int8(message, values.astype(np.float64))
    assert not loops.decode_int8(values[::2], message, False) and not loops.decode_int8(values, message[1:], True)
    assert not loops.rest(values, values, values) and not loops.rest(values[:-1], values.copy(), values.copy())
