import numpy as np
import pytest

from mpistrat.comm.arrays import array_module, as_array, import_cupy, is_gpu, synchronize, to_host
from mpistrat.errors import MissingDependencyError


class ByArrayInterface:
    def __init__(self, array):
        self._array = array
        self.__array_interface__ = array.__array_interface__


class ByArray:
    def __init__(self, array):
        self._array = array

    def __array__(self, dtype=None, copy=None):
        return self._array


def test_an_array_is_itself():
    array = np.ones(3)
    assert as_array(array) is array


@pytest.mark.parametrize("wrap", [ByArrayInterface, ByArray, memoryview])
def test_foreign_arrays_are_not_copied(wrap):
    array = np.arange(4, dtype=np.int32)
    assert np.shares_memory(as_array(wrap(array)), array)


def test_numbers_and_sequences():
    assert as_array(2).dtype == np.int64
    assert as_array(2.5).shape == ()
    assert as_array([[1.0, 2.0]]).shape == (1, 2)
    assert as_array(np.float32(1)).dtype == np.float32


def test_byte_order_becomes_native():
    array = as_array(np.array([1, 2], ">i4"))
    assert array.dtype.isnative
    assert array.tolist() == [1, 2]


@pytest.mark.parametrize("value", [None, object(), {"a": 1}, [1, [2, 3]], np.array([object()])])
def test_no_array(value):
    with pytest.raises(TypeError, match="reduce: value: expected an array"):
        as_array(value, "reduce")


def test_the_host_is_no_gpu():
    array = np.ones(2)
    assert not is_gpu(array)
    assert not is_gpu(3.0)
    assert array_module(array) is np
    assert to_host(array) is array
    synchronize(array)


class OnGpu:
    __cuda_array_interface__: dict = {}  # noqa: RUF012


def test_a_gpu_array_without_cupy_says_what_is_missing():
    try:
        import cupy  # noqa: F401
    except ImportError:
        pass
    else:
        pytest.skip("CuPy is installed")
    assert is_gpu(OnGpu())
    for call in (lambda: as_array(OnGpu(), "reduce"), lambda: import_cupy("reduce")):
        with pytest.raises(MissingDependencyError, match=r"reduce: expected CuPy.*cuda12x"):
            call()


@pytest.mark.gpu
def test_gpu_arrays():
    import cupy

    array = cupy.arange(6.0).reshape(2, 3)
    assert is_gpu(array)
    assert array_module(array) is cupy
    assert as_array(array).data.ptr == array.data.ptr
    assert to_host(array.T).tolist() == [[0, 3], [1, 4], [2, 5]]
