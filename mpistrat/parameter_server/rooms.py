"""Versioned buffers (rooms) for atomic zero-copy reads: a server writes each new version into a buffer without readers.

A large variable has several rooms, for workers that share memory with its server: one with the current version, one
for each of these workers to hold, and one for the next version. Words next to the version give the current room, and whether
rooms may be held; each worker has a word for the room that it holds (a hazard pointer).

A worker that announces a room and finds afterwards that it is still current, holds it. The server uses a room that
is neither current nor held; there always is one. So neither waits for the other, and a worker that stops or dies blocks
only its own room. A room that a worker holds does not change as long as any array of its program refers to it.

Rooms are allocated only after a worker has requested one and a gradient of the whole variable has come: writing a few rows
of a variable would cost a copy of all of it.
"""

from __future__ import annotations

import weakref
from typing import Any, final

import numpy as np

from ..comm.window import SharedWindow
from .layout import Place
from .memory import ServerMemory

__all__ = ["HeldRoom", "Rooms"]

_ASKED = -1  # in a worker's word: it would hold a room if it might
_TRIES = 100  # against a server that makes new versions in the meantime: each takes much longer than a try


@final
class HeldRoom:
    """A worker's end, for one variable.

    Args:
        place: where the variable lies.
        worker: number of the worker.
        window, rank: in which its server's segment is.
    """

    def __init__(self, place: Place, worker: int, window: SharedWindow, rank: int) -> None:
        self._place, self._window, self._rank = place, window, rank
        self._word = place.held(worker)
        self._root: Any = _nobody  # of all arrays that refer to the room
        self._version = 0

    def read(self) -> tuple[int, np.ndarray] | None:
        """Return a version of the variable, and it, read-only and not copied; None if it must be copied."""
        window, rank, place = self._window, self._rank, self._place
        root = self._root()
        if root is not None:
            same = window.get_word(rank, place.version) == self._version
            return (self._version >> 1, self._array(root)) if same else None
        for _ in range(_TRIES):
            if not window.get_word(rank, place.may_hold):
                window.put_word(rank, self._word, _ASKED)
                return None
            version, room = window.get_word(rank, place.version), window.get_word(rank, place.current)
            window.put_word(rank, self._word, room + 1)
            window.sync()
            same = window.get_word(rank, place.version) == version and not version & 1
            if same and window.get_word(rank, place.may_hold):
                return version >> 1, self._hold(room, version)
        return None

    def _hold(self, room: int, version: int) -> np.ndarray:
        start, nbytes = self._place.room(room), self._place.spec.nbytes
        memory: Any = self._window.segments[self._rank][start : start + nbytes]
        root = np.frombuffer(memory.data, np.uint8)  # over a buffer: arrays made of it refer to it, not to the segment
        root.flags.writeable = False
        self._root, self._version = weakref.ref(root), version
        return self._array(root)

    def _array(self, root: np.ndarray) -> np.ndarray:
        return root.view(self._place.spec.dtype).reshape(self._place.spec.shape)


def _nobody() -> None:
    """Stands for a reference to an array that is gone."""


@final
class Rooms:
    """A server's end, for one variable. Under the server's lock.

    Args:
        place: where the variable lies.
        slab: the memory there.

    Attributes:
        current: number of the room with the newest version.
    """

    def __init__(self, place: Place, slab: ServerMemory) -> None:
        self._place, self._slab = place, slab
        self._words = [place.held(worker) // 8 for worker in place.near]
        self._open: bool | None = None if place.near else False  # None: nobody has asked yet
        self.current = 0

    def view(self, room: int) -> np.ndarray:
        """Return a room as an array, writable."""
        start, spec = self._place.room(room), self._place.spec
        return self._slab.own[start : start + spec.nbytes].view(spec.dtype).reshape(spec.shape)

    def open(self) -> bool:
        """Return whether rooms may be held; from the first time on that somebody has asked, if there is memory for them."""
        if self._open is None and any(self._held()):
            place = self._place
            self._open = self._slab.find(place.room(1), place.room(place.rooms))
            self._allow(self._open)
        return bool(self._open)

    def close(self) -> bool:
        """Let no room be held from now on. Return whether the current one is held still."""
        if not self._open:
            return False
        self._open = False
        self._allow(False)
        return self.current + 1 in self._held()

    def free(self) -> int:
        """Return a room that is neither current nor held."""
        taken = {self.current + 1, *self._held()}
        return next(room for room in range(self._place.rooms) if room + 1 not in taken)

    def make_current(self, room: int) -> None:
        """Say where the newest version lies. The version must be odd meanwhile."""
        self.current = self._slab.words[self._place.current // 8] = room

    def _held(self) -> list[int]:
        self._slab.sync()
        words = self._slab.words
        return [words[at] for at in self._words]

    def _allow(self, yes: bool) -> None:
        self._slab.words[self._place.may_hold // 8] = yes
        self._slab.sync()
