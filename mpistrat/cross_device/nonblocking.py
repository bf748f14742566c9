"""Nonblocking collectives: all ranks start them in one order, and wait for them in any; MPI moves the data in between.

A start is a collective call like others, whose form the ranks compare. What it posts goes over a communicator of its own, where
no other call of MPI is made, so it is matched by the order of the starts alone.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np

from ..arena.arithmetic import Arithmetic, arithmetic, combine, finish, flatten_all
from ..arena.pieces import leave
from ..base import log
from ..base.buffers import BufferPool
from ..base.errors import explain
from ..base.types import IndexedSlices, ReduceOp
from ..base.waiting import Backoff, Deadline, PeerWait, wait_until
from ..cluster.forks import ParentsOnly, refuse_in_children
from ..comm.arrays import (
    CHUNK_ELEMENTS,
    check_movable,
    is_gpu,
    mpi_datatype,
    mpi_op,
    to_host,
)
from ..comm.monitor.rank_monitor import user_line
from ..comm.packing import forms_of, num_bytes, of_bytes, to_bytes
from ..comm.process_group import ProcessGroup
from ..comm.recorder import RECORDER
from .flat import on_devices
from .values import Leaves, beside, call_of, check_root, local_arrays, local_values, reducible_values

__all__ = ["CollectiveRequest", "NonblockingCollectives"]

# MPI moves data only where it is asked, so a wait uses its core at first, as MPI's own calls do, and sleeps little after that.
_BUSY, _SLEEP = 1.0, 1e-4  # seconds
_AT_EXIT = 5.0  # seconds that the end of a program waits for what it has left
_CHUNK = 1 << 30  # bytes of one broadcast
_POOL = BufferPool(kept=2)
_REMEDY = "All ranks must have started it; MPI moves its data while they are in calls of MPI, such as done() and wait()"


@final
class CollectiveRequest:
    """A collective that was started, as by `Strategy.all_reduce_async` (MPI: MPI_Request; Horovod: a handle).

    Each rank waits for several in whichever order it likes. One that nobody waits for is completed when the strategy is closed at
    the latest, with a warning that names the line where it was started. Use it in the thread that started it.
    """

    owner: Any = None  # lives until this is complete: the process set

    def __init__(self, text: str, group: Any, requests: Sequence[Any], result: Callable[[], Any]) -> None:
        """Hold what was posted, and what makes the result when that is complete; the strategy's calls make it.

        `group` is the `ProcessGroup`, None where nothing was posted.
        """
        self._text, self._place = text, user_line(threading.get_ident())
        self._group, self._requests = group, list(requests)
        self._make: Callable[[], Any] | None = result
        self._result: Any = None
        self._told = False
        if self._requests:
            refuse_in_children(self)

    def refuse_in_child(self) -> None:
        """See `cluster.forks`."""
        if self._requests:
            self._requests = [ParentsOnly(f"the wait for {self._text}")]

    def done(self) -> bool:
        """Return whether it is complete: then `wait` returns at once.

        It is a call of MPI, too, which moves data: between two parts of a long computation it lets messages go on.
        """
        self._requests = [request for request in self._requests if not request.Test()]
        if self._requests:
            return False
        self.owner = None
        return True

    def wait(self) -> Any:
        """Return what the synchronous call would, when it is complete; again the same object.

        Raises:
            CollectiveTimeoutError: it takes longer than MPISTRAT_ABORT_AFTER.
            PeerExitError: a rank has left the program.
            ClosedError, RanksLostError: an earlier collective of the strategy has failed.
        """
        if self._requests:
            self._complete()
        if self._make is not None:
            self._result, self._make = self._make(), None
        return self._result

    def _complete(self) -> None:
        group, what = self._group, f"the wait for {self._text}"
        others = [rank for rank in range(group.topology.size) if rank != group.topology.rank]
        wait = PeerWait(group, what, others, remedy=_REMEDY, backoff=Backoff(_SLEEP, yields=0))
        busy = Deadline(_BUSY)
        with RECORDER.span("c", f"wait of {self._text.partition(' ')[0]}"):
            while not self.done():
                group.monitor.refuse(what)
                if busy.passed:
                    wait.pause()
                else:
                    os.sched_yield()

    def keep_memory(self) -> None:
        """Keep the memory of what is under way for as long as the process lives."""
        leave(self._requests)

    def tell_unwanted(self) -> bool:
        """Return whether nobody has waited for it, and log that, once."""
        if self._make is None:
            return False
        if not self._told:
            self._told = True
            log.logger.warning("%s, started at %s, was never waited for", self._text, self._place)
        return True

    def __del__(self) -> None:
        if self._group is not None and self._group.monitor.refusal is None and not sys.is_finalizing():
            self.tell_unwanted()

    def __repr__(self) -> str:
        return f"<CollectiveRequest of {self._text}, started at {self._place}>"


@final
class NonblockingCollectives:
    """What the ranks of a group have started, on a communicator of its own, until it is complete."""

    def __init__(self, group: ProcessGroup) -> None:
        """Be closed with a group. The same on every rank: the first start makes it."""
        self._group = group
        self._comm: Any = None
        self._pending: list[CollectiveRequest] = []  # MPI works in their memory
        self._known: weakref.WeakSet[CollectiveRequest] = weakref.WeakSet()
        group.attach(self)

    def all_reduce(self, op: ReduceOp, leaves: Leaves, pack: Callable[[list[Any]], Any]) -> CollectiveRequest:
        """Start the reduction of values over all replicas; those that are combined in one dtype are one message. Collective.

        Args:
            op: the reduction.
            leaves: the values.
            pack: returns the result, made of the leaves' results.

        Raises:
            Exception: see `Strategy.all_reduce_async`.
        """
        group, function = self._group, leaves.function
        values = [_arrays(value, group, op, function) for value in leaves.values]
        hows = [arithmetic(op, arrays[0].dtype, group.topology.num_replicas, function) for arrays in values]
        for how in hows:
            _check_extremes(how, function)
        requests: list[Any] = []
        parts: list[Any] = [None] * len(values)
        with group.collective(function, leaves.name, *call_of([arrays[0] for arrays in values], op.value)) as call:
            for dtype in dict.fromkeys(how.accumulate for how in hows):
                members = [index for index, how in enumerate(hows) if how.accumulate == dtype]
                total, low = _POOL.empty(sum(values[index][0].size for index in members), dtype), 0
                for index in members:
                    high = low + values[index][0].size
                    part = parts[index] = total[low:high]
                    combine(hows[index].ufunc, flatten_all([to_host(array) for array in values[index]]), part)
                    low = high
                requests += self._post_all_reduce(_sortable(total, hows[members[0]]), hows[members[0]])

        def result() -> Any:
            return pack([_finished(*each) for each in zip(parts, hows, values, strict=True)])

        return self._note(CollectiveRequest(call.text, group, requests, result))

    def _post_all_reduce(self, total: np.ndarray, how: Arithmetic) -> list[Any]:
        """Post the reduction of a flat array in place."""
        comm = self._own_comm()
        if comm is None:
            return []
        from mpi4py import MPI

        datatype, op = mpi_datatype(total.dtype), mpi_op(how.ufunc, total.dtype.kind)
        chunks = [total[low : low + CHUNK_ELEMENTS] for low in range(0, total.size, CHUNK_ELEMENTS)]
        return [comm.Iallreduce(MPI.IN_PLACE, [chunk, datatype], op) for chunk in chunks]

    def broadcast(self, root: int, leaves: Leaves, pack: Callable[[list[Any]], Any]) -> CollectiveRequest:
        """Start to send all ranks the arrays of replica `root`, in one message. Collective. See `all_reduce`.

        Raises:
            Exception: see `Strategy.broadcast_async`.
        """
        group, function = self._group, leaves.function
        check_root(root, group, function)
        values = [local_arrays(local_values(value, group, function), function) for value in leaves.values]
        forms = forms_of([arrays[0] for arrays in values])
        for _, dtype in forms:
            check_movable(dtype, function)
        rank, index = group.topology.rank_of_replica(root)
        requests: list[Any] = []
        with group.collective(
            function, leaves.name, *call_of([arrays[0] for arrays in values], f"root {root}")
        ) as call:
            packed = np.empty(num_bytes(forms), np.uint8)
            if rank == group.topology.rank:
                packed[:] = to_bytes([to_host(arrays[index]) for arrays in values])
            comm = self._own_comm()
            if comm is not None:
                from mpi4py import MPI

                chunks = [packed[low : low + _CHUNK] for low in range(0, packed.size, _CHUNK)]
                requests = [comm.Ibcast([chunk, MPI.BYTE], rank) for chunk in chunks]

        def result() -> Any:
            return pack(
                [beside(found, arrays[0]) for found, arrays in zip(of_bytes(packed, forms), values, strict=True)]
            )

        return self._note(CollectiveRequest(call.text, group, requests, result))

    def _own_comm(self) -> Any:
        """The communicator of what is posted, made by the first start. Collective that time, inside a collective."""
        if self._comm is None and self._group.topology.size > 1:
            self._comm = self._group.topology.comm.Dup()
        return self._comm

    def _note(self, request: CollectiveRequest) -> CollectiveRequest:
        self._known.add(request)
        self._pending.append(request)
        self._pending = [each for each in self._pending if not each.done()]
        return request

    # its end

    def close(self) -> None:
        """Complete what was never waited for, with a warning, and free the communicator. Collective over the group."""
        for request in self._unwanted():
            request.wait()
        self._pending = []
        if self._comm is not None:
            self._comm.Free()
            self._comm = None

    def leave(self) -> Callable[[], None] | None:
        """Return what completes, before MPI ends, what was never waited for, with a warning."""
        if self._group.monitor.refusal is not None:
            self.abandon()
            return None
        left = self._unwanted()

        def complete() -> None:
            wait_until(lambda: all([request.done() for request in left]), _AT_EXIT)  # noqa: C419 each of them is asked

        return complete if left else None

    def abandon(self) -> None:
        """Forget what was started: ranks were lost. MPI may still write into its memory, which stays."""
        for request in list(self._known):
            request.keep_memory()
        self._pending = []

    def _unwanted(self) -> list[CollectiveRequest]:
        """What nobody has waited for, which is told."""
        return [request for request in list(self._known) if request.tell_unwanted()]


def _arrays(value: Any, group: ProcessGroup, op: ReduceOp, function: str) -> list[Any]:
    values = reducible_values(value, group, op, function)
    if any(isinstance(each, IndexedSlices) for each in values):
        remedy = "Pass to_dense() of them, or use the call that waits"
        raise TypeError(explain(function, "value", expected="arrays", got="IndexedSlices", remedy=remedy))
    return local_arrays(values, function)


def _finished(total: np.ndarray, how: Arithmetic, arrays: Sequence[Any]) -> Any:
    """The result of a leaf, from what MPI has made of its part, where its values lie."""
    _unsorted(total, how)
    result = finish(total, how).reshape(arrays[0].shape)
    return on_devices(result, arrays) if is_gpu(arrays[0]) else result


# MIN and MAX of floats. MPI's own make of NaN whatever the order of the operands gives, and an operation in Python would run in
# whichever thread is in MPI. So what travels are whole numbers in the same order, with NaN at the end that wins.


def _is_of_floats(how: Arithmetic) -> bool:
    return how.ufunc in (np.minimum, np.maximum) and how.accumulate.kind == "f"


def _check_extremes(how: Arithmetic, function: str) -> None:
    if _is_of_floats(how) and how.accumulate.itemsize > 8:
        remedy = "Use the call that waits, or pass float64"
        expected = "floats of at most 64 bits for MIN and MAX"
        raise TypeError(explain(function, "value", expected=expected, got=str(how.accumulate), remedy=remedy))


def _sortable(total: np.ndarray, how: Arithmetic) -> np.ndarray:
    """Return what MPI reduces of a flat array: itself, or the same memory as whole numbers, in place."""
    if not _is_of_floats(how):
        return total
    nan = np.isnan(total)
    bits = _reordered(total)
    limits = np.iinfo(bits.dtype)
    bits[nan] = limits.min if how.ufunc is np.minimum else limits.max
    return bits


def _unsorted(total: np.ndarray, how: Arithmetic) -> None:
    """Turn whole numbers into the floats that they were, in place."""
    if _is_of_floats(how):
        _reordered(total)


def _reordered(total: np.ndarray) -> np.ndarray:
    """Return the bits of floats as signed integers of the same order, in place; again, and they are the floats' bits."""
    bits = total.view(f"i{total.itemsize}")
    bits ^= (bits >> (8 * total.itemsize - 1)) & np.iinfo(bits.dtype).max
    return bits
