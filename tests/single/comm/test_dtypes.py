import numpy as np
import pytest

from mpistrat.comm.arrays import accumulation_dtype, check_movable, check_reducible, is_bfloat16, mean_dtype


def test_narrow_floats_are_summed_in_float32():
    assert accumulation_dtype(np.dtype("float16")) == np.float32
    for name in ("int8", "uint64", "float32", "float64", "complex64", "longdouble"):
        assert accumulation_dtype(np.dtype(name)) == np.dtype(name)


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = np.dtype(ml_dtypes.bfloat16)
    assert is_bfloat16(dtype)
    assert accumulation_dtype(dtype) == np.float32
    check_reducible(dtype, "reduce")
    check_movable(dtype, "gather")


def test_a_void_of_two_bytes_is_not_bfloat16():
    assert not is_bfloat16(np.dtype("V2"))
    with pytest.raises(TypeError):
        check_reducible(np.dtype("V2"), "reduce")


def test_means_of_integers_are_float64():
    assert mean_dtype(np.dtype("uint8")) == np.float64
    assert mean_dtype(np.dtype("float16")) == np.float16
    assert mean_dtype(np.dtype("complex64")) == np.complex64


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        ("bool", "astype"),
        ([("a", "i4")], "fields one by one"),
        ("O", "numbers"),
        ("U3", "numbers"),
        ("M8[s]", "numbers"),
    ],
)
def test_what_cannot_be_summed(dtype, text):
    with pytest.raises(TypeError, match=rf"reduce: value: expected an array of numbers.*{text}|{text}"):
        check_reducible(np.dtype(dtype), "reduce")


@pytest.mark.parametrize("dtype", [[("a", "i4")], "O", "V3"])
def test_what_cannot_be_moved(dtype):
    with pytest.raises(TypeError, match="gather: value"):
        check_movable(np.dtype(dtype), "gather")
    check_movable(np.dtype("U3"), "gather")
    check_movable(np.dtype("bool"), "gather")
