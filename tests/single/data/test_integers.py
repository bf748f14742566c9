"""Integers that a dtype cannot hold are refused wherever a program names a dtype, and not wrapped."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data.spec import ArraySpec

DTYPES = [np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)]
LIMITS = [(dtype, number) for dtype in DTYPES for number in (np.iinfo(dtype).min, np.iinfo(dtype).max)]
OUTSIDE = [(dtype, number + (1 if number > 0 else -1)) for dtype, number in LIMITS]


def ids(value):
    return str(value)


def forms(number):
    """Return values with a number in them, of Python's integers and of NumPy's where one holds it."""
    found = [number, [number]]
    if number < 1 << 63:  # of 0 and more NumPy makes floats
        found.append([[0], [number]])
    for held in (np.int64, np.uint64):
        if np.iinfo(held).min <= number <= np.iinfo(held).max:
            found += [[held(number)], [held(number), held(0)]]
    return found


def spec_of(value, dtype):
    return ArraySpec(np.shape(value), dtype)


def elements(value, dtype):
    # a list as a leaf, not as a structure
    if isinstance(value, list):
        value = Wrapped(value)
        return list(ms.data.from_generator(lambda: iter([value]), ArraySpec(np.shape(value.value), dtype)))
    return list(ms.data.from_generator(lambda: iter([value]), ArraySpec((), dtype)))


class Wrapped:
    """A value of another library, such as a tensor."""

    def __init__(self, value):
        self.value = value

    def __array__(self, dtype=None, copy=None):
        return np.array(self.value, dtype)


@pytest.mark.parametrize(("dtype", "number"), OUTSIDE, ids=ids)
def test_a_number_outside_is_refused(dtype, number, tmp_path):
    for value in forms(number):
        with pytest.raises(ValueError, match=r"from_generator: element 0: expected u?int\d+\[.*\].*, got"):
            elements(value, dtype)
    with pytest.raises(ValueError, match="element 0: expected "):
        list(ms.data.from_arrays(np.arange(2)).map(lambda x: number, element_spec=ArraySpec((), dtype)))
    with ms.data.ShardWriter(tmp_path / "set") as writer:
        writer.write_row({"x": dtype.type(1)})
        with pytest.raises(ValueError, match=r"at \['x'\]: expected u?int\d+"):
            writer.write_row({"x": number})
    with pytest.raises((OverflowError, TypeError)):
        ms.lookup.KeyValueTensorInitializer([1], [number], value_dtype=dtype)
    for value in forms(number):
        with pytest.raises((OverflowError, TypeError)):
            ms.Variable(np.array(value) if isinstance(value, list) else value, dtype=dtype)
        with pytest.raises((OverflowError, TypeError)):
            ms.Variable(np.zeros(np.shape(value), dtype)).assign(value)


@pytest.mark.parametrize(("dtype", "number"), LIMITS, ids=ids)
def test_the_largest_and_the_least_number_are_legal(dtype, number):
    for value in forms(number):
        (element,) = elements(value, dtype)
        assert element.dtype == dtype and element.tolist() == (value if np.ndim(value) else number)
    assert ms.lookup.KeyValueTensorInitializer([1], [number], value_dtype=dtype).values.tolist() == [number]
    assert ms.Variable(np.zeros((), dtype)).assign(number).numpy() == number


def test_a_range_is_checked():
    with pytest.raises(OverflowError, match=r"Dataset.range: dtype: expected integers from 0 to 255, got 299"):
        ms.data.Dataset.range(300, output_type=np.uint8)
    assert list(ms.data.Dataset.range(254, 256, output_type=np.uint8)) == [254, 255]
    assert list(ms.data.Dataset.range(3, output_type=np.float32)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("numbers", "dtype", "error", "text"),
    [
        ((2**63, 2**63 + 2), "int64", OverflowError, "dtype: expected integers from .*, got 9223372036854775808"),
        ((-(2**63) - 1, 0), "int64", OverflowError, "got -9223372036854775809"),
        ((2047, 2050), "float16", ValueError, "dtype: expected values that float16 holds, got 2049"),
        ((65504, 65540, 16), "float16", ValueError, "expected values that float16 holds, got 65520"),
        ((3,), "bool", ValueError, "expected values that bool holds, got 2"),
        ((1.5,), "int64", TypeError, "expected an integer, got 1.5"),
        ((0, 5, 0), "int64", ValueError, "step: expected an integer other than 0, got 0"),
    ],
)
def test_what_is_no_range_of_a_dtype_is_refused(numbers, dtype, error, text):
    with pytest.raises(error, match=f"Dataset.range: .*{text}"):
        ms.data.Dataset.range(*numbers, output_type=dtype)


def test_a_range_at_the_limits():
    found = list(ms.data.Dataset.range(2**64 - 2, 2**64, output_type=np.uint64))
    assert found == [2**64 - 2, 2**64 - 1]
    assert list(ms.data.Dataset.range(2**63 - 2, 2**63)) == [2**63 - 2, 2**63 - 1]
    assert list(ms.data.Dataset.range(5, 0, -2)) == [5, 3, 1] and not list(ms.data.Dataset.range(0))


def test_an_assignment_in_the_same_kind_is_checked():
    v = ms.Variable(np.zeros(2, np.int32))
    with pytest.raises(OverflowError, match=r"expected integers from -2147483648 to 2147483647, got 1099511627776"):
        v.assign(np.array([0, 1 << 40]))
    assert v.assign(np.array([5, -6])).numpy().tolist() == [5, -6]


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("float16", 65520.0),
        ("float16", -1e5),
        ("float32", 1e39),
        ("float32", [[1.0], [-1e39]]),
        ("complex64", 1e39 + 1j),
    ],
)
def test_a_float_that_would_become_infinite_is_refused(dtype, number):
    limit = {"float16": "65504"}.get(dtype, r"3\.4.*e\+38")
    with pytest.raises(ValueError, match=rf"element 0: expected {dtype}\[.*\], from -.* to .*{limit}.*, got"):
        elements(number, np.dtype(dtype))


@pytest.mark.parametrize("number", [65504.0, 65519.0, np.inf, -np.inf, np.nan, 1e-30])
def test_floats_that_fit_are_rounded(number):
    np.testing.assert_array_equal(elements(number, np.dtype(np.float16))[0], np.float16(number))


def test_indices_that_int64_cannot_hold_are_refused():
    rows, last = ms.data.from_arrays(np.arange(3)), 2**63 - 1
    assert [int(i) for i, _ in rows.enumerate(last - 2)] == [last - 2, last - 1, last]
    assert int(next(iter(rows.enumerate(-(2**63))))[0]) == -(2**63)
    for first in (last - 1, last, last + 1, -(2**63) - 1):
        with pytest.raises(
            ValueError, match=rf"Dataset.enumerate: start: expected indices that int64 holds, got .* {first} to"
        ):
            rows.enumerate(first)


@pytest.mark.parametrize("name", ["batch", "take", "skip", "repeat", "enumerate", "prefetch"])
def test_a_bool_is_no_number(name):
    with pytest.raises(TypeError, match=rf"Dataset\.{name}: .*expected an integer, got True"):
        getattr(ms.data.from_arrays(np.arange(3)), name)(True)
