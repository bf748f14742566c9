"""The compiled loops of input give what NumPy does; what is not for them is left alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.base import loops
from mpistrat.data import permutation
from mpistrat.data.buffers import take_rows

pytestmark = pytest.mark.skipif(not loops.used()[0], reason=f"no compiled loops: {loops.used()[1]}")

SIZES = [*range(1, 20), 63, 64, 65, 255, 256, 257, 300, 1000, 3072]


@st.composite
def places(draw: st.DrawFn, count: int = 60) -> np.ndarray:
    """Row numbers: single ones, runs of neighbours, and the same ones again."""
    runs = draw(st.lists(st.tuples(st.integers(0, count - 1), st.integers(1, 20)), max_size=12))
    rows = [np.arange(first, min(first + length, count)) for first, length in runs]
    return np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64)


@settings(max_examples=200, deadline=None)
@given(places(), st.sampled_from(SIZES), st.integers(0, 7), st.integers(0, 2**31))
def test_rows_are_gathered_as_numpy_takes_them(rows, size, shift, seed) -> None:
    """Of any size, wherever they begin in memory; nothing beside the buffer is written."""
    random = np.random.default_rng(seed)
    array = random.integers(0, 256, 60 * size + shift, np.uint8)[shift:].reshape(60, size)
    memory = np.full(rows.size * size + 2 * 64, 77, np.uint8)
    out = memory[64 : 64 + rows.size * size].reshape(rows.size, size)
    assert loops.gather(out, array, rows) is (rows.size > 0)
    np.testing.assert_array_equal(out, array[rows])
    assert (memory[:64] == 77).all() and (memory[64 + rows.size * size :] == 77).all()


@pytest.mark.parametrize("dtype", ["f4", ">i2", "c16", "S5", [("a", "i4"), ("b", "f8")], "?"])
def test_rows_of_any_type_are_gathered(dtype) -> None:
    array = np.arange(24 * np.dtype(dtype).itemsize).astype(np.uint8).view(dtype).reshape(8, 3)
    rows = np.array([7, 0, 1, 2, 7])
    out = np.empty((5, 3), dtype)
    assert loops.gather(out, array, rows)
    np.testing.assert_array_equal(out, array[rows])


ARRAY = np.arange(40, dtype=np.int32).reshape(10, 4)
NOT_FOR_GATHER = {
    "a row behind the last": (np.zeros((2, 4), "i4"), ARRAY, np.array([0, 10])),
    "a negative row": (np.zeros((2, 4), "i4"), ARRAY, np.array([0, -1])),
    "no rows": (np.zeros((0, 4), "i4"), ARRAY, np.empty(0, np.int64)),
    "columns": (np.zeros((2, 10), "i4"), ARRAY.T, np.array([0, 1])),
    "every second row": (np.zeros((2, 4), "i4"), ARRAY[::2], np.array([0, 1])),
    "a buffer with gaps": (np.zeros((2, 8), "i4")[:, ::2], ARRAY, np.array([0, 1])),
    "a buffer of another type": (np.zeros((2, 4), "f4"), ARRAY, np.array([0, 1])),
    "a buffer of another size": (np.zeros((3, 4), "i4"), ARRAY, np.array([0, 1])),
    "a buffer that is only read": (np.frombuffer(bytes(32), "i4").reshape(2, 4), ARRAY, np.array([0, 1])),
    "numbers of 32 bits": (np.zeros((2, 4), "i4"), ARRAY, np.array([0, 1], np.int32)),
    "every second number": (np.zeros((2, 4), "i4"), ARRAY, np.arange(4)[::2]),
    "numbers that are not integers": (np.zeros((2, 4), "i4"), ARRAY, np.array([0.0, 1.0])),
    "objects": (np.zeros((2, 1), object), np.zeros((3, 1), object), np.array([0, 1])),
    "dates": (np.zeros((2, 1), "M8[s]"), np.zeros((3, 1), "M8[s]"), np.array([0, 1])),
}


@pytest.mark.parametrize("what", NOT_FOR_GATHER)
def test_other_rows_are_left_to_numpy_untouched(what) -> None:
    out, array, rows = NOT_FOR_GATHER[what]
    before = out.copy()
    assert loops.gather(out, array, rows) is False
    np.testing.assert_array_equal(out, before)


def test_rows_are_not_gathered_over_themselves() -> None:
    array = np.arange(40).reshape(10, 4)
    assert loops.gather(array[:2], array, np.array([5, 6])) is False


def test_rows_without_a_loop_are_taken_by_numpy() -> None:
    for what in ("columns", "every second row"):
        out, array, rows = NOT_FOR_GATHER[what]
        out = out.copy()
        take_rows(array, rows, out)
        np.testing.assert_array_equal(out, array[rows])


@settings(max_examples=60, deadline=None)
@given(st.integers(5, 2**62 - 1), st.integers(0, 2**32), st.integers(0, 1300))
def test_an_order_is_numpys(count, seed, size) -> None:
    positions = np.random.default_rng(seed).integers(0, count, size)
    keys = permutation._keys((seed, 0, count))
    found = positions.copy()
    assert loops.permute(found, keys, count)
    # As the docstring of permutation.py says it, a number at a time.
    bits = (count - 1).bit_length()
    low_bits, mask = (bits + 1) // 2, 2**64 - 1
    high_bits = bits - low_bits

    def mix(half: int, key: int, width: int) -> int:
        half = (half + key) * 0xBF58476D1CE4E5B9 & mask
        half = (half ^ half >> 29) * 0x94D049BB133111EB & mask
        half = (half ^ half >> 32) * 0xBF58476D1CE4E5B9 & mask
        return half >> (64 - width)

    for place in range(min(size, 20)):
        value = int(positions[place])
        while True:
            low, high = value % 2**low_bits, value >> low_bits
            for number, key in enumerate(keys.tolist()):
                if number % 2:
                    high ^= mix(low, key, high_bits)
                else:
                    low ^= mix(high, key, low_bits)
            value = high << low_bits | low
            if value < count:
                break
        assert value == found[place]


def test_an_order_with_and_without_the_loop_is_the_same(monkeypatch) -> None:
    found = [permutation.permute(np.arange(0, 10**6, 7), 10**6, seed=3, epoch=2)]
    monkeypatch.setattr(loops, "permute", loops.leave_to_numpy)
    permutation._aligned_block.cache_clear()
    found.append(permutation.permute(np.arange(0, 10**6, 7), 10**6, seed=3, epoch=2))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("position", [-1, 5000])
def test_positions_outside_an_order_are_refused(position) -> None:
    positions = np.array([1, position])
    assert loops.permute(positions, permutation._keys((0, 0, 5000)), 5000) is False
    assert positions.tolist() == [1, position]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(0, 3000), st.integers(0, 2**31))
def test_the_shuffle_filter_is_undone(size, length, seed) -> None:
    encoded = np.random.default_rng(seed).integers(0, 256, length, np.uint8)
    count = length // size
    out = np.empty(length, np.uint8)
    assert loops.unshuffle(out, encoded, size)
    np.testing.assert_array_equal(out[: count * size], encoded[: count * size].reshape(size, count).T.reshape(-1))
    np.testing.assert_array_equal(out[count * size :], encoded[count * size :])
