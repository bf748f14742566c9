"""What pushes do to arrays, and how they say it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.parameter_server.operations import Operation, apply_operation, pack, sum_duplicate_rows, unpack
from mpistrat.parameter_server.wire.fragments import LARGEST_WHAT


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("optimizer", [0, 1, LARGEST_WHAT >> 8])
def test_an_integer_holds_operation_and_optimizer(operation, optimizer):
    what = pack(operation, optimizer)
    assert type(what) is int
    assert 0 <= what <= LARGEST_WHAT
    assert unpack(what) == (operation, optimizer)


@pytest.mark.parametrize("what", [0, 13, 255, 256])
def test_other_integers_are_refused(what):
    with pytest.raises(ValueError, match=f"unpack: what: expected an integer that pack made, got {what}"):
        unpack(what)


WHOLE = {
    Operation.ASSIGN: [10, 20, 30],
    Operation.ASSIGN_ADD: [12, 23, 34],
    Operation.ASSIGN_SUB: [-8, -17, -26],
}


@pytest.mark.parametrize("operation", WHOLE)
@pytest.mark.parametrize("dtype", ["int64", "float32", "float16"])
def test_whole_arrays(operation, dtype):
    array = np.array([2, 3, 4], dtype)
    apply_operation(operation, array, None, np.array([10, 20, 30], dtype))
    assert array.tolist() == WHOLE[operation]


# Rows 2 and 0 of [[2, 3], [4, 5], [6, 7]], row 2 twice: each pair acts on its own, one after the other.
ROWS = {
    Operation.SCATTER_UPDATE: [[10, 20], [4, 5], [1, 2]],
    Operation.SCATTER_ADD: [[12, 23], [4, 5], [12, 17]],
    Operation.SCATTER_SUB: [[-8, -17], [4, 5], [0, -3]],
    Operation.SCATTER_MUL: [[20, 60], [4, 5], [30, 112]],
    Operation.SCATTER_DIV: [[0.2, 0.15], [4, 5], [1.2, 0.4375]],
    Operation.SCATTER_MIN: [[2, 3], [4, 5], [1, 2]],
    Operation.SCATTER_MAX: [[10, 20], [4, 5], [6, 8]],
}


@pytest.mark.parametrize("operation", ROWS)
def test_rows_that_come_twice_act_one_by_one(operation):
    array = np.array([[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]])
    apply_operation(operation, array, np.array([2, 0, 2]), np.array([[5.0, 8.0], [10.0, 20.0], [1.0, 2.0]]))
    np.testing.assert_allclose(array, ROWS[operation])


@pytest.mark.parametrize("shape", [(3, 4, 2), (12, 2), (24, 1)], ids=str)
def test_rows_are_those_of_the_array_seen_as_the_values_are(shape):
    array = np.zeros((3, 4, 2))
    apply_operation(Operation.SCATTER_ADD, array, np.array([2]), np.ones((1, *shape[1:])))
    expected = np.zeros(shape)
    expected[2] = 1
    assert np.array_equal(array, expected.reshape(3, 4, 2))


def test_an_empty_array_has_no_rows_to_change():
    apply_operation(Operation.SCATTER_ADD, np.zeros((0, 3)), np.zeros(0, np.int64), np.zeros((0, 3)))
    apply_operation(Operation.SCATTER_ADD, np.zeros((3, 0)), np.array([1]), np.zeros((1, 0)))


@pytest.mark.parametrize(
    ("operation", "rows"), [(Operation.GRADIENT, None), (Operation.SCATTER_ADD, None), (Operation.ASSIGN, [0])]
)
def test_operations_that_do_not_fit(operation, rows):
    array = np.zeros((1, 1))
    with pytest.raises(ValueError, match=f"apply_operation: operation: expected one that fits, got {operation.name}"):
        apply_operation(operation, array, rows if rows is None else np.array(rows), np.ones((1, 1)))
    assert not array.any()


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=30))
def test_rows_are_summed(rows):
    values = np.arange(2.0 * len(rows)).reshape(-1, 2)
    numbers, sums = sum_duplicate_rows(np.array(rows, np.int64), values, "test")
    dense, expected = np.zeros((6, 2)), np.zeros((6, 2))
    np.add.at(expected, rows, values)
    dense[numbers] = sums
    assert numbers.tolist() == sorted(set(numbers.tolist()))
    np.testing.assert_array_equal(dense, expected)


@pytest.mark.parametrize("dtype", [np.int16, np.uint16, np.int32, np.uint32, np.uint64])
def test_rows_of_every_integer_type_are_summed(dtype):
    top = min(np.iinfo(dtype).max, 1 << 40)
    rows = np.tile(np.array([top, 7, 5, top - 1], dtype), 5000)
    numbers, sums = sum_duplicate_rows(rows, np.arange(20_000.0), "test")
    assert numbers.tolist() == [5, 7, top - 1, top]
    assert sums.tolist() == [np.arange(start, 20_000.0, 4).sum() for start in (2, 1, 3, 0)]


def test_narrow_rows_are_summed_in_float32():
    rows, values = np.zeros(4, np.int64), np.array([[2048], [1], [1], [2]], np.float16)  # 2048 + 1 is 2048 in float16
    assert sum_duplicate_rows(rows, values, "test")[1].tolist() == [[2052]]
    with pytest.raises(TypeError, match=r"^test: values: expected an array of numbers"):
        sum_duplicate_rows(rows, np.zeros((4, 1), bool), "test")
