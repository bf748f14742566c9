"""The arrays of variables: checks and conversion of values written to them, and private memory on a device."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from ..base.arguments import check_range
from ..base.devices import parse
from ..base.distributed_values import DistributedValues, Mirrored
from ..base.errors import explain
from ..base.files import with_zero_padding
from ..base.text import is_utf8
from ..base.underflow import may_underflow
from ..comm.arrays import array_module, as_array, import_cupy, is_gpu, on_device_of, to_host

__all__ = [
    "as_flat",
    "check_name",
    "checksum",
    "convert",
    "initial_array",
    "move_like",
    "one_value",
    "parse_dtype",
    "quick_digest",
    "read_only",
    "zeros",
]

_LADDER = {"b": 0, "u": 1, "i": 1, "f": 2, "V": 2, "c": 3}  # V: bfloat16


def check_name(function: str, name: Any) -> None:
    """Raise unless a file can store the name.

    Raises:
        TypeError: it is not text, or empty.
        ValueError: it has a character that HDF5 rejects.
    """
    if not isinstance(name, str) or not name:
        raise TypeError(explain(function, "name", expected="a text that is not empty", got=repr(name)))
    if "\0" in name or not is_utf8(name):
        raise ValueError(explain(function, "name", expected="a text in UTF-8 without null characters", got=repr(name)))


def parse_dtype(dtype: Any, function: str = "Variable") -> np.dtype:
    """Return a dtype of numbers, in this machine's byte order; "bfloat16" needs ml_dtypes.

    Raises:
        TypeError: not a dtype, or not one of numbers.

    Example:
        >>> parse_dtype("float32").itemsize
        4
    """
    if isinstance(dtype, str) and dtype == "bfloat16":
        import ml_dtypes

        dtype = ml_dtypes.bfloat16
    try:
        parsed = np.dtype(dtype)
    except TypeError as error:
        raise TypeError(explain(function, "dtype", expected="a dtype of numbers", got=repr(dtype))) from error
    if parsed.kind not in _LADDER or (parsed.kind == "V" and parsed.name != "bfloat16"):
        raise TypeError(explain(function, "dtype", expected="bool, or a dtype of numbers", got=str(parsed)))
    return parsed if parsed.isnative else parsed.newbyteorder("=")


def initial_array(value: Any, dtype: np.dtype | None) -> np.ndarray:
    """Return an initial value as a host array.

    As in TensorFlow, Python floats and integers become float32 and int32; arrays keep their dtype.

    Raises:
        TypeError: not an array of numbers, or it does not fit the requested dtype.
    """
    value = one_value(value, "Variable")
    array = to_host(as_array(value, "Variable", "initial_value"))
    if dtype is not None:
        return convert(value, array, dtype, "Variable", "any")
    if not hasattr(value, "dtype"):
        if array.dtype == np.float64:
            return _cast(array, np.dtype(np.float32))
        if array.dtype == np.int64 and (array == array.astype(np.int32)).all():
            return array.astype(np.int32)
    return array.astype(parse_dtype(array.dtype), copy=False)


def convert(value: Any, array: Any, dtype: np.dtype, function: str, casting: str = "same_kind") -> Any:
    """Return `array`, made of `value`, in another dtype of the same kind or a higher one.

    Arrays are converted between signed and unsigned integers only if `casting` is "any".

    Raises:
        TypeError: the kind does not fit, such as a float for an integer variable.
        OverflowError: an integer that the dtype cannot hold.
    """
    if array.dtype == dtype:
        return array
    if hasattr(value, "dtype") and casting == "same_kind":
        fits = np.can_cast(array.dtype, dtype, "same_kind")
    else:  # Python numbers have no precision of their own
        fits = _LADDER.get(array.dtype.kind, 9) <= _LADDER[dtype.kind]
    if not fits:
        remedy = "Convert it explicitly with astype"
        expected = f"a value that {dtype} can hold"
        raise TypeError(explain(function, "value", expected=expected, got=str(array.dtype), remedy=remedy))
    check_range(function, "value", array, dtype)
    return _cast(array, dtype)


@may_underflow
def _cast(array: Any, dtype: np.dtype) -> Any:
    return array.astype(dtype)


def as_flat(value: Any, shape: tuple[int, ...], dtype: np.dtype, function: str) -> Any:
    """Return a value as a flat contiguous array of a dtype, without a copy if it fits already.

    Raises:
        TypeError: not an array of numbers, or numbers of another kind.
        ValueError: its shape is not exactly `shape`.
    """
    array = as_array(value, function)
    if array.shape != shape:
        expected = f"shape {shape}, the variable's"
        raise ValueError(explain(function, "value", expected=expected, got=f"shape {tuple(array.shape)}"))
    flat = convert(value, array, dtype, function).reshape(-1)
    return flat if flat.flags.c_contiguous else flat.copy()


def one_value(value: Any, function: str) -> Any:
    """Return the common value of all replicas.

    Raises:
        ValueError: for a PerReplica, whose values may differ.
    """
    if isinstance(value, Mirrored):
        return value.values[0]
    if isinstance(value, DistributedValues):
        remedy = "Reduce it first: strategy.reduce(op, value, axis=None)"
        got = f"a {type(value).__name__} of {len(value.values)} values"
        raise ValueError(explain(function, "value", expected="one value", got=got, remedy=remedy))
    return value


def checksum(*arrays: Any) -> int:
    """Return a CRC-32 of flat contiguous arrays, by which ranks compare what they write."""
    crc = 0
    for array in arrays:
        host = to_host(array) if is_gpu(array) else array
        crc = zlib.crc32(with_zero_padding(host).view(np.uint8).data, crc)
    return crc


def quick_digest(flat: Any) -> int:
    """Return 63 bits that change with any number, computed in one pass at the speed of memory.

    Unlike `checksum` it does not detect exchanged numbers: use it for memory that should be equal, not for user input.
    """
    host = with_zero_padding(to_host(flat) if is_gpu(flat) else flat)
    bits = host.view(np.uint64 if host.nbytes % 8 == 0 else np.uint8)
    total = int(np.add.reduce(bits, dtype=np.uint64))
    if bits.dtype == np.uint64:  # the sum loses pairs of highest bits, the signs
        total += int(np.count_nonzero(bits.view(np.int64) < 0)) << 20
    return total % ((1 << 63) - 1)


# Memory on a device


def zeros(shape: int | tuple[int, ...], dtype: np.dtype, device: str) -> Any:
    """Return a new zeroed array on a device."""
    kind, index = parse(device)
    if kind == "cpu":
        return np.zeros(shape, dtype)
    cupy = import_cupy("Variable")
    with cupy.cuda.Device(index):
        return cupy.zeros(shape, dtype)


def move_like(value: Any, target: Any) -> Any:
    """Return a value on the device of `target`; a NumPy array is unchanged for a NumPy target."""
    if not is_gpu(target):
        return value
    with on_device_of(target):
        if not is_gpu(value) or value.device.id == target.device.id:
            return array_module(target).asarray(value)
        cuda = array_module(target).cuda
        stream = cuda.get_current_stream()
        # The value has another stream: order the copy after its earlier work, and its later work after the copy.
        with on_device_of(value):
            source = cuda.get_current_stream()
            written = source.record()
        stream.wait_event(written)
        copy = array_module(target).asarray(value)
        source.wait_event(stream.record())
        return copy


def read_only(array: Any) -> Any:
    """Return a read-only view; CuPy has none, so return a CuPy array itself."""
    if is_gpu(array):
        return array
    view = array.view()
    view.flags.writeable = False
    return view
