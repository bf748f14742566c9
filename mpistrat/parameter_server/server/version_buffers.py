"""Buffers of a variable's versions on its server: a version does not change while a worker holds it or it is being sent."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np

from ...base.buffers import BufferPool
from ..layout import Address, ServerMemory

__all__ = ["PrivateBuffers", "SnapshotBuffers", "VersionBuffers"]

_POOL = BufferPool()  # page faults of fresh memory would cost as much as a copy
_BYTES = np.dtype(np.uint8)


class VersionBuffers(ABC):
    """The buffers of one variable. Under the server's lock.

    Args:
        address: of the variable.
        slab: its memory.

    Attributes:
        current: the buffer with the newest version.
    """

    current: Any

    def __init__(self, address: Address, slab: ServerMemory) -> None:
        self._address, self._slab = address, slab
        self._lent: Any = _nothing  # the root of all arrays that refer to the last lent buffer

    @final
    def view(self, buffer: Any) -> np.ndarray:
        """Return a buffer as an array, writable."""
        spec = self._address.spec
        return self._bytes(buffer).view(spec.dtype).reshape(spec.shape)

    @abstractmethod
    def lend(self, version: int) -> np.ndarray:
        """Return the current version as bytes, read-only, which do not change while referenced."""

    @abstractmethod
    def open(self) -> bool:
        """Return whether the next version of the whole variable must be written into another buffer."""

    @abstractmethod
    def close(self) -> bool:
        """Prepare to change parts of the variable in place. Return True if the current buffer is in use and must not change."""

    @abstractmethod
    def free(self) -> Any:
        """Return an unused buffer."""

    @abstractmethod
    def make_current(self, buffer: Any) -> None:
        """Set the buffer of the newest version. The version word must be odd meanwhile."""

    @abstractmethod
    def _bytes(self, buffer: Any) -> np.ndarray: ...

    def _lend(self, memory: np.ndarray) -> np.ndarray:
        if not memory.nbytes:
            return memory
        root = np.frombuffer(memory.data, np.uint8)  # from a buffer, so that views refer to it and not to `memory`
        root.flags.writeable = False
        self._lent = weakref.ref(root)
        return root


@final
class PrivateBuffers(VersionBuffers):
    """Buffers that only this server reads, to send them. While one is being sent, the next version is written into another."""

    def __init__(self, address: Address, slab: ServerMemory) -> None:
        super().__init__(address, slab)
        self.current = self._home = slab.own[address.offset : address.offset + address.spec.nbytes]
        self._home_lent: Any = _nothing

    def lend(self, version: int) -> np.ndarray:
        root = self._lent()
        return self._lend(self.current) if root is None else root

    def open(self) -> bool:
        return self._lent() is not None

    def close(self) -> bool:
        return self._lent() is not None

    def free(self) -> np.ndarray:
        if self.current is not self._home and self._home_lent() is None:
            return self._home  # already allocated
        return _POOL.empty(self._address.spec.nbytes, _BYTES)

    def make_current(self, buffer: np.ndarray) -> None:
        if buffer is not self.current:
            if self.current is self._home:
                self._home_lent = self._lent
            self.current, self._lent = buffer, _nothing

    def _bytes(self, buffer: np.ndarray) -> np.ndarray:
        return buffer


@final
class SnapshotBuffers(VersionBuffers):
    """Numbered buffers that workers of the node may hold (`atomic_reads.py`). One copy per version is sent."""

    def __init__(self, address: Address, slab: ServerMemory) -> None:
        super().__init__(address, slab)
        self._words = [address.held(worker) // 8 for worker in address.near]
        self._open: bool | None = None if address.near else False  # None: not requested yet
        self.current, self._version = 0, -1  # the version of the last lent buffer

    def lend(self, version: int) -> np.ndarray:
        root = self._lent()
        if root is None or self._version != version:
            root, self._version = self._lend(_copy(self._bytes(self.current))), version
        return root

    def open(self) -> bool:
        """Return whether buffers may be held: True once a worker has requested one, if there is memory for them."""
        if self._open is None and any(self._held()):
            address = self._address
            self._open = self._slab.find(address.buffer(1), address.buffer(address.buffers))
            self._allow(self._open)
        return bool(self._open)

    def close(self) -> bool:
        """Stop workers from holding buffers. Return True if the current one is still held: it must not change."""
        if not self._open:
            return False
        self._open = False
        self._allow(False)
        return self.current + 1 in self._held()

    def free(self) -> int:
        taken = {self.current + 1, *self._held()}
        return next(buffer for buffer in range(self._address.buffers) if buffer + 1 not in taken)

    def make_current(self, buffer: int) -> None:
        self.current = self._slab.words[self._address.current // 8] = buffer

    def _bytes(self, buffer: int) -> np.ndarray:
        start = self._address.buffer(buffer)
        return self._slab.own[start : start + self._address.spec.nbytes]

    def _held(self) -> list[int]:
        self._slab.sync()
        words = self._slab.words
        return [words[at] for at in self._words]

    def _allow(self, yes: bool) -> None:
        self._slab.words[self._address.may_hold // 8] = yes
        self._slab.sync()


def _copy(memory: np.ndarray) -> np.ndarray:
    copy = _POOL.empty(memory.nbytes, _BYTES)
    np.copyto(copy, memory)
    return copy


def _nothing() -> None:
    """Return None, in place of a reference to a deleted array."""
