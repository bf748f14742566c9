"""CuPy's interface on host memory, as far as a strategy uses it: work is done at once, and NumPy is never given an array unasked.

It shows which arrays are handed to whom, without a copy through the host that nobody asked for. It cannot show that a GPU
takes the calls, nor that streams are waited for: see `fake_gpu.py` for those of the input.
"""

from __future__ import annotations

import ctypes
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

WRAPPED = ("reshape", "astype", "view", "ravel", "copy", "sum", "mean", "max", "min", "all", "any", "dot", "transpose")


class Array(np.lib.mixins.NDArrayOperatorsMixin):
    """An array that says that it lies on a GPU."""

    def __init__(self, shape: Any, dtype: Any = float, memory: Any = None) -> None:
        if memory is None:
            self.host = np.empty(shape, dtype)
        else:
            buffer = (ctypes.c_uint8 * memory.nbytes).from_address(memory.ptr)
            buffer.owner = memory.owner
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            self.host = np.frombuffer(buffer, np.uint8, size).view(dtype).reshape(shape)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["host"], name)
        return (lambda *args, **kwargs: wrap(value(*plain(args), **plain(kwargs)))) if name in WRAPPED else value

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        result = getattr(ufunc, method)(*plain(inputs), **plain(kwargs))
        return kwargs["out"][0] if "out" in kwargs else wrap(result)

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return wrap(function(*plain(args), **plain(kwargs)))

    def __getitem__(self, key: Any) -> Array:
        return wrap(self.host[plain(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.host[plain(key)] = plain(value)

    def __len__(self) -> int:
        return len(self.host)

    def __float__(self) -> float:
        return float(self.host)

    def __int__(self) -> int:
        return int(self.host)

    def __bool__(self) -> bool:
        return bool(self.host)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.host.__array_interface__, "version": 3}

    def __dlpack__(self, **_: Any) -> Any:
        return self.host.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.host.__dlpack_device__()

    @property
    def device(self) -> Any:
        return SimpleNamespace(id=0)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.host.ctypes.data)

    def get(self, out: np.ndarray | None = None, **_: Any) -> np.ndarray:
        if out is None:
            return self.host.copy()
        np.copyto(out, self.host)
        return out

    def set(self, host: np.ndarray, **_: Any) -> None:
        np.copyto(self.host, host)


def wrap(value: Any) -> Any:
    """What NumPy has computed, as arrays here; numbers are arrays without dimensions, as CuPy has them."""
    if isinstance(value, (np.ndarray, np.generic)):
        array = Array.__new__(Array)
        array.host = np.asarray(value)
        return array
    return type(value)(map(wrap, value)) if isinstance(value, (tuple, list)) else value


def plain(value: Any) -> Any:
    """Arguments as NumPy takes them; CuPy takes no array of NumPy but one number."""
    if isinstance(value, Array):
        return value.host
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("Unsupported type <class 'numpy.ndarray'>")
    if isinstance(value, (tuple, list)):
        return type(value)(map(plain, value))
    return {key: plain(one) for key, one in value.items()} if isinstance(value, dict) else value


def aligned_zeros(shape: Any, dtype: np.dtype) -> np.ndarray:
    """Memory that begins at a multiple of 256 bytes, as CUDA's does."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.zeros(size + 256, np.uint8)
    first = -memory.ctypes.data % 256
    return memory[first : first + size].view(dtype).reshape(shape)


def module() -> ModuleType:
    """What stands for `cupy`, with one GPU."""
    device = type("Device", (), {"__init__": lambda self, index=0: None, "mem_info": (1 << 32, 1 << 32)})
    stream = type(
        "Stream", (), {"__init__": lambda self, non_blocking=False: None, "wait_event": lambda self, event: None}
    )
    for kind in (device, stream):
        kind.__enter__ = kind.__exit__ = kind.synchronize = lambda self, *_: None  # type: ignore[attr-defined]
    event = SimpleNamespace(record=lambda stream: None, done=True)
    kept: list[np.ndarray] = []

    def alloc(nbytes: int) -> Any:
        kept.append(np.empty(nbytes, np.uint8))
        return SimpleNamespace(ptr=kept[-1].ctypes.data)

    cupy: Any = ModuleType("cupy")
    cupy.__getattr__ = lambda name: getattr(np, name)
    cupy.__spec__ = SimpleNamespace(name="cupy")
    cupy.ndarray = Array
    cupy.zeros = cupy.empty = lambda shape, dtype=float: wrap(aligned_zeros(shape, np.dtype(dtype)))
    cupy.asarray = lambda value, dtype=None: (
        value if isinstance(value, Array) and dtype in (None, value.dtype) else wrap(np.array(plain_host(value), dtype))
    )
    cupy.ascontiguousarray = lambda value: wrap(np.ascontiguousarray(value.host))
    cupy.from_dlpack = lambda value: wrap(np.from_dlpack(value))
    cupy.cuda = SimpleNamespace(
        Device=device,
        Stream=stream,
        Event=lambda disable_timing: event,
        get_current_stream=stream,
        alloc=alloc,
        alloc_pinned_memory=bytearray,
        UnownedMemory=lambda ptr, nbytes, owner, device: SimpleNamespace(ptr=ptr, nbytes=nbytes, owner=owner),
        MemoryPointer=lambda memory, offset: memory,
        runtime=SimpleNamespace(getDeviceCount=lambda: 1),
    )
    return cupy


def plain_host(value: Any) -> Any:
    """What `cupy.asarray` copies to the GPU."""
    return value.host if isinstance(value, Array) else value
