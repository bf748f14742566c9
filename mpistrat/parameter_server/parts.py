"""Messages from a worker to a server, cut into parts that fit a slot and put together again.

A part is a header of eight words and at most `chunk_bytes` of payload. Parts of a worker arrive in order and one message
after the other, so the server needs no more memory for a worker than its largest message, and none for messages of one part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import numpy as np

from .layout import LINE

__all__ = ["Assembly", "Kind", "Part", "cut"]


class Kind:
    """What a message is. The windows carry pushes only; the rest is done there by reading and writing words."""

    PUSH, PUSH_ROWS, READ, READ_ROWS, ADD, CLOCK, CLOCKS, LEAVE = range(1, 9)


class Part(NamedTuple):
    """The header of a part.

    Attributes:
        kind: of the message, one of `Kind`.
        variable: which one it is about.
        number: of the push; for other kinds a value.
        rows: how many rows the message is about.
        offset: of this part's payload in the message's.
        nbytes: of this part's payload.
        total: bytes of the message's payload.
    """

    kind: int
    variable: int
    number: int
    rows: int
    offset: int
    nbytes: int
    total: int

    def write(self, header: np.ndarray) -> None:
        """Write the header into `LINE` bytes. Not collective."""
        header.view(np.int64)[:7] = self

    @classmethod
    def read(cls, header: np.ndarray) -> Part:
        """Return the header that `write` wrote. Not collective."""
        return cls(*header[: LINE - 8].view(np.int64).tolist())


def cut(
    kind: int, variable: int, number: int, rows: int, pieces: Sequence[np.ndarray], chunk_bytes: int
) -> Iterator[tuple[Part, list[np.ndarray]]]:
    """Yield the parts of a message, each with the bytes of its payload in pieces; at least one part. Not collective.

    Args:
        kind, variable, number, rows: as in `Part`.
        pieces: the payload, flat bytes, one piece after the other.
        chunk_bytes: most bytes in a part.

    Example:
        >>> [(part.offset, part.nbytes) for part, _ in cut(1, 0, 1, 0, [np.zeros(5, np.uint8)], 2)]
        [(0, 2), (2, 2), (4, 1)]
    """
    total = sum(piece.nbytes for piece in pieces)
    for low in range(0, max(total, 1), chunk_bytes):
        high = min(low + chunk_bytes, total)
        payload, start = [], 0
        for piece in pieces:
            some = piece[max(low - start, 0) : max(high - start, 0)]
            if some.nbytes:
                payload.append(some)
            start += piece.nbytes
        yield Part(kind, variable, number, rows, low, high - low, total), payload


@final
class Assembly:
    """Puts the parts of one worker's messages together, in order. Its memory is that of the largest message so far."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def add(self, part: Part, payload: np.ndarray) -> np.ndarray | None:
        """Return the payload of the message if this part ends it. Valid until the next call. Not collective.

        Args:
            part: the header.
            payload: the part's bytes; a message of one part is these very bytes, not copied.
        """
        if part.nbytes == part.total:
            return payload
        if self._memory.nbytes < part.total:
            self._memory = np.empty(part.total, np.uint8)
        self._memory[part.offset : part.offset + part.nbytes] = payload
        return self._memory[: part.total] if part.offset + part.nbytes == part.total else None
