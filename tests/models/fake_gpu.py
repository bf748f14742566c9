"""A GPU of the imagination: what is put on a stream runs later, in any order that the streams and events allow.

It stands in for CuPy where the order of calls is what matters. It shows that nothing is read before it has arrived and
nothing is written over while it is still wanted; it cannot show that CuPy takes the calls.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np


class Stream:
    def __init__(self, gpu: FakeGpu, name: str) -> None:
        self.gpu = gpu
        self.name = name
        self.waiting: deque[tuple[Callable[[], bool], Callable[[], None]]] = deque()

    def put(self, action: Callable[[], None], ready: Callable[[], bool] = lambda: True) -> None:
        self.waiting.append((ready, action))
        self.gpu.run_some()

    def wait_event(self, event: Event) -> None:
        self.gpu.log.append(f"{self.name} waits")
        recorded = event.recorded
        self.put(lambda: None, lambda: event.reached >= recorded)

    def __enter__(self) -> None:
        self.gpu.current.append(self)

    def __exit__(self, *exc_info: object) -> None:
        self.gpu.current.pop()


class Event:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.recorded = self.reached = 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        number = self.recorded

        def reach() -> None:
            self.reached = number

        stream.put(reach)

    @property
    def done(self) -> bool:
        self.gpu.run_some()
        return self.reached == self.recorded


class Array:
    """An array in memory of the GPU; who looks at its values from outside sees what is there at that moment."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, pointer: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.pointer = pointer
        self.nbytes = int(np.prod(shape)) * self.dtype.itemsize

    @property
    def values(self) -> np.ndarray:
        return self.pointer.bytes[: self.nbytes].view(self.dtype).reshape(self.shape)

    def set(self, host: np.ndarray, stream: Stream) -> None:
        target = self.values
        stream.gpu.log.append("copy")
        stream.put(lambda: np.copyto(target, host))


class FakeGpu:
    """Install `module` as `cupy`. `compute` puts work on the stream that computes."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.speed = self.random.choice([0.0, 0.2, 0.4, 0.7])  # how much of what waits runs at each new piece of work
        self.log: list[str] = []
        self.default = Stream(self, "compute")
        self.current = [self.default]
        self.streams = [self.default]
        self.memory: dict[int, np.ndarray] = {}
        self.module = self._module()

    def run_some(self) -> None:
        while self.random.random() < self.speed:
            self.run_one()

    def run_one(self) -> bool:
        ready = [stream for stream in self.streams if stream.waiting and stream.waiting[0][0]()]
        if not ready:
            return False
        self.random.choice(ready).waiting.popleft()[1]()
        return True

    def drain(self) -> None:
        while self.run_one():
            pass
        assert not any(stream.waiting for stream in self.streams), "streams wait for each other"

    def compute(self, action: Callable[[], None]) -> None:
        self.log.append("compute")
        self.default.put(action)

    def _new_stream(self, non_blocking: bool) -> Stream:
        assert non_blocking
        self.streams.append(Stream(self, "copies"))
        return self.streams[-1]

    def _alloc(self, nbytes: int) -> Any:
        self.log.append("alloc")
        ptr = 1 << 12 << len(self.memory)
        self.memory[ptr] = np.full(nbytes, 0xEE, np.uint8)
        return SimpleNamespace(ptr=ptr)

    def _pinned(self, nbytes: int) -> bytearray:
        self.log.append("pin")
        return bytearray(nbytes)

    def _module(self) -> ModuleType:
        class Device:
            def __init__(self, index: int) -> None:
                pass

            def __enter__(self) -> None:
                pass

            def __exit__(self, *exc_info: object) -> None:
                pass

        def unowned(ptr: int, nbytes: int, owner: object, device: int) -> Any:
            return SimpleNamespace(bytes=self.memory[ptr], owner=owner)

        cupy = ModuleType("cupy")
        cupy.ndarray = Array  # type: ignore[attr-defined]
        cupy.empty = lambda shape, dtype: Array(shape, dtype, SimpleNamespace(bytes=np.empty(0, np.uint8)))  # type: ignore[attr-defined]
        cupy.cuda = SimpleNamespace(  # type: ignore[attr-defined]
            Device=Device,
            Stream=self._new_stream,
            Event=lambda disable_timing: Event(self),
            get_current_stream=lambda: self.current[-1],
            alloc=self._alloc,
            alloc_pinned_memory=self._pinned,
            UnownedMemory=unowned,
            MemoryPointer=lambda memory, offset: memory,
        )
        return cupy
