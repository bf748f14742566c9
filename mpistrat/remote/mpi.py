"""Messages of any length between two ranks, by polling: nobody waits for anybody.

What the chief and the ranks that serve say to each other:

| kind | from | number | extra | payload |
|---|---|---|---|---|
| CALL | chief | of the call among this worker's | up to which calls answers have come | inputs and function (`pack_call`) |
| COMMAND | chief | 0 | 0 | name and arguments of what all ranks do together |
| END | chief | 0 | 1 if the chief leaves the program | none |
| HELLO | worker loop | 0 | 1 if it can give calls back | none: it serves |
| BYE | worker loop | 0 | 0 | none: it has had END, and sends nothing more |
| RESULT | worker | of the call | microseconds that it took | what the function returned |
| FAILED | worker | of the call | microseconds | (exception or None, text) |
| RETURNED | worker | of the call | 0 | none: it has not begun, for the one before it takes long |

A worker keeps its answers until the chief has them; a call that comes again is answered from what is kept, not run again.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, final

import numpy as np

from ..comm.mailbox import Mailbox

__all__ = ["CHUNK", "FIRST", "Channel", "Kind", "Message", "pack_call", "unpack_call"]

FIRST = 1 << 16  # bytes of the payload that go with the head
CHUNK = 1 << 20  # bytes in each further piece
_HEAD = struct.Struct("<4q")
_TAG = 1


class Message(NamedTuple):
    """A message as it arrived.

    Attributes:
        rank: who sent it.
        kind: what it is.
        number: its number among the sender's.
        extra: another number.
        payload: its bytes.
    """

    rank: int
    kind: int
    number: int
    extra: int
    payload: bytes


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
class Channel:
    """Sends and receives messages. From one thread at a time.

    Args:
        comm: a communicator on which nothing else is sent.
    """

    def __init__(self, comm: Any) -> None:
        self._mailbox = Mailbox(comm)
        self._incoming: dict[int, _Incoming] = {}

    def send(self, rank: int, kind: int, number: int = 0, extra: int = 0, payload: bytes = b"") -> None:
        """Begin to send a message; `poll` goes on with it."""
        self._mailbox.send(_HEAD.pack(kind, number, extra, len(payload)) + payload[:FIRST], rank, _TAG)
        view = memoryview(payload)
        for low in range(FIRST, len(payload), CHUNK):
            self._mailbox.send(view[low : low + CHUNK], rank, _TAG)

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


class Kind(enum.IntEnum):
    """What a message is."""

    CALL = 1
    COMMAND = 2
    END = 3
    HELLO = 4
    RESULT = 5
    FAILED = 6
    BYE = 7
    RETURNED = 8


_WORD: Final = 8


def pack_call(inputs: Sequence[tuple[int, bytes]], data: bytes) -> bytes:
    """Return the payload of a call.

    Args:
        inputs: the number and the bytes of each value that the function needs.
        data: function and arguments.

    Example:
        >>> values, data = unpack_call(pack_call([(7, b"seven")], b"call"))
        >>> {number: bytes(value) for number, value in values.items()}, bytes(data)
        ({7: b'seven'}, b'call')
    """
    table = [len(inputs)]
    for number, value in inputs:
        table += [number, len(value)]
    return b"".join([np.array(table, np.int64).tobytes(), *(value for _, value in inputs), data])


def unpack_call(payload: bytes) -> tuple[dict[int, memoryview], memoryview]:
    """Return what `pack_call` was given."""
    view = memoryview(payload)
    count = int(np.frombuffer(payload, np.int64, 1)[0])
    table = np.frombuffer(payload, np.int64, 2 * count, _WORD).tolist()
    at = _WORD * (1 + 2 * count)
    inputs = {}
    for number, nbytes in zip(table[::2], table[1::2], strict=True):
        inputs[number] = view[at : at + nbytes]
        at += nbytes
    return inputs, view[at:]
