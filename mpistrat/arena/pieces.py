"""Slices that nodes share: each node sums and updates a piece of a slice, and sends its new weights to the others.

In each round a node receives its peers' sums of a block of its piece, computes the total, and sends them the updated block,
directly between the memories of the weights. The sums of the next round are sent while a block is updated, without a thread. A
total is summed over nodes in their order, so its bits do not depend on MPI's all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, final

import numpy as np

from ..base.partition import blocks
from ..comm.arrays import mpi_datatype
from .arithmetic import Arithmetic, combine

__all__ = [
    "AS_THEY_ARE",
    "BESIDE_WEIGHTS",
    "NodeForm",
    "Messages",
    "PieceShare",
    "PieceSum",
    "Pieces",
    "Range",
    "leave",
    "round_size",
    "rounds_of",
    "summed_blocks",
    "wait",
]

Range = tuple[int, int]
Pieces = Sequence[Sequence[Range]]  # element ranges by node

BESIDE_WEIGHTS = frozenset({"wire_residual"})  # the names that any `NodeForm` stores beside weights

_ROUND = 1 << 20  # bytes of all pieces together that a rank sums in a round
_LEAST_BLOCK = 64 << 10  # bytes of one piece, if many nodes share a round
_SUMS, SHARED = 10, 11  # tags
_left: list[Any] = []  # requests, which keep their memory alive


def leave(requests: Sequence[Any]) -> None:
    """Keep the memory of messages that an error left in flight, into which they still write, until the process ends."""
    _left.extend(request for request in requests if request is not None)


def round_size(nodes: int, dtype: np.dtype) -> int:
    """Return the most elements of a piece in a round."""
    return max(_ROUND // nodes, _LEAST_BLOCK) // dtype.itemsize


def rounds_of(pieces: Pieces, size: int) -> list[tuple[Range | None, ...]]:
    """Return the block of each node's piece in each round, None if it has none left."""
    return list(zip_longest(*(blocks(piece, size) for piece in pieces)))


def summed_blocks(ranges: Sequence[Range], nodes: int, dtype: np.dtype, block: int) -> list[Range]:
    """Return the blocks in which the sums of ranges are delivered."""
    size = round_size(nodes, dtype)
    return blocks(blocks(ranges, size), min(block, size))


def wait(requests: Sequence[Any]) -> None:
    """Wait for messages."""
    for request in requests:  # one by one: MPI_Waitall hides the error
        request.Wait()


class Messages:
    """The messages of a `PieceSum`, here its numbers as they are; see `encoded.EncodedMessages`.

    Attributes:
        sent, came: arrays of messages, for two rounds and by node.
        kind: the MPI datatype of their elements.
    """

    def __init__(self, sums: np.ndarray) -> None:
        """Serve the local sums of two rounds, by node."""
        self._sums = self.sent = sums
        self.came, self.kind = np.empty_like(sums), mpi_datatype(sums.dtype)

    def width(self, count: int) -> int:
        """Return the number of elements of a message with `count` numbers."""
        return count

    def add(self, half: int, me: int, part: slice, how: Arithmetic, total: np.ndarray) -> None:
        """Write the sum over nodes, in their order, of the elements in a part of a round; `me` is this node."""
        from_node = [(self._sums if node == me else self.came)[half, node] for node in range(len(self.came[half]))]
        combine(how.ufunc, [numbers[part] for numbers in from_node], total)


class NodeForm:
    """The form of an arena's numbers between nodes, here as they are; see `encoded.Encoded`.

    Attributes:
        messages: makes the messages of a `PieceSum`; the same object for equal forms.
        exact: whether the weights in memory are exact.
        may_start_early: whether sums may start before the step that takes them.
        names: of the arrays that are stored beside the weights; files have them among the slots.
    """

    messages: Callable[[np.ndarray], Messages] = Messages
    exact: bool = True
    may_start_early: bool = True
    names: Sequence[str] = ()

    def encode(self, low: int, high: int, total: np.ndarray, message: np.ndarray, work: np.ndarray) -> None:
        """Write the sum of elements [low, high) into its message. The sum and `work` may be changed."""

    def stored(self, low: int, high: int) -> dict[str, np.ndarray]:
        """Return what is stored beside weights [low, high), which this rank must own, writable, by name."""
        return {}

    def of_steps(self) -> NodeForm:
        """Return the form of the sums of one optimizer's gradients."""
        return self

    def applied(self, gradients: Any) -> Any:
        """Return gradients whose sums have this form."""
        return gradients

    def forget(self) -> None:
        """Drop what is stored of sums that were refused, or belong to replaced weights."""


AS_THEY_ARE = NodeForm()


@final
class PieceSum:
    """The sums of a node's arrays, then of these over nodes, each piece on its own node; owns the scratch memory."""

    def __init__(
        self,
        inter: Any,
        dtype: np.dtype,
        block: int,
        messages: Callable[[np.ndarray], Messages] = Messages,
        finish: Callable[[Sequence[Any]], None] = wait,
    ) -> None:
        """Allocate.

        Args:
            inter: the peers that own the same slice, by node.
            dtype: of the sums.
            block: elements that are summed while in cache.
            messages: returns the messages for the local sums.
            finish: waits for requests.
        """
        self._inter, self._block, self._finish = inter, block, finish
        self._size = round_size(inter.size, dtype)
        # For two rounds: the local sums and the received ones, by node; of this node's own piece only the former is
        # used.
        self._sums = np.empty((2, inter.size, self._size), dtype)
        self._total = np.empty(min(block, self._size), dtype)
        self._messages = messages(self._sums)

    def hand_out(
        self,
        arrays: Sequence[np.ndarray],
        pieces: Pieces,
        how: Arithmetic,
        consume: Callable[[int, int, np.ndarray], None],
        form: NodeForm = AS_THEY_ARE,
    ) -> None:
        """Call consume(low, high, sum) for this node's piece, in order. Collective over `inter`."""
        me, rounds = self._inter.rank, rounds_of(pieces, self._size)
        travelling: list[list[Any]] = [[], []]
        try:
            for number in range(len(rounds) + 1):
                if number < len(rounds):
                    self._finish(travelling[number % 2])  # then its memory is free
                    travelling[number % 2] = []
                    self._begin(number % 2, arrays, rounds[number], how, travelling[number % 2], form)
                mine = rounds[number - 1][me] if number else None
                if mine is not None:
                    self._finish(travelling[(number - 1) % 2])
                    self._consume((number - 1) % 2, mine, how, consume)
            self._finish(travelling[0] + travelling[1])
        except BaseException:
            leave(travelling[0] + travelling[1])
            raise

    def _begin(
        self,
        half: int,
        arrays: Sequence[np.ndarray],
        blocks_of: Sequence[Range | None],
        how: Arithmetic,
        requests: list[Any],
        form: NodeForm,
    ) -> None:
        """Sum a round over this node, and start to send the sums to their nodes; append to the requests."""
        inter, nodes, messages = self._inter, self._inter.size, self._messages
        mine = blocks_of[inter.rank]
        if mine is not None:
            for step in range(1, nodes):
                node = (inter.rank - step) % nodes
                into = messages.came[half, node, : messages.width(mine[1] - mine[0])]
                requests.append(inter.Irecv([into, messages.kind], node, _SUMS))
        for step in [*range(1, nodes), 0]:
            node = (inter.rank + step) % nodes
            block = blocks_of[node]
            if block is None:
                continue
            low, high = block
            message = messages.sent[half, node, : messages.width(high - low)]
            for begin, end in blocks([block], self._block):
                total = self._sums[half, node, begin - low : end - low]
                combine(how.ufunc, [array[begin:end] for array in arrays], total)
                if step:
                    part = message[messages.width(begin - low) : messages.width(end - low)]
                    form.encode(begin, end, total, part, self._total)
            if step:
                requests.append(inter.Isend([message, messages.kind], node, _SUMS))

    def _consume(self, half: int, mine: Range, how: Arithmetic, consume: Callable[[int, int, Any], None]) -> None:
        low = mine[0]
        for begin, end in self._cached([mine]):
            total = self._total[: end - begin]
            self._messages.add(half, self._inter.rank, slice(begin - low, end - low), how, total)
            consume(begin, end, total)

    def consumed(self, ranges: Sequence[Range]) -> list[Range]:
        """Return the blocks in which the sums of this node's ranges are delivered."""
        return summed_blocks(ranges, self._inter.size, self._sums.dtype, self._block)

    def _cached(self, ranges: Sequence[Range]) -> list[Range]:
        return blocks(ranges, len(self._total))


class PieceShare:
    """One exchange of pieces of an array: each node's final blocks go to all nodes while it computes the rest.

    Only `finish` waits, so elsewhere no node waits for a slower one.
    """

    def __init__(self, inter: Any, array: np.ndarray, pieces: Pieces, first: int = 0) -> None:
        """Start one; all nodes do, in the same order.

        Args:
            inter: the peers that own the same slice, by node.
            array: the elements, equal on all ranks of `inter` at the end.
            pieces: the ranges that each node sends.
            first: the number of the first element in `array`.
        """
        self._inter, self._array, self._first = inter, array, first
        self._kind = mpi_datatype(array.dtype)
        self._requests: list[Any] = []
        self._rounds = rounds_of(pieces, round_size(inter.size, array.dtype))
        self._next = 0
        self.ready(-1)

    def ready(self, high: int) -> None:
        """Send the elements below `high` of this node's piece, which must not change any more."""
        rank = self._inter.rank
        while self._next < len(self._rounds):
            block = self._rounds[self._next][rank]
            if block is not None and block[1] > high:
                return
            self._post(self._rounds[self._next])
            self._next += 1

    def _post(self, blocks_of: Sequence[Range | None]) -> None:
        inter, nodes = self._inter, self._inter.size
        for step in range(1, nodes):
            node = (inter.rank - step) % nodes
            block = blocks_of[node]
            if block is not None:
                self._receive(node, block)
        mine = blocks_of[inter.rank]
        if mine is not None:
            message = self._message(mine)
            for step in range(1, nodes):
                self._requests.append(inter.Isend(message, (inter.rank + step) % nodes, SHARED))

    def _receive(self, node: int, block: Range) -> None:
        """Start to receive a block of another node's piece."""
        self._requests.append(self._inter.Irecv(self._message(block), node, SHARED))

    def _message(self, block: Range) -> list[Any]:
        """Return the memory of a block as an MPI buffer."""
        return [self._array[block[0] - self._first : block[1] - self._first], self._kind]

    def finish(self) -> None:
        """Wait until all the others' pieces are received and this node's is sent."""
        wait(self._requests)
        self._requests = []

    def leave(self) -> None:
        """Keep the memory of pending messages alive after an error, until the process ends."""
        leave(self._requests)
