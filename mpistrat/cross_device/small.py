"""Small arrays of the ranks of one node: reductions, parts and broadcasts in the barrier that compares the call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np

from ..arena.arithmetic import Arithmetic, combine, finish, flatten_all
from ..comm.arrays import is_movable, to_host
from ..comm.call import Call
from ..comm.exchange import SmallExchange
from ..comm.node import SMALL
from ..comm.packing import Forms, num_bytes, of_bytes, to_bytes
from ..comm.process_group import ProcessGroup

__all__ = ["SmallReduction", "small_broadcast"]


@final
class SmallReduction:
    """The reduction of arrays of one form, one of each rank of a node, or of a part of them.

    Args:
        group: the ranks.
        shape: of the arrays.
        how: the reduction.
        part: slices of the part that this rank needs.

    Attributes:
        shape, dtype: of the result.
    """

    def __init__(self, group: ProcessGroup, shape: tuple[int, ...], how: Arithmetic, part: Any = ...) -> None:
        exchange, self._node = SmallExchange(group.node), group.node
        self._how, self._ufunc = how, how.ufunc
        self._rounded = how.divisor != 1 or how.accumulate != how.result
        self._place = exchange.place(shape, how.accumulate)
        halves = exchange.views(shape, how.accumulate)
        self._parts = [[half[rank, ...][part] for rank in range(group.node.size)] for half in halves]
        self.shape, self.dtype = self._parts[0][0].shape, how.result

    def __call__(self, array: np.ndarray, call: Call) -> np.ndarray:
        """Return the reduction, a new array. Collective on the node. The barrier compares `call`."""
        node = self._node
        turn = ~node.barriers & 1
        self._place[turn][...] = array
        node.barrier(call)
        parts = self._parts[turn]
        if len(parts) == 2:
            total = np.asarray(self._ufunc(parts[0], parts[1]))
        else:
            total = np.empty(self.shape, self._how.accumulate)
            combine(self._ufunc, flatten_all(parts), total.reshape(-1))
        return finish(total, self._how) if self._rounded else total


@final
class SmallBroadcast:
    """The broadcast of arrays of known forms from one replica to all ranks of a node.

    Args:
        group: the ranks.
        forms: of the arrays.
        root: the replica.
    """

    def __init__(self, group: ProcessGroup, forms: Forms, root: int) -> None:
        self._exchange, nbytes = SmallExchange(group.node), num_bytes(forms)
        rank, self._index = group.topology.rank_of_replica(root)
        self._place = None
        if rank == group.topology.rank:
            one = forms[0] if len(forms) == 1 else ((nbytes,), np.dtype(np.uint8))
            self._place = self._exchange.place(*one)
        self._parts = [of_bytes(self._exchange.data(turn, rank, nbytes), forms) for turn in (0, 1)]

    def __call__(self, array: np.ndarray, call: Call) -> np.ndarray:
        """Return the root's array of a single value, given the local replica's. Collective, inside one."""
        self._exchange.move(call, self._place, array)
        return self._parts[self._exchange.turn][0].copy()

    def broadcast(self, leaves: Sequence[Sequence[Any]], call: Call) -> list[np.ndarray]:
        """Return the root's array of each value, given the local replicas'. Collective, inside one."""
        data = None
        if self._place is not None:
            hosts = [to_host(values[self._index]) for values in leaves]
            data = hosts[0] if len(hosts) == 1 else to_bytes(hosts)
        self._exchange.move(call, self._place, data)
        return [part.copy() for part in self._parts[self._exchange.turn]]


def small_broadcast(group: ProcessGroup, arrays: Sequence[Any], root: int) -> SmallBroadcast | None:
    """Return the broadcast of small arrays on one node, of forms that the call compares; None for others."""
    forms = [(array.shape, array.dtype) for array in arrays]
    if not group.num_nodes == 1 < group.topology.size or num_bytes(forms) > SMALL:
        return None
    if not all(is_movable(dtype) for _, dtype in forms):  # raises an error later, after the ranks have compared
        return None
    return SmallBroadcast(group, forms, root)
