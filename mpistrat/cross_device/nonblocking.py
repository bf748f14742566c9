"""Nonblocking collectives: all ranks start them in one order, and wait for them in any; meanwhile MPI sends the data.

A start is a collective call like others, whose form the ranks compare. Its messages use a separate communicator without other
calls, so they are matched by the order of the starts.
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

# MPI sends data only during calls, so a wait first spins, as MPI's own calls do, and then sleeps briefly.
_BUSY, _SLEEP = 1.0, 1e-4  # seconds
_AT_EXIT = 5.0  # seconds that the end of a program waits for pending collectives
_CHUNK = 1 << 30  # bytes of one broadcast
_POOL = BufferPool(kept=2)
_REMEDY = "All ranks must have started it; MPI moves its data while they are in calls of MPI, such as done() and wait()"


@final
class CollectiveRequest:
    """A started collective, as by `Strategy.all_reduce_async` (MPI: MPI_Request; Horovod: a handle).

    Each rank may wait for several in any order. Closing the strategy completes the ones without a wait, with a warning that names
    the line that started them. Use it in the thread that started it.
    """

    owner: Any = None  # the process set, kept alive until this is complete

    def __init__(self, text: str, group: Any, requests: Sequence[Any], result: Callable[[], Any]) -> None:
        """Store the posted requests, and the function that returns the result; the strategy's calls create it.

        `group` is the `ProcessGroup`, None without requests.
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
        """Return True if it is complete: then `wait` returns at once.

        It also calls MPI, which sends data: call it between parts of a long computation to make progress.
        """
        self._requests = [request for request in self._requests if not request.Test()]
        if self._requests:
            return False
        self.owner = None
        return True

    def wait(self) -> Any:
        """Return the result of the synchronous call, once complete; a repeated call returns the same object.

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
        """Keep the memory of pending messages alive until the process ends."""
        leave(self._requests)

    def tell_unwanted(self) -> bool:
        """Return True if the program never waited for it, and log that, once."""
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
    """The pending collectives of a group, on a separate communicator."""

    def __init__(self, group: ProcessGroup) -> None:
        """Attach to a group, which closes it. Equal on every rank: the first start creates it."""
        self._group = group
        self._comm: Any = None
        self._pending: list[CollectiveRequest] = []  # MPI accesses their memory
        self._known: weakref.WeakSet[CollectiveRequest] = weakref.WeakSet()
        group.attach(self)

    def all_reduce(self, op: ReduceOp, leaves: Leaves, pack: Callable[[list[Any]], Any]) -> CollectiveRequest:
        """Start the reduction of values over all replicas; values with one accumulation dtype share one message. Collective.

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
        """Start to broadcast the arrays of replica `root`, in one message. Collective. See `all_reduce`.

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
        """Return the separate communicator, created by the first start. Collective that time, inside a collective."""
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
        """Complete collectives without a wait, with a warning, and free the communicator. Collective over the group."""
        for request in self._unwanted():
            request.wait()
        self._pending = []
        if self._comm is not None:
            self._comm.Free()
            self._comm = None

    def leave(self) -> Callable[[], None] | None:
        """Return a function that completes, before MPI ends, collectives without a wait, with a warning."""
        if self._group.monitor.refusal is not None:
            self.abandon()
            return None
        left = self._unwanted()

        def complete() -> None:
            wait_until(lambda: all([request.done() for request in left]), _AT_EXIT)  # noqa: C419 check each of them

        return complete if left else None

    def abandon(self) -> None:
        """Discard pending collectives, because ranks were lost. MPI may still write into their memory, which stays."""
        for request in list(self._known):
            request.keep_memory()
        self._pending = []

    def _unwanted(self) -> list[CollectiveRequest]:
        """Return the collectives that the program never waited for, and log them."""
        return [request for request in list(self._known) if request.tell_unwanted()]


def _arrays(value: Any, group: ProcessGroup, op: ReduceOp, function: str) -> list[Any]:
    values = reducible_values(value, group, op, function)
    if any(isinstance(each, IndexedSlices) for each in values):
        remedy = "Pass to_dense() of them, or use the synchronous call"
        raise TypeError(explain(function, "value", expected="arrays", got="IndexedSlices", remedy=remedy))
    return local_arrays(values, function)


def _finished(total: np.ndarray, how: Arithmetic, arrays: Sequence[Any]) -> Any:
    """Return the result of a leaf, from MPI's total of its part, on the device of its values."""
    _unsorted(total, how)
    result = finish(total, how).reshape(arrays[0].shape)
    return on_devices(result, arrays) if is_gpu(arrays[0]) else result


# MIN and MAX of floats. MPI's result with NaN depends on the order of the operands, and an operation in Python would
# run in any thread that is in MPI. So they are sent as integers of the same order, with NaN at the winning end.


def _is_of_floats(how: Arithmetic) -> bool:
    return how.ufunc in (np.minimum, np.maximum) and how.accumulate.kind == "f"


def _check_extremes(how: Arithmetic, function: str) -> None:
    if _is_of_floats(how) and how.accumulate.itemsize > 8:
        remedy = "Use the synchronous call, or pass float64"
        expected = "floats of at most 64 bits for MIN and MAX"
        raise TypeError(explain(function, "value", expected=expected, got=str(how.accumulate), remedy=remedy))


def _sortable(total: np.ndarray, how: Arithmetic) -> np.ndarray:
    """Return a flat array for MPI's reduction: itself, or the same memory as integers, in place."""
    if not _is_of_floats(how):
        return total
    nan = np.isnan(total)
    bits = _reordered(total)
    limits = np.iinfo(bits.dtype)
    bits[nan] = limits.min if how.ufunc is np.minimum else limits.max
    return bits


def _unsorted(total: np.ndarray, how: Arithmetic) -> None:
    """Convert integers back to floats, in place."""
    if _is_of_floats(how):
        _reordered(total)


def _reordered(total: np.ndarray) -> np.ndarray:
    """Return the bits of floats as signed integers of the same order, in place; a second call restores the bits."""
    bits = total.view(f"i{total.itemsize}")
    bits ^= (bits >> (8 * total.itemsize - 1)) & np.iinfo(bits.dtype).max
    return bits
