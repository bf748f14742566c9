"""Arrays of NumPy and CuPy: conversion, the dtypes that can be sent and summed, and sums over a communicator.

CuPy is imported only when an array is on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import MissingDependencyError, explain
from ..base.masks import check_lossless

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "CHUNK_ELEMENTS",
    "accumulation_dtype",
    "all_reduce",
    "all_reduce_gpu",
    "array_module",
    "as_array",
    "check_movable",
    "check_reducible",
    "dtype_name",
    "import_cupy",
    "is_bfloat16",
    "is_gpu",
    "is_movable",
    "mean_dtype",
    "mpi_datatype",
    "mpi_op",
    "on_device_of",
    "pinned_empty",
    "synchronize",
    "to_host",
]

_ON_GPU = (2, 10, 13)  # kDLCUDA, kDLROCM and kDLCUDAManaged of DLPack


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
    """Return True if an array's memory is on a GPU.

    Example:
        >>> is_gpu(np.zeros(3))
        False
    """
    if type(value) is np.ndarray:
        return False
    cupy = sys.modules.get("cupy")  # imported if CuPy arrays exist; on AMD's GPUs they have no __cuda_array_interface__
    if cupy is not None and isinstance(value, cupy.ndarray):
        return True
    if hasattr(value, "__cuda_array_interface__"):
        return True
    return hasattr(value, "__dlpack_device__") and int(value.__dlpack_device__()[0]) in _ON_GPU


def array_module(value: Any) -> ModuleType:
    """Return the module that computes with a value: numpy, or cupy on a GPU."""
    return import_cupy("array_module") if is_gpu(value) else np


def as_array(value: Any, function: str = "as_array", argument: str = "value") -> Any:
    """Return a value as an array of NumPy, or of CuPy if its memory is on a GPU; without a copy if possible.

    Understands NumPy, CuPy, tensors of PyTorch (without their history), DLPack, the two array interfaces, `__array__` (Variables
    have it), Python numbers and sequences of them. The result is in this machine's byte order.

    Raises:
        TypeError: none of these; a sparse tensor; masked numbers.
        MissingDependencyError: a bfloat16 tensor, without ml_dtypes.

    Example:
        >>> as_array([1, 2]).dtype.kind
        'i'
    """
    if type(value) is np.ndarray and value.dtype.isnative and value.dtype.kind != "O":
        return value
    torch = sys.modules.get("torch")  # imported if tensors exist
    if torch is not None and isinstance(value, torch.Tensor):
        return _array_of_tensor(value, torch, function, argument)
    if is_gpu(value):
        cupy = import_cupy(function)
        if isinstance(value, cupy.ndarray):
            return value
        if hasattr(value, "__cuda_array_interface__"):
            return cupy.asarray(value)
        return cupy.from_dlpack(value)
    try:
        array = np.asanyarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(_no_array(value, function, argument)) from error
    array = check_lossless(value, array, function, argument)
    if array.dtype.kind == "O":
        raise TypeError(_no_array(value, function, argument))
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _array_of_tensor(tensor: Any, torch: Any, function: str, argument: str) -> Any:
    """Return a tensor of PyTorch as an array of the same memory."""
    plain = tensor.detach()
    if plain.is_cuda:
        return import_cupy(function).from_dlpack(plain)
    narrow = plain.dtype is torch.bfloat16  # unknown to NumPy
    try:
        array = (plain.view(torch.int16) if narrow else plain.resolve_conj().resolve_neg()).numpy()
    except (TypeError, RuntimeError) as error:
        raise TypeError(_no_array(tensor, function, argument)) from error
    return array.view(_bfloat16(function)) if narrow else array


def _bfloat16(function: str) -> np.dtype:
    try:
        import ml_dtypes
    except ImportError as error:
        remedy = "pip install 'mpistrat[bfloat16]'"
        text = explain(function, "", expected="ml_dtypes for bfloat16", got="no module ml_dtypes", remedy=remedy)
        raise MissingDependencyError(text) from error
    return np.dtype(ml_dtypes.bfloat16)


def _no_array(value: Any, function: str, argument: str) -> str:
    expected = "an array (NumPy, CuPy, DLPack, array interface) or a number"
    return explain(function, argument, expected=expected, got=f"{type(value).__name__} {value!r:.60}")


def synchronize(value: Any) -> None:
    """Wait until the GPU has written an array, which MPI does not do; do nothing for NumPy."""
    if is_gpu(value):
        cupy = import_cupy("synchronize")
        with cupy.cuda.Device(value.device.id):
            cupy.cuda.get_current_stream().synchronize()


@contextlib.contextmanager
def on_device_of(value: Any) -> Iterator[None]:
    """Make an array's GPU the current one for a `with` block; do nothing for NumPy."""
    if is_gpu(value):
        with import_cupy("on_device_of").cuda.Device(value.device.id):
            yield
    else:
        yield


def pinned_empty(size: int, dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised flat host array in pinned memory, which a GPU copies at full speed."""
    cupy = import_cupy("pinned_empty")
    memory = cupy.cuda.alloc_pinned_memory(max(1, size * dtype.itemsize))
    return np.frombuffer(memory, np.uint8, size * dtype.itemsize).view(dtype)


def to_host(value: Any, function: str = "to_host", argument: str = "value") -> np.ndarray:
    """Return a value as a NumPy array; one on a GPU is copied through pinned memory.

    Example:
        >>> to_host(3.5)
        array(3.5)
    """
    array = as_array(value, function, argument)
    if not is_gpu(array):
        return array
    cupy = import_cupy("to_host")
    with on_device_of(array):
        flat = cupy.ascontiguousarray(array).reshape(-1)
        host = pinned_empty(flat.size, flat.dtype)
        flat.get(out=host)
        cupy.cuda.get_current_stream().synchronize()
    return host.reshape(array.shape)


_MOVABLE_KINDS = "biufcmMSU"  # bool, integers, floats, complex, dates, fixed-length strings
_REDUCIBLE_KINDS = "iufc"


def is_bfloat16(dtype: np.dtype) -> bool:
    """Return True if a dtype is bfloat16, which NumPy supports only through ml_dtypes."""
    return dtype.kind == "V" and dtype.name == "bfloat16"


def as_buffer(array: Any) -> Any:
    """Return an array that has Python's buffer protocol, if it is in host memory: for bfloat16 the bits, as uint16."""
    return array.view(np.uint16) if is_bfloat16(array.dtype) else array


@functools.cache
def dtype_name(dtype: np.dtype) -> str:
    """Return `dtype.name`, cached because NumPy takes 2 µs to compute it.

    Example:
        >>> dtype_name(np.dtype(np.float32))
        'float32'
    """
    return dtype.name


@functools.cache
def accumulation_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in which values are summed: float32 for float16 and bfloat16, else the same.

    Example:
        >>> accumulation_dtype(np.dtype(np.float16)).name, accumulation_dtype(np.dtype(np.int8)).name
        ('float32', 'int8')
    """
    if dtype == np.float16 or is_bfloat16(dtype):
        return np.dtype(np.float32)
    return dtype


@functools.cache
def mean_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype of a mean: float64 for integers, else the same.

    Example:
        >>> mean_dtype(np.dtype(np.uint8)).name
        'float64'
    """
    return np.dtype(np.float64) if dtype.kind in "iu" else dtype


@functools.cache
def _reducible(dtype: np.dtype) -> bool:
    return dtype.kind in _REDUCIBLE_KINDS or is_bfloat16(dtype)


def check_reducible(dtype: np.dtype, function: str, argument: str = "value", ordered: bool = False) -> None:
    """Raise unless values of a dtype can be combined over ranks.

    Args:
        dtype, function, argument: in errors.
        ordered: True for a minimum or maximum, which bools have.

    Raises:
        TypeError: for bool, structured and other non-numeric dtypes, with the remedy.
    """
    if _reducible(dtype) or (ordered and dtype.kind == "b"):
        return
    if dtype.kind == "b":
        remedy = "To count, cast it first: value.astype(np.int64); MIN is True if all are, MAX if any is"
    elif dtype.names:
        remedy = "Reduce the fields one by one"
    else:
        remedy = ""
    got = f"dtype {dtype}"
    raise TypeError(explain(function, argument, expected="an array of numbers", got=got, remedy=remedy))


def is_movable(dtype: np.dtype) -> bool:
    """Return True if values of a dtype can be sent as bytes."""
    return dtype.kind in _MOVABLE_KINDS or is_bfloat16(dtype)


def check_movable(dtype: np.dtype, function: str, argument: str = "value") -> None:
    """Raise unless values of a dtype can be sent as bytes.

    Raises:
        TypeError: for structured dtypes and Python objects.
    """
    if is_movable(dtype):
        return
    remedy = "Send the fields one by one" if dtype.names else "Python objects are not sent between ranks"
    expected = "an array of numbers, bools, dates or fixed-length strings"
    raise TypeError(explain(function, argument, expected=expected, got=f"dtype {dtype}", remedy=remedy))


@functools.cache
def mpi_datatype(dtype: np.dtype) -> MPI.Datatype:
    """Return the MPI datatype of a NumPy dtype; float16 and bfloat16 are sent as 16-bit integers.

    Those two are summed in `accumulation_dtype`, never in this type.

    Raises:
        TypeError: MPI has no such type.
    """
    from mpi4py import MPI

    if dtype == np.float16 or is_bfloat16(dtype):
        return MPI.UINT16_T
    if dtype.kind in "biufc" and dtype.isnative:
        return MPI.Datatype.fromcode(dtype.char)
    expected = "a dtype of NumPy that MPI supports, in this machine's byte order"
    raise TypeError(explain("mpi_datatype", "dtype", expected=expected, got=str(dtype)))


# MPI counts are 32-bit before MPI 4, and in some later libraries. Constants, because other chunks give other bits.
CHUNK_ELEMENTS = 1 << 30
NARROW_CHUNK_ELEMENTS = 1 << 20  # for float16 and bfloat16, each through 4 MiB of float32


def all_reduce(
    comm: MPI.Intracomm, array: np.ndarray, source: np.ndarray | None = None, ufunc: np.ufunc = np.add
) -> None:
    """Sum an array, or combine it by another function, over the ranks of a communicator. Collective over `comm`.

    float16 and bfloat16 are combined in float32 and rounded once. The result has the same bits on every rank.

    Args:
        comm: an intracommunicator.
        array: C-contiguous host array; receives the result, and holds this rank's part unless `source` does.
        source: C-contiguous array of the same dtype and size with this rank's part, not changed.
        ufunc: np.add, np.multiply, np.minimum or np.maximum; the latter two not for complex numbers.

    Raises:
        TypeError: a sum or product of bools, or a structured or another dtype that MPI cannot combine.
        ValueError: an array is not C-contiguous.
    """
    check_reducible(array.dtype, "all_reduce", "array", ufunc in (np.minimum, np.maximum))
    target = _flat(array, "array")
    part = target if source is None else _flat(source, "source")
    if accumulation_dtype(array.dtype) != array.dtype:
        _all_reduce_narrow(comm, target, part, ufunc)
        return
    from mpi4py import MPI

    datatype, op = mpi_datatype(array.dtype), mpi_op(ufunc, array.dtype.kind)
    for low in range(0, target.size, CHUNK_ELEMENTS):
        chunk = slice(low, low + CHUNK_ELEMENTS)
        send: Any = MPI.IN_PLACE if part is target else [part[chunk], datatype]
        comm.Allreduce(send, [target[chunk], datatype], op=op)


@functools.cache
def mpi_op(ufunc: np.ufunc, kind: str) -> MPI.Op:
    """Return the MPI operation of a function for dtypes of a kind, cached until the program ends.

    The results of MPI_MIN and MPI_MAX for NaN and for 0.0 and -0.0 depend on the order of the operands, so floats need NumPy's.
    NumPy's choice of a zero depends on the order too, so the operation is not commutative, and MPI keeps the order of ranks.
    """
    from mpi4py import MPI

    if ufunc in (np.minimum, np.maximum) and kind == "f":

        def of_buffers(first: Any, second: Any, datatype: MPI.Datatype) -> None:
            dtype = np.dtype(datatype.tocode())
            target = np.frombuffer(second, dtype)
            ufunc(np.frombuffer(first, dtype), target, out=target)

        return MPI.Op.Create(of_buffers, commute=False)
    if kind == "b":  # MPI_MIN and MPI_MAX do not take logical types
        return MPI.LAND if ufunc is np.minimum else MPI.LOR
    ops: dict[np.ufunc, MPI.Op] = {np.add: MPI.SUM, np.multiply: MPI.PROD, np.minimum: MPI.MIN, np.maximum: MPI.MAX}
    return ops[ufunc]


def _flat(array: np.ndarray, argument: str) -> np.ndarray:
    if not array.flags.c_contiguous:
        raise ValueError(explain("all_reduce", argument, expected="a C-contiguous array", got="another memory order"))
    return array.reshape(-1)


def _all_reduce_narrow(comm: MPI.Intracomm, target: np.ndarray, part: np.ndarray, ufunc: np.ufunc) -> None:
    from mpi4py import MPI

    op = mpi_op(ufunc, "f")
    wide = np.empty(min(target.size, NARROW_CHUNK_ELEMENTS), np.float32)
    for low in range(0, target.size, NARROW_CHUNK_ELEMENTS):
        chunk = slice(low, min(low + NARROW_CHUNK_ELEMENTS, target.size))
        piece = wide[: chunk.stop - low]
        np.copyto(piece, part[chunk], casting="unsafe")
        comm.Allreduce(MPI.IN_PLACE, piece, op=op)
        np.copyto(target[chunk], piece, casting="unsafe")


def all_reduce_gpu(comm: MPI.Intracomm, array: Any) -> None:
    """Sum a contiguous CuPy array over the ranks, in place, by a CUDA-aware MPI. Collective over `comm`.

    The stream is synchronised first, because MPI does not know it. The dtype must be one that MPI sums. Not yet run: it needs a
    CUDA-aware MPI.
    """
    from mpi4py import MPI

    if not is_gpu(array) or accumulation_dtype(array.dtype) != array.dtype:
        raise TypeError(explain("all_reduce_gpu", "array", expected="a GPU array MPI can sum", got=str(array.dtype)))
    flat = array.reshape(-1)
    synchronize(flat)
    datatype = mpi_datatype(array.dtype)
    for low in range(0, flat.size, CHUNK_ELEMENTS):
        comm.Allreduce(MPI.IN_PLACE, [flat[low : low + CHUNK_ELEMENTS], datatype], op=MPI.SUM)
