"""NCCL communicators over all ranks and their GPUs, through cupy.cuda.nccl: creation, sums, destruction.

NCCL and MPI calls never overlap, because this may deadlock: every call here synchronises its streams before it returns,
and every MPI call of this package blocks. Not yet run on a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import Any, final

import numpy as np

from ..errors import ClosedError, MissingDependencyError, explain
from .arrays import import_cupy
from .dtypes import is_bfloat16
from .process_group import ProcessGroup

__all__ = ["NcclCommunicator", "nccl_available", "nccl_datatype_name", "require_nccl"]

_REMEDY = "pip install 'mpistrat[cuda12x]' or 'mpistrat[cuda13x]' on a machine with a GPU"
_ID_BYTES = 128

# NumPy dtype → name of NCCL's constant. NCCL sums float16 and bfloat16 itself, with float32 inside its kernels.
_DATATYPES = {
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}


def nccl_datatype_name(dtype: np.dtype) -> str | None:
    """Return the name of NCCL's constant for a dtype; None where NCCL has none.

    Complex numbers travel as pairs of floats, which a sum allows.

    Example:
        >>> nccl_datatype_name(np.dtype(np.float32))
        'NCCL_FLOAT32'
    """
    if is_bfloat16(dtype):
        return "NCCL_BFLOAT16"
    if dtype.kind == "c":
        return {"complex64": "NCCL_FLOAT32", "complex128": "NCCL_FLOAT64"}.get(dtype.name)
    return _DATATYPES.get(dtype.name)


@functools.lru_cache(maxsize=1)
def nccl_available() -> str:
    """Return why NCCL cannot be used, or "" if it can."""
    try:
        import cupy
    except ImportError:
        return f"CuPy is not installed: {_REMEDY}"
    try:
        from cupy.cuda import nccl
    except ImportError:
        return f"CuPy has no NCCL: {_REMEDY}"
    if not getattr(nccl, "available", True):
        return f"CuPy has no NCCL: {_REMEDY}"
    try:
        return "" if cupy.cuda.runtime.getDeviceCount() else "there is no GPU"
    except Exception as error:  # a missing driver has an exception type of CuPy's own
        return f"there is no usable GPU ({error})"


def require_nccl(function: str) -> ModuleType:
    """Return cupy.cuda.nccl.

    Raises:
        MissingDependencyError: with what is missing and the remedy.
    """
    reason = nccl_available()
    if reason:
        remedy = "Or choose CommunicationImplementation.AUTO, which does without"
        raise MissingDependencyError(explain(function, "", expected="CuPy with NCCL", got=reason, remedy=remedy))
    from cupy.cuda import nccl

    return nccl


@final
class NcclCommunicator:
    """One NCCL communicator for each local GPU, over all GPUs of all ranks. A context manager.

    The order of replicas is the topology's: by rank, then by device.
    """

    def __init__(self, group: ProcessGroup, devices: Sequence[int]) -> None:
        """Collective over all ranks.

        Args:
            group: the ranks.
            devices: this rank's GPUs, one for each local replica.

        Raises:
            MissingDependencyError: NCCL or CuPy is missing.
        """
        self._nccl = require_nccl("NcclCommunicator")
        self._group = group
        self._cupy = import_cupy("NcclCommunicator")
        self._devices = tuple(devices)
        self._comms: list[Any] = []
        topology = group.topology
        unique = np.zeros(_ID_BYTES, np.uint8)
        if topology.rank == 0:
            unique[:] = np.asarray(self._nccl.get_unique_id(), np.int16).astype(np.uint8)
        if group.topology.size > 1:
            group.broadcast(unique, root=0)
            topology.comm.Barrier()  # no rank is inside MPI when the first one enters NCCL
        identity = tuple(int(byte) for byte in unique.view(np.int8))
        with group.quiet():
            self._nccl.groupStart()
            for index, device in enumerate(self._devices):
                with self._cupy.cuda.Device(device):
                    number = topology.replica_offset + index
                    self._comms.append(self._nccl.NcclCommunicator(topology.num_replicas, identity, number))
            self._nccl.groupEnd()

    def all_reduce(self, arrays: Sequence[Any]) -> None:
        """Sum contiguous CuPy arrays over all replicas, in place. Collective; returns when the sums are there.

        Args:
            arrays: one for each local GPU, in the order of the devices, of one dtype and size.

        Raises:
            TypeError: NCCL cannot sum the dtype.
            ClosedError: after `close()`.
        """
        if not self._comms:
            raise ClosedError("NcclCommunicator.all_reduce: the communicator was closed")
        first = arrays[0]
        name = nccl_datatype_name(first.dtype)
        if name is None or not hasattr(self._nccl, name):
            raise TypeError(explain("NcclAllReduce", "value", expected="a dtype that NCCL sums", got=str(first.dtype)))
        datatype = getattr(self._nccl, name)
        count = first.size * (2 if first.dtype.kind == "c" else 1)
        with self._group.quiet():  # the watchdog must not call MPI meanwhile
            self._sum(arrays, count, datatype)

    def _sum(self, arrays: Sequence[Any], count: int, datatype: int) -> None:
        streams = []
        self._nccl.groupStart()
        for device, comm, array in zip(self._devices, self._comms, arrays, strict=True):
            with self._cupy.cuda.Device(device):
                stream = self._cupy.cuda.get_current_stream()
                comm.allReduce(array.data.ptr, array.data.ptr, count, datatype, self._nccl.NCCL_SUM, stream.ptr)
                streams.append((device, stream))
        self._nccl.groupEnd()
        for device, stream in streams:
            with self._cupy.cuda.Device(device):
                stream.synchronize()

    def close(self) -> None:
        """Destroy the communicators. Collective the first time; later calls do nothing."""
        comms, self._comms = self._comms, []
        for device, comm in zip(self._devices, comms, strict=False):
            with self._cupy.cuda.Device(device):
                comm.destroy()

    def __enter__(self) -> NcclCommunicator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
