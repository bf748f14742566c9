"""Encoded exchanges between nodes: of changes of pieces, which each node adds to its copy, and of whole sums.

A node adds exactly what it sends of its own changes and defers the rest to the next exchange (see `wire`), so the bits stay equal
on all nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import numpy as np

from ..base.buffers import BufferPool
from ..base.partition import aligned_bounds, blocks
from ..base.types import ReduceOp
from ..comm.arrays import mpi_datatype
from .arithmetic import Arithmetic, arithmetic, combine
from .pieces import SHARED, Messages, NodeForm, Pieces, PieceShare, PieceSum, Range, leave
from .wire import Unsent, Wire, wire_named

__all__ = ["Encoded", "EncodedAllReduce", "EncodedMessages", "EncodedShare", "EncodedSums", "forms_of"]

_BYTES = np.dtype(np.uint8)


@final
class EncodedMessages(Messages):
    """The messages of a `PieceSum` of float32 numbers in an encoding."""

    def __init__(self, sums: np.ndarray, wire: Wire) -> None:
        """Serve the local sums of two rounds, by node."""
        rounds, nodes, size = sums.shape
        self._sums, self._wire, self.kind = sums, wire, mpi_datatype(_BYTES)
        self.sent, self.came = (np.empty((rounds, nodes, wire.nbytes(size)), _BYTES) for _ in range(2))

    def width(self, count: int) -> int:
        return self._wire.nbytes(count)

    def add(self, half: int, me: int, part: slice, how: Arithmetic, total: np.ndarray) -> None:
        where = slice(self.width(part.start), self.width(part.stop))
        for node, message in enumerate(self.came[half]):
            if node != me:
                self._wire.decode(message[where], total, add=node > 0)
            else:
                own = self._sums[half, node, part]
                combine(np.add, [total, own] if node else [own], total)


@functools.cache
def _messages_in(wire: Wire) -> Callable[[np.ndarray], Messages]:
    """Return the function that makes messages in an encoding, the same object for the same encoding."""
    return functools.partial(EncodedMessages, wire=wire)


class EncodedSums(NodeForm):
    """The form of sums in an encoding."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.messages = wire, _messages_in(wire)

    def encode(self, low: int, high: int, total: np.ndarray, message: np.ndarray, work: np.ndarray) -> None:
        self.wire.encode(total, message)


@final
class _FedBack(EncodedSums):
    """The form of the sums of one optimizer's gradients, with the error feedback of earlier ones; not in files."""

    def __init__(self, wire: Wire, unsent: Unsent) -> None:
        super().__init__(wire)
        self.unsent = unsent

    def encode(self, low: int, high: int, total: np.ndarray, message: np.ndarray, work: np.ndarray) -> None:
        self.wire.encode_sum(total, message, self.unsent.of(low, high), work)

    def applied(self, gradients: Any) -> Any:
        return gradients.in_form(self)

    def forget(self) -> None:
        self.unsent.array[...] = 0


@final
class Encoded(EncodedSums):
    """The form of an arena's numbers in an encoding. A weight plus its error feedback is the exact weight.

    Attributes:
        unsent: the error feedback of the weights that this rank updates, for all optimizers.
    """

    exact = False
    names = ("wire_residual",)

    def __init__(self, owned: Range, sliced: Range, wire: Wire) -> None:
        """Serve the weights that this rank updates, and sums of its slice."""
        super().__init__(wire)
        self.may_start_early = not wire.feeds_back  # a step's feedback is added to the next one's messages
        self.unsent, self._slice = Unsent(*owned), sliced

    def stored(self, low: int, high: int) -> dict[str, np.ndarray]:
        return {name: self.unsent.of(low, high) for name in self.names}

    def of_steps(self) -> NodeForm:
        return _FedBack(self.wire, Unsent(*self._slice)) if self.wire.feeds_back else self


def forms_of(name: str, dtype: np.dtype) -> Callable[[Range, Range], Encoded] | None:
    """Return what makes the forms of arenas of a dtype for a `StepOptions.wire`; None for numbers as they are."""
    wire = wire_named(name) if dtype == np.float32 else None
    return None if wire is None else functools.partial(Encoded, wire=wire)


@final
class EncodedShare(PieceShare):
    """One exchange of the changes of pieces of a float32 array, which each node adds to its copy."""

    def __init__(
        self,
        inter: Any,
        array: np.ndarray,
        pieces: Pieces,
        unsent: Unsent,
        wire: Wire,
        work: np.ndarray,
        pool: BufferPool,
    ) -> None:
        """Start one; all nodes do, in the same order.

        Args:
            inter, array, pieces: as for `PieceShare`; the elements are equal on all ranks of `inter` before, too.
            unsent: the changes of this node's piece, replaced by their error feedback.
            wire: the encoding.
            work: scratch memory: blocks of its size are encoded at a time, a multiple of 4,096 or at least a round.
            pool: memory for messages.
        """
        self._unsent, self._wire, self._work, self._pool = unsent, wire, work, pool
        self._coming: list[tuple[Any, Range, np.ndarray]] = []
        super().__init__(inter, array, pieces)

    def ready(self, high: int) -> None:
        """Send the changes below element `high` of this node's piece, and add those that have arrived."""
        super().ready(high)
        while self._coming and self._coming[0][0].Test():
            self._take(self._coming.pop(0))

    def _receive(self, node: int, block: Range) -> None:
        message = self._empty(block)
        self._coming.append((self._inter.Irecv([message, mpi_datatype(_BYTES)], node, SHARED), block, message))

    def _empty(self, block: Range) -> np.ndarray:
        return self._pool.empty(self._wire.nbytes(block[1] - block[0]), _BYTES)

    def _message(self, block: Range) -> list[Any]:
        message, low, nbytes = self._empty(block), block[0], self._wire.nbytes
        for begin, end in blocks([block], self._work.size):
            part = message[nbytes(begin - low) : nbytes(end - low)]
            self._wire.encode_change(self._array[begin:end], part, self._unsent.of(begin, end), self._work)
        return [message, mpi_datatype(_BYTES)]

    def _take(self, arrived: tuple[Any, Range, np.ndarray]) -> None:
        _, (low, high), message = arrived
        self._wire.decode(message, self._array[low:high], add=True)

    def finish(self) -> None:
        """Wait until the changes of all others are in the array and this node's are sent."""
        for arrived in self._coming:
            arrived[0].Wait()
            self._take(arrived)
        self._coming = []
        super().finish()

    def leave(self) -> None:
        """Keep the memory of pending messages alive after an error, until the process ends."""
        super().leave()
        leave([request for request, _, _ in self._coming])


@final
class EncodedAllReduce:
    """The sum of float32 arrays over nodes: each sums a piece, in node order, and uses the encoded sum that others get."""

    def __init__(self, inter: Any, wire: Wire, block: int) -> None:
        """Allocate.

        Args:
            inter: the peers that have the same slice, by node.
            wire: the encoding of sums.
            block: elements that are summed while in cache, a multiple of 4,096.
        """
        self._inter, self._form = inter, EncodedSums(wire)
        self._how = arithmetic(ReduceOp.SUM, np.dtype(np.float32), 1)
        self._pieces = PieceSum(inter, self._how.accumulate, block, self._form.messages)
        self._work = np.empty(block, np.float32)
        self._pool = BufferPool(kept=16)

    def sum(self, total: np.ndarray) -> None:
        """Replace a flat array of this node's sums by the sums over all nodes, bit-identical on all. Collective over `inter`."""
        pieces = [[bounds] for bounds in aligned_bounds(total.size, self._inter.size)]
        result = self._pool.empty(total.size, total.dtype)
        result[...] = 0
        unsent = Unsent(*pieces[self._inter.rank][0])
        share = EncodedShare(self._inter, result, pieces, unsent, self._form.wire, self._work, self._pool)

        def consume(low: int, high: int, block: np.ndarray) -> None:
            unsent.of(low, high)[...] = block
            share.ready(high)

        try:
            self._pieces.hand_out([total], pieces, self._how, consume, self._form)
            share.finish()
        except BaseException:
            share.leave()
            raise
        total[...] = result
