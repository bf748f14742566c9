"""Small parts for each rank: through a node's memory in the barrier that compares the call, or in one message between nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from ..arena.arithmetic import Arithmetic, combine, finish
from ..base.partition import bounds
from ..comm.call import Call
from ..comm.exchange import PartExchange, SmallExchange
from ..comm.node import SMALL
from ..comm.process_group import ProcessGroup

__all__ = ["Found", "MessageReduction", "PartsByMessage", "PartsOnNode", "Way", "between"]

_FAILED = -1  # in place of a length
_IN_ONE = 1 << 17  # bytes that a rank sends between nodes together with their lengths
_KEPT = 16  # combinations of lengths that are cached


class Found(NamedTuple):
    """Parts that came, or only their lengths.

    Attributes:
        came: the lengths that this rank receives from each rank.
        largest: the most bytes that any rank sends to one.
        parts: the part from each rank, valid until the next call; empty if they are too large to come with the lengths.
    """

    came: np.ndarray
    largest: int
    parts: list[np.ndarray]


class Way(Protocol):
    """A way for the parts of one array of each rank to the others, with their lengths if those may differ.

    Args:
        group: the ranks.
        array: an array of this rank, with the dtype and shape of all later ones.
        axis: the dimension that is cut.
        equal: True if all ranks have arrays of one shape, in equal parts.
    """

    def __init__(self, group: ProcessGroup, array: Any, axis: int, equal: bool) -> None: ...

    def move(self, call: Call, array: Any, lengths: Sequence[int] | None) -> Found | None:
        """Send parts, and return those from all ranks. Collective, inside one.

        Args:
            call: the current call.
            array: this rank's array.
            lengths: those of the parts for each rank; None if this rank will raise an error.

        Returns:
            None if a rank will raise an error.
        """
        ...


@final
class PartsOnNode:
    """Parts of arrays of the ranks of a node, which read them in each other's array. See `Way`."""

    def __init__(self, group: ProcessGroup, array: Any, axis: int, equal: bool) -> None:
        self._rank, self._size, self._axis, self._equal = group.topology.rank, group.topology.size, axis, equal
        self._shape, self._dtype = array.shape, array.dtype
        self._row = _row(array, axis)
        self._exchange = SmallExchange(group.node, 0 if equal else 8 + 8 * self._size)
        small = array.size * array.dtype.itemsize <= SMALL
        self._place = self._exchange.place(array.shape, array.dtype) if small else None
        self._heads: dict[tuple[int, ...], bytes] = {}
        self._found: dict[bytes, tuple[Found, Found] | None] = {}

    def move(self, call: Call, array: Any, lengths: Sequence[int] | None) -> Found | None:
        """See `Way`."""
        place, head = (None if lengths is None else self._place), b""
        if not self._equal:
            numbers = (_FAILED,) * (1 + self._size) if lengths is None else (0, *lengths)
            head = np.array(numbers, np.int64).tobytes()
        heads = self._exchange.move(call, place, array, head)
        if heads not in self._found:
            _keep(self._found, heads, self._look(heads))
        found = self._found[heads]
        return None if found is None else found[self._exchange.turn]

    def _look(self, heads: bytes) -> tuple[Found, Found] | None:
        """Return what is found in each half of the memory."""
        axis, shape, size = self._axis, self._shape, self._size
        if self._equal:
            lengths = np.full((size, size), shape[axis] // size)
        else:
            table = np.frombuffer(heads, np.int64).reshape(size, 1 + size)
            if (table[:, 0] == _FAILED).any():
                return None
            lengths = table[:, 1:]
        wholes, starts = lengths.sum(axis=1).tolist(), lengths[:, : self._rank].sum(axis=1).tolist()
        came, row, largest = lengths[:, self._rank].copy(), self._row, int(lengths.max()) * self._row
        even, odd = Found(came, largest, []), Found(came, largest, [])
        for turn, found in enumerate((even, odd) if max(wholes) * row <= SMALL else ()):
            for other, (whole, low, length) in enumerate(zip(wholes, starts, came.tolist(), strict=True)):
                flat = self._exchange.data(turn, other, whole * row).view(self._dtype)
                there = flat.reshape(*shape[:axis], whole, *shape[axis + 1 :])
                found.parts.append(between(there, axis, low, low + length))
        return even, odd


@final
class PartsByMessage:
    """Parts of arrays of ranks on several nodes, which travel with their lengths in one message. See `Way`.

    The message has room for the largest part of the group's last four calls with lengths, or for the part of an array that is
    cut into equal parts.
    """

    def __init__(self, group: ProcessGroup, array: Any, axis: int, equal: bool) -> None:
        self._group, self._size, self._axis, self._equal = group, group.topology.size, axis, equal
        self._shape, self._dtype = array.shape, array.dtype
        self._row = _row(array, axis)
        self._exchange = PartExchange(group, 0 if equal else 2)
        self._cuts: dict[tuple[int, ...], list[tuple[Any, np.ndarray]]] = {}
        self._found: dict[bytes, Found | None] = {}

    def move(self, call: Call, array: Any, lengths: Sequence[int] | None) -> Found | None:
        """See `Way`."""
        exchange, part = self._exchange, self._shape[self._axis] // self._size * self._row
        sizes = [part] if self._equal else self._group.parted
        room = max(each if each * self._size <= _IN_ONE else 0 for each in sizes)
        if room != exchange.room:
            exchange.open(room)
            self._cuts.clear()  # they refer to the old memory
            self._found.clear()
        largest = _FAILED if lengths is None else max(lengths) * self._row
        if not self._equal:
            exchange.heads[:, 0], exchange.heads[:, 1] = largest, lengths or 0
        if lengths is not None and largest <= room:
            key = tuple(lengths)
            if key not in self._cuts:
                _keep(self._cuts, key, self._cut(lengths))
            for cut, place in self._cuts[key]:
                place[...] = array[cut]
        heads = exchange.move()
        if heads not in self._found:
            _keep(self._found, heads, self._look(heads, part))
        found = self._found[heads]
        if not self._equal and found is not None:
            self._group.parted = (*self._group.parted[1:], found.largest)
        return found

    def _cut(self, lengths: Sequence[int]) -> list[tuple[Any, np.ndarray]]:
        """Return slices of the part for each rank, and its place in the message."""
        found, low = [], 0
        for length, place in zip(lengths, self._exchange.parts, strict=True):
            cut = (*(slice(None),) * self._axis, slice(low, low + length))
            found.append((cut, self._part(place, length)))
            low += length
        return found

    def _look(self, heads: bytes, part: int) -> Found | None:
        if self._equal:
            came, largest = np.full(self._size, self._shape[self._axis] // self._size), part
        else:
            table = np.frombuffer(heads, np.int64).reshape(self._size, 2)
            if (table[:, 0] == _FAILED).any():
                return None
            came, largest = table[:, 1].copy(), int(table[:, 0].max())
        if largest > self._exchange.room:
            return Found(came, largest, [])
        rows = zip(self._exchange.came, came.tolist(), strict=True)
        return Found(came, largest, [self._part(row, length) for row, length in rows])

    def _part(self, row: np.ndarray, length: int) -> np.ndarray:
        """Return the array of a part at the start of bytes."""
        axis, shape = self._axis, self._shape
        return row[: length * self._row].view(self._dtype).reshape(*shape[:axis], length, *shape[axis + 1 :])


@final
class MessageReduction:
    """The reduction of a part of arrays of one form, one of each rank, on several nodes: one message has the parts.

    The parts of all ranks are reduced in the order of ranks, as those of large arrays are.

    Args:
        group: the ranks.
        array: one with the dtype and shape of all.
        how: the reduction.
        axis: the dimension that is divided over the ranks.

    Attributes:
        shape, dtype: of the result.
    """

    def __init__(self, group: ProcessGroup, array: Any, how: Arithmetic, axis: int) -> None:
        shape, dtype, size = array.shape, array.dtype, group.topology.size
        cuts, row = bounds(shape[axis], size), _row(array, axis)
        self._how, self._exchange = how, PartExchange(group)
        self._exchange.open(max(high - low for low, high in cuts) * row)

        def part(memory: np.ndarray, low: int, high: int) -> np.ndarray:
            return memory[: (high - low) * row].view(dtype).reshape(*shape[:axis], high - low, *shape[axis + 1 :])

        places = zip(cuts, self._exchange.parts, strict=True)
        self._cuts = [((*(slice(None),) * axis, slice(*cut)), part(place, *cut)) for cut, place in places]
        self._parts = [part(row, *cuts[group.topology.rank]) for row in self._exchange.came]
        self.shape, self.dtype = self._parts[0].shape, how.result

    def __call__(self, array: np.ndarray, call: Call) -> np.ndarray:
        """Return the reduction, a new array. Collective, inside the call."""
        for cut, place in self._cuts:
            place[...] = array[cut]
        self._exchange.move()
        total = np.empty(self.shape, self._how.accumulate)
        combine(self._how.ufunc, self._parts, total)
        return finish(total, self._how)


def between(array: Any, axis: int, low: int, high: int) -> Any:
    """Return a view of part of an array along an axis."""
    return array[(slice(None),) * axis + (slice(low, high),)]


def _row(array: Any, axis: int) -> int:
    """Return the bytes of an array at one index along an axis."""
    return math.prod(array.shape[:axis] + array.shape[axis + 1 :]) * int(array.dtype.itemsize)


def _keep(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= _KEPT:
        cache.clear()
    cache[key] = value
