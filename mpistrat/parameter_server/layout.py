"""Memory layout of a server: the words and slots of its workers, and its variables. Pure arithmetic.

The mailbox of a server, in bytes:

| what | written by | words |
|---|---|---|
| a line for each worker | that worker | gate, posted, left, clock, signed |
| a line for each worker | the server | taken, applied |
| slots for each worker | that worker | header and payload of one part of a message |

A line is 64 bytes, so that no two writers share a cache line. A slab holds variables: a line with the version word and those
of `rooms.py`, then the bytes of the variable. A large one that workers of the same node may read in place has a
word for each of them before that line, and after it further buffers like the first, and one for the gradient of each of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import final

import numpy as np

from ..comm.arrays import check_movable

__all__ = ["LINE", "MailboxLayout", "Place", "VariableSpec", "aligned"]

LINE = 64
_GATE, _POSTED, _LEFT, _CLOCK, _SIGNED = 0, 8, 16, 24, 32
_TAKEN, _APPLIED = 0, 8


def aligned(nbytes: int) -> int:
    """Return a size rounded up to whole lines.

    Example:
        >>> aligned(65)
        128
    """
    return -(-nbytes // LINE) * LINE


@final
@dataclass(frozen=True)
class VariableSpec:
    """What a variable on a server is.

    Args:
        name: for errors.
        shape: its shape.
        dtype: any that can be moved as bytes (`comm.arrays`).
        server: which server holds it, counted from 0.

    Raises:
        TypeError: the dtype cannot be moved.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    server: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(n) for n in self.shape))
        object.__setattr__(self, "dtype", np.dtype(self.dtype))
        check_movable(self.dtype, "VariableSpec", "dtype")

    @functools.cached_property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @functools.cached_property
    def row_bytes(self) -> int:
        """The size in bytes of one row, an entry of the first dimension."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


@final
@dataclass(frozen=True)
class Place:
    """Where a variable lies.

    Attributes:
        index: its number, the same on every rank.
        spec: what it is.
        slab: the number of the slab.
        offset: of its bytes in its server's segment of the slab.
        near: the workers that may hold rooms of the variable, in ascending order.
        version: offset of the version word.
    """

    index: int
    spec: VariableSpec
    slab: int
    offset: int
    near: tuple[int, ...] = ()

    @classmethod
    def after(cls, start: int, index: int, spec: VariableSpec, slab: int, near: tuple[int, ...] = ()) -> Place:
        """Return the place of a variable whose memory begins at an offset."""
        return cls(index, spec, slab, start + aligned(8 * len(near)) + LINE, near)

    @property
    def start(self) -> int:
        """The first byte of all that belongs to the variable."""
        return self.version - aligned(8 * len(self.near))

    @property
    def version(self) -> int:
        return self.offset - LINE

    @property
    def current(self) -> int:
        """Offset of the word that says in which room the newest version lies."""
        return self.version + 8

    @property
    def may_hold(self) -> int:
        """Offset of the word that says whether workers may hold rooms."""
        return self.version + 16

    def held(self, worker: int) -> int:
        """The word of a near worker: 1 + the number of the room that it holds."""
        return self.start + 8 * self.near.index(worker)

    @property
    def rooms(self) -> int:
        """How many there are: the current one, one for each worker to hold, and one in which the next version is written."""
        return len(self.near) + 2 if self.near else 1

    def room(self, number: int) -> int:
        """The first byte of a room; the variable lies in room 0 at first."""
        return self.offset + number * aligned(max(self.spec.nbytes, 1))

    def gradient(self, worker: int) -> int:
        """The first byte of the memory in which a near worker writes its gradient."""
        return self.room(self.rooms + self.near.index(worker))

    @property
    def end(self) -> int:
        """The first byte after the variable that another one may have."""
        return self.room(self.rooms + len(self.near))


@final
@dataclass(frozen=True)
class MailboxLayout:
    """The mailbox of each server, the same for all: offsets in bytes.

    Args:
        workers: their number.
        slots: parts that a worker may post before the server takes one.
        chunk_bytes: the largest payload of a part.
    """

    workers: int
    slots: int
    chunk_bytes: int

    def gate(self, worker: int) -> int:
        """The word by which a reader announces itself: what it reads, and a number."""
        return worker * LINE + _GATE

    def posted(self, worker: int) -> int:
        """How many parts the worker has posted."""
        return worker * LINE + _POSTED

    def left(self, worker: int) -> int:
        """How many passes the worker has signed off from."""
        return worker * LINE + _LEFT

    def clock(self, worker: int) -> int:
        """How many steps the worker has finished."""
        return worker * LINE + _CLOCK

    def signed(self, worker: int) -> int:
        """How many pushes the worker had sent when it signed off last."""
        return worker * LINE + _SIGNED

    def taken(self, worker: int) -> int:
        """How many parts of the worker the server has taken."""
        return (self.workers + worker) * LINE + _TAKEN

    def applied(self, worker: int) -> int:
        """The number of the worker's last push that is applied, as are all before it."""
        return (self.workers + worker) * LINE + _APPLIED

    def slot(self, worker: int, part: int) -> int:
        """The header of the worker's part of this number; the payload is a line further."""
        return 2 * self.workers * LINE + (worker * self.slots + part % self.slots) * self._slot_bytes

    @property
    def words_bytes(self) -> int:
        """The size of the mailbox without slots."""
        return 2 * self.workers * LINE

    @property
    def nbytes(self) -> int:
        """The size of the whole mailbox."""
        return self.words_bytes + self.workers * self.slots * self._slot_bytes

    @property
    def _slot_bytes(self) -> int:
        return LINE + aligned(self.chunk_bytes)
