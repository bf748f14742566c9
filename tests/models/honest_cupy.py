"""A stand-in for CuPy that is strict about streams, devices, memory and NCCL.

`install()` puts it into sys.modules as `cupy`. It differs from a stand-in that computes at once:

- **Streams.** A call puts work on the current stream of the current device and returns. Work is done as late as it may be: when
  the host waits for a stream, an event or a device, or asks for a number. A reader that does not wait reads poison. The null
  stream is CUDA's legacy one: it waits for all blocking streams, and these wait for it; `non_blocking=True` streams do neither.
- **A race checker.** Each piece of work knows which work is ordered before it (a vector clock). Two pieces that touch the same
  bytes, one of them writing, with no order between them are reported, whatever the schedule made of the numbers. So is memory
  that is given back to its pool while another stream may use it, and memory that MPI gets while a stream may still write it.
- **Devices.** The current device is each thread's own, 0 at first. Work on an array of another device is reported, and so is an
  event that is recorded on a stream of another device than the one on which it was made, which is an error of CUDA.
- **Kernels.** g++ compiles the source of a RawKernel, with a few lines in place of CUDA, and it runs as work on a stream: threads
  one after the other. What const pointers point to is read, all else is written. Arguments must have the kernel's types.
- **NCCL.** Each rank of a communicator needs a physical GPU of its own, else every rank gets NCCL_ERROR_INVALID_USAGE
  ("Duplicate GPU"). What would hang raises `Hang`: ncclCommInitRank for a second GPU outside of a group, a collective on one of
  several local communicators. Counts and dtypes are compared. A reduction is work on a stream. MPI moves the data. While one is
  on a stream, memory of a GPU that MPI gets is reported: both may wait for the other.

GPUs: FAKE_GPUS (default 1) of this node, seen through CUDA_VISIBLE_DEVICES if that is set. FAKE_POLICY: "late" or "early".
FAKE_CUPY: 14, or 13. FAKE_ROCM=1: a CuPy for AMD's GPUs, whose arrays have no __cuda_array_interface__, with RCCL as its
`nccl`, kernels by hiprtc, and GPUs seen through HIP_VISIBLE_DEVICES and ROCR_VISIBLE_DEVICES, too.
`report()` returns what was reported, and counts of launches, copies and waits.
"""

from __future__ import annotations

import collections
import ctypes
import hashlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np

POISON = 0xCB
VERSION = int(
    os.environ.get("FAKE_CUPY", "14")
)  # CuPy 14 made NCCL's unique id bytes, where 13 had a tuple of signed numbers
ROCM = os.environ.get("FAKE_ROCM", "") == "1"
_PACKAGE = "/mpistrat/"


class Hang(RuntimeError):
    """What would wait for ever on a GPU."""


class Machine:
    def __init__(self) -> None:
        physical = list(range(int(os.environ.get("FAKE_GPUS", "1"))))
        rocm = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES") if ROCM else ()  # HIP counts what ROCR has left
        self.bus = physical
        for name in (*rocm, "CUDA_VISIBLE_DEVICES"):
            visible = os.environ.get(name)
            if visible is not None and (
                name != "CUDA_VISIBLE_DEVICES" or "HIP_VISIBLE_DEVICES" not in (os.environ if ROCM else ())
            ):
                self.bus = [self.bus[int(i)] for i in visible.split(",") if i.strip()]
        self.policy = os.environ.get("FAKE_POLICY", "late")
        self.local = threading.local()
        self.lock = threading.RLock()
        self.told: collections.OrderedDict[str, int] = collections.OrderedDict()
        self.counts: collections.Counter[str] = collections.Counter()
        self.nbytes: collections.Counter[str] = collections.Counter()  # that each kind of work reads and writes
        self.streams: list[Stream] = []
        self.null: dict[int, Stream] = {}
        self.clock: dict[int, int] = {}  # of the host: what it has waited for
        self.torch_stream: Stream | None = None
        self.memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()

    def tell(self, what: str, other: str = "") -> None:
        text = f"{what}\n    here:  {where()}" + (f"\n    other: {other}" if other else "")
        self.told[text] = self.told.get(text, 0) + 1

    @property
    def device(self) -> int:
        return getattr(self.local, "device", 0)

    def current(self, device: int | None = None) -> Stream:
        device = self.device if device is None else device
        stacks = self.local.__dict__.setdefault("stacks", {})
        stack = stacks.get(device)
        return stack[-1] if stack else self.null_of(device)

    def null_of(self, device: int) -> Stream:
        if device not in self.null:
            self.null[device] = Stream(null=True, device=device)
        return self.null[device]


def where() -> str:
    """The innermost lines of the package that is examined, else of the program."""
    frames = [f for f in traceback.extract_stack() if __file__ not in f.filename]
    ours = [f for f in frames if _PACKAGE in f.filename] or frames
    return " < ".join(
        f"{f.filename.rpartition(_PACKAGE)[2] if _PACKAGE in f.filename else os.path.basename(f.filename)}:{f.lineno}"
        for f in reversed(ours[-3:])
    )


class Op:
    __slots__ = ("act", "deps", "seq", "what")

    def __init__(self, seq: int, act: Any, deps: list[tuple[Stream, int]], what: str) -> None:
        self.seq, self.act, self.deps, self.what = seq, act, deps, what


class Stream:
    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, device: int | None = None
    ) -> None:
        self.device_id = M.device if device is None else device
        self.is_null, self.blocking = null, not non_blocking
        self.queue: collections.deque[Op] = collections.deque()
        self.seq = self.done = 0
        self.clock: dict[int, int] = {}
        M.streams.append(self)
        self.id = len(M.streams)
        self.ptr = 0 if null else 0x1000 + self.id

    # order

    def _deps(self) -> list[Stream]:
        if not self.blocking:
            return []
        same = [s for s in M.streams if s.device_id == self.device_id and s.blocking and s is not self]
        return same if self.is_null else [s for s in same if s.is_null]

    def put(self, act: Any, what: str, reads: Any = (), writes: Any = (), after: Any = ()) -> None:
        with M.lock:
            deps = [(s, s.seq) for s in self._deps()] + list(after)
            for other, seq in deps:
                _merge(self.clock, other.clock if seq == other.seq else {})
                self.clock[other.id] = max(self.clock.get(other.id, 0), seq)
            _merge(self.clock, M.clock)
            self.seq += 1
            here = where()
            for array, is_write in [*((a, False) for a in reads), *((a, True) for a in writes)]:
                array.memory.touch(array, self, is_write, f"{what} at {here}")
                M.nbytes[what] += array.bounds()[1] - array.bounds()[0]
            self.clock[self.id] = self.seq
            self.queue.append(Op(self.seq, act, deps, what))
            M.counts[what] += 1
            if M.policy == "early":
                self.run(self.seq)

    def run(self, upto: int, waits: bool = True) -> bool:
        """Do what was put on the stream, up to a piece of work, and what that waits for.

        Work that returns False waits for other ranks. Return False if it still does, unless this call waits for it.
        """
        with M.lock:
            while self.queue and self.queue[0].seq <= upto:
                op = self.queue[0]
                if not all(other.run(seq, waits) for other, seq in op.deps):
                    return False
                while op.act() is False:
                    if not waits:
                        return False
                    time.sleep(1e-4)
                self.queue.popleft()
                self.done = op.seq
        return True

    # CuPy's

    def synchronize(self) -> None:
        M.counts["wait"] += 1
        if self.is_null:
            for other in self._deps():
                other.run(other.seq)
                _merge(M.clock, other.clock)
        self.run(self.seq)
        _merge(M.clock, self.clock)

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            self.put(lambda: None, "wait_event", after=[(event.stream, event.seq)])
            _merge(self.clock, event.clock)

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def use(self) -> Stream:
        M.local.__dict__.setdefault("stacks", {})[self.device_id] = [self]
        return self

    def __enter__(self) -> Stream:
        M.local.__dict__.setdefault("stacks", {}).setdefault(self.device_id, []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        M.local.stacks[self.device_id].pop()

    @property
    def finished(self) -> bool:
        return not self.queue


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        self.stream: Stream | None = None
        self.seq, self.clock, self.asked = 0, {}, 0
        self.device_id = M.device

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or M.current()
        if stream.device_id != self.device_id:
            M.tell(f"WRONG DEVICE: an event of GPU {self.device_id} is recorded on a stream of GPU {stream.device_id}")
        stream.put(lambda: None, "record")
        self.stream, self.seq, self.clock = stream, stream.seq, dict(stream.clock)

    @property
    def done(self) -> bool:
        finished = self.stream is None or self.stream.done >= self.seq
        self.asked += 1
        if not finished and np.random.default_rng([self.seq, self.asked]).random() < 0.5:  # time passes
            finished = self.stream.run(self.seq, waits=False)
        if finished:
            _merge(M.clock, self.clock)
        return finished

    def synchronize(self) -> None:
        M.counts["wait"] += 1
        if self.stream is not None:
            self.stream.run(self.seq)
            _merge(M.clock, self.clock)


def _merge(clock: dict[int, int], other: dict[int, int]) -> None:
    for key, seq in other.items():
        if clock.get(key, 0) < seq:
            clock[key] = seq


class Device:
    def __init__(self, index: int | None = None) -> None:
        self.id = M.device if index is None else int(index)
        if not 0 <= self.id < len(M.bus):
            raise RuntimeError("cudaErrorInvalidDevice: invalid device ordinal")

    def use(self) -> Device:
        M.local.device = self.id
        return self

    def __enter__(self) -> Device:
        M.local.__dict__.setdefault("before", []).append(M.device)
        M.local.device = self.id
        return self

    def __exit__(self, *_: object) -> None:
        M.local.device = M.local.before.pop()

    def __int__(self) -> int:
        return self.id

    def synchronize(self) -> None:
        for stream in list(M.streams):
            if stream.device_id == self.id:
                stream.synchronize()

    mem_info = (1 << 31, 1 << 31)


# memory


class Memory:
    """One allocation; `log` has who touched which bytes since the last write that all others are ordered after."""

    def __init__(self, nbytes: int, device: int) -> None:
        whole = np.full(nbytes + 512, POISON, np.uint8)
        first = -whole.ctypes.data % 512
        self.bytes = whole[first : first + nbytes]
        self.ptr, self.nbytes, self.device_id = self.bytes.ctypes.data, nbytes, device
        self.stream = M.current(device)
        self.log: list[tuple[int, int, int, int, bool, str]] = []
        M.memories[self.ptr] = self
        weakref.finalize(self, _freed, self.bytes, self.log, self.stream)

    def touch(self, array: Any, stream: Stream, is_write: bool, what: str) -> None:
        low, high = array.bounds()
        if low == high:
            return
        kept = []
        for entry in self.log:
            begin, end, other, seq, wrote, before = entry
            if begin < high and low < end and (wrote or is_write):
                known = other == stream.id or stream.clock.get(other, 0) >= seq
                if not known:
                    kind = f"{'write' if wrote else 'read'} then {'write' if is_write else 'read'}"
                    M.tell(f"RACE: {kind} of the same memory on streams without an order between them", before)
                elif is_write and low <= begin and end <= high:
                    continue  # covered by this one, which is ordered after it
            kept.append(entry)
        kept.append((low, high, stream.id, stream.seq, is_write, what))
        self.log = kept[-64:]

    def host_touch(self, array: Any, what: str) -> None:
        """MPI or another library gets the pointer."""
        low, high = array.bounds()
        for begin, end, other, seq, wrote, before in self.log:
            if wrote and begin < high and low < end and M.clock.get(other, 0) < seq:
                M.tell(f"RACE: {what} gets memory that a stream may not have written yet", before)


def _freed(memory: np.ndarray, log: list[Any], stream: Stream) -> None:
    if sys.is_finalizing():
        return
    for _, _, other, seq, _, before in log:
        if other != stream.id and stream.clock.get(other, 0) < seq and M.clock.get(other, 0) < seq:
            M.tell("USE AFTER FREE: memory went back to the pool of one stream while another may still use it", before)
    stream.put(lambda: memory.fill(POISON), "free")


class Pinned(bytearray):
    """Pinned host memory: its pool may give it to somebody else as soon as nothing refers to it."""


def alloc_pinned_memory(nbytes: int) -> Pinned:
    M.counts["pinned alloc"] += 1
    return Pinned(bytes([POISON]) * nbytes)


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        base = next(m for p, m in M.memories.items() if p <= ptr < p + max(m.nbytes, 1))
        self.base, self.ptr, self.size, self.owner, self.device_id = base, ptr, size, owner, device_id


class MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset
        self.device_id = mem.device_id


def alloc(nbytes: int) -> MemoryPointer:
    M.counts["alloc"] += 1
    return MemoryPointer(Memory(nbytes, M.device), 0)


# arrays


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    def __init__(
        self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None, order: str = "C"
    ) -> None:
        dtype = np.dtype(dtype)
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if memptr is None:
            memptr = alloc(nbytes)
        memory = getattr(memptr.mem, "base", memptr.mem)
        low = memptr.ptr - memory.ptr
        self._become(memory.bytes[low : low + nbytes].view(dtype).reshape(shape), memory, memptr.mem)

    def _become(self, host: np.ndarray, memory: Memory, owner: Any) -> None:
        self.host, self.memory, self.owner = host, memory, owner

    def _of(self, host: np.ndarray) -> Array:
        array = Array.__new__(Array)
        array._become(host, self.memory, self.owner)
        return array

    def bounds(self) -> tuple[int, int]:
        if not self.host.size:
            return 0, 0
        low, high = np.lib.array_utils.byte_bounds(self.host)
        return low - self.memory.ptr, high - self.memory.ptr

    shape = property(lambda self: self.host.shape)
    dtype = property(lambda self: self.host.dtype)
    size = property(lambda self: self.host.size)
    ndim = property(lambda self: self.host.ndim)
    nbytes = property(lambda self: self.host.nbytes)
    itemsize = property(lambda self: self.host.itemsize)
    strides = property(lambda self: self.host.strides)
    flags = property(lambda self: self.host.flags)
    T = property(lambda self: self._of(self.host.T))
    real = property(lambda self: self._of(self.host.real))
    device = property(lambda self: Device(self.memory.device_id))

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.host.ctypes.data, device_id=self.memory.device_id, mem=self.owner)

    # what comes without work

    def reshape(self, *shape: Any, order: str = "C") -> Array:
        shape = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        view = self.host.reshape(shape)
        if np.shares_memory(view, self.host) or not view.size:
            return self._of(view)
        return launch(lambda a: a.reshape(shape), (self,))

    def ravel(self, order: str = "C") -> Array:
        return self.reshape(-1)

    def view(self, dtype: Any = None) -> Array:
        return self._of(self.host.view(dtype) if dtype is not None else self.host.view())

    def transpose(self, *axes: Any) -> Array:
        return self._of(self.host.transpose(*axes))

    def __len__(self) -> int:
        return len(self.host)

    # work

    def __getitem__(self, key: Any) -> Array:
        keys = key if isinstance(key, tuple) else (key,)
        if all(isinstance(k, (int, np.integer, slice)) or k is None or k is Ellipsis for k in keys):
            return self._of(self.host[plain_key(key)])  # NumPy would read one element now
        arrays = [k for k in keys if isinstance(k, Array)]
        for k in arrays:
            k._wait()
        index = tuple(k.host if isinstance(k, Array) else k for k in keys)  # CuPy copies those of NumPy first
        return launch(lambda a, *_: a[index], (self, *arrays))

    def __setitem__(self, key: Any, value: Any) -> None:
        plain(value)
        target = self._of(self.host[plain_key(key)]) if not _is_fancy(key) else self
        if target is self:
            keys = key if isinstance(key, tuple) else (key,)
            index = tuple(k.host if isinstance(k, Array) else k for k in keys)  # CuPy copies those of NumPy first
            launch(lambda a, v: a.__setitem__(index, v), (self, value), writes=[self])
        else:
            launch(lambda v: target.host.__setitem__(..., v), (value,), writes=[target])

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        if method != "__call__":
            return NotImplemented
        return launch(lambda *args: ufunc(*args, **kwargs), inputs, out=None if out is None else out[0])

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.copyto:
            target, source = args[:2]
            if not isinstance(target, Array):
                raise TypeError("copyto: a NumPy array as the target of a CuPy array")
            return launch(lambda s: np.copyto(target.host, s, casting="unsafe"), (source,), writes=[target])
        out = kwargs.pop("out", None)
        flat = [x for x in _leaves(args) if isinstance(x, Array)]
        return launch(lambda *_: function(*plain(args), **plain(kwargs)), tuple(flat), out=out)

    def astype(self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True) -> Array:
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        return launch(lambda a: a.astype(dtype), (self,))

    def copy(self, order: str = "C") -> Array:
        return launch(lambda a: a.copy(), (self,), device_free=True)

    def fill(self, value: Any) -> None:
        self[...] = value

    def _reduce(name: str) -> Any:
        def method(self: Array, *args: Any, out: Any = None, **kwargs: Any) -> Array:
            return launch(lambda a: getattr(a, name)(*args, **kwargs), (self,), out=out)

        return method

    sum, mean, max, min, all, any, dot, argmax, prod = map(
        _reduce, ("sum", "mean", "max", "min", "all", "any", "dot", "argmax", "prod")
    )

    # to the host

    def _wait(self) -> None:
        """What `get` does: it waits for the current stream of the array's device, and no other."""
        stream = M.current(self.memory.device_id)
        stream.put(lambda: None, "copy to host", reads=[self])
        stream.synchronize()

    def get(self, stream: Stream | None = None, order: str = "C", out: Any = None, blocking: bool = True) -> np.ndarray:
        host = np.empty(self.shape, self.dtype) if out is None else out
        assert host.shape == self.shape and host.dtype == self.dtype
        stream = stream or M.current(self.memory.device_id)
        source = self.host
        stream.put(lambda: np.copyto(host, source), "copy to host", reads=[self])
        if blocking:
            stream.synchronize()
        return host

    def set(self, arr: np.ndarray, stream: Stream | None = None) -> None:
        if not isinstance(arr, np.ndarray) or arr.dtype != self.dtype or arr.shape != self.shape:
            raise TypeError("set: another type, dtype or shape")
        target = self.host
        given = stream
        stream = stream or M.current(self.memory.device_id)
        stream.put(lambda: np.copyto(target, arr), "copy to device", writes=[self])
        if given is None and stream.is_null:
            stream.synchronize()

    def item(self) -> Any:
        return self.get().item()

    def tolist(self) -> Any:
        return self.get().tolist()

    def __float__(self) -> float:
        return float(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __bool__(self) -> bool:
        return bool(self.get())

    def __index__(self) -> int:
        return self.get().__index__()

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"honest.{self.get()!r}"

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    # to other libraries

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if ROCM:
            raise AttributeError("HIP/ROCm does not support cuda array interface")
        return {**self.host.__array_interface__, "version": 3, "stream": M.current().ptr or 1}

    def __dlpack_device__(self) -> tuple[int, int]:
        return FAKE_DLPACK or (10 if ROCM else 2, self.memory.device_id)

    def __dlpack__(self, stream: Any = None, **more: Any) -> Any:
        if stream == -1 and "max_version" in more:
            raise TypeError("max_version")  # mpi4py asks again, as of an older CuPy
        if stream == -1:  # mpi4py
            self.memory.host_touch(self, "MPI")
            if sums_in_flight():
                M.tell("MPI gets memory of a GPU while NCCL is in flight", where())
        elif stream != -1:  # the consumer's stream waits for the current one
            current = M.current(self.memory.device_id)
            if M.torch_stream is not None and M.torch_stream is not current:
                M.torch_stream.wait_event(current.record())
            current.run(current.seq)
        return _capsule(self.host)


_UNSIGNED, _BFLOAT = 1, 4  # kinds of numbers in DLPack; NumPy does not know the latter


def _with_kind(capsule: Any, kind: int) -> Any:
    """Return a DLPack capsule whose numbers are of another kind."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # DLTensor: void* data, two int32 of the device, int32 ndim, then the kind in a byte
    ctypes.c_uint8.from_address(pointer(capsule, b"dltensor") + 20).value = kind
    return capsule


def _capsule(host: np.ndarray) -> Any:
    if host.dtype.name != "bfloat16":
        return host.__dlpack__()
    return _with_kind(host.view(np.uint16).__dlpack__(), _BFLOAT)


def _numpy_of(value: Any) -> np.ndarray:
    """Return NumPy's view of memory of another library on this machine's CPU."""
    if str(getattr(value, "dtype", "")) != "torch.bfloat16":
        return np.from_dlpack(value)
    import ml_dtypes

    capsule = _with_kind(value.__dlpack__(), _UNSIGNED)
    other = type("Other", (), {"__dlpack__": lambda self, **_: capsule, "__dlpack_device__": lambda self: (1, 0)})()
    return np.from_dlpack(other).view(ml_dtypes.bfloat16)


FAKE_DLPACK = (1, 0)  # what torch and JAX on a CPU take


def _is_fancy(key: Any) -> bool:
    return any(isinstance(k, (Array, list, np.ndarray)) for k in (key if isinstance(key, tuple) else (key,)))


def plain_key(key: Any) -> Any:
    """A key whose result is a view, also of one element."""
    return (
        (*key, ...)
        if isinstance(key, tuple) and Ellipsis not in key
        else key
        if key is Ellipsis
        else (key, ...)
        if not isinstance(key, tuple)
        else key
    )


def _leaves(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    else:
        yield value


def plain(value: Any) -> Any:
    if isinstance(value, Array):
        return value.host
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError(f"Unsupported type {type(value)}")
    if isinstance(value, (tuple, list)):
        return type(value)(map(plain, value))
    return {k: plain(v) for k, v in value.items()} if isinstance(value, dict) else value


def launch(
    function: Any, inputs: tuple[Any, ...], out: Any = None, writes: Any = None, device_free: bool = False
) -> Any:
    """Put a kernel on the current stream of the current device."""
    args = plain(tuple(inputs))
    arrays = [x for x in inputs if isinstance(x, Array)]
    stream, device = M.current(), M.device
    if writes is not None:
        for array in [*arrays, *writes]:
            _check_device(array, device)
        stream.put(lambda: _quietly(function, args), "kernel", reads=arrays, writes=writes)
        return None
    if out is None:
        form = _quietly(function, args)  # of what is there: only the form counts
        if not isinstance(form, (np.ndarray, np.generic)):
            raise TypeError(f"honest_cupy: no array came out: {type(form)}")
        out = Array(np.shape(form), np.asarray(form).dtype)
    if not isinstance(out, Array):
        raise TypeError("'out' must be a CuPy array")
    if not device_free:
        for array in [*arrays, out]:
            _check_device(array, device)
    target = out.host
    far = (
        [M.null_of(a.memory.device_id) for a in arrays if a.memory.device_id != device]
        if device_free and stream.is_null
        else []
    )
    # A copy between two devices on their null streams waits for both, and both for it (CUDA C++ guide, Peer-to-Peer Memory Copy).
    stream.put(lambda: np.copyto(target, _quietly(function, args), casting="unsafe"), "copy" if far else "kernel", reads=arrays,
               writes=[out], after=[(other, other.seq) for other in far])  # fmt: skip
    for other in far:
        other.put(lambda: None, "order", after=[(stream, stream.seq)])
    return out


def _check_device(array: Array, device: int) -> None:
    if array.memory.device_id != device:
        M.tell(
            f"WRONG DEVICE: a kernel runs on GPU {device} (current in this thread), its array is on GPU {array.memory.device_id}"
        )


def _quietly(function: Any, args: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*args)


# functions


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> Array:
    array = Array(shape, dtype)
    target = array.host
    M.current().put(lambda: target.fill(0), "memset", writes=[array])
    return array


def empty(shape: Any, dtype: Any = float, order: str = "C") -> Array:
    return Array(shape, dtype)


def full(shape: Any, value: Any, dtype: Any = None) -> Array:
    array = Array(shape, np.asarray(plain(value)).dtype if dtype is None else dtype)
    array[...] = value
    return array


def array(obj: Any, dtype: Any = None, copy: bool = True, order: str = "K", **_: Any) -> Array:
    if isinstance(obj, Array):
        if obj.memory.device_id != M.device:
            M.counts["copy between devices"] += 1
            obj = obj.copy()
        elif not copy and (dtype is None or np.dtype(dtype) == obj.dtype):
            return obj
        return obj.astype(obj.dtype if dtype is None else dtype, copy=copy)
    host = np.array(obj, dtype)  # CuPy copies to pinned memory of its own at once
    result = Array(host.shape, host.dtype)
    target = result.host
    M.current().put(lambda: np.copyto(target, host), "copy to device", writes=[result])
    return result


def asarray(obj: Any, dtype: Any = None, order: Any = None, **_: Any) -> Array:
    return array(obj, dtype, copy=False)


def ascontiguousarray(obj: Any, dtype: Any = None) -> Array:
    obj = asarray(obj, dtype)
    return obj if obj.flags.c_contiguous else launch(np.ascontiguousarray, (obj,))


def concatenate(arrays: Any, axis: int = 0, **_: Any) -> Array:
    return launch(lambda *parts: np.concatenate(parts, axis=axis), tuple(arrays))


def from_dlpack(value: Any) -> Array:
    """Memory of another library, which has been ordered before the current stream."""
    if M.torch_stream is not None and M.torch_stream is not M.current():
        M.current().wait_event(M.torch_stream.record())
    host = _numpy_of(value)
    low = host.ctypes.data
    for start, memory in list(M.memories.items()):
        if start <= low < start + memory.nbytes:
            result = Array.__new__(Array)
            result._become(host, memory, value)
            return result
    memory = Memory.__new__(Memory)
    memory.bytes, memory.ptr, memory.nbytes = host.reshape(-1).view(np.uint8), low, host.nbytes
    memory.device_id, memory.stream, memory.log = M.device, M.current(), []
    result = Array.__new__(Array)
    result._become(host, memory, value)
    return result


class _Add:
    """cupy.add: a ufunc with `at`."""

    __name__ = "add"

    def __call__(self, *inputs: Any, out: Any = None, **kwargs: Any) -> Any:
        return launch(lambda *args: np.add(*args, **kwargs), inputs, out=out)

    def at(self, target: Array, indices: Array, values: Any) -> None:
        launch(lambda a, i, v: np.add.at(a, i, v), (target, indices, values), writes=[target])


# kernels

_CUDA = r"""
#include <cmath>
#define __device__
#define __global__
struct Dimensions { unsigned x, y, z; };
static thread_local Dimensions threadIdx, blockIdx, blockDim, gridDim;
"""
_KERNEL = re.compile(r'extern "C" __global__ void (\w+)\(([^)]*)\)\s*\{')


class _Parameter(NamedTuple):
    """A parameter of a kernel: its declaration, the bytes of the argument, and of what it points to, 0 where it is no pointer."""

    text: str
    nbytes: int
    points_to: int


_compiled: dict[str, dict[str, tuple[Any, list[_Parameter]]]] = {}


def compiled(*codes: str) -> list[dict[str, tuple[Any, list[_Parameter]]]]:
    """Return the kernels of CUDA sources, by name: each a function of grid, block and pointers to its arguments; its parameters.

    Sources that are given together are compiled together, which is quicker.
    """
    new = [code for code in dict.fromkeys(codes) if code not in _compiled]
    if new:
        library = ctypes.CDLL(_built("\n".join([_CUDA, *(_wrapped(code, i) for i, code in enumerate(new))])))
        for i, code in enumerate(new):
            found = _compiled[code] = {}
            for name, given in _parameters(code):
                sizes = (ctypes.c_longlong * (2 * len(given))).in_dll(library, f"sizes_{i}_{name}")
                how = list(map(_Parameter, given, sizes[::2], sizes[1::2]))
                found[name] = getattr(library, f"run_{i}_{name}"), how
    return [_compiled[code] for code in codes]


def _parameters(code: str) -> list[tuple[str, list[str]]]:
    return [(name, [each.strip() for each in given.split(",")]) for name, given in _KERNEL.findall(code)]


def _wrapped(code: str, number: int) -> str:
    """Return a source in a namespace, with a function for each kernel that runs its threads one after the other."""
    lines = [f"namespace source_{number} {{", code.replace('extern "C" __global__', "__global__")]
    for name, given in _parameters(code):
        types = [re.sub(r"__restrict__|\bconst\b(?=[^*]*$)|\w+$", "", each).strip() for each in given]
        arguments = ", ".join(f"*({kind} *)arguments[{i}]" for i, kind in enumerate(types))
        sizes = ", ".join(f"sizeof({kind}), {f'sizeof(**({kind} *)0)' if '*' in kind else '0'}" for kind in types)
        lines.append(
            f'extern "C" const long long sizes_{number}_{name}[] = {{{sizes}}};\n'
            f'extern "C" void run_{number}_{name}(unsigned grid, unsigned block, void **arguments) {{\n'
            "    gridDim = {grid, 1, 1}, blockDim = {block, 1, 1};\n"
            "    for (unsigned i = 0; i < grid; i++)\n"
            "        for (unsigned j = 0; j < block; j++) {\n"
            f"            blockIdx = {{i, 0, 0}}, threadIdx = {{j, 0, 0}};\n            {name}({arguments});\n"
            "        }\n}"
        )
    return "\n".join([*lines, "}"])


def _built(text: str) -> str:
    """Return the path of a library of C++, built if it was not before."""
    folder = Path(tempfile.gettempdir()) / f"honest_cupy-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:
            (Path(own) / "kernels.cpp").write_text(text)
            options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared"]
            subprocess.run(["g++", *options, "kernels.cpp", "-o", "kernels.so"], cwd=own, check=True)
            os.replace(Path(own) / "kernels.so", path)
    return str(path)


class RawKernel:
    """cupy.RawKernel."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        if not isinstance(options, tuple):
            raise TypeError("Argument 'options' has incorrect type")
        unknown = [each for each in options if ROCM and each.startswith(("--fmad", "--use_fast_math", "-arch"))]
        if unknown:  # as clang does
            raise RuntimeError(f"HIPRTC_ERROR_COMPILATION: unknown argument: {unknown[0]}")
        self.code, self.name = code, name

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: tuple[Any, ...]) -> None:
        run, parameters = compiled(self.code)[0][self.name]
        if len(args) != len(parameters):  # a GPU would read what is there
            raise TypeError(f"{self.name} takes {len(parameters)} arguments, got {len(args)}")
        stream, device, own = M.current(), M.device, []
        memory, reads, writes = [], [], []
        for given, parameter in zip(args, parameters, strict=True):
            own.append(_argument(given, parameter))
            if isinstance(given, Array):
                _check_device(given, device)
                (reads if parameter.text.startswith("const ") else writes).append(given)
                memory.append(given.host)

        def act(memory: Any = memory) -> None:  # which lives as long
            buffers = [ctypes.create_string_buffer(each, len(each)) for each in own]
            run(grid[0], block[0], (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers)))

        stream.put(act, "kernel", reads=reads, writes=writes)


def _argument(given: Any, parameter: _Parameter) -> bytes:
    """Return the bytes of an argument, of now.

    Raises:
        TypeError: another type than the kernel's, of which a GPU would read the bytes.
    """
    if isinstance(given, Array):
        if not given.host.flags.c_contiguous or given.itemsize != parameter.points_to:
            raise TypeError(f"{parameter.text}: got an array of {given.dtype}, strides {given.strides}")
        given = np.uintp(given.host.ctypes.data)
    elif parameter.points_to and given != 0:
        raise TypeError(f"{parameter.text}: got {given!r}, which is no array, nor 0")
    if not isinstance(given, (np.generic, np.ndarray)) or given.size != 1 or given.nbytes != parameter.nbytes:
        raise TypeError(f"{parameter.text}: expected {parameter.nbytes} bytes of NumPy, got {given!r}")
    return given.tobytes()


# NCCL


class NcclError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        self.status = status
        super().__init__(text)


_TYPES = {
    "NCCL_INT8": "i1",
    "NCCL_UINT8": "u1",
    "NCCL_INT32": "i4",
    "NCCL_UINT32": "u4",
    "NCCL_INT64": "i8",
    "NCCL_UINT64": "u8",
    "NCCL_FLOAT16": "f2",
    "NCCL_FLOAT32": "f4",
    "NCCL_FLOAT64": "f8",
}
_NUMBERS = {name: i for i, name in enumerate(_TYPES)}
_group = threading.local()


def _comm() -> Any:
    if not hasattr(M, "transport"):
        from mpi4py import MPI

        M.transport = MPI.COMM_WORLD.Dup()
    return M.transport


def _calls() -> list[Any] | None:
    return getattr(_group, "calls", None)


def groupStart() -> None:
    _group.depth = getattr(_group, "depth", 0) + 1
    if _group.depth == 1:
        _group.calls = []


def groupEnd() -> None:
    _group.depth -= 1
    if _group.depth:
        return
    calls, _group.calls = _group.calls, None
    made = [c for kind, c in calls if kind == "init"]
    if made:
        _complete_init(made)
    reductions = [c for kind, c in calls if kind == "all_reduce"]
    if reductions:
        _complete_all_reduce(reductions)


def _complete_init(comms: list[NcclCommunicator]) -> None:
    rows = [
        row
        for rows in _comm().allgather([(c.rank, socket.gethostname(), M.bus[c.device], c.ndev) for c in comms])
        for row in rows
    ]
    gpus = [(host, bus) for _, host, bus, _ in rows]
    if len(set(gpus)) < len(gpus):
        raise NcclError(
            5, "NCCL_ERROR_INVALID_USAGE: invalid usage (run with NCCL_DEBUG=WARN for details): Duplicate GPU detected"
        )
    if sorted(rank for rank, *_ in rows) != list(range(comms[0].ndev)):
        raise Hang(
            f"ncclCommInitRank: ranks {sorted(r for r, *_ in rows)} of {comms[0].ndev} are here: it would wait for ever"
        )


class NcclCommunicator:
    living: ClassVar[collections.Counter[Any]] = collections.Counter()  # of this process, by unique id

    def __init__(self, ndev: int, commId: tuple[int, ...], rank: int) -> None:
        if type(commId) is not (bytes if VERSION >= 14 else tuple):
            kind = "bytes" if VERSION >= 14 else "tuple"
            raise TypeError(f"Argument 'commId' has incorrect type (expected {kind}, got {type(commId).__name__})")
        assert len(commId) == 128
        self.ndev, self.rank, self.device, self.alive, self.identity = ndev, rank, M.device, True, commId
        self.aborted, self.error = False, None
        if _calls() is None:
            _complete_init([self])
        else:
            _calls().append(("init", self))  # type: ignore[union-attr]
        NcclCommunicator.living[commId] += 1

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        if not self.alive:
            raise NcclError(4, "NCCL_ERROR_INVALID_ARGUMENT: invalid argument")
        chosen = next((s for s in M.streams if s.ptr == stream and (stream or s.device_id == self.device)), None)
        if chosen is None or chosen.device_id != self.device:
            M.tell(f"NCCL: the stream belongs to another GPU than the communicator's ({self.device})")
        kind = np.dtype(list(_TYPES.values())[datatype])
        arrays = []
        for ptr in (sendbuf, recvbuf):
            memory = next(m for p, m in M.memories.items() if p <= ptr < p + max(1, m.nbytes))
            if memory.device_id != self.device:
                M.tell(f"NCCL: memory of GPU {memory.device_id} for the communicator of GPU {self.device}")
            found = Array.__new__(Array)
            found._become(memory.bytes[ptr - memory.ptr :][: count * kind.itemsize].view(kind), memory, memory)
            arrays.append(found)
        call = self, arrays, op, chosen
        if _calls() is None:
            if NcclCommunicator.living[self.identity] > 1:
                raise Hang(
                    "ncclAllReduce outside of a group, on one of several GPUs of this communicator in one thread"
                )
            _complete_all_reduce([call])
        else:
            _calls().append(("all_reduce", call))  # type: ignore[union-attr]

    def destroy(self) -> None:
        NcclCommunicator.living[self.identity] -= self.alive
        self.alive = False

    def check_async_error(self) -> None:
        """Raise the error that a test has given to the communicator, as NCCL's does after an error of the network."""
        if not self.alive:
            raise NcclError(4, "NCCL_ERROR_INVALID_ARGUMENT: invalid argument")
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        """End the kernels in flight, whose results are not written."""
        self.aborted = True
        self.destroy()


def _complete_all_reduce(calls: list[Any]) -> None:
    before = [(stream, stream.seq) for *_, stream in calls]
    steps = _reduce(calls)
    over = [False]

    def act() -> bool:
        """Return False while other ranks have not come, unless the communicator was aborted."""
        over[0] = over[0] or any(comm.aborted for comm, *_ in calls) or next(steps)
        return over[0]

    for _, arrays, _, stream in calls:
        stream.put(act, "nccl", reads=[arrays[0]], writes=[arrays[1]], after=[b for b in before if b[0] is not stream])


def _reduce(calls: list[Any]) -> Iterator[bool]:
    """Do a reduction over all ranks; yield False until it is done."""
    from mpi4py import MPI

    sends = [arrays[0].host for _, arrays, _, _ in calls]
    own = f"{sends[0].size} {sends[0].dtype.str} {calls[0][2]}".ljust(64).encode()
    forms = bytearray(64 * _comm().size)
    yield from _until(_comm().Iallgather([own, MPI.BYTE], [forms, MPI.BYTE]))
    if forms != own * _comm().size:
        raise Hang(f"NCCL: ranks reduce other things: {forms.decode().split('  ')}")
    total = sends[0].copy()
    for more in sends[1:]:
        total += more
    yield from _until(_comm().Iallreduce(MPI.IN_PLACE, total))
    for _, arrays, _, _ in calls:
        arrays[1].host[...] = total
    yield True


def _until(request: Any) -> Iterator[bool]:
    while not request.Test():
        yield False


# the module

M: Machine


def module() -> ModuleType:
    global M
    M = Machine()
    nccl: Any = ModuleType("cupy.cuda.nccl")
    nccl.available = True

    def get_unique_id() -> Any:
        drawn = os.urandom(128)
        return drawn if VERSION >= 14 else tuple(b - 256 * (b > 127) for b in drawn)

    nccl.get_unique_id = get_unique_id
    nccl.groupStart, nccl.groupEnd, nccl.NcclCommunicator, nccl.NcclError = (
        groupStart,
        groupEnd,
        NcclCommunicator,
        NcclError,
    )
    for number, name in enumerate(("NCCL_SUM", "NCCL_PROD", "NCCL_MAX", "NCCL_MIN")):
        setattr(nccl, name, number)
    for name, number in _NUMBERS.items():
        setattr(nccl, name, number)
    runtime = SimpleNamespace(
        is_hip=ROCM,
        getDeviceCount=lambda: len(M.bus),
        getDeviceProperties=lambda i: (
            {"name": b"Fake MI250X"} if ROCM else {"name": b"Fake H100", "uuid": bytes([M.bus[i] + 1]) * 16}
        ),
        deviceGetPCIBusId=lambda i: f"0000:{M.bus[i]:02x}:00.0",
    )
    cuda: Any = ModuleType("cupy.cuda")
    cuda.__dict__.update(
        Device=Device, Stream=Stream, Event=Event, get_current_stream=lambda device_id=None: M.current(device_id), alloc=alloc,
        alloc_pinned_memory=alloc_pinned_memory, UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer, runtime=runtime,
        nccl=nccl,
        ExternalStream=lambda ptr, device_id=-1: next(stream for stream in M.streams if stream.ptr == ptr),
    )  # fmt: skip
    cupy: Any = ModuleType("cupy")
    cupy.__spec__ = SimpleNamespace(name="cupy")
    cupy.__version__ = f"{VERSION}.0.0"
    cupy.__dict__.update(
        ndarray=Array, zeros=zeros, empty=empty, full=full, array=array, asarray=asarray, ascontiguousarray=ascontiguousarray,
        concatenate=concatenate, from_dlpack=from_dlpack, add=_Add(), cuda=cuda, RawKernel=RawKernel,
        copyto=lambda dst, src, casting="same_kind": np.copyto(dst, src, casting=casting),
        arange=lambda *a, **k: array(np.arange(*a, **k)), ones=lambda shape, dtype=float: full(shape, 1, dtype), dtype=np.dtype,
    )  # fmt: skip
    for kind in (
        "float16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool_",
    ):
        setattr(cupy, kind, getattr(np, kind))
    sys.modules.update({"cupy.cuda": cuda, "cupy.cuda.nccl": nccl})
    return cupy


def install() -> Any:
    sys.modules["cupy"] = module()
    return sys.modules["cupy"]


def drain() -> None:
    for stream in list(M.streams):
        stream.run(stream.seq)


def sums_in_flight() -> int:
    """Return the number of NCCL's kernels that are not done."""
    return sum(op.what == "nccl" for stream in M.streams for op in stream.queue)


def report() -> tuple[dict[str, int], dict[str, int]]:
    return dict(M.told), dict(M.counts)


class _Bytes:
    """Bytes of a tensor, as `Memory.touch` asks for them."""

    def __init__(self, memory: Memory, low: int, high: int) -> None:
        self.memory, self._bounds = memory, (low, high)

    def bounds(self) -> tuple[int, int]:
        return self._bounds


def _bytes_of(tensor: Any) -> _Bytes | None:
    if not tensor.numel() or tensor.is_sparse:
        return None
    low = tensor.data_ptr()
    span = sum((n - 1) * abs(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    for start, memory in list(M.memories.items()):
        if start <= low < start + memory.nbytes:
            return _Bytes(memory, low - start, low - start + span * tensor.element_size())
    return None


def torch_mode(same_stream: bool = True) -> Any:
    """A context in which torch computes as it would on the GPU's null stream: after all that was put there before it.

    With same_stream=False it is on a stream of its own, as in `with torch.cuda.stream(...)`: only what waits for an event, as
    DLPack's exchange does, orders the two. torch itself computes at once, so its side of a race shows in what is reported, not
    in numbers.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    stream = M.null_of(0) if same_stream else Stream(non_blocking=True)
    if not same_stream:
        stream.wait_event(M.null_of(0).record())  # as programs do: side.wait_stream(torch.cuda.current_stream())

    class Mode(TorchDispatchMode):
        def __enter__(self) -> Any:
            self.before, M.torch_stream = M.torch_stream, stream
            self.asked = torch.cuda.is_initialized, torch.cuda.current_stream
            torch.cuda.is_initialized = lambda: True
            torch.cuda.current_stream = lambda device=None: SimpleNamespace(cuda_stream=stream.ptr, device_index=0)
            return super().__enter__()

        def __exit__(self, *exc: Any) -> None:
            M.torch_stream = self.before
            torch.cuda.is_initialized, torch.cuda.current_stream = self.asked
            super().__exit__(*exc)

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            reads, writes = [], []
            names = [a.name for a in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            for argument in func._schema.arguments:
                into = writes if argument.alias_info is not None and argument.alias_info.is_write else reads
                for leaf in _leaves(given.get(argument.name)):
                    if isinstance(leaf, torch.Tensor) and (found := _bytes_of(leaf)) is not None:
                        into.append(found)
            if (reads or writes) and not _only_a_view(func):
                stream.put(lambda: None, "torch", reads=reads, writes=writes)
                M.counts["torch"] -= 1
                M.counts[f"torch {func}"] += 1
            stream.run(stream.seq)
            return func(*args, **(kwargs or {}))

    return Mode()


def _only_a_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
