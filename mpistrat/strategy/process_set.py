"""A process set: some of the ranks of a strategy, with their own collectives."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..base.agree import same, together
from ..base.errors import CollectiveMismatchError, ContextError, by_rank, explain
from ..base.masks import plain_array
from ..base.options import CommunicationOptions
from ..base.text import named
from ..base.types import ReduceOp
from ..cluster.forks import is_child
from ..comm.dropped import collect_cycles, dropped_by_all
from ..comm.process_group import ProcessGroup
from ..cross_device.collectives import Collectives
from .contexts import require_one_call
from .old_calls import formerly

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..cross_device.nonblocking import CollectiveRequest

__all__ = ["ProcessSet", "ProcessSets", "make_process_set"]

_SHOWN = 8  # ranks of a set in errors


@final
class _Inner:
    """The parts of a set on a rank, without the program's object.

    Attributes:
        group: the set's ranks, or this rank alone if it is outside.
        collectives: theirs.
        kept: whether the program may use the communicator without the set.
        forgotten: whether this rank has no reference to the set left.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group, self.collectives = group, Collectives(group, "ProcessSet")
        self.kept = self.forgotten = False

    def close(self) -> None:
        """Free communicators and memory. Collective over the set."""
        if not (self.group.closed or is_child()):
            self.collectives.close()
            self.group.close()
            self.group.topology.close()

    @property
    def unused(self) -> bool:
        """True if this rank does not use it any more."""
        return self.group.closed or (self.forgotten and not self.kept)


@final
class ProcessSets:
    """The existing sets over the ranks of a strategy.

    Freeing a communicator is collective, and Python collects a set at different times on each rank. So the sets without
    references on all ranks are freed when the next one is created, in which all ranks take part. (Horovod frees a set by
    `remove_process_set` only.)
    """

    def __init__(self, group: ProcessGroup) -> None:
        """Attach to the strategy's ranks, which close it. The same on every rank: the first set creates it."""
        self._group = group
        self._inner: dict[int, _Inner] = {}  # by number, in the order of creation
        self._count = 0
        group.attach(self)

    def make(self, strategy: Any, ranks: tuple[int, ...], group: ProcessGroup) -> ProcessSet:
        """Return a new set over a group of this rank's. Collective over all ranks."""
        inner = self._inner[self._count] = _Inner(group)
        self._count += 1
        made = ProcessSet(strategy, ranks, inner)
        weakref.finalize(made, setattr, inner, "forgotten", True).atexit = False
        return made

    def free_forgotten(self) -> None:
        """Free the sets that no rank uses any more. Collective over all ranks."""
        collect_cycles(len(self._inner))
        mine = [number for number, inner in self._inner.items() if inner.unused]
        for number in dropped_by_all(partial(self._group.exchange, "process_set"), mine):
            self._inner.pop(number).close()

    def close(self) -> None:
        """Free all sets, the last one first. Collective; the strategy's ranks call it."""
        for inner in reversed(self._inner.values()):
            inner.close()
        self._inner.clear()

    def leave(self) -> None:
        """Do nothing: the sets' groups report their own end."""

    def abandon(self) -> None:
        """Do nothing: the sets' groups are abandoned separately."""


@final
class ProcessSet:
    """Some of the ranks of a strategy (Horovod: ProcessSet). `Strategy.process_set` creates it.

    All ranks of the set call each of its collectives, the same number of times and in the same order; other ranks do not take
    part. Each rank passes one value, independent of its replicas. Call them outside of steps, or in steps of ranks with one
    replica. Errors name the set, and number its ranks from 0.

    Attributes:
        ranks: the strategy's ranks that are in it, in order.
    """

    def __init__(self, strategy: Any, ranks: tuple[int, ...], inner: _Inner) -> None:
        """Store this rank's parts. `Strategy.process_set` calls it."""
        self.ranks = ranks
        self._strategy, self._inner, self._group = strategy, inner, inner.group
        self._collectives = inner.collectives
        self._strategy_rank = strategy.rank

    @property
    def included(self) -> bool:
        """True if this rank is in it."""
        return self._strategy_rank in self.ranks

    @property
    def size(self) -> int:
        """The number of ranks in it."""
        return len(self.ranks)

    @property
    def rank(self) -> int | None:
        """This rank's number in the set, from 0; None outside."""
        return self.ranks.index(self._strategy_rank) if self.included else None

    @property
    def comm(self) -> MPI.Intracomm | None:
        """Its communicator, a duplicate for the program's own messages; None outside, and for a set of one rank.

        It is valid until the set or the strategy is closed.
        """
        self._inner.kept = True
        return self._group.comm if self.included and self.size > 1 else None

    def all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Return the sum, or another reduction, of the ranks' values. Collective over the set. See `ReplicaContext.all_reduce`.

        Raises:
            ContextError: outside of the set, or in a step of a rank with several replicas. So do all that follow.
        """
        return self._made("all_reduce").all_reduce(reduce_op, value, options=options)

    def all_reduce_async(self, reduce_op: ReduceOp | str, value: Any) -> CollectiveRequest:
        """Start an `all_reduce`, and return its request. Collective over the set. See `Strategy.all_reduce_async`."""
        return self._keeping(self._made("all_reduce_async").all_reduce_async(reduce_op, value))

    def all_gather(self, value: Any, axis: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the ranks' arrays concatenated along an axis. Collective over the set. See `ReplicaContext.all_gather`."""
        return self._made("all_gather").all_gather(value, axis=axis, options=options)

    @formerly()
    def reduce_scatter(
        self, reduce_op: ReduceOp | str, value: Any, *, axis: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Return this rank's part of a reduction. Collective over the set. See `ReplicaContext.reduce_scatter`."""
        return self._made("reduce_scatter").reduce_scatter(reduce_op, value, axis=axis, options=options)

    @formerly()
    def all_to_all(self, value: Any, *, splits: Any = None, axis: int = 0) -> Any:
        """Return the values that all ranks sent to this one. Collective over the set. See `ReplicaContext.all_to_all`."""
        made = self._made("all_to_all")
        given = None if splits is None else plain_array(splits, "ProcessSet.all_to_all", "splits")
        result = made.all_to_all(value, splits=given, axis=axis)
        return result[0] if splits is None else result

    @formerly()
    def broadcast(self, value: Any, *, root: int = 0) -> Any:
        """Return one rank's array, or nest of arrays, on all. Collective over the set. See `ReplicaContext.broadcast`.

        Args:
            value: of the same shapes and dtypes on every rank.
            root: a rank of the strategy that is in the set.

        Raises:
            ValueError: the root is not in the set.
        """
        return self._made("broadcast").broadcast(value, root=self._number(root, "broadcast"))

    @formerly()
    def broadcast_async(self, value: Any, *, root: int = 0) -> CollectiveRequest:
        """Start a `broadcast`, and return its request. Collective over the set. See `Strategy.broadcast_async`.

        Raises:
            ValueError: the root is not in the set.
        """
        made = self._made("broadcast_async")
        return self._keeping(made.broadcast_async(value, root=self._number(root, "broadcast_async")))

    def broadcast_object(self, obj: Any = None, *, root: int = 0) -> Any:
        """Return one rank's Python object on all. Collective over the set. See `Strategy.broadcast_object`.

        Args:
            obj: used on the root only.
            root: a rank of the strategy that is in the set.

        Raises:
            ValueError: the root is not in the set.
        """
        return self._made("broadcast_object").broadcast_object(obj, root=self._number(root, "broadcast_object"))

    def all_gather_object(self, obj: Any = None) -> list[Any]:
        """Return every rank's Python object. Collective over the set. See `Strategy.all_gather_object`."""
        return self._made("all_gather_object").all_gather_object(obj)

    def barrier(self, timeout: float | None = None, name: str | None = None) -> None:
        """Wait until every rank of the set is here. Collective over the set. See `Strategy.barrier`."""
        self._made("barrier").barrier(timeout, name)

    def _made(self, function: str) -> Collectives:
        """Return the collectives of the set, if this rank may call one.

        Raises:
            ContextError: outside of the set, or in a step of a rank with several replicas.
        """
        function = f"ProcessSet.{function}"
        if not self.included:
            expected, got = f"a call by {named('rank', self.ranks, most=_SHOWN)}", "one outside of the set"
            raise ContextError(explain(function, "", expected=expected, got=got, rank=self._strategy_rank))
        require_one_call(self._strategy, function)
        return self._collectives

    def _keeping(self, request: CollectiveRequest) -> CollectiveRequest:
        request.owner = self  # keeps the set until it is complete
        return request

    def _number(self, root: int, function: str) -> int:
        if root not in self.ranks:
            expected = f"one of {named('rank', self.ranks, most=_SHOWN)}"
            raise ValueError(explain(f"ProcessSet.{function}", "root", expected=expected, got=repr(root)))
        return self.ranks.index(root)

    # lifetime

    def close(self) -> None:
        """Free its communicators and its memory before the strategy does. Collective over the set."""
        self._inner.close()

    def __repr__(self) -> str:
        return f"<ProcessSet of {named('rank', self.ranks, most=_SHOWN)}>"


def make_process_set(strategy: Any, ranks: Sequence[int]) -> ProcessSet:
    """Return a new set. Collective over all ranks. See `Strategy.process_set`."""
    group = strategy.extended.process_group
    rank = group.topology.rank
    with together(partial(group.exchange, "process_set")):
        found = _checked(ranks, group.topology.size)
    same(partial(group.exchange, "process_set"), named("rank", found), _different_ranks)
    members = found if rank in found else (rank,)
    label = f"process set of {named('rank', found, most=_SHOWN)}"
    one = group.topology.devices[:1]  # one value per rank, independent of its replicas
    sets = strategy.extended.process_sets
    sets.free_forgotten()
    return sets.make(strategy, found, group.subgroup(members, "Strategy.process_set", label, one))


def _checked(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    given = list(ranks)
    whole = all(isinstance(rank, (int, np.integer)) and 0 <= rank < size for rank in given)
    if not given or not whole or len(set(given)) < len(given):
        expected = f"different ranks from 0 to {size - 1}, at least one"
        raise ValueError(explain("Strategy.process_set", "ranks", expected=expected, got=repr(given)))
    return tuple(sorted(int(rank) for rank in given))


def _different_ranks(texts: dict[int, str]) -> CollectiveMismatchError:
    return CollectiveMismatchError(f"Strategy.process_set: expected the same ranks on all, got {by_rank(texts)}")
