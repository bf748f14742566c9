"""Seqlock with reader announcements: atomic reads of memory that a server writes.

The version word of a variable is odd while the server writes; a reader copies, and retries if the word was odd or has
changed. A plain seqlock starves readers of a busy server. So a reader announces itself in a separate word, and the
server waits for it before its next write, a bounded time, once for each announcement: a reader that was stopped or died
delays the server only once. Each retry is a new announcement. The server waits a second at most for the first, since all
workers wait meanwhile, and twice as long for each further one of a slow reader, so that its read eventually succeeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, final

from ...comm.waiting import Backoff, PeerWait
from ...comm.window import Window

__all__ = ["SeqLockReader", "SeqLockWriter"]

_BITS = 24  # of an announcement for the variable, the others number the announcements
_VARIABLES = 1 << _BITS
_SECONDS, _BYTES_PER_SECOND = 0.1, 50e6  # how long a server waits for one reading
_MOST_SECONDS = 1.0  # but at first no longer than this
_YIELDS = 1000
_SLEEP = 1e-4


@final
class SeqLockReader:
    """A worker's end.

    Args:
        mailbox: the window with the announcement.
        rank: of the server, in the window.
        offset: of the word.
        wait: makes what waits while the server writes.
    """

    def __init__(self, mailbox: Window, rank: int, offset: int, wait: Callable[[], PeerWait]) -> None:
        self._mailbox, self._rank, self._offset, self._wait = mailbox, rank, offset, wait
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
                    wait = self._wait()
                    while before & 1:
                        wait.pause()
                        before = slab.get_word(rank, version)
                slab.sync()
                copy(*args)
                slab.sync()
                if slab.get_word(rank, version) == before:
                    return before >> 1
        finally:
            mailbox.put_word(rank, offset, 0)


@final
class SeqLockWriter:
    """A server's end.

    Args:
        words: the words of the mailbox.
        offsets: of the words of all workers that read by themselves.
        sync: makes what others wrote visible.
        progress: lets MPI carry out what others do to this rank's memory.
    """

    def __init__(
        self, words: memoryview, offsets: Sequence[int], sync: Callable[[], object], progress: Callable[[], object]
    ) -> None:
        self._words, self._announced = words, [offset // 8 for offset in offsets]
        self._sync, self._progress = sync, progress
        self._given_up: dict[int, int] = {}
        self._most: dict[int, float] = {}  # seconds for the next attempt of readers that were given up

    def wait(self, variable: int, nbytes: int) -> None:
        """Wait until nobody is in a reading of a variable that began before now, or for long enough."""
        self._sync()
        words, wanted = self._words, variable + 1
        start = 0.0
        for word in self._announced:
            announcement = words[word]
            if announcement % _VARIABLES == wanted and self._given_up.get(word) != announcement:
                start = start or monotonic()  # one time for all: they read at the same time
                self._wait_for(word, announcement, start, _SECONDS + nbytes / _BYTES_PER_SECOND)

    def _wait_for(self, word: int, announcement: int, start: float, seconds: float) -> None:
        most = self._most.get(word, _MOST_SECONDS)
        until, backoff = start + min(seconds, most), Backoff(_SLEEP, yields=_YIELDS, start=_SLEEP)
        while self._words[word] == announcement:
            self._progress()
            self._sync()
            if backoff.pause() and monotonic() > until:
                self._given_up[word], self._most[word] = announcement, 2 * most
                return
        self._most.pop(word, None)

    def readers(self) -> int:
        """Return a number that changes whenever a reader announces itself or is done."""
        return hash(tuple([self._words[word] for word in self._announced]))
