"""Who reads which piece of a cache: each piece is read by one thread of one process, the others wait for it.

A claim is a lock of the system's on one byte of a file that the ranks of a node have open: taking and leaving it costs a
microsecond, as much as MPI's compare-and-swap, and the system takes it back from a process that dies. Reading fails on
whoever reads; the piece is then free, and who waits for it tries by itself and meets the error itself.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable
from time import monotonic, sleep
from typing import final

import numpy as np
from numpy.typing import NDArray

__all__ = ["Claims"]

_READY = -1  # else 0, or 1 + the rank that reads it: for the error of who waits
_NAPS = 200  # of 50 µs, then 1 ms
_RETRY = 16  # naps between two tries to claim what somebody else has claimed


@final
class Claims:
    """What is ready, and who reads what is not.

    Args:
        state: an int16 for each piece, 0 at first; shared if the pieces are.
        rank: of this process, for the others' errors.
        file: descriptor of a file open in all processes that share the pieces; None where only threads do.
        sync: keeps loads and stores of shared memory apart.
        timeout: seconds to wait for somebody else; None for ever.
    """

    def __init__(
        self,
        state: NDArray[np.int16],
        rank: int = 0,
        file: int | None = None,
        sync: Callable[[], None] = lambda: None,
        timeout: float | None = None,
    ) -> None:
        self._state = state
        self._rank = rank
        self._file = file
        self._sync = sync
        self._timeout = timeout
        self._lock = threading.Lock()
        self._busy: set[int] = set()  # claimed by a thread of this process: the system's locks know processes only

    def missing(self, pieces: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return those of some pieces that are not ready, each once and ascending; the others may be read now."""
        missing = pieces[self._state[pieces] != _READY]
        self._sync()
        return np.unique(missing) if missing.size else missing

    def claim(self, pieces: NDArray[np.int64], limit: int | None = None) -> NDArray[np.int64]:
        """Return those of some pieces, which were not ready, that the caller must now read and `release`; not too many."""
        with self._lock:
            if self._file is None:
                claimed = pieces[self._state[pieces] == 0][:limit]
            else:
                free = (p for p in pieces.tolist() if p not in self._busy and self._take(self._file, p))
                claimed = np.array(list(itertools.islice(free, limit)), np.int64)
                self._sync()
                ready = self._state[claimed] == _READY  # since the caller looked
                for piece in claimed[ready].tolist():
                    self._give(self._file, piece)
                claimed = claimed[~ready]
                self._busy.update(claimed.tolist())
            self._state[claimed] = self._rank + 1
        return claimed

    def release(self, pieces: NDArray[np.int64], *, ready: bool) -> None:
        """End claims: the pieces are ready, or free again."""
        self._sync()
        with self._lock:
            self._state[pieces] = _READY if ready else 0
            if self._file is not None:
                self._sync()
                for piece in pieces.tolist():
                    self._give(self._file, piece)
                self._busy.difference_update(pieces.tolist())

    def wait(self, pieces: NDArray[np.int64], limit: int | None = None) -> NDArray[np.int64]:
        """Wait for pieces that somebody else reads. Return those that the caller must read after all, as from `claim`.

        Raises:
            TimeoutError: naming a rank.
        """
        deadline = None if self._timeout is None else monotonic() + self._timeout
        naps = 0
        while True:
            pieces = self.missing(pieces)
            if not pieces.size:
                return pieces
            if naps % _RETRY == 0:
                mine = self.claim(pieces, limit)
                if mine.size:
                    return mine
            if deadline is not None and monotonic() > deadline:
                reader = int(self._state[pieces[0]]) - 1
                raise TimeoutError(f"waited {self._timeout:g} s for rows that rank {reader} reads")
            sleep(5e-5 if naps < _NAPS else 1e-3)
            naps += 1

    def _take(self, file: int, piece: int) -> bool:
        import fcntl

        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, piece)
        except OSError:
            return False
        return True

    def _give(self, file: int, piece: int) -> None:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_UN, 1, piece)

    def close(self) -> None:
        """Close the file. Nobody claims any more."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                os.close(file)
