"""MPI buffers of arrays: reductions and copies over a communicator, in fixed chunks within MPI's 32-bit counts."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._util.log import once
from ..errors import explain
from .arrays import is_gpu, synchronize
from .dtypes import accumulation_dtype, check_reducible, mpi_datatype

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["CHUNK_ELEMENTS", "accumulation_dtype", "all_reduce", "all_reduce_gpu", "cuda_aware", "mpi_datatype"]

# MPI counts are 32-bit before MPI 4, and in some libraries after. Constants: other chunks give other bits.
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
        source: C-contiguous array of the same dtype and size with this rank's part, left as it is.
        ufunc: np.add, np.multiply, np.minimum or np.maximum; the latter two not for complex numbers.

    Raises:
        TypeError: bool, structured, or another dtype that MPI cannot sum.
        ValueError: an array is not C-contiguous.
    """
    check_reducible(array.dtype, "all_reduce", "array")
    target = _flat(array, "array")
    part = target if source is None else _flat(source, "source")
    if accumulation_dtype(array.dtype) != array.dtype:
        _all_reduce_narrow(comm, target, part, ufunc)
        return
    from mpi4py import MPI

    datatype, op = mpi_datatype(array.dtype), _mpi_op(ufunc, array.dtype.kind)
    for low in range(0, target.size, CHUNK_ELEMENTS):
        chunk = slice(low, low + CHUNK_ELEMENTS)
        send: Any = MPI.IN_PLACE if part is target else [part[chunk], datatype]
        comm.Allreduce(send, [target[chunk], datatype], op=op)


@functools.cache
def _mpi_op(ufunc: np.ufunc, kind: str) -> MPI.Op:
    """The MPI operation of a function for dtypes of a kind, kept as long as the program runs.

    What MPI_MIN and MPI_MAX make of NaN and of 0.0 and -0.0 depends on the order of the operands, so floats need NumPy's.
    Which zero NumPy takes depends on the order too: the operation is not commutative, and MPI keeps to the order of ranks.
    """
    from mpi4py import MPI

    if ufunc in (np.minimum, np.maximum) and kind == "f":

        def of_buffers(first: Any, second: Any, datatype: MPI.Datatype) -> None:
            dtype = np.dtype(datatype.tocode())
            target = np.frombuffer(second, dtype)
            ufunc(np.frombuffer(first, dtype), target, out=target)

        return MPI.Op.Create(of_buffers, commute=False)
    ops: dict[np.ufunc, MPI.Op] = {np.add: MPI.SUM, np.multiply: MPI.PROD, np.minimum: MPI.MIN, np.maximum: MPI.MAX}
    return ops[ufunc]


def _flat(array: np.ndarray, argument: str) -> np.ndarray:
    if not array.flags.c_contiguous:
        raise ValueError(explain("all_reduce", argument, expected="a C-contiguous array", got="another memory order"))
    return array.reshape(-1)


def _all_reduce_narrow(comm: MPI.Intracomm, target: np.ndarray, part: np.ndarray, ufunc: np.ufunc) -> None:
    from mpi4py import MPI

    op = _mpi_op(ufunc, "f")
    wide = np.empty(min(target.size, NARROW_CHUNK_ELEMENTS), np.float32)
    for low in range(0, target.size, NARROW_CHUNK_ELEMENTS):
        chunk = slice(low, min(low + NARROW_CHUNK_ELEMENTS, target.size))
        piece = wide[: chunk.stop - low]
        np.copyto(piece, part[chunk], casting="unsafe")
        comm.Allreduce(MPI.IN_PLACE, piece, op=op)
        np.copyto(target[chunk], piece, casting="unsafe")


def all_reduce_gpu(comm: MPI.Intracomm, array: Any) -> None:
    """Sum a contiguous CuPy array over the ranks, in place, by a CUDA-aware MPI. Collective over `comm`.

    The stream is synchronised first, because MPI does not know it. The dtype must be one that MPI sums. Not yet run on
    a GPU.
    """
    from mpi4py import MPI

    if not is_gpu(array) or accumulation_dtype(array.dtype) != array.dtype:
        raise TypeError(explain("all_reduce_gpu", "array", expected="a GPU array MPI can sum", got=str(array.dtype)))
    flat = array.reshape(-1)
    synchronize(flat)
    datatype = mpi_datatype(array.dtype)
    for low in range(0, flat.size, CHUNK_ELEMENTS):
        comm.Allreduce(MPI.IN_PLACE, [flat[low : low + CHUNK_ELEMENTS], datatype], op=MPI.SUM)


@functools.lru_cache(maxsize=1)
def cuda_aware() -> bool:
    """Return whether the MPI library says that it takes GPU memory.

    Asks `MPIX_Query_cuda_support`, which Open MPI and some MPICH builds have; a library that does not say is taken to
    have no support.
    """
    for library in _mpi_libraries():
        try:
            query = ctypes.CDLL(library).MPIX_Query_cuda_support
        except (OSError, AttributeError):
            continue
        query.argtypes, query.restype = [], ctypes.c_int
        return bool(query())
    once(logging.DEBUG, "MPI does not answer MPIX_Query_cuda_support: GPU arrays go through pinned host memory")
    return False


def _mpi_libraries() -> list[str]:
    """The extension module of mpi4py, whose dependencies are searched too, then every MPI library that is loaded."""
    from mpi4py import MPI

    loaded = []
    maps = Path("/proc/self/maps")
    if maps.exists():
        for line in maps.read_text().splitlines():
            path = line.split(maxsplit=5)[5:]
            if path and Path(path[0]).name.startswith(("libmpi.", "libmpich", "libmpi_abi")):
                loaded.append(path[0])
    return [str(MPI.__file__), *dict.fromkeys(loaded)]
