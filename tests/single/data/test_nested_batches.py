"""Batches of batches, as tf.data makes them; test_beside_tensorflow.py has the same chains side by side."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data import ArraySpec, Dataset


def listed(dataset):
    return [batch.tolist() for batch in dataset]


def test_batches_are_the_rows_of_batches():
    dataset = Dataset.range(12).batch(2).batch(3)
    assert listed(dataset) == [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
    assert dataset.element_spec == ArraySpec((None, 2), np.int64)
    assert dataset.cardinality() == 2
    assert dataset.node.random_access


def test_windows_in_batches():
    """The usual way to the time series of tf.data's guide."""
    windows = Dataset.range(7).window(3, shift=1, drop_remainder=True).flat_map(lambda window: window.batch(3))
    assert listed(windows.batch(2)) == [[[0, 1, 2], [1, 2, 3]], [[2, 3, 4], [3, 4, 5]], [[4, 5, 6]]]
    assert windows.batch(2).element_spec == ArraySpec((None, 3), np.int64)


@pytest.mark.parametrize("in_order", [False, True])
def test_batches_of_other_lengths_are_named(in_order):
    rows = Dataset.range(7).filter(lambda x: True) if in_order else Dataset.range(7)
    with pytest.raises(
        ValueError, match=r"expected batches of 2 rows, as the first has, got 1 row in batch 3\. Pass drop_rem"
    ):
        listed(rows.batch(2).batch(2))
    assert listed(rows.batch(2).padded_batch(2)) == [[[0, 1], [2, 3]], [[4, 5], [6, 0]]]


def test_ragged_batches_are_rows_of_ragged_batches_only():
    rows = Dataset.range(5).map(np.arange, element_spec=ArraySpec((None,), np.int64)).ragged_batch(2)
    assert [[[row.tolist() for row in inner] for inner in batch] for batch in rows.ragged_batch(2)] == [
        [[[], [0]], [[0, 1], [0, 1, 2]]], [[[0, 1, 2, 3]]]
    ]  # fmt: skip
    with pytest.raises(
        ValueError, match=r"padded_batch: .*got ragged batches. Use padded_batch in place of ragged_batch"
    ):
        list(rows.padded_batch(2))
    with pytest.raises(ValueError, match=r"batch: expected rows of one shape"):
        list(rows.batch(2))


def test_an_iterator_goes_on_where_it_was():
    for rows in (Dataset.range(24), Dataset.range(24).filter(lambda x: True)):
        dataset = rows.batch(2).batch(3)
        iterator = iter(dataset)
        next(iterator)
        state = iterator.state()
        left = [batch.tolist() for batch in iterator]
        again = iter(dataset)
        again.restore(state)
        assert [batch.tolist() for batch in again] == left


def test_shuffled_batches_of_batches():
    dataset = Dataset.range(24).shuffle(seed=1).batch(2).shuffle(seed=2).batch(3)
    plain = [row for batch in Dataset.range(24).shuffle(seed=1).batch(2).shuffle(seed=2) for row in [batch.tolist()]]
    assert [row for batch in listed(dataset) for row in batch] == plain


def test_prefetch_none_is_autotune():
    assert listed(Dataset.range(4).batch(2).prefetch(None)) == [[0, 1], [2, 3]]
    assert str(Dataset.range(4).prefetch(None)) == str(Dataset.range(4).prefetch(ms.data.AUTOTUNE))
