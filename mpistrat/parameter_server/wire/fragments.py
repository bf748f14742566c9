"""Message fragments: messages from a worker to a server, split to fit a slot and reassembled.

A fragment is a header of eight words and at most `chunk_bytes` of payload. Fragments of a worker arrive in order and one
message after the other, so the server needs no more memory for a worker than its largest message, and none for messages of one
fragment.

Also pieces of large messages between two ranks, in order, sent and received in place.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np

__all__ = [
    "LARGEST_WHAT",
    "Assembly",
    "Fragment",
    "MessageKind",
    "Pieces",
    "chunks",
    "cut",
]


LARGEST_WHAT = (1 << 47) - 1
_WORDS = struct.Struct("<8q")  # a line


class MessageKind:
    """The kinds of messages. Windows carry pushes only, and replace the others by reads and writes of words.

    The payload of `PUSH_ENCODED` and the kind after it is encoded by one of `WIRES`, in their order.

    `ENDS_STEP` is a flag of pushes: a commit goes with the push. Two flags mark a payload in other memory:
    `STAGED` in a `Staging`, given with its half by the offset; `IN_PLACE` in the worker's gradient of the variable.
    """

    PUSH, PUSH_ROWS, COMMIT, READ, READ_ROWS, CLOCK, CLOCKS, LEAVE, PUSH_ENCODED = range(1, 10)
    IN_PLACE, STAGED, ENDS_STEP = 0x20, 0x40, 0x80
    ELSEWHERE = IN_PLACE | STAGED


class Fragment(NamedTuple):
    """The header of a fragment.

    Attributes:
        kind: of the message, one of `MessageKind`.
        variable: its number.
        number: of the push; for other kinds a value.
        rows: the number of rows of the message.
        what, version: see `Push`.
        offset: of this fragment's payload in the message's.
        nbytes: of this fragment's payload.
        total: bytes of the message's payload.
    """

    kind: int
    variable: int
    number: int
    rows: int = 0
    what: int = 0
    version: int = 0
    offset: int = 0
    nbytes: int = 0
    total: int = 0

    def write(self, memory: Any, at: int = 0) -> None:
        """Write the header, `LINE` bytes, into bytes."""
        kind, variable, number, rows, what, version, offset, nbytes, total = self
        _WORDS.pack_into(memory, at, what << 16 | kind, variable, number, rows, version, offset, nbytes, total)

    @classmethod
    def read(cls, memory: Any, at: int = 0) -> Fragment:
        """Return the header from `write`."""
        first, variable, number, rows, version, offset, nbytes, total = _WORDS.unpack_from(memory, at)
        return cls(first & 0xFFFF, variable, number, rows, first >> 16, version, offset, nbytes, total)


def cut(
    message: Fragment, payload: Sequence[np.ndarray], chunk_bytes: int
) -> Iterable[tuple[Fragment, Sequence[np.ndarray]]]:
    """Return the fragments of a message, each with the buffers of its payload; at least one fragment.

    Args:
        message: the header of the whole message: `nbytes` and `total` are those of the payload.
        payload: flat bytes, one buffer after the other.
        chunk_bytes: most bytes in a fragment.

    Example:
        >>> message = Fragment(1, 0, 1, nbytes=5, total=5)
        >>> [(fragment.offset, fragment.nbytes) for fragment, _ in cut(message, [np.zeros(5, np.uint8)], 2)]
        [(0, 2), (2, 2), (4, 1)]
    """
    if message.total <= chunk_bytes:
        return ((message, payload),)
    return _cut(message, payload, chunk_bytes)


def _cut(
    message: Fragment, payload: Sequence[np.ndarray], chunk_bytes: int
) -> Iterator[tuple[Fragment, Sequence[np.ndarray]]]:
    for low in range(0, message.total, chunk_bytes):
        high = min(low + chunk_bytes, message.total)
        parts, start = [], 0
        for buffer in payload:
            part = buffer[max(low - start, 0) : max(high - start, 0)]
            if part.nbytes:
                parts.append(part)
            start += buffer.nbytes
        yield message._replace(offset=low, nbytes=high - low), parts


@final
class Assembly:
    """A buffer that reassembles one worker's messages from fragments, in order; as large as the largest so far."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def add(self, fragment: Fragment, payload: np.ndarray) -> np.ndarray | None:
        """Return the payload of the message if this fragment ends it. Valid until the next call.

        Args:
            fragment: the header.
            payload: the fragment's bytes; for a message of one fragment they are returned without a copy.
        """
        if fragment.nbytes == fragment.total:
            return payload
        if self._memory.nbytes < fragment.total:
            self._memory = np.empty(fragment.total, np.uint8)
        self._memory[fragment.offset : fragment.offset + fragment.nbytes] = payload
        return self._memory[: fragment.total] if fragment.offset + fragment.nbytes == fragment.total else None


_AHEAD = 4  # pieces sent at a time: enough that MPI never waits, and few enough that each completes soon


def chunks(data: np.ndarray, chunk_bytes: int) -> list[np.ndarray]:
    """Return flat bytes in pieces of at most `chunk_bytes`."""
    return [data[low : low + chunk_bytes] for low in range(0, data.nbytes, chunk_bytes)]


@final
class Pieces:
    """The data in flight in one direction between this rank and another one. MPI moves them only in its calls.

    Only the oldest piece is tested, which moves all of them: a test costs the same for any size of message.

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
        """Return whether data are in flight."""
        return bool(self._requests)

    def send(self, data: np.ndarray, tag: int) -> None:
        """Start to send flat bytes, which must not change meanwhile."""
        self._later += [(piece, tag) for piece in chunks(data, self._chunk_bytes)]
        while self._later and len(self._requests) < _AHEAD:
            self._send_next()

    def receive(self, data: np.ndarray, tag: int) -> None:
        """Start to receive flat bytes."""
        for piece in chunks(data, self._chunk_bytes):
            self.expect(piece, tag)

    def expect(self, data: np.ndarray, tag: int) -> None:
        """Start to receive flat bytes in one piece of any size."""
        self._requests.append((self._comm.Irecv([data, self._byte], self._rank, tag), data))

    def look(self) -> bool:
        """Return whether a piece has completed since the last call."""
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
