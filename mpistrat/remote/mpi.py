"""The carrier between ranks: messages of any length over MPI, by polling."""

from __future__ import annotations

import struct
from typing import Any, final

from ..comm.mailbox import Mailbox
from .channel import Message

__all__ = ["CHUNK", "FIRST", "MpiChannel"]

FIRST = 1 << 16  # bytes of the payload that go with the head
CHUNK = 1 << 20  # bytes in each further piece
_HEAD = struct.Struct("<4q")
_TAG = 1


@final
class _Incoming:
    """The pieces that one rank sends, in order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.missing = 0
        self._head: tuple[int, int, int] = (0, 0, 0)
        self._pieces: list[bytearray | memoryview] = []

    def add(self, piece: bytearray) -> Message | None:
        """Take the next piece; return the message that it ends."""
        if self._pieces:
            self._pieces.append(piece)
            self.missing -= len(piece)
        else:
            *head, nbytes = _HEAD.unpack_from(piece)
            self._head = (head[0], head[1], head[2])
            self._pieces.append(memoryview(piece)[_HEAD.size :])
            self.missing = nbytes - (len(piece) - _HEAD.size)
        if self.missing:
            return None
        payload = b"".join(self._pieces)
        self._pieces = []
        return Message(self.rank, *self._head, payload)


@final
class MpiChannel:
    """The channel whose peers are ranks. From one thread at a time.

    Args:
        comm: a communicator on which nothing else is sent.
    """

    def __init__(self, comm: Any) -> None:
        self._mailbox = Mailbox(comm)
        self._incoming: dict[int, _Incoming] = {}

    def send(self, peer: int, kind: int, number: int = 0, payload: bytes = b"", extra: int = 0) -> None:
        """Start to send a message; `poll` continues."""
        self._mailbox.send(_HEAD.pack(kind, number, extra, len(payload)) + payload[:FIRST], peer, _TAG)
        view = memoryview(payload)
        for low in range(FIRST, len(payload), CHUNK):
            self._mailbox.send(view[low : low + CHUNK], peer, _TAG)

    def poll(self) -> list[Message]:
        """Return the messages that have arrived, those of each rank in order."""
        messages = []
        for rank, _, piece in self._mailbox.poll():
            message = self._incoming.setdefault(rank, _Incoming(rank)).add(piece)
            if message is not None:
                messages.append(message)
        return messages

    def sending(self) -> bool:
        """Return whether anything is not sent yet."""
        return bool(self._mailbox.sending)

    def give_up(self, rank: int) -> None:
        """Wait no more for what is being sent to a rank that left."""
        self._mailbox.abandon(rank)
        self._incoming.pop(rank, None)
