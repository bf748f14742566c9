"""Sliding windows next to slices of NumPy: with random access and in order, with a horizon, shuffled, and over chunks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpistrat.data import INFINITE, UNKNOWN, ArraySpec, Dataset, HDF5Dataset, from_arrays, write_shards

X = np.arange(60, dtype=np.int64).reshape(20, 3)
Y = np.arange(20, dtype=np.float32) / 2


def expected(
    array: np.ndarray, length: int, horizon: int, shift: int, stride: int
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return all whole windows of an array, cut after `length` rows."""
    rows = length + horizon
    span = (rows - 1) * stride + 1
    whole = [array[start : start + span : stride] for start in range(0, len(array) - span + 1, shift)]
    return [(window[:length], window[length:]) for window in whole]


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_random_windows(seed: int, in_order: bool) -> None:
    rng = np.random.default_rng(seed)
    length, horizon, shift, stride = (int(rng.integers(low, high)) for low, high in ((1, 7), (0, 4), (1, 6), (1, 4)))
    source = from_arrays({"x": X, "y": Y})
    source = source.filter(lambda row: True) if in_order else source
    dataset = source.sliding_window(length, horizon, shift, stride)
    windows = zip(expected(X, length, horizon, shift, stride), expected(Y, length, horizon, shift, stride), strict=True)
    found = list(dataset)
    assert dataset.cardinality() == (UNKNOWN if in_order else len(found))
    for element, ((x, x_after), (y, y_after)) in zip(found, windows, strict=True):
        past, future = element if horizon else (element, {"x": x_after, "y": y_after})
        for name, values, after in (("x", x, x_after), ("y", y, y_after)):
            np.testing.assert_array_equal(past[name], values, strict=True)
            np.testing.assert_array_equal(future[name], after, strict=True)


def test_windows_are_rows_of_batches() -> None:
    dataset = from_arrays(X).sliding_window(4, horizon=1)
    assert dataset.element_spec == (ArraySpec((4, 3), np.int64), ArraySpec((1, 3), np.int64))
    past, future = dataset.rows([15, 0, 15])
    np.testing.assert_array_equal(past, [X[15:19], X[:4], X[15:19]], strict=True)
    np.testing.assert_array_equal(future, [X[19:], X[4:5], X[19:]], strict=True)
    shapes = [batch[0].shape for batch in dataset.batch(6)]
    assert shapes == [(6, 4, 3), (6, 4, 3), (4, 4, 3)]
    assert from_arrays(X).sliding_window(4).rows(np.zeros(0, np.int64)).shape == (0, 4, 3)


def test_windows_of_several_epochs() -> None:
    """Each repetition has its own windows, and its own rows where a shuffle is below."""
    shuffled = Dataset.range(7).shuffle(seed=3)
    found = [window.tolist() for window in shuffled.sliding_window(3, shift=2).repeat(2)]
    rows = [[int(x) for x in shuffled] for _ in range(2)]
    assert found == [each[start : start + 3] for each in rows for start in (0, 2, 4)]


def test_a_shuffle_is_global() -> None:
    dataset = Dataset.range(1000).sliding_window(5)
    order = [int(window[0]) for window in dataset.shuffle(seed=1)]
    assert sorted(order) == list(range(996))
    assert max(order[:20]) - min(order[:20]) > 500


@pytest.mark.parametrize("shift", [1, 3, 50])
def test_windows_over_chunks(shift: int, tmp_path: Any) -> None:
    """A block shuffle mixes the windows that begin in neighbouring chunks, and reads each chunk about once."""
    write_shards(tmp_path / "a", {"x": np.arange(4000)}, layout="chunked", chunk_rows=100)
    dataset = HDF5Dataset(tmp_path / "a", "x")
    windows = dataset.sliding_window(10, shift=shift)
    starts = np.arange(0, 3991, shift)
    assert windows.node.chunk_starts().tolist() == [*np.searchsorted(starts, np.arange(0, 3901, 100)), len(starts)]
    shuffled = windows.shuffle(300, seed=2, mode="block")
    found = [window.tolist() for window in shuffled]
    assert sorted(found) == [list(range(start, start + 10)) for start in starts]
    assert found != sorted(found)
    assert dataset.node.counters.chunk_reads <= 2 * 40


def test_rows_are_read_once_per_batch() -> None:
    calls = []
    rows = Dataset.range(50).map(lambda x: calls.append(int(x)) or x)
    (batch,) = rows.sliding_window(10).batch(41)
    assert batch.shape == (41, 10)
    assert sorted(calls[1:]) == list(range(50))  # one more for the spec


def test_endless_and_empty() -> None:
    endless = Dataset.range(3).repeat().sliding_window(4)
    assert endless.cardinality() == INFINITE
    assert [window.tolist() for window in endless.take(2)] == [[0, 1, 2, 0], [1, 2, 0, 1]]
    assert len(Dataset.range(3).sliding_window(4)) == 0
    assert list(Dataset.range(3).sliding_window(4)) == []
    assert len(Dataset.range(3).sliding_window(2, horizon=1)) == 1


def test_text() -> None:
    assert (
        from_arrays(X).sliding_window(3, 2, 4, 5).node.describe() == "sliding_window(3, horizon=2, shift=4, stride=5)"
    )
    assert from_arrays(X).sliding_window(3).node.describe() == "sliding_window(3, shift=1, stride=1)"


def test_arguments_and_rows_that_do_not_fit() -> None:
    rows = from_arrays(X)
    for name, value in (("length", 0), ("horizon", -1), ("shift", 0), ("stride", 1.5)):
        with pytest.raises((ValueError, TypeError), match=rf"Dataset\.sliding_window: {name}: expected"):
            rows.sliding_window(**{"length": 2, name: value})
    with pytest.raises(ValueError, match="sliding_window: expected a dataset of rows, got one that is batched"):
        rows.batch(2).sliding_window(2)
    ragged = Dataset.range(4).map(np.arange, element_spec=ArraySpec((None,), np.int64)).sliding_window(2)
    with pytest.raises(ValueError, match=r"Dataset\.sliding_window: expected rows of one shape, got int64\[\?\]"):
        list(ragged)
