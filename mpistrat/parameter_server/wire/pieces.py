"""Pieces of large messages between two ranks, in order, straight from and to the memory where they belong."""

from __future__ import annotations

from collections import deque
from typing import Any, final

import numpy as np

__all__ = ["Pieces", "chunks"]

_AHEAD = 4  # pieces that MPI has to send at a time: enough that it never waits, and each is through in good time


def chunks(data: np.ndarray, chunk_bytes: int) -> list[np.ndarray]:
    """Return flat bytes in pieces of at most `chunk_bytes`."""
    return [data[low : low + chunk_bytes] for low in range(0, data.nbytes, chunk_bytes)]


@final
class Pieces:
    """What is on its way in one direction between this rank and another one. MPI moves it only while it is called.

    Only the oldest piece is tested, which moves all of them: a look costs the same however large the message is.

    Args:
        comm: a communicator.
        rank: the other one in it.
        chunk_bytes: of the largest piece.
    """

    def __init__(self, comm: Any, rank: int, chunk_bytes: int) -> None:
        from mpi4py import MPI

        self._comm, self._byte, self._rank, self._chunk_bytes = comm, MPI.BYTE, rank, chunk_bytes
        self._requests: deque[tuple[Any, np.ndarray]] = deque()
        self._later: deque[tuple[np.ndarray, int]] = deque()  # to be sent

    def __bool__(self) -> bool:
        """Whether anything is on its way."""
        return bool(self._requests)

    def send(self, data: np.ndarray, tag: int) -> None:
        """Begin to send flat bytes, which must not change meanwhile."""
        self._later += [(piece, tag) for piece in chunks(data, self._chunk_bytes)]
        while self._later and len(self._requests) < _AHEAD:
            self._send_next()

    def receive(self, data: np.ndarray, tag: int) -> None:
        """Begin to receive flat bytes."""
        for piece in chunks(data, self._chunk_bytes):
            self.expect(piece, tag)

    def expect(self, data: np.ndarray, tag: int) -> None:
        """Begin to receive flat bytes that come in one piece, however many they are."""
        self._requests.append((self._comm.Irecv([data, self._byte], self._rank, tag), data))

    def look(self) -> bool:
        """Return whether a piece has got there since the last look."""
        requests, moved = self._requests, False
        while requests and requests[0][0].Test():
            requests.popleft()
            if self._later:
                self._send_next()
            moved = True
        return moved

    def _send_next(self) -> None:
        piece, tag = self._later.popleft()
        self._requests.append((self._comm.Isend([piece, self._byte], self._rank, tag), piece))
