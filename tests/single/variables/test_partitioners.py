"""How many shards a variable gets. The numbers are TensorFlow 2.21's, but where it breaks its own word."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.base.partition import bounds
from mpistrat.partitioners import FixedShardsPartitioner as Fixed
from mpistrat.partitioners import MaxSizePartitioner as Max
from mpistrat.partitioners import MinSizePartitioner as Min
from mpistrat.variables.partitioners import check_partitions


@pytest.mark.parametrize(
    ("partitioner", "shape", "expected"),
    [
        (Fixed(1), (6, 1), [1, 1]), (Fixed(5), (6, 1), [5, 1]), (Fixed(20), (6, 1), [6, 1]), (Fixed(5), (13,), [5]),
        (Fixed(20), (1, 5), [1, 1]), (Fixed(2), (6, 0), [2, 1]),
        (Min(4, 10), (6, 1), [6, 1]), (Min(4, 2), (6, 1), [2, 1]), (Min(30, 10), (6, 1), [1, 1]),
        (Min(4, 10), (13,), [10]), (Min(4, 10), (0, 3), [1, 1]), (Min(4, 10), (6, 0), [1, 1]),
        (Min(), (1000, 1000), [1, 1]), (Min(max_shards=99), (1024, 1024), [16, 1]),
        (Max(4), (6, 1), [6, 1]), (Max(4, 2), (6, 1), [2, 1]), (Max(1024), (6, 1), [1, 1]), (Max(4), (10, 3), [10, 1]),
        (Max(30), (10, 3), [5, 1]), (Max(25, 3), (10, 3), [3, 1]), (Max(30), (13,), [2]),
    ],
)  # fmt: skip
def test_as_tensorflow(partitioner, shape, expected):
    for dtype in ("float32", np.float32, np.dtype("int32")):
        assert partitioner(shape, dtype) == partitioner(shape=shape, dtype=dtype, axis=0) == expected


def test_sizes_of_the_shards_differ_by_at_most_one():
    def lengths(rows, shards):
        return [high - low for low, high in bounds(rows, Fixed(shards)((rows,), "float32")[0])]

    assert lengths(13, 5) == [3, 3, 3, 2, 2]
    assert lengths(10, 4) == [3, 3, 2, 2]


def test_shards_are_never_smaller_than_the_least():
    assert Min(30, 10)((10,), "float32") == [1]  # TensorFlow: [2], of 20 bytes each
    assert Min(30, 10)((10, 3), "float32") == [3, 1]  # TensorFlow: [4, 1], of which one has 24 bytes


shapes = st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple)
counts = st.integers(1, 200)


@given(shapes, counts, counts, st.sampled_from(["int8", "float32", "complex128"]), st.data())
def test_bounds_hold_and_are_reached(shape, nbytes, most, dtype, data):
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    rows = shape[axis]
    row = int(np.prod(shape)) // rows * np.dtype(dtype).itemsize if rows else 0

    def shards(partitioner):
        result = partitioner(shape, dtype, axis)
        assert [n for i, n in enumerate(result) if i != axis % len(shape)] == [1] * (len(shape) - 1)
        assert 1 <= result[axis] <= max(1, rows)
        return result[axis], [high - low for low, high in bounds(rows, result[axis])]

    count, lengths = shards(Min(nbytes, most))
    assert count <= most
    assert count == 1 or min(lengths) * row >= nbytes
    assert count in (most, rows) or not rows or (rows // (count + 1)) * row < nbytes
    count, lengths = shards(Max(nbytes, most))
    assert count <= most
    assert count == most or max(lengths) <= 1 or max(lengths) * row <= nbytes
    assert count == 1 or -(-rows // (count - 1)) * row > nbytes


def test_a_scalar_is_never_split():
    assert Fixed(3)((), "float32") == []
    assert check_partitions([], ()) == 1
    for partitioner in (Min(1, 9), Max(1)):
        assert partitioner((), "float32") == []


def test_texts_count_what_was_said():
    for dtype in (str, "S3", np.dtype("U7")):
        assert Max(64)((10, 2), dtype) == Min(64, 100)((10, 2), dtype) == [5, 1]
    assert Max(64, bytes_per_string=32)((10, 2), str) == [10, 1]


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Fixed(0), ValueError, "FixedShardsPartitioner: num_shards: expected >= 1, got 0"),
        (lambda: Fixed(1.5), TypeError, "FixedShardsPartitioner: num_shards: expected an integer, got 1.5"),
        (lambda: Fixed(True), TypeError, "num_shards: expected an integer, got True"),
        (lambda: Min(0), ValueError, "MinSizePartitioner: min_shard_bytes: expected >= 1, got 0"),
        (lambda: Min(1, 0), ValueError, "MinSizePartitioner: max_shards: expected >= 1, got 0"),
        (lambda: Min(1, 1, -1), ValueError, "MinSizePartitioner: bytes_per_string: expected >= 1, got -1"),
        (lambda: Max(0), ValueError, "MaxSizePartitioner: max_shard_bytes: expected >= 1, got 0"),
        (lambda: Max(1, 0), ValueError, "MaxSizePartitioner: max_shards: expected >= 1, got 0"),
        (lambda: Max(1, 1, 0), ValueError, "MaxSizePartitioner: bytes_per_string: expected >= 1, got 0"),
        (lambda: Fixed(2)((4,), "float32", axis=1), ValueError, r"axis: expected an axis of shape \(4,\), got 1"),
        (lambda: Max(2)((4,), "float32", axis=-2), ValueError, r"axis: expected an axis of shape \(4,\), got -2"),
    ],
)
def test_wrong_values(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (None, TypeError, r"expected a list of 2 integers for shape \(4, 3\), got None"),
        (2, TypeError, "got 2"),
        ("21", TypeError, "got '21'"),
        ([2.0, 1], TypeError, r"got \[2.0, 1\]"),
        ([True, 1], TypeError, "got"),
        ([2], ValueError, r"expected a number >= 1 for each axis of shape \(4, 3\), got \[2\]"),
        ([], ValueError, "for each axis"),
        ([0, 1], ValueError, ">= 1"),
        ([1, 2], ValueError, "expected 1 on all axes but the first"),
        ([2, 2], ValueError, "expected 1 on all axes but the first"),
        ([5, 1], ValueError, "expected at most 4 shards"),
    ],
)
def test_what_no_partitioner_should_return(result, error, text):
    with pytest.raises(error, match="variable_partitioner: result: .*" + text):
        check_partitions(result, (4, 3))


def test_what_a_partitioner_may_return():
    assert check_partitions((4, 1), (4, 3)) == 4
    assert check_partitions([np.int64(2)], [4]) == 2
    assert check_partitions([1], (0,)) == 1


def test_a_partitioner_of_ones_own():
    class Halves(ms.partitioners.Partitioner):
        def __call__(self, shape, dtype, axis=0):
            return [2] + [1] * (len(shape) - 1)

    assert check_partitions(Halves()((4, 3), "float32"), (4, 3)) == 2
    with pytest.raises(TypeError):
        ms.partitioners.Partitioner()
