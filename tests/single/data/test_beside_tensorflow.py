"""Chains of operators beside TensorFlow's, where it is installed: the same elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpistrat.data import ArraySpec, Dataset, from_generator

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

WORDS = [[0], [1, 2, 3, 4], [5, 6, 7], [7, 8, 9, 10, 11], [13, 14, 15, 16, 19, 20], [21, 22], [1], [2, 3]]
CHOICES = np.array([0, 1, 0, 0, 1, 1])


def plain(element: Any) -> Any:
    """An element in tuples, dicts and lists of numbers; a dataset is the list of its elements."""
    if isinstance(element, (tuple, list)):
        return tuple(map(plain, element))
    if hasattr(element, "to_list"):
        return element.to_list()  # a RaggedTensor
    if hasattr(element, "element_spec"):
        return [plain(each) for each in element]
    array = np.asarray(element)
    return [plain(each) for each in array] if array.dtype == object and array.ndim else array.tolist()


def sequences(kind: Any) -> Any:
    if kind is Dataset:
        return from_generator(lambda: map(np.array, WORDS), ArraySpec((None,), np.int64))
    return kind.from_generator(lambda: WORDS, output_signature=tf.TensorSpec([None], tf.int64))


def length(row: Any) -> Any:
    return tf.shape(row)[0] if tf.is_tensor(row) else len(row)


def one_over(x: Any) -> Any:
    if tf.is_tensor(x):
        return tf.debugging.check_numerics(1 / x, "")
    if x == 0:
        raise ZeroDivisionError
    return 1 / x


def numbers(kind: Any) -> Any:
    return kind.from_tensor_slices(np.array([1, 2, 0, 4, 0, 8], np.float32))


def total(state: Any, x: Any) -> Any:
    return state + x


CHAINS: dict[str, Callable[[Any], Any]] = {
    "window": lambda kind: kind.range(7).window(3),
    "window, shift": lambda kind: kind.range(7).window(3, 1, 1, True),
    "window, stride": lambda kind: kind.range(7).window(3, 1, 2),
    "window, gaps": lambda kind: kind.range(7).window(2, 7, 3),
    "window, longer": lambda kind: kind.range(7).window(9, 4),
    "window, in order": lambda kind: kind.range(9).filter(lambda x: x != 4).window(3, 2, 2),
    "take_while": lambda kind: kind.range(10).take_while(lambda x: x != 5),
    "unique": lambda kind: kind.from_tensor_slices(np.array([1, 37, 2, 37, 2, 1])).unique(),
    "counter": lambda kind: kind.counter(10, -3).take(4),
    "scan": lambda kind: kind.range(5).scan(np.int64(1), lambda s, x: (s + x, s * x)),
    "scan of pairs": lambda kind: kind.from_tensor_slices((np.arange(3), np.arange(3))).scan(
        np.int64(1), lambda s, x: (s + x[0], (s, x[1]))
    ),
    "group": lambda kind: kind.range(8).group_by_window(
        lambda x: 2 - x % 3, lambda key, rows: rows.map(lambda x: x + 10 * key), window_size_func=lambda key: key + 1
    ),
    "group, negative keys": lambda kind: kind.range(11).group_by_window(
        lambda x: x % 4 - 2, lambda key, rows: rows, window_size=2
    ),
    "choose": lambda kind: kind.choose_from_datasets(
        [kind.range(2), kind.range(10, 20)], kind.from_tensor_slices(CHOICES)
    ),
    "choose, going on": lambda kind: kind.choose_from_datasets(
        [kind.range(2), kind.range(10, 20)], kind.from_tensor_slices(CHOICES), False
    ),
    "rebatch": lambda kind: kind.range(10).batch(4).rebatch([2, 3]),
    "rebatch, dropping": lambda kind: kind.range(9).batch(4).rebatch([2, 3], True),
    "buckets": lambda kind: sequences(kind).bucket_by_sequence_length(length, [3, 5], [2, 2, 2]),
    "buckets, dropping": lambda kind: sequences(kind).bucket_by_sequence_length(
        length, [3, 5], [2, 3, 2], drop_remainder=True
    ),
    "buckets, boundary": lambda kind: (
        sequences(kind).take(3).bucket_by_sequence_length(length, [3, 5], [2, 2, 2], pad_to_bucket_boundary=True)
    ),
    "ragged": lambda kind: sequences(kind).ragged_batch(3),
    "ignore_errors": lambda kind: numbers(kind).map(one_over).ignore_errors(),
    "ignore_errors of batches": lambda kind: numbers(kind).map(one_over).batch(2).ignore_errors(),
    "ignore_errors of filter": lambda kind: numbers(kind).filter(lambda x: one_over(x) < 9).ignore_errors(),
    "windows of batches": lambda kind: kind.range(10).filter(lambda x: x != 4).batch(2).window(2),
    "windows of windows": lambda kind: (
        kind.range(12).window(6).flat_map(lambda w: w.window(2).flat_map(lambda v: v.batch(2)))
    ),
    "batches of batches": lambda kind: kind.range(12).batch(2).batch(3).batch(2),
    "batches of mapped batches": lambda kind: kind.range(8).batch(2).map(lambda x: x + 1).batch(2).map(lambda x: x * 2),
    "batches of filtered batches": lambda kind: kind.range(12).batch(2).filter(lambda x: x[0] > 2).batch(2),
    "batches of interleaved batches": lambda kind: (
        kind.range(3).interleave(lambda n: kind.range(4).batch(2), cycle_length=2).batch(2)
    ),
    "batches of pairs": lambda kind: kind.from_tensor_slices((np.arange(8), np.eye(8))).batch(2).batch(3),
    "batches of batches, skip, take, repeat": lambda kind: kind.range(12).batch(2).batch(2).skip(1).take(1).repeat(2),
    "batches of batches, unbatch": lambda kind: kind.range(8).batch(2).batch(2).unbatch(),
    "batches of batches, unbatch twice": lambda kind: kind.range(8).batch(2).batch(2).unbatch().unbatch(),
    "batches of batches, dropping": lambda kind: (
        kind.range(7).batch(2, drop_remainder=True).batch(2, drop_remainder=True)
    ),
    "batches of batches, rebatch": lambda kind: kind.range(16).batch(2).batch(2).rebatch(3),
    "batches of batches, padded": lambda kind: kind.range(7).batch(2).padded_batch(3),
    "padded batches, padded": lambda kind: sequences(kind).padded_batch(2).padded_batch(3),
    "padded batches in batches": lambda kind: sequences(kind).padded_batch(2, [7]).batch(3),
    "ragged batches, ragged": lambda kind: sequences(kind).ragged_batch(2).ragged_batch(2),
    "ragged batches of batches": lambda kind: kind.range(7).batch(2).ragged_batch(3),
    "batches of windows": lambda kind: kind.range(9).window(3).flat_map(lambda w: w.batch(3)).batch(2),
    "batches of windows, shift": lambda kind: (
        kind.range(7).window(3, 1, 1, True).flat_map(lambda w: w.batch(9)).batch(2).prefetch(None)
    ),
    "batches of windows of pairs": lambda kind: (
        kind.from_tensor_slices((np.arange(6), np.arange(6) * 2))
        .window(3, 1, 1, True)
        .flat_map(lambda a, b: kind.zip((a.batch(3), b.batch(3))))
        .batch(2)
    ),
    "windows padded": lambda kind: sequences(kind).window(3).flat_map(lambda w: w.padded_batch(3)),
    "windows of pairs": lambda kind: (
        kind.from_tensor_slices((np.arange(4), np.arange(4) * 2))
        .window(3)
        .map(lambda a, b: (a.reduce(np.int64(0), total), b.reduce(np.int64(0), total)))
    ),
    "windows enumerated": lambda kind: kind.range(5).window(2).enumerate(),
    "windows over epochs": lambda kind: kind.range(4).repeat(2).window(3).flat_map(lambda w: w.concatenate(w)),
    "windows interleaved": lambda kind: kind.range(8).window(4).interleave(lambda w: w, cycle_length=2, block_length=1),
    "group of parts": lambda kind: kind.range(10).group_by_window(lambda x: x % 2, lambda k, d: d.take(1), 3),
    "group without end": lambda kind: (
        kind.range(3).repeat().group_by_window(lambda x: x % 2, lambda k, d: d.batch(2), 2).take(5)
    ),
    "group of windows": lambda kind: kind.range(12).group_by_window(
        lambda x: x % 2, lambda k, d: d.window(2).flat_map(lambda w: w.batch(2)), 6
    ),
    "group of batches": lambda kind: kind.range(12).batch(2).group_by_window(lambda x: x[0] % 4, lambda k, d: d, 2),
    "group scanned": lambda kind: kind.range(8).group_by_window(
        lambda x: x % 2, lambda k, d: d.scan(np.int64(0), lambda s, x: (s + x, s + x)), 4
    ),
    "scan of scan": lambda kind: (
        kind.range(5).scan(np.int64(0), lambda s, x: (s + x, s)).scan(np.int64(0), lambda s, x: (s + x, s))
    ),
    "scan of a list": lambda kind: kind.range(4).scan(
        [np.int64(0), np.int64(1)], lambda s, x: ([s[0] + 1, s[1] * 2], s[1])
    ),
    "scan of batches": lambda kind: kind.range(6).batch(2).scan(np.int64(0), lambda s, x: (s + x[0], x + s)),
    "scan over epochs": lambda kind: kind.range(3).repeat(2).scan(np.int64(0), lambda s, x: (s + x + 1, s)).repeat(2),
    "choose from batches": lambda kind: kind.choose_from_datasets(
        [kind.range(6).batch(2), kind.range(10, 16).batch(2)], kind.range(2).repeat(3)
    ),
    "choose of nothing": lambda kind: kind.choose_from_datasets(
        [kind.range(0), kind.range(2)], kind.from_tensor_slices(CHOICES), False
    ),
    "rebatch of rebatch": lambda kind: kind.range(10).batch(3).rebatch([2, 1]).rebatch([1, 3]),
    "rebatch, divided": lambda kind: kind.range(10).batch(3).rebatch([2, 1]).shard(2, 1),
    "rebatch, windows": lambda kind: kind.range(10).batch(3).rebatch(2).window(2).flat_map(lambda w: w),
    "rebatch of padded": lambda kind: sequences(kind).padded_batch(3, (9,)).rebatch(5),
    "rebatch, concatenated": lambda kind: kind.range(5).batch(3).rebatch([2, 1]).concatenate(kind.range(4).batch(2)),
    "padded over epochs": lambda kind: sequences(kind).repeat(2).padded_batch(5).repeat(2),
    "padded strings": lambda kind: kind.from_tensor_slices(np.array([[b"a"], [b"b"]])).padded_batch(2, (2,), b"long"),
    "counter, divided": lambda kind: kind.counter().shard(3, 1).batch(2).take(3),
    "take_while without end": lambda kind: kind.counter().take_while(lambda x: x < 5).repeat(2),
    "buckets without end": lambda kind: (
        sequences(kind).repeat().bucket_by_sequence_length(length, [3, 5], [2, 2, 2]).take(5)
    ),
}


@pytest.mark.parametrize("name", CHAINS)
def test_the_same_elements(name: str) -> None:
    make = CHAINS[name]
    ours, theirs = (list(map(plain, make(kind))) for kind in (Dataset, tf.data.Dataset))
    assert ours == theirs
    assert ours


def test_the_same_results() -> None:
    for kind in (Dataset, tf.data.Dataset):
        assert plain(kind.range(5).reduce(np.int64(0), lambda state, x: state + x)) == 10
        assert plain(kind.range(3).batch(3).get_single_element()) == [0, 1, 2]
