"""Bytes that types do not use are no content: digests, comparisons and checksums do not depend on them."""

from __future__ import annotations

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arena.values import checksum, quick_digest
from mpistrat.base.files import digest_of_array, with_zero_padding
from mpistrat.data.nodes.sources import row_content

ALIGNED = np.dtype([("a", "u1"), ("b", "f8"), ("c", [("x", "i2"), ("y", np.longdouble)], (2,))], align=True)
PACKED = np.dtype([("a", "u1"), ("b", "f8")])
TYPES = [np.dtype(np.longdouble), np.dtype(np.clongdouble), np.dtype(np.longdouble).newbyteorder(), ALIGNED]


def twins(dtype):
    """Two equal arrays, made in memory that was full of other bytes."""
    found = []
    for fill in (0x00, 0xFF):
        array = np.frombuffer(bytearray([fill]) * (5 * dtype.itemsize), dtype)
        for index in range(5):
            if dtype.names is None:
                array[index] = np.longdouble(index) + np.longdouble(2) ** -60
            else:
                array[index]["a"], array[index]["b"] = index, index / 3
                array[index]["c"]["x"], array[index]["c"]["y"] = index, index / 7
        if dtype.names is None and np.finfo(np.longdouble).nmant == 63:
            halves = array.view(np.uint8).reshape(-1, np.dtype(np.longdouble).itemsize)
            halves[:, slice(10, None) if dtype.isnative else slice(None, -10)] = fill
        found.append(array)
    return found


@pytest.mark.parametrize("dtype", TYPES, ids=["longdouble", "complex", "swapped", "aligned"])
def test_equal_arrays_are_equal_whatever_was_in_memory(dtype):
    one, other = twins(dtype)
    if np.finfo(np.longdouble).nmant == 63:
        assert one.tobytes() != other.tobytes()  # what is tested
    assert with_zero_padding(one).tobytes() == with_zero_padding(other).tobytes()
    assert np.array_equal(with_zero_padding(other), one)
    assert with_zero_padding(other[::2].reshape(3, 1)).shape == (3, 1)
    assert with_zero_padding(other[:0]).shape == (0,)
    assert [row_content(row) for row in one] == [row_content(row) for row in other]
    assert digest_of_array(one, "w") == digest_of_array(other, "w")
    assert checksum(one) == checksum(other)
    if dtype.names is None:
        assert quick_digest(one) == quick_digest(other)
    fingerprints = {ms.data.from_arrays(array).node.fingerprint() for array in (one, other)}
    assert len(fingerprints) == 1
    assert [len({row_content(row) for row in one})] == [5]  # and content counts


@pytest.mark.parametrize("dtype", TYPES, ids=["longdouble", "complex", "swapped", "aligned"])
def test_a_change_is_seen(dtype):
    one, other = twins(dtype)
    if dtype.names is None:
        other[3] = other[3] + np.longdouble(2) ** -60
    else:
        other[3]["c"]["y"][1] = 5
    assert checksum(one) != checksum(other)
    assert digest_of_array(one, "w") != digest_of_array(other, "w")
    assert row_content(one[3]) != row_content(other[3])


def test_types_without_unused_bytes_are_not_copied():
    for array in (np.zeros(3), np.zeros(3, PACKED), np.array(["a"]), np.zeros(2, "V4")):
        assert with_zero_padding(array) is array


def test_a_long_field_counts_whole():
    dtype = np.dtype([("values", "f8", (3000,))])
    one, other = np.zeros(1, dtype), np.zeros(1, dtype)
    other["values"][0, 1500] = 1
    assert row_content(one[0]) != row_content(other[0])


def test_unique_rows_of_types_with_unused_bytes():
    one, other = twins(np.dtype(np.longdouble))
    both = np.concatenate([one, other])
    assert len(list(ms.data.from_arrays(both).unique())) == 5


def test_arrays_are_read_later_unless_they_are_copied():
    array, rows = np.arange(4), np.empty(2, object)
    rows[:] = [np.zeros(1), np.ones(2)]
    seen = {copy: ms.data.from_arrays((array, np.arange(4.0)), copy=copy) for copy in (False, True)}
    objects = {copy: ms.data.from_arrays(rows, copy=copy) for copy in (False, True)}
    array[0], rows[0][0] = 9, 9.0
    assert {copy: int(next(iter(dataset))[0]) for copy, dataset in seen.items()} == {False: 9, True: 0}
    assert {copy: float(next(iter(dataset))[0]) for copy, dataset in objects.items()} == {False: 9.0, True: 0.0}
