"""Messages between the program that schedules functions and the ranks that run them, over any carrier.

Between the chief and the ranks that serve (`mpi.py`):

| kind | from | number | extra | payload |
|---|---|---|---|---|
| HELLO | worker loop | 0 | 1 if it can return calls | none: it serves |
| CALL | chief | of the call among this worker's | up to which answers have arrived | inputs and function (`pack_call`) |
| COMMAND | chief | 0 | 0 | name and arguments of a call that all ranks make |
| RESULT | worker | of the call | microseconds that it took | the value that the function returned |
| FAILED | worker | of the call | microseconds | (exception or None, text) |
| RETURNED | worker | of the call | 0 | none: it has not started, since the one before it takes long |
| END | chief | 0 | 1 if the chief leaves the program | none |
| BYE | worker loop | 0 | 0 | none: it has END, and sends nothing more |

A worker keeps its answers until the chief has them. If a call arrives again, it sends the kept answer, and does not run it again.

Between a client and the chief (`zmq.py`) the number is that of a value:

| kind | from | payload |
|---|---|---|
| HELLO | client | user, host and process |
| WELCOME | chief | none; the number is that of the workers |
| REFUSED | chief | why the client cannot be served, or no longer |
| SCHEDULE | client | a function for a worker |
| CALL | client | a function for the chief |
| DONE | chief | none: the function has returned, and its value stays in the job |
| FAILED | chief | (exception or None, text) |
| FETCH | client | the number of the value wanted; RESULT answers |
| RESULT | chief | the value |
| FORGET | client | numbers of values that are in use no more |
| CANCEL | client | none: cancel the functions that wait |
| ALIVE | chief | none |
| LEAVE | client | none: the client ends |
| END | client | none: the job must end |
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

__all__ = ["Channel", "Kind", "Message", "pack_call", "unpack_call"]


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
    WELCOME = 16
    REFUSED = 17
    DONE = 18
    FAILED = 19
    RESULT = 20
    ALIVE = 21


class Message(NamedTuple):
    """A message as it arrived.

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
    """A carrier of messages, in order for each peer. `MpiChannel` has no `seconds`: ranks watch for peers that leave."""

    def send(self, peer: Any, kind: int, number: int = 0, payload: bytes = b"") -> bool:
        """Start to send a message; return False if the peer is known to be gone."""

    def poll(self, seconds: float = 0.0) -> list[Message]:
        """Return messages that have arrived; wait for the first for at most `seconds`."""


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
