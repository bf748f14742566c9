"""Versioned buffers for atomic zero-copy reads: a server writes each new version into a buffer without readers.

A large variable has several buffers, for workers that share memory with its server: one with the current version, one
for each of these workers to hold, and one for the next version. Words next to the version give the current buffer, and whether
buffers may be held; each worker has a word for the buffer that it holds (a hazard pointer).

A worker that announces a buffer and finds afterwards that it is still current, holds it. The server uses a buffer that
is neither current nor held; there always is one. So neither waits for the other, and a worker that stops or dies blocks
only its own buffer. A buffer that a worker holds does not change as long as any array of its program refers to it.

Buffers are allocated only after a worker has requested one and a gradient of the whole variable has come: writing a few
rows of a variable would cost a copy of all of it.
"""

from __future__ import annotations

import weakref
from typing import Any, final

import numpy as np

from ...comm.window import SharedWindow
from ..layout import Address
from ..wire.memory import ServerMemory

__all__ = ["HeldSnapshot", "SnapshotBuffers"]

_ASKED = -1  # in a worker's word: it would hold a buffer if it might
_TRIES = 100  # against a server that makes new versions in the meantime: each takes much longer than a try


@final
class HeldSnapshot:
    """A worker's end, for one variable.

    Args:
        address: where the variable lies.
        worker: number of the worker.
        window, rank: in which its server's segment is.
    """

    def __init__(self, address: Address, worker: int, window: SharedWindow, rank: int) -> None:
        self._address, self._window, self._rank = address, window, rank
        self._word = address.held(worker)
        self._root: Any = _nobody  # of all arrays that refer to the buffer
        self._version = 0

    def read(self) -> tuple[int, np.ndarray] | None:
        """Return a version of the variable, and it, read-only and not copied; None if it must be copied."""
        window, rank, address = self._window, self._rank, self._address
        root = self._root()
        if root is not None:
            same = window.get_word(rank, address.version) == self._version
            return (self._version >> 1, self._array(root)) if same else None
        for _ in range(_TRIES):
            if not window.get_word(rank, address.may_hold):
                window.put_word(rank, self._word, _ASKED)
                return None
            version, buffer = window.get_word(rank, address.version), window.get_word(rank, address.current)
            window.put_word(rank, self._word, buffer + 1)
            window.sync()
            same = window.get_word(rank, address.version) == version and not version & 1
            if same and window.get_word(rank, address.may_hold):
                return version >> 1, self._hold(buffer, version)
        return None

    def _hold(self, buffer: int, version: int) -> np.ndarray:
        start, nbytes = self._address.buffer(buffer), self._address.spec.nbytes
        memory: Any = self._window.segments[self._rank][start : start + nbytes]
        root = np.frombuffer(memory.data, np.uint8)  # over a buffer: arrays made of it refer to it, not to the segment
        root.flags.writeable = False
        self._root, self._version = weakref.ref(root), version
        return self._array(root)

    def _array(self, root: np.ndarray) -> np.ndarray:
        return root.view(self._address.spec.dtype).reshape(self._address.spec.shape)


def _nobody() -> None:
    """Stands for a reference to an array that is gone."""


@final
class SnapshotBuffers:
    """A server's end, for one variable. Under the server's lock.

    Args:
        address: where the variable lies.
        slab: the memory there.

    Attributes:
        current: number of the buffer with the newest version.
    """

    def __init__(self, address: Address, slab: ServerMemory) -> None:
        self._address, self._slab = address, slab
        self._words = [address.held(worker) // 8 for worker in address.near]
        self._open: bool | None = None if address.near else False  # None: nobody has asked yet
        self.current = 0

    def view(self, buffer: int) -> np.ndarray:
        """Return a buffer as an array, writable."""
        start, spec = self._address.buffer(buffer), self._address.spec
        return self._slab.own[start : start + spec.nbytes].view(spec.dtype).reshape(spec.shape)

    def open(self) -> bool:
        """Return whether buffers may be held; from the first time on that somebody has asked, if there is memory for them."""
        if self._open is None and any(self._held()):
            address = self._address
            self._open = self._slab.find(address.buffer(1), address.buffer(address.buffers))
            self._allow(self._open)
        return bool(self._open)

    def close(self) -> bool:
        """Let no buffer be held from now on. Return whether the current one is held still."""
        if not self._open:
            return False
        self._open = False
        self._allow(False)
        return self.current + 1 in self._held()

    def free(self) -> int:
        """Return a buffer that is neither current nor held."""
        taken = {self.current + 1, *self._held()}
        return next(buffer for buffer in range(self._address.buffers) if buffer + 1 not in taken)

    def make_current(self, buffer: int) -> None:
        """Say where the newest version lies. The version must be odd meanwhile."""
        self.current = self._slab.words[self._address.current // 8] = buffer

    def _held(self) -> list[int]:
        self._slab.sync()
        words = self._slab.words
        return [words[at] for at in self._words]

    def _allow(self, yes: bool) -> None:
        self._slab.words[self._address.may_hold // 8] = yes
        self._slab.sync()
