"""Messages between the program that schedules functions and the ranks that run them, and the carrier between ranks.

`MpiChannel` sends messages of any length over MPI, by polling. `zmq.py` has the carrier from outside.

Between the chief and the serving ranks, over MPI:

| kind | from | number | extra | payload |
|---|---|---|---|---|
| HELLO | worker loop | 0 | 1 if it can return calls | none: it serves |
| FUNCTION | chief | of the function among this worker's | 0 | the function, for later calls |
| FORGET | chief | of the function | 0 | none: no later call needs it |
| CALL | chief | of the call among this worker's | number up to which answers have arrived | inputs and call (`pack_call`) |
| COMMAND | chief | 0 | 0 | name and arguments of a collective call |
| RESULT | worker | of the call | its duration in microseconds | the function's return value |
| FAILED | worker | of the call | microseconds | (exception or None, text) |
| RETURNED | worker | of the call | 0 | none: not started, because the previous call takes long |
| REFORM | chief | 0 | 0 | none: create a new communicator with the living ranks, because a worker has died |
| END | chief | 0 | 1 if the chief leaves the program | none |
| BYE | worker loop | 0 | 0 | none: it has received END, and sends no more messages |
| PROGRAM | chief | 0 | 0 | a client's program (`program.py`), which every rank runs |
| OUTPUT | worker loop | 1 stdout, 2 stderr | 0 | printed text |
| STOP | chief | 0 | 0 | none: stop the program |
| ENDED | worker loop | 0 | RESULT, FAILED, or CANCEL if it was stopped | the return value, or (exception or None, text) |
| OVER | chief | 0 | 1 if it has returned on all ranks | none: it has ended on all ranks |

A worker stores its answers until the chief has them. If a call arrives again, it sends the stored answer without running it
again.

Between a client and the chief, over ZeroMQ, the number is that of a value:

| kind | from | payload |
|---|---|---|
| HELLO | client | user, host and process |
| WELCOME | chief | none; the number is that of the workers |
| REFUSED | chief | the reason why the client is not served, or no longer |
| SCHEDULE | client | a function for a worker |
| CALL | client | a function for the chief |
| DONE | chief | none: the function has returned, and its value stays in the job |
| FAILED | chief | (exception or None, text) |
| FETCH | client | the number of the requested value; RESULT answers |
| RESULT | chief | the value |
| FORGET | client | numbers of values that are no longer used |
| CANCEL | client | none: cancel the waiting functions |
| PROGRAM | client | a program for all ranks; RESULT or FAILED answers |
| OUTPUT | chief | text that a rank has printed; the number is 1 for stdout, 2 for stderr |
| STOP | client | none: stop the program |
| ALIVE | chief | none |
| LEAVE | client | none: the client ends |
| END | client | none: the job must end |
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, final

import numpy as np

from ..comm.mailbox import Mailbox

__all__ = [
    "CHUNK",
    "FIRST",
    "Channel",
    "Kind",
    "Message",
    "MpiChannel",
    "pack_call",
    "unpack_call",
]


class Kind(enum.IntEnum):
    """The kind of a message."""

    HELLO = 1
    SCHEDULE = 2
    CALL = 3
    FETCH = 4
    FORGET = 5
    CANCEL = 6
    LEAVE = 7
    END = 8
    COMMAND = 9
    BYE = 10
    RETURNED = 11
    PROGRAM = 12
    OUTPUT = 13
    STOP = 14
    ENDED = 15
    WELCOME = 16
    REFUSED = 17
    DONE = 18
    FAILED = 19
    RESULT = 20
    ALIVE = 21
    OVER = 22
    FUNCTION = 23
    REFORM = 24


class Message(NamedTuple):
    """A received message.

    Attributes:
        peer: the sender: a rank; of a client its routing id; empty at the client.
        kind: its kind.
        number: see the tables above.
        extra: another number, 0 over ZeroMQ.
        payload: its bytes.
    """

    peer: Any
    kind: int
    number: int
    extra: int
    payload: bytes


class Channel(Protocol):
    """A carrier of messages, in order for each peer. `MpiChannel` has no `seconds`: ranks check for peers that leave."""

    def send(self, peer: Any, kind: int, number: int = 0, payload: bytes = b"") -> bool:
        """Start to send a message; return False if the peer is known to be gone."""

    def poll(self, seconds: float = 0.0) -> list[Message]:
        """Return messages that have arrived; wait for the first for at most `seconds`."""

    def close(self) -> None:
        """Disconnect."""


_WORD: Final = 8


def pack_call(inputs: Sequence[tuple[int, bytes]], data: bytes, function: int = 0) -> bytes:
    """Return the payload of a call.

    Args:
        inputs: the number and the bytes of each value that the function needs.
        data: the arguments; the function too if its number is 0.
        function: its number on the worker.

    Example:
        >>> function, values, data = unpack_call(pack_call([(7, b"seven")], b"call", 3))
        >>> function, {number: bytes(value) for number, value in values.items()}, bytes(data)
        (3, {7: b'seven'}, b'call')
    """
    table = [function, len(inputs)]
    for number, value in inputs:
        table += [number, len(value)]
    return b"".join([np.array(table, np.int64).tobytes(), *(value for _, value in inputs), data])


def unpack_call(payload: bytes) -> tuple[int, dict[int, memoryview], memoryview]:
    """Return the number of the function, the inputs and the data: see `pack_call`."""
    view = memoryview(payload)
    function, count = np.frombuffer(payload, np.int64, 2).tolist()
    table = np.frombuffer(payload, np.int64, 2 * count, 2 * _WORD).tolist()
    at = _WORD * (2 + 2 * count)
    inputs = {}
    for number, nbytes in zip(table[::2], table[1::2], strict=True):
        inputs[number] = view[at : at + nbytes]
        at += nbytes
    return function, inputs, view[at:]


FIRST = 1 << 16  # bytes of the payload that are sent with the head
CHUNK = 1 << 20  # bytes in each further chunk
_HEAD = struct.Struct("<4q")
_TAG = 1


@final
class _Incoming:
    """The chunks that one rank sends, in order."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.missing = 0
        self._head: tuple[int, int, int] = (0, 0, 0)
        self._pieces: list[bytearray | memoryview] = []

    def add(self, piece: bytearray) -> Message | None:
        """Add the next chunk; return the message that it completes."""
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
    """A channel whose peers are ranks. From one thread at a time.

    Args:
        comm: a communicator without other messages.
        bear: see `Mailbox`.
    """

    def __init__(self, comm: Any, bear: Callable[[BaseException, Any], None] | None = None) -> None:
        self._mailbox = Mailbox(comm, bear)
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
        """Return True if a message is not sent yet."""
        return bool(self._mailbox.sending)

    def give_up(self, rank: int) -> None:
        """Abandon messages to a rank that left."""
        self._mailbox.abandon(rank)
        self._incoming.pop(rank, None)
