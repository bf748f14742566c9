"""GPUs: copies from the host on a separate CUDA stream, and NCCL communicators over all ranks.

While NCCL is in flight this package does not call MPI on memory of a GPU: it may deadlock. Calls on memory of the host are safe:
all ranks put the same sums on their GPUs before them, so no rank waits for a sum that another has not started. So `all_reduce`
waits for its streams before it returns, or at the end of the block of `one_wait`; the sums of a step end with the next
collective, and those of `start` with the step. A wait polls: when ranks have left or are lost, when NCCL reports an error, or
when time is over, it aborts the communicators, because kernels of NCCL would wait for ever.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from ..base.devices import parse
from ..base.errors import ClosedError, MissingDependencyError, PeerExitError, explain
from ..base.text import named
from ..base.waiting import PeerWait, wait_until
from ..cluster.world import survives
from .arrays import import_cupy, is_bfloat16, pinned_empty
from .contract import IN_FLIGHT
from .process_group import ProcessGroup

__all__ = [
    "DeviceCopy",
    "NcclCommunicator",
    "Started",
    "computing_streams",
    "lend",
    "nccl_available",
    "nccl_datatype_name",
    "own_gpus",
    "require_nccl",
    "shared_gpus",
    "why_not_nccl",
]

G = TypeVar("G")

_KEPT = 16  # free buffers of either kind that are cached


def computing_streams() -> list[Any]:
    """Return the streams on which the program computes on the current GPU: CuPy's, and PyTorch's if it is another one.

    PyTorch's streams and CuPy's do not wait for each other.
    """
    cupy, torch = import_cupy("computing_streams"), sys.modules.get("torch")
    own = cupy.cuda.get_current_stream()
    if torch is None or not torch.cuda.is_initialized():
        return [own]
    stream = torch.cuda.current_stream(cupy.cuda.Device().id)
    if stream.cuda_stream in (0, own.ptr):  # 0 is the default stream, which is ordered with CuPy's
        return [own]
    return [own, cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index)]


@dataclass(frozen=True, eq=False)
class Started:
    """A pending copy: the array on the GPU, and the event of its arrival; None if there was nothing to copy."""

    array: Any
    arrived: Any = None


class _Loan:
    """One use of GPU memory, alive as long as an array or view of that memory."""

    memory: Any = None  # kept alive as long


def lend(array: Any) -> tuple[Any, weakref.ref[Any]]:
    """Return an array with the memory of a contiguous GPU array, and a weak reference that dies with its last use.

    Arrays of other libraries over the memory also keep it alive.
    """
    return _lent(array.data.ptr, array.nbytes, array.device.id, array, kept=array)


def _lent(pointer: Any, nbytes: int, device: int, like: Any, kept: Any = None) -> tuple[Any, weakref.ref[_Loan]]:
    """Return an array like another in memory of a GPU, and the reference; `kept` lives as long as the loan."""
    cupy, loan = import_cupy("lend"), _Loan()
    loan.memory = kept
    memory = cupy.cuda.UnownedMemory(int(pointer), nbytes, loan, device)
    return cupy.ndarray(like.shape, like.dtype, cupy.cuda.MemoryPointer(memory, 0)), weakref.ref(loan)


@dataclass(eq=False)
class _Buffer:
    """Memory, host or GPU, and the events after which it may be written again."""

    memory: Any
    nbytes: int
    free_after: Sequence[Any] = ()
    loan: weakref.ref[_Loan] | None = None


def _fitting(buffers: list[_Buffer], nbytes: int) -> _Buffer | None:
    """Take the smallest buffer that is large enough out of a list."""
    found = min(
        (buffer for buffer in buffers if buffer.nbytes >= nbytes), key=lambda buffer: buffer.nbytes, default=None
    )
    if found is not None:
        buffers.remove(found)
    return found


@final
class DeviceCopy:
    """A copier of host arrays to one GPU through pinned memory, on a non-blocking stream. Threads may share it.

    Each array gets GPU memory that is reused only when no array or view of it is left *and* all work that the computing thread
    had started by then is finished: `reclaim` records that moment.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._stream: Any = None
        self._staging: list[_Buffer] = []  # pinned host memory
        self._free: list[_Buffer] = []
        self._lent: list[_Buffer] = []

    def start(self, array: NDArray[Any]) -> Started:
        """Start to copy an array; it may be changed once this returns.

        Arrays of Python objects (strings, rows of varying shape) stay on the host.
        """
        if array.dtype.hasobject:
            return Started(array)
        cupy = import_cupy("DeviceCopy")
        with self._lock, cupy.cuda.Device(self._index):
            if array.nbytes == 0:
                return Started(cupy.empty(array.shape, array.dtype))
            if self._stream is None:
                self._stream = cupy.cuda.Stream(non_blocking=True)
            host = self._host_memory(array.nbytes)
            pinned = host.memory[: array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(pinned, array)
            target = self._device_array(cupy, array)
            target.set(pinned, stream=self._stream)
            arrived = cupy.cuda.Event(disable_timing=True)
            arrived.record(self._stream)
            host.free_after = [arrived]
            self._staging.append(host)
            return Started(target, arrived)

    def _host_memory(self, nbytes: int) -> _Buffer:
        arrived = [buffer for buffer in self._staging if all(event.done for event in buffer.free_after)]
        found = _fitting(arrived, nbytes)
        if found is not None:
            self._staging.remove(found)
            return found
        for buffer in arrived[: max(0, len(self._staging) - _KEPT)]:
            self._staging.remove(buffer)
        return _Buffer(pinned_empty(nbytes, np.dtype(np.uint8)), nbytes)

    def _device_array(self, cupy: Any, array: NDArray[Any]) -> Any:
        """Return an array on the GPU in a free buffer, which the stream waits for, or in a new one."""
        buffer = _fitting(self._free, array.nbytes)
        if buffer is None:
            with self._stream:  # the memory pool is separate for each stream
                buffer = _Buffer(cupy.cuda.alloc(array.nbytes), array.nbytes)
        for event in buffer.free_after:
            self._stream.wait_event(event)
        lent, buffer.loan = _lent(buffer.memory.ptr, buffer.nbytes, self._index, array)
        self._lent.append(buffer)
        return lent

    def finish(self, started: Started) -> Any:
        """Make the streams of the program wait for a copy, and return the array on the GPU."""
        if started.arrived is not None:
            cupy = import_cupy("DeviceCopy")
            with cupy.cuda.Device(self._index):
                for stream in computing_streams():
                    stream.wait_event(started.arrived)
        return started.array

    def reclaim(self) -> None:
        """Reclaim the memory of freed arrays; call it in the thread that started the work with them."""
        with self._lock:
            gone = [buffer for buffer in self._lent if buffer.loan is None or buffer.loan() is None]
            if not gone:
                return
            cupy = import_cupy("DeviceCopy")
            with cupy.cuda.Device(self._index):
                used = []
                for stream in computing_streams():
                    used.append(cupy.cuda.Event(disable_timing=True))
                    used[-1].record(stream)
                for buffer in gone:
                    self._lent.remove(buffer)
                    buffer.free_after = used
                    self._free.append(buffer)
                for event in itertools.chain.from_iterable(buffer.free_after for buffer in self._free[:-_KEPT]):
                    self._stream.wait_event(event)  # the pool may give it to this stream's next array
                del self._free[:-_KEPT]


_REMEDY = "pip install 'mpistrat[cuda12x]' or 'mpistrat[cuda13x]' on a machine with a GPU"
_ID_BYTES = 128
_LAST_PART = 1.0  # seconds in which a sum ends after the first rank that has finished its part

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
    """Return the name of NCCL's constant for a dtype; None if NCCL has none.

    Complex numbers are sent as pairs of floats, which a sum allows.

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
    except Exception as error:  # a missing driver raises an exception type of CuPy
        return f"there is no usable GPU ({error})"


def require_nccl(function: str) -> ModuleType:
    """Return cupy.cuda.nccl.

    Raises:
        MissingDependencyError: with the missing part and the remedy.
    """
    reason = nccl_available()
    if reason:
        remedy = "Or choose CommunicationImplementation.AUTO, which works without NCCL"
        raise MissingDependencyError(explain(function, "", expected="CuPy with NCCL", got=reason, remedy=remedy))
    from cupy.cuda import nccl

    return nccl


def _id_bytes(unique_id: Any) -> NDArray[np.uint8]:
    """Return the bytes of NCCL's unique id: bytes in CuPy 14, a tuple of signed numbers in CuPy 13."""
    if isinstance(unique_id, bytes):
        return np.frombuffer(unique_id, np.uint8)
    return np.asarray(unique_id, np.int8).view(np.uint8)


def own_gpus(group: ProcessGroup) -> list[int]:
    """Return the numbers of this rank's GPUs, one for each local replica; none if one of its devices is a CPU."""
    kinds = [parse(device) for device in group.topology.devices]
    return [index for _, index in kinds] if all(kind == "gpu" for kind, _ in kinds) else []


def why_not_nccl(group: ProcessGroup) -> str:
    """Return the reason why NCCL cannot sum for a group, "" if it can. Collective, inside `collective()`; equal on all ranks.

    Each replica must have its own GPU. GPUs are compared by node and PCI bus id. Instances of one GPU (MIG) have the same id:
    NCCL rejects them too.
    """
    reason, topology = nccl_available(), group.topology
    devices = [] if reason else own_gpus(group)
    if not reason and not devices:
        reason = f"its devices are {', '.join(topology.devices)}"
    runtime = import_cupy("why_not_nccl").cuda.runtime if devices else None
    buses = [_text(runtime.deviceGetPCIBusId(device)) for device in devices] if runtime is not None else []
    rows = [json.loads(text) for text in group.all_gather_text(json.dumps([reason, buses]))]
    for rank, (why, _) in enumerate(rows):
        if why:
            return why if topology.size == 1 else f"rank {rank}: {why}"
    shared = shared_gpus((rank, (topology.node_of[rank], bus)) for rank, (_, found) in enumerate(rows) for bus in found)
    return "; ".join(
        f"{named('rank', ranks)} share the GPU {bus} of node {node}" for (node, bus), ranks in shared.items()
    )


def shared_gpus(used: Iterable[tuple[int, G]]) -> dict[G, list[int]]:
    """Return the ranks of each GPU that several ranks use, from pairs of a rank and its GPU.

    Example:
        >>> shared_gpus([(0, "a"), (1, "b"), (2, "a")])
        {'a': [0, 2]}
    """
    users: dict[G, list[int]] = {}
    for rank, gpu in used:
        users.setdefault(gpu, []).append(rank)
    return {gpu: ranks for gpu, ranks in users.items() if len(ranks) > 1}


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


@final
class NcclCommunicator:
    """One NCCL communicator for each local GPU, over all GPUs of all ranks. A context manager.

    The order of replicas is the topology's: by rank, then by device.

    Attributes:
        devices: the numbers of this rank's GPUs.
    """

    def __init__(self, group: ProcessGroup, devices: Sequence[int]) -> None:
        """Connect this rank's GPUs, one for each local replica. Collective over all ranks.

        Raises:
            MissingDependencyError: NCCL or CuPy is missing.
        """
        self._nccl = require_nccl("NcclCommunicator")
        self._group = group
        self._cupy = import_cupy("NcclCommunicator")
        self.devices = tuple(devices)
        self._comms: list[Any] = []
        self._waits = True
        self._stream: Any = None  # of sums that start before the step
        self._unfinished: list[tuple[Callable[[], bool], Callable[[], bool]]] = []  # see `_watch`
        topology = group.topology
        unique = np.zeros(_ID_BYTES, np.uint8)
        if topology.rank == 0:
            unique[:] = _id_bytes(self._nccl.get_unique_id())
        if group.topology.size > 1:
            group.broadcast(unique, root=0)
            topology.comm.Barrier()  # no rank is inside MPI when the first one enters NCCL
        identity: Any = unique.tobytes()
        if int(self._cupy.__version__.split(".")[0]) < 14:  # it takes a tuple of signed numbers
            identity = tuple(unique.view(np.int8).tolist())
        with self._grouped():
            for index, device in enumerate(self.devices):
                with self._cupy.cuda.Device(device):
                    number = topology.replica_offset + index
                    self._comms.append(self._nccl.NcclCommunicator(topology.num_replicas, identity, number))

    @contextlib.contextmanager
    def _grouped(self) -> Iterator[None]:
        """Make NCCL start the calls of a block together. A group left open by an error would include all later calls."""
        self._nccl.groupStart()
        try:
            yield
        finally:
            self._nccl.groupEnd()

    @contextlib.contextmanager
    def one_wait(self, later: bool = False) -> Iterator[None]:
        """Wait once for all sums in a block, at its end or later; they are ordered with other work on the current streams.

        The block must not call MPI. Its work comes after started sums.

        Args:
            later: wait in the next collective. If ranks may be lost and the others go on, the wait is at the end all the same: a
                program that asks the GPU for a number would wait there for ever.
        """
        several = self._group.topology.size > 1
        own = self._mark() if several else None
        if self._stream is not None:
            self._cupy.cuda.get_current_stream().wait_event(self._stream.record())
        self._waits = False
        try:
            yield
        finally:
            self._waits = True
            if own is not None:
                self._unfinished.append((own, self._mark()))
            if not later or survives():
                self.settle()
                for device in self.devices:
                    with self._cupy.cuda.Device(device):
                        self._cupy.cuda.get_current_stream().synchronize()
            elif own is not None:
                IN_FLIGHT.append(self)

    def settle(self) -> None:
        """Wait for the sums in flight.

        Raises:
            PeerExitError: a rank has left the program.
            mpi4py.MPI.Exception, RanksLostError: ranks were lost, in a program that survives it.
            CollectiveTimeoutError: the wait exceeds the time limit of the collective.
            cupy.cuda.nccl.NcclError: NCCL reports an error of a communicator.
        """
        unfinished, self._unfinished = self._unfinished, []
        for own, done in unfinished:
            if self._comms:
                self._watch(own, done)

    def _mark(self) -> Callable[[], bool]:
        """Return a function that returns True when the work on the current streams is done."""
        cuda, marks = self._cupy.cuda, []
        for device in self.devices:
            with cuda.Device(device):
                marks.append(cuda.Event(disable_timing=True))
                marks[-1].record(cuda.get_current_stream())
        return lambda: all(mark.done for mark in marks)

    def _watch(self, own: Callable[[], bool], done: Callable[[], bool]) -> None:
        """Wait until NCCL has finished. After an error, abort the communicators and let the group refuse later collectives.

        Args:
            own: returns True when this rank's work before the sums is done. Only then the recorded call begins.
            done: returns True when all is done.
        """
        group, current, waits = self._group, self._group.monitor.current, False
        call = None if current is None else current[1]
        others = [rank for rank in range(group.topology.size) if rank != group.topology.rank]
        wait = PeerWait(group, call.text if call else "a sum by NCCL", others, seconds=call.timeout if call else None)
        group.monitor.on_time = True
        try:
            while not done():
                if not waits and own():
                    waits = True
                    if call is not None:
                        call.begin_again()
                for comm in self._comms:
                    comm.check_async_error()
                wait.pause()
        except Exception as error:
            if isinstance(error, PeerExitError) and wait_until(done, _LAST_PART):
                return  # the rank had left after its part of the sum
            self._abort(error)
            raise
        finally:
            group.monitor.on_time = False

    def _abort(self, error: BaseException) -> None:
        comms, self._comms = self._comms, []
        for comm in comms:
            comm.abort()
        self._group.refuse_after(error, "ended sums by NCCL, with some")

    def start(self, arrays: Sequence[Any], sources: Sequence[Any] | None = None) -> None:
        """Start to sum the array of this rank's only GPU, as `all_reduce`, on a stream of its own after the current one's work.

        The next `one_wait` takes the sums. Nothing is compared: all ranks must start the same in one order.
        """
        cuda = self._cupy.cuda
        if self._stream is None:
            self._stream = cuda.Stream(non_blocking=True)
        self._stream.wait_event(cuda.get_current_stream().record())
        with self._stream:
            self._sum(arrays, sources)

    def drop(self, error: BaseException) -> None:
        """End sums in flight, after an error: abort the communicators unless all of them end by themselves within a second."""
        last = [done for _, done in self._unfinished]
        self._unfinished = []
        if self._stream is not None:
            started = self._stream.record()
            last.append(lambda: started.done)
        if not wait_until(lambda: all(done() for done in last), _LAST_PART):
            self._abort(error)

    def all_reduce(self, arrays: Sequence[Any], sources: Sequence[Any] | None = None) -> None:
        """Sum contiguous CuPy arrays of one dtype and size over all replicas; one for each local GPU, in order.

        In place, or of `sources`, which are not changed. Collective; returns when the sums are complete, but see `one_wait`.

        Raises:
            TypeError: NCCL cannot sum the dtype.
            ClosedError: after `close()`, and after an error.
            Exception: see `settle`.
        """
        with self.one_wait() if self._waits else contextlib.nullcontext():
            self._sum(arrays, sources)

    def _sum(self, arrays: Sequence[Any], sources: Sequence[Any] | None) -> None:
        """Put sums on the current streams."""
        if not self._comms:
            raise ClosedError("NcclCommunicator.all_reduce: the communicator was closed")
        first = arrays[0]
        name = nccl_datatype_name(first.dtype)
        if name is None or not hasattr(self._nccl, name):
            raise TypeError(explain("NcclAllReduce", "value", expected="a dtype that NCCL sums", got=str(first.dtype)))
        datatype = getattr(self._nccl, name)
        count = first.size * (2 if first.dtype.kind == "c" else 1)
        with self._grouped():
            for device, comm, array, source in zip(self.devices, self._comms, arrays, sources or arrays, strict=True):
                with self._cupy.cuda.Device(device):
                    stream = self._cupy.cuda.get_current_stream().ptr
                    comm.allReduce(source.data.ptr, array.data.ptr, count, datatype, self._nccl.NCCL_SUM, stream)

    def close(self) -> None:
        """Destroy the communicators, after the sums in flight. Collective the first time; later calls do nothing."""
        self.settle()
        comms, self._comms = self._comms, []
        for device, comm in zip(self.devices, comms, strict=False):
            with self._cupy.cuda.Device(device):
                comm.destroy()

    def __enter__(self) -> NcclCommunicator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
