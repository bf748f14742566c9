"""Windows and groups: the examples of TensorFlow's documentation (2.21), and what becomes of wrong arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpistrat.data import INFINITE, UNKNOWN, ArraySpec, Dataset, DatasetSpec, from_arrays, from_generator


def listed(elements: Any) -> list[Any]:
    return [np.asarray(element).tolist() for element in elements]


def in_order(dataset: Dataset) -> Dataset:
    return dataset.filter(lambda *row: True)


SEVEN = [
    ({"size": 3}, [[0, 1, 2], [3, 4, 5], [6]]),
    ({"size": 3, "shift": 1, "drop_remainder": True}, [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]),
    ({"size": 3, "shift": 1, "stride": 2, "drop_remainder": True}, [[0, 2, 4], [1, 3, 5], [2, 4, 6]]),
    ({"size": 2, "shift": 4}, [[0, 1], [4, 5]]),  # gaps
    ({"size": 2, "shift": 3, "stride": 3}, [[0, 3], [3, 6], [6]]),
    ({"size": 9, "drop_remainder": True}, []),
    ({"size": 9, "shift": 4}, [[0, 1, 2, 3, 4, 5, 6], [4, 5, 6]]),
]


@pytest.mark.parametrize(("arguments", "expected"), SEVEN)
def test_windows_of_seven(arguments: dict[str, Any], expected: list[list[int]]) -> None:
    windows = Dataset.range(7).window(**arguments)
    assert [listed(window) for window in windows] == expected
    assert len(windows) == len(expected)
    assert windows.node.random_access
    read = in_order(Dataset.range(7)).window(**arguments)
    assert [listed(window) for window in read] == expected
    assert read.cardinality() == UNKNOWN


def test_windows_of_tuples_and_dicts() -> None:
    for source in (lambda rows: rows, in_order):
        pairs = source(Dataset.from_tensor_slices(([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]))).window(2)
        assert [(listed(x), listed(y)) for x, y in pairs] == [([1, 2], [6, 7]), ([3, 4], [8, 9]), ([5], [10])]
        names = source(Dataset.from_tensor_slices({"a": [1, 2, 3], "b": [4, 5, 6], "c": [7, 8, 9]})).window(2)
        assert [{name: listed(each) for name, each in window.items()} for window in names] == [
            {"a": [1, 2], "b": [4, 5], "c": [7, 8]},
            {"a": [3], "b": [6], "c": [9]},
        ]


def test_windows_say_what_they_are() -> None:
    scalar = ArraySpec((), np.int64)
    windows = Dataset.range(7).window(3)
    assert windows.element_spec == DatasetSpec(scalar) != scalar
    assert repr(windows.element_spec) == "DatasetSpec(ArraySpec((), int64))"
    assert next(iter(windows)).element_spec == scalar
    assert Dataset.range(7).batch(2).window(3).element_spec == DatasetSpec(ArraySpec((None,), np.int64))
    assert str(windows) == ("from_arrays: 7 rows of int64[]\n└─ window(3, shift=3, stride=1, drop_remainder=False)")
    assert Dataset.range(7).repeat().window(3).cardinality() == INFINITE


def test_windows_of_a_shuffle_are_those_of_their_epoch() -> None:
    rows = Dataset.range(20).shuffle(seed=1)
    orders = [listed(rows.node.elements(epoch)) for epoch in range(2)]
    windows = rows.window(8)
    assert [[x for window in windows for x in listed(window)] for _ in range(2)] == orders
    first = next(iter(rows.window(8)))
    assert listed(first) == listed(first) == orders[0][:8]  # read again they are the same
    # They can be shuffled, taken, filtered, and read from any position on.
    assert [listed(window) for window in windows.node.elements(1, 2)] == [orders[1][16:]]
    assert listed(windows.skip(1).take(1).flat_map(lambda window: window)) != []
    moved = Dataset.range(6).window(2).shuffle(seed=3)
    assert sorted(listed(window) for window in moved) == [[0, 1], [2, 3], [4, 5]]


def test_windows_of_batches_and_of_windows() -> None:
    batches = Dataset.range(7).batch(2).window(2)
    assert [listed(window) for window in batches] == [[[0, 1], [2, 3]], [[4, 5], [6]]]
    twice = Dataset.range(6).window(2).window(2)
    assert [[listed(inner) for inner in outer] for outer in twice] == [[[0, 1], [2, 3]], [[4, 5]]]
    flat = Dataset.range(7).window(3, shift=1, drop_remainder=True).flat_map(lambda window: window.batch(3))
    assert listed(flat) == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6]]
    sums = Dataset.range(7).window(3).map(lambda window: sum(int(x) for x in window))
    assert listed(sums) == [3, 12, 6]


def test_group_by_window() -> None:
    groups = Dataset.range(10).group_by_window(
        key_func=lambda x: x % 2, reduce_func=lambda key, dataset: dataset.batch(5), window_size=5
    )
    assert listed(groups) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    assert groups.element_spec == ArraySpec((None,), np.int64)
    # Those that are not complete come at the end, by their keys, and each key has a size of its own.
    groups = Dataset.range(8).group_by_window(
        lambda x: 2 - x % 3,
        lambda key, dataset: dataset.map(lambda x: 10 * key + x),
        window_size_func=lambda key: key + 1,
    )
    assert listed(groups) == [2, 11, 14, 5, 20, 23, 26, 17]
    pairs = from_arrays((np.arange(4), np.array([1, 0, 1, 0])))
    groups = pairs.group_by_window(lambda x, y: y, lambda key, dataset: dataset, 2)
    assert [int(x) for x, _ in groups] == [0, 2, 1, 3]
    batches = Dataset.range(9).batch(2).group_by_window(len, lambda key, dataset: dataset, 2)
    assert listed(batches) == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]


def test_wrong_groups_are_explained() -> None:
    rows = Dataset.range(4)
    with pytest.raises(ValueError, match=r"window_size: expected one of window_size, window_size_func, got none"):
        rows.group_by_window(lambda x: 0, lambda key, dataset: dataset)
    with pytest.raises(ValueError, match=r"got both"):
        rows.group_by_window(lambda x: 0, lambda key, dataset: dataset, 2, lambda key: 2)
    with pytest.raises(TypeError, match=r"key_func: expected an integer, got 0\.5"):
        list(rows.group_by_window(lambda x: 0.5, lambda key, dataset: dataset, 2))
    with pytest.raises(ValueError, match=r"window_size_func: expected at least 1, got 0"):
        list(rows.group_by_window(lambda x: 0, lambda key, dataset: dataset, window_size_func=lambda key: 0))
    with pytest.raises(TypeError, match=r"reduce_func: expected a function that returns a Dataset, got int"):
        list(rows.group_by_window(lambda x: 0, lambda key, dataset: 3, 2))
    with pytest.raises(ValueError, match=r"Dataset\.window: size: expected at least 1, got 0"):
        rows.window(0)


ELEMENTS = [[0], [1, 2, 3, 4], [5, 6, 7], [7, 8, 9, 10, 11], [13, 14, 15, 16, 19, 20], [21, 22]]


def sequences() -> Dataset:
    return from_generator(lambda: map(np.array, ELEMENTS), ArraySpec((None,), np.int64))


def test_bucket_by_sequence_length() -> None:
    batches = sequences().bucket_by_sequence_length(
        element_length_func=len, bucket_boundaries=[3, 5], bucket_batch_sizes=[2, 2, 2]
    )
    expected = [
        [[1, 2, 3, 4], [5, 6, 7, 0]],
        [[7, 8, 9, 10, 11, 0], [13, 14, 15, 16, 19, 20]],
        [[0, 0], [21, 22]],
    ]
    assert listed(batches) == expected
    assert batches.element_spec == ArraySpec((None, None), np.int64)
    # A length that is a boundary is in the bucket that begins there; the boundary less one is what it is padded to.
    batches = (
        sequences()
        .take(3)
        .bucket_by_sequence_length(len, [3, 5], [2, 2, 2], padding_values=-1, pad_to_bucket_boundary=True)
    )
    assert listed(batches) == [[[1, 2, 3, 4], [5, 6, 7, -1]], [[0, -1]]]
    with pytest.raises(ValueError, match=r"pad_to_bucket_boundary: expected lengths below 5, the last boundary, got 5"):
        list(sequences().bucket_by_sequence_length(len, [3, 5], [2, 2, 2], pad_to_bucket_boundary=True))
    batches = sequences().bucket_by_sequence_length(len, [3, 5], [2, 3, 2], drop_remainder=True)
    assert listed(batches) == [expected[1], expected[2]]
    batches = sequences().bucket_by_sequence_length(len, [4], [2, 3], padded_shapes=(7,))
    assert [np.shape(batch) for batch in batches] == [(2, 7), (3, 7), (1, 7)]


def test_buckets_without_padding() -> None:
    rows = Dataset.range(6).bucket_by_sequence_length(lambda x: x % 2, [1], [2, 2], no_padding=True)
    assert listed(rows) == [[0, 2], [1, 3], [4], [5]]
    with pytest.raises(ValueError, match=r"bucket_by_sequence_length: expected rows of one shape, got int64\[\?\]"):
        list(sequences().bucket_by_sequence_length(len, [3], [2, 2], no_padding=True))


def test_wrong_buckets_are_explained() -> None:
    with pytest.raises(ValueError, match=r"bucket_batch_sizes: expected 3 numbers, one more than there are boundaries"):
        sequences().bucket_by_sequence_length(len, [3, 5], [2, 2])
    with pytest.raises(ValueError, match=r"bucket_boundaries: expected growing lengths, got \[5, 3\]"):
        sequences().bucket_by_sequence_length(len, [5, 3], [2, 2, 2])
    with pytest.raises(ValueError, match=r"expected a dataset of rows, got one that is batched already"):
        Dataset.range(4).batch(2).bucket_by_sequence_length(len, [3], [2, 2])


def test_an_iterator_over_groups_goes_on_where_it_was() -> None:
    for make in (
        lambda: Dataset.range(9).window(4, shift=3).flat_map(lambda window: window),
        lambda: Dataset.range(9).group_by_window(lambda x: x % 2, lambda key, dataset: dataset, 3),
        lambda: sequences().bucket_by_sequence_length(len, [3, 5], [2, 2, 2]),
    ):
        iterator = iter(make())
        next(iterator), next(iterator)
        following = iter(make())
        following.restore(iterator.state())
        assert listed(following) == listed(iterator) != []


def ragged() -> Dataset:
    return Dataset.range(6).map(np.arange, element_spec=ArraySpec((None,), np.int64))


def test_ragged_batch() -> None:
    expected = [[[], [0]], [[0, 1], [0, 1, 2]], [[0, 1, 2, 3], [0, 1, 2, 3, 4]]]
    for rows in (ragged(), in_order(ragged())):
        batches = rows.ragged_batch(2)
        assert [[row.tolist() for row in batch] for batch in batches] == expected
        assert batches.element_spec == ArraySpec((None, None), np.int64)
        assert [row.tolist() for row in batches.unbatch()] == [row for batch in expected for row in batch]
        assert [len(batch) for batch in rows.ragged_batch(batch_size=4, drop_remainder=True)] == [4]
        padded = batches.unbatch().padded_batch(3)
        assert [np.shape(batch) for batch in padded] == [(3, 2), (3, 5)]
    assert len(ragged().ragged_batch(4)) == 2
    assert listed(Dataset.range(5).ragged_batch(2)) == [[0, 1], [2, 3], [4]]  # rows of one shape as by batch
    with pytest.raises(ValueError, match=r"expected rows of one shape, got int64\[\?\].*padded_batch or ragged_batch"):
        next(iter(ragged().batch(2)))


@pytest.mark.parametrize("sizes", [2, [2, 1]])
def test_rows_that_are_scalars_are_no_batches(sizes) -> None:
    pairs = from_arrays((np.zeros((4, 3)), np.arange(4)))
    for dataset, got in ((Dataset.range(8), "a scalar"), (pairs, r"a scalar at \[1\]")):
        for made in (dataset.rebatch(sizes), dataset.map(lambda *row: row).rebatch(sizes), dataset.unbatch()):
            with pytest.raises(
                ValueError, match=f"expected arrays with a first axis, got {got}.* Batch the rows first"
            ):
                list(made)


def test_rebatch() -> None:
    def batched(rows: int, size: int) -> Dataset:
        return Dataset.range(rows).batch(size)

    assert listed(batched(6, 2).rebatch(3)) == [[0, 1, 2], [3, 4, 5]]
    assert listed(batched(7, 4).rebatch(3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert listed(batched(7, 2).rebatch(3, drop_remainder=True)) == [[0, 1, 2], [3, 4, 5]]
    cycled = batched(8, 4).rebatch([2, 1, 1])
    assert listed(cycled) == [[0, 1], [2], [3], [4, 5], [6], [7]]
    assert len(cycled) == 6
    assert cycled.node.random_access
    assert cycled.element(0, 3).tolist() == [4, 5]
    assert listed(batched(10, 4).rebatch([2, 3])) == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]
    assert listed(batched(9, 4).rebatch([2, 3], True)) == [[0, 1], [2, 3, 4], [5, 6]]
    assert listed(from_arrays(np.arange(6).reshape(3, 2)).rebatch(4)) == [[0, 1, 2, 3], [4, 5]]
    for rows, sizes, drop in ((0, [1, 2], False), (3, [1, 2], False), (4, [1, 2], True), (5, [4, 3], True)):
        assert len(batched(rows, 2).rebatch(sizes, drop)) == len(list(batched(rows, 2).rebatch(sizes, drop)))
    again = batched(4, 2).repeat(2).rebatch([1, 2])
    assert again.cardinality() == UNKNOWN  # random access is kept right behind batch only
    assert listed(again) == [[0], [1, 2], [3], [0, 1], [2], [3]]
    for wrong in (0, [2, 0], []):
        with pytest.raises(ValueError, match=r"Dataset\.rebatch: global_batch_size: expected at least"):
            batched(4, 2).rebatch(wrong)
