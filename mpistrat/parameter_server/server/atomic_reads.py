"""Atomic reads of memory that a server writes: a seqlock with reader announcements, and versioned buffers.

Seqlock: the version word of a variable is odd while the server writes; a reader copies, and retries if the word was odd or has
changed. A plain seqlock starves readers of a busy server. So a reader announces itself in a separate word, and the server waits
for it before its next write, a bounded time, once per announcement: a stopped or dead reader delays the server only once. Each
retry is a new announcement. The first wait is at most a second, because all workers wait meanwhile. Each further wait for a
slow reader is twice as long, so its read eventually succeeds.

Versioned buffers: reads without a copy. For workers that share memory with its server a large variable has one buffer with the
current version, one for each of these workers to hold, and one for the next version. Words next to the version store the
current buffer, and whether buffers may be held. Each worker has a word for the buffer that it holds (a hazard pointer): it
announces the buffer, and holds it if it is still current afterwards. The server writes a buffer that is neither current nor
held; there always is one. So neither waits for the other, and a stopped or dead worker blocks only its own buffer. A held
buffer does not change while any array of the worker's program refers to it. Buffers are allocated only after a worker has
requested one and a gradient of the whole variable has arrived: with them, writing a few rows costs a copy of the whole.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, final

import numpy as np

from ...base import loops
from ...base.waiting import Backoff, PeerWait
from ...comm.window import SharedWindow, Window
from ..layout import Address

__all__ = ["HeldSnapshot", "SeqLockReader", "SeqLockWriter"]

_BITS = 24  # of an announcement, for the variable; the other bits number the announcements
_VARIABLES = 1 << _BITS
_SECONDS, _BYTES_PER_SECOND = 0.1, 50e6  # a server's wait for one read
_MOST_SECONDS = 1.0  # the longest first wait
_YIELDS = 1000
_SLEEP = 1e-4


@final
class SeqLockReader:
    """A worker's end of a seqlock.

    Args:
        mailbox: the window with the announcement.
        rank: of the server, in the window.
        offset: of the word.
        wait: creates the wait for the server's write.
    """

    def __init__(self, mailbox: Window, rank: int, offset: int, wait: Callable[[], PeerWait]) -> None:
        self._mailbox, self._rank, self._offset, self._wait = mailbox, rank, offset, wait
        self._number = 0

    def read_bytes(self, address: Address, slab: Window, out: np.ndarray) -> int:
        """Copy a whole variable into flat bytes; return its version."""
        if isinstance(slab, SharedWindow) and isinstance(self._mailbox, SharedWindow):
            self._number += 1
            announcement = self._number * _VARIABLES + address.index + 1
            memory, mailbox = slab.segments[self._rank], self._mailbox.segments[self._rank]
            version = loops.read_version(
                out, memory, address.offset, address.version, mailbox, self._offset, announcement
            )
            if version >= 0:
                return version
        return self.read(address.index, slab, address.version, slab.get, self._rank, address.offset, out)

    def read(self, variable: int, slab: Window, version: int, copy: Callable[..., None], *args: Any) -> int:
        """Copy until the copy is consistent; return its version.

        Args:
            variable: its number.
            slab: the window with the variable.
            version: offset of the version word.
            copy: makes the copy; called with `args`.
        """
        mailbox, rank, offset = self._mailbox, self._rank, self._offset
        wait = None
        try:
            while True:
                self._number += 1  # again after each pause: the server may have stopped waiting for this reader
                mailbox.put_word(rank, offset, self._number * _VARIABLES + variable + 1)
                before = slab.get_word(rank, version)
                if before & 1:
                    wait = wait or self._wait()
                    wait.pause()
                    continue
                slab.sync()
                copy(*args)
                slab.sync()
                if slab.get_word(rank, version) == before:
                    return before >> 1
        finally:
            mailbox.put_word(rank, offset, 0)


@final
class SeqLockWriter:
    """A server's end of a seqlock.

    Args:
        words: the words of the mailbox.
        offsets: of the words of all workers that read this rank's memory.
        sync: makes other processes' writes visible.
        progress: lets MPI complete accesses to this rank's memory.
    """

    def __init__(
        self, words: memoryview, offsets: Sequence[int], sync: Callable[[], object], progress: Callable[[], object]
    ) -> None:
        self._words, self._announced = words, [offset // 8 for offset in offsets]
        self._sync, self._progress = sync, progress
        self._given_up: dict[int, int] = {}
        self._patience: dict[int, float] = {}  # seconds for the next attempt of readers that timed out

    def wait(self, variable: int, nbytes: int) -> None:
        """Wait for the reads of a variable that started before now, at most a bounded time."""
        self._sync()
        words, wanted = self._words, variable + 1
        start = 0.0
        for word in self._announced:
            announcement = words[word]
            if announcement % _VARIABLES == wanted and self._given_up.get(word) != announcement:
                start = start or monotonic()  # one limit for all: they read at the same time
                at_first = min(_SECONDS + nbytes / _BYTES_PER_SECOND, _MOST_SECONDS)
                self._wait_for(word, announcement, start, self._patience.get(word, at_first))

    def _wait_for(self, word: int, announcement: int, start: float, seconds: float) -> None:
        until, backoff = start + seconds, Backoff(_SLEEP, yields=_YIELDS, start=_SLEEP)
        while self._words[word] == announcement:
            self._progress()
            self._sync()
            backoff.pause()  # on a busy machine yielding also takes long
            if monotonic() > until:
                self._given_up[word], self._patience[word] = announcement, 2 * seconds
                return
        self._patience.pop(word, None)

    def readers(self) -> int:
        """Return a number that changes whenever a reader announces itself or finishes."""
        return hash(tuple([self._words[word] for word in self._announced]))


_REQUESTED = -1  # in a worker's word: it requests to hold buffers
_TRIES = 100  # while the server writes new versions, each of which takes much longer than a try


@final
class HeldSnapshot:
    """A worker's end of the versioned buffers of one variable.

    Args:
        address: of the variable.
        worker: number of the worker.
        window, rank: of its server's segment.
    """

    def __init__(self, address: Address, worker: int, window: SharedWindow, rank: int) -> None:
        self._address, self._window, self._rank = address, window, rank
        self._word = address.held(worker)
        self._root: Any = _no_array  # the root of all arrays that refer to the buffer
        self._version = 0

    def read(self) -> tuple[int, np.ndarray] | None:
        """Return the version and a read-only view of the variable; None if it must be copied."""
        window, rank, address = self._window, self._rank, self._address
        root = self._root()
        if root is not None:
            same = window.get_word(rank, address.version) == self._version
            return (self._version >> 1, self._array(root)) if same else None
        for _ in range(_TRIES):
            if not window.get_word(rank, address.may_hold):
                window.put_word(rank, self._word, _REQUESTED)
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
        root = np.frombuffer(memory.data, np.uint8)  # from a buffer, so that arrays refer to it and not to the segment
        root.flags.writeable = False
        self._root, self._version = weakref.ref(root), version
        return self._array(root)

    def _array(self, root: np.ndarray) -> np.ndarray:
        return root.view(self._address.spec.dtype).reshape(self._address.spec.shape)


def _no_array() -> None:
    """Return None, in place of a reference to a deleted array."""
