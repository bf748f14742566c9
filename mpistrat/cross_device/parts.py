"""Small parts for each rank: through a node's memory in the barrier that compares the call, or in one message between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, final

import numpy as np

from ..arena.arithmetic import Arithmetic, combine, finish
from ..base.partition import bounds
from ..comm.call import Call
from ..comm.exchange import PartExchange, SmallExchange
from ..comm.node import SMALL
from ..comm.process_group import ProcessGroup
from .values import row_size

__all__ = ["CutForm", "Found", "MessageReduction", "PartsByMessage", "PartsOnNode", "Way", "between", "keep"]

_FAILED = -1  # in place of a length
_IN_ONE = 1 << 17  # bytes that a rank sends between nodes together with their lengths
_KEPT = 16  # combinations of lengths that are cached


@final
class CutForm:
    """The form of an array that is cut into parts along an axis.

    Attributes:
        dtype, axis: the array's dtype, and the axis.
        row: bytes at one index along the axis.
        length: the array's, along the axis.
    """

    def __init__(self, array: Any, axis: int) -> None:
        self.dtype, self.axis, self.length = array.dtype, axis, array.shape[axis]
        self.row = row_size(array, axis) * int(array.dtype.itemsize)
        self._before, self._after = array.shape[:axis], array.shape[axis + 1 :]

    def part(self, memory: np.ndarray, length: int) -> np.ndarray:
        """Return the part of some length at the start of flat bytes."""
        return memory[: length * self.row].view(self.dtype).reshape(*self._before, length, *self._after)


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

    def move(self, call: Call, array: Any, lengths: tuple[int, ...] | None) -> Found | None:
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
        self._rank, self._size, self._equal = group.topology.rank, group.topology.size, equal
        self._form = CutForm(array, axis)
        self._exchange = SmallExchange(group.node, 0 if equal else 8 + 8 * self._size)
        small = array.size * array.dtype.itemsize <= SMALL
        self._place = self._exchange.place(array.shape, array.dtype) if small else None
        self._heads: dict[tuple[int, ...] | None, bytes] = {}
        self._found: dict[bytes, tuple[Found, Found] | None] = {}

    def move(self, call: Call, array: Any, lengths: tuple[int, ...] | None) -> Found | None:
        """See `Way`."""
        place, head = (None if lengths is None else self._place), b""
        if not self._equal:
            if lengths not in self._heads:
                numbers = (_FAILED,) * (1 + self._size) if lengths is None else (0, *lengths)
                keep(self._heads, lengths, np.array(numbers, np.int64).tobytes())
            head = self._heads[lengths]
        heads = self._exchange.move(call, place, array, head)
        if heads not in self._found:
            keep(self._found, heads, self._look(heads))
        found = self._found[heads]
        return None if found is None else found[self._exchange.turn]

    def _look(self, heads: bytes) -> tuple[Found, Found] | None:
        """Return what is found in each half of the memory."""
        form, size = self._form, self._size
        if self._equal:
            lengths = np.full((size, size), form.length // size)
        else:
            table = np.frombuffer(heads, np.int64).reshape(size, 1 + size)
            if (table[:, 0] == _FAILED).any():
                return None
            lengths = table[:, 1:]
        wholes, starts = lengths.sum(axis=1).tolist(), lengths[:, : self._rank].sum(axis=1).tolist()
        came, largest = lengths[:, self._rank].copy(), int(lengths.max()) * form.row
        even, odd = Found(came, largest, []), Found(came, largest, [])
        for turn, found in enumerate((even, odd) if max(wholes) * form.row <= SMALL else ()):
            for other, (whole, low, length) in enumerate(zip(wholes, starts, came.tolist(), strict=True)):
                there = form.part(self._exchange.data(turn, other, whole * form.row), whole)
                found.parts.append(between(there, form.axis, low, low + length))
        return even, odd


@final
class PartsByMessage:
    """Parts of arrays of ranks on several nodes, which travel with their lengths in one message. See `Way`.

    The message has room for the largest part of the group's last four calls with lengths, or for the part of an array that is
    cut into equal parts.
    """

    def __init__(self, group: ProcessGroup, array: Any, axis: int, equal: bool) -> None:
        self._group, self._size, self._equal = group, group.topology.size, equal
        self._form = CutForm(array, axis)
        self._exchange = PartExchange(group, 0 if equal else 2)
        self._places: dict[tuple[int, ...], list[np.ndarray]] = {}
        self._found: dict[bytes, Found | None] = {}

    def move(self, call: Call, array: Any, lengths: tuple[int, ...] | None) -> Found | None:
        """See `Way`."""
        exchange, form = self._exchange, self._form
        sizes = [form.length // self._size * form.row] if self._equal else self._group.parted
        room = max(each if each * self._size <= _IN_ONE else 0 for each in sizes)
        if room != exchange.room:
            exchange.open(room)
            self._places.clear()  # they refer to the old memory
            self._found.clear()
        largest = _FAILED if lengths is None else max(lengths) * form.row
        if not self._equal:
            exchange.heads[:, 0], exchange.heads[:, 1] = largest, lengths or 0
        if lengths is not None and largest <= room:
            if lengths not in self._places:
                keep(self._places, lengths, list(map(form.part, exchange.parts, lengths)))
            _cut(array, form.axis, self._places[lengths], lengths)
        heads = exchange.move()
        if heads not in self._found:
            keep(self._found, heads, self._look(heads))
        found = self._found[heads]
        if not self._equal and found is not None:
            self._group.parted = (*self._group.parted[1:], found.largest)
        return found

    def _look(self, heads: bytes) -> Found | None:
        form = self._form
        if self._equal:
            came = np.full(self._size, form.length // self._size)
            largest = form.length // self._size * form.row
        else:
            table = np.frombuffer(heads, np.int64).reshape(self._size, 2)
            if (table[:, 0] == _FAILED).any():
                return None
            came, largest = table[:, 1].copy(), int(table[:, 0].max())
        parts = [] if largest > self._exchange.room else list(map(form.part, self._exchange.came, came.tolist()))
        return Found(came, largest, parts)


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
        form, exchange = CutForm(array, axis), PartExchange(group)
        self._how, self._exchange, self._axis = how, exchange, axis
        self._lengths = tuple(high - low for low, high in bounds(form.length, group.topology.size))
        exchange.open(max(self._lengths) * form.row)
        self._places = list(map(form.part, exchange.parts, self._lengths))
        self._parts = [form.part(came, self._lengths[group.topology.rank]) for came in exchange.came]
        self.shape, self.dtype = self._parts[0].shape, how.result

    def __call__(self, array: np.ndarray, call: Call) -> np.ndarray:
        """Return the reduction, a new array. Collective, inside the call."""
        _cut(array, self._axis, self._places, self._lengths)
        self._exchange.move()
        total = np.empty(self.shape, self._how.accumulate)
        combine(self._how.ufunc, self._parts, total)
        return finish(total, self._how)


def between(array: Any, axis: int, low: int, high: int) -> Any:
    """Return a view of part of an array along an axis."""
    return array[(slice(None),) * axis + (slice(low, high),)]


def _cut(array: Any, axis: int, places: Sequence[np.ndarray], lengths: Sequence[int]) -> None:
    """Copy the parts of an array along an axis to their places."""
    low = 0
    for place, length in zip(places, lengths, strict=True):
        place[...] = between(array, axis, low, low + length)
        low += length


def keep(cache: dict[Any, Any], key: Any, value: Any) -> None:
    """Cache what was found for a combination of lengths; clear a full cache."""
    if len(cache) >= _KEPT:
        cache.clear()
    cache[key] = value
