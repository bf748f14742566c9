"""Seqlock with reader announcements: atomic reads of memory that a server writes.

The version word of a variable is odd while the server writes; a reader copies, and retries if the word was odd or has
changed. A plain seqlock starves readers of a busy server. So a reader announces itself in a separate word (its gate), and the
server waits for it before its next write, a bounded time, once for each announcement: a reader that was stopped or died
delays the server only once. Each retry is a new announcement. The server waits a second at most for the first, since all
workers wait meanwhile, and twice as long for each further one of a slow reader, so that its read eventually succeeds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any, final

from ..comm.window import Window
from .waiting import Patience

__all__ = ["ReaderGate", "WriterGate"]

_BITS = 24  # of a gate's word for the variable, the others number the announcements
_VARIABLES = 1 << _BITS
_SECONDS, _BYTES_PER_SECOND = 0.1, 50e6  # how long a server waits for one reading
_MOST_SECONDS = 1.0  # but at first no longer than this
_YIELDS = 1000
_NAP = 1e-4


@final
class ReaderGate:
    """A worker's end.

    Args:
        mailbox: the window with the gate.
        rank: of the server, in the window.
        offset: of the gate.
        patience: makes what waits while the server writes.
    """

    def __init__(self, mailbox: Window, rank: int, offset: int, patience: Callable[[], Patience]) -> None:
        self._mailbox, self._rank, self._offset, self._patience = mailbox, rank, offset, patience
        self._number = 0

    def read(self, variable: int, slab: Window, version: int, copy: Callable[..., None], *args: Any) -> int:
        """Copy until the copy is whole; return the version of what was copied.

        Args:
            variable: its number.
            slab: the window with the variable.
            version: offset of the version word.
            copy: copies what is read; called with `args`.
        """
        mailbox, rank, offset = self._mailbox, self._rank, self._offset
        try:
            while True:
                self._number += 1
                mailbox.put_word(rank, offset, self._number * _VARIABLES + variable + 1)
                before = slab.get_word(rank, version)
                if before & 1:
                    patience = self._patience()
                    while before & 1:
                        patience.pause()
                        before = slab.get_word(rank, version)
                slab.sync()
                copy(*args)
                slab.sync()
                if slab.get_word(rank, version) == before:
                    return before >> 1
        finally:
            mailbox.put_word(rank, offset, 0)


@final
class WriterGate:
    """A server's end.

    Args:
        words: the words of the mailbox.
        offsets: of the gates of all workers that read by themselves.
        sync: makes what others wrote visible.
        progress: lets MPI carry out what others do to this rank's memory.
    """

    def __init__(
        self, words: memoryview, offsets: Sequence[int], sync: Callable[[], object], progress: Callable[[], object]
    ) -> None:
        self._words, self._places = words, [offset // 8 for offset in offsets]
        self._sync, self._progress = sync, progress
        self._given_up: dict[int, int] = {}
        self._most: dict[int, float] = {}  # seconds for the next attempt of readers that were given up

    def wait(self, variable: int, nbytes: int) -> None:
        """Wait until nobody is in a reading of a variable that began before now, or for long enough."""
        self._sync()
        words, wanted = self._words, variable + 1
        start = 0.0
        for place in self._places:
            gate = words[place]
            if gate % _VARIABLES == wanted and self._given_up.get(place) != gate:
                start = start or monotonic()  # one time for all: they read at the same time
                self._wait_for(place, gate, start, _SECONDS + nbytes / _BYTES_PER_SECOND)

    def _wait_for(self, place: int, gate: int, start: float, seconds: float) -> None:
        most = self._most.get(place, _MOST_SECONDS)
        until, looks = start + min(seconds, most), 0
        while self._words[place] == gate:
            self._progress()
            self._sync()
            looks += 1
            if looks < _YIELDS:
                os.sched_yield()
            else:
                sleep(_NAP)
                if monotonic() > until:
                    self._given_up[place], self._most[place] = gate, 2 * most
                    return
        self._most.pop(place, None)

    def readers(self) -> int:
        """Return a number that changes whenever a reader announces itself or is done."""
        return hash(tuple([self._words[place] for place in self._places]))
