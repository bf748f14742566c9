"""Array conversion: user values to NumPy or CuPy arrays, and the few operations that differ between the two.

CuPy is imported only when an array is on a GPU. The GPU branches have not yet been run on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import MissingDependencyError, explain

__all__ = [
    "array_module",
    "as_array",
    "import_cupy",
    "is_gpu",
    "on_device_of",
    "pinned_empty",
    "synchronize",
    "to_host",
]

_CUDA = 2  # kDLCUDA and kDLCUDAManaged of DLPack
_CUDA_MANAGED = 13


def import_cupy(function: str) -> ModuleType:
    """Return CuPy.

    Raises:
        MissingDependencyError: with the command that installs it.
    """
    try:
        import cupy
    except ImportError as error:
        remedy = "pip install 'mpistrat[cuda12x]' or 'mpistrat[cuda13x]'"
        text = explain(function, "", expected="CuPy for arrays on a GPU", got="no module cupy", remedy=remedy)
        raise MissingDependencyError(text) from error
    return cupy


def is_gpu(value: Any) -> bool:
    """Return whether an array's memory lies on a GPU.

    Example:
        >>> is_gpu(np.zeros(3))
        False
    """
    if type(value) is np.ndarray:
        return False
    if hasattr(value, "__cuda_array_interface__"):
        return True
    if hasattr(value, "__dlpack_device__"):
        return int(value.__dlpack_device__()[0]) in (_CUDA, _CUDA_MANAGED)
    return False


def array_module(value: Any) -> ModuleType:
    """Return the module that computes with a value: numpy, or cupy for what lies on a GPU."""
    return import_cupy("array_module") if is_gpu(value) else np


def as_array(value: Any, function: str = "as_array", argument: str = "value") -> Any:
    """Return a value as an array of NumPy, or of CuPy where its memory is on a GPU; without a copy where possible.

    Understands NumPy, CuPy, DLPack, the two array interfaces, `__array__` (Variables have it), Python
    numbers and sequences of them. The result is in this machine's byte order.

    Raises:
        TypeError: for what is none of these.

    Example:
        >>> as_array([1, 2]).dtype.kind
        'i'
    """
    if type(value) is np.ndarray and value.dtype.isnative and value.dtype.kind != "O":
        return value
    if is_gpu(value):
        cupy = import_cupy(function)
        if hasattr(value, "__cuda_array_interface__"):
            return cupy.asarray(value)
        return cupy.from_dlpack(value)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(_no_array(value, function, argument)) from error
    if array.dtype.kind == "O":
        raise TypeError(_no_array(value, function, argument))
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _no_array(value: Any, function: str, argument: str) -> str:
    expected = "an array (NumPy, CuPy, DLPack, array interface) or a number"
    return explain(function, argument, expected=expected, got=f"{type(value).__name__} {value!r:.60}")


def synchronize(value: Any) -> None:
    """Wait until the GPU has written an array, which MPI does not do; nothing for NumPy."""
    if is_gpu(value):
        cupy = import_cupy("synchronize")
        with cupy.cuda.Device(value.device.id):
            cupy.cuda.get_current_stream().synchronize()


@contextlib.contextmanager
def on_device_of(value: Any) -> Iterator[None]:
    """Make an array's GPU the current one for a `with` block; nothing for NumPy."""
    if is_gpu(value):
        with import_cupy("on_device_of").cuda.Device(value.device.id):
            yield
    else:
        yield


def pinned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised flat host array in pinned memory, which a GPU copies to and from at full speed.

    Not yet run on a GPU.
    """
    cupy = import_cupy("pinned_empty")
    memory = cupy.cuda.alloc_pinned_memory(max(1, size * dtype.itemsize))
    return np.frombuffer(memory, np.uint8, size * dtype.itemsize).view(dtype)


def to_host(value: Any) -> np.ndarray:
    """Return a value as a NumPy array; what lies on a GPU is copied through pinned memory.

    Example:
        >>> to_host(3.5)
        array(3.5)
    """
    array = as_array(value, "to_host")
    if not is_gpu(array):
        return array
    cupy = import_cupy("to_host")
    with on_device_of(array):
        flat = cupy.ascontiguousarray(array).reshape(-1)
        host = pinned_empty(flat.size, flat.dtype)
        flat.get(out=host)
        cupy.cuda.get_current_stream().synchronize()
    return host.reshape(array.shape)
