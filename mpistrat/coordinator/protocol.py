"""What the chief and the ranks that follow it say to each other.

| kind | from | number | extra | payload |
|---|---|---|---|---|
| CALL | chief | of the call among this worker's | up to which calls answers have come | inputs and function (`pack_call`) |
| ORDER | chief | 0 | 0 | name and arguments of what all ranks do together |
| END | chief | 0 | 1 if the chief leaves the program | none |
| HELLO | follower | 0 | 1 if it can give calls back | none: it serves |
| BYE | follower | 0 | 0 | none: it has had END, and sends nothing more |
| RESULT | worker | of the call | microseconds that it took | what the function returned |
| FAILED | worker | of the call | microseconds | (exception or None, text) |
| RETURNED | worker | of the call | 0 | none: it has not begun, for the one before it takes long |

A worker keeps its answers until the chief has them; a call that comes again is answered from what is kept, not run again.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import numpy as np

__all__ = ["Kind", "pack_call", "unpack_call"]


class Kind(enum.IntEnum):
    """What a message is."""

    CALL = 1
    ORDER = 2
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
