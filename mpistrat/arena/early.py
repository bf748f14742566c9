"""Sums of gradients that are computed before the step that uses them: a thread of each rank exchanges them between nodes.

Gradients that are final at the same time are adjacent, so a node's share of them is cut into equal parts for its ranks,
regardless of owners. Each sum goes into the node's shared memory, where its owner reads it in the step. The order of summation is
that of a step, so the bits are equal.
"""

from __future__ import annotations

import os
import queue
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from ..base.errors import ClosedError
from ..base.partition import aligned_bounds, blocks, cut, inside, merge, without
from ..base.types import ReduceOp
from ..base.waiting import Backoff
from ..comm.process_group import ProcessGroup
from .arena import Gradients
from .arithmetic import Arithmetic, arithmetic, combine
from .pieces import NodeForm, PieceSum, Range, wait
from .reduction import BLOCK, ArenaSum, Consume, of_node

__all__ = ["EarlyArenaSum", "EarlyMemory", "EarlySums", "threads_agree"]

_CEILING = 2e-4  # the most seconds that the thread sleeps between two checks for messages
_END = 5.0  # seconds that its end may take


def threads_agree(group: ProcessGroup) -> bool:
    """Return True if MPI was started with MPI_THREAD_MULTIPLE on all ranks. Collective, inside one."""
    from mpi4py import MPI

    return bool(group.agree(int(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)))


@final
class EarlyMemory:
    """The sums of one arena that this node owns, by owner; `memory[low:high]` are elements of one owner."""

    def __init__(self, pieces: Sequence[Range], arrays: Sequence[np.ndarray]) -> None:
        self.pieces, self._arrays = pieces, arrays
        self._lows = [low for low, _ in pieces]
        self.begun: list[Range] = []  # element ranges

    def of(self, low: int, high: int) -> np.ndarray:
        """Return the sums of elements that one rank owns."""
        owner = bisect_right(self._lows, low) - 1
        first = self._lows[owner]
        return self._arrays[owner][low - first : high - first]

    def __getitem__(self, where: slice) -> np.ndarray:
        return self.of(where.start, where.stop)

    def put(self, low: int, high: int, block: np.ndarray) -> None:
        self.of(low, high)[...] = block


class _Job(NamedTuple):
    """A sum for the thread: arrays, the pieces of each node, and the function that stores this node's sums."""

    arrays: Sequence[Any]  # array[low:high] are elements of the arena
    pieces: Sequence[Sequence[Range]]
    how: Arithmetic
    form: NodeForm
    put: Callable[[int, int, np.ndarray], None]
    done: threading.Event


@final
class EarlySums:
    """The early sums of a group's ranks, and the thread that exchanges them between nodes."""

    def __init__(self, group: ProcessGroup, block: int, threads: bool = True) -> None:
        """Allocate. Collective over all ranks.

        Args:
            group: the ranks.
            block: the number of elements that are summed in cache.
            threads: MPI was started with MPI_THREAD_MULTIPLE on all ranks; else `begin` sums at once.
        """
        self._group, self._block, self._threads = group, block, threads
        self._inter = None if group.inter is None else group.inter.Dup()  # steps use the other one
        self._memories: dict[str, EarlyMemory] = {}
        self._sums: dict[tuple[np.dtype, Any], PieceSum] = {}
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._last: _Job | None = None
        self._error: BaseException | None = None
        self._hurry = self._ending = False
        self._open = self._dropped = False  # since the last `wait`: sums were started; some were discarded
        self._thread: threading.Thread | None = None
        group.attach(self)

    def begin(self, arena: Any, arrays: Sequence[Any], ranges: Sequence[Range], how: Arithmetic) -> None:
        """Start to sum ranges of an arena whose gradients are final on all ranks of the node. Collective, inside one."""
        self._wait_for_dropped()
        self._open = True
        memory = self._memories.get(arena.key)
        if memory is None:
            memory = self._memories[arena.key] = self._allocate(arena, how.accumulate)
        memory.begun = merge([*memory.begun, *ranges])
        index, nodes = self._group.slice_index, arena.node_pieces()
        if index is None:
            return
        if not nodes:
            self._sum_whole(memory, arrays, ranges, how)
            return
        if self._inter is None:
            return
        by_node = [[part for piece in node for part in inside(ranges, *piece)] for node in nodes]
        parts = [aligned_bounds(sum(high - low for low, high in node), self._group.slices)[index] for node in by_node]
        pieces = [cut(node, *part) for node, part in zip(by_node, parts, strict=True)]
        job = _Job(arrays, pieces, how, arena.form, memory.put, threading.Event())
        if not self._threads:
            self._sum(job)
            return
        self._last = job
        self._jobs.put(job)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mpistrat-sums", daemon=True)
            self._thread.start()

    def _sum_whole(self, memory: EarlyMemory, arrays: Sequence[Any], ranges: Sequence[Range], how: Arithmetic) -> None:
        """Sum this rank's part over the node, for an arena that every node sums whole; `ArenaStep` sums it over nodes."""
        index, total = self._group.slice_index, sum(high - low for low, high in ranges)
        mine = cut(ranges, *aligned_bounds(total, self._group.slices)[index or 0])
        for piece in memory.pieces:
            for low, high in blocks(inside(mine, *piece), self._block):
                combine(how.ufunc, [array[low:high] for array in arrays], memory.of(low, high))

    def _allocate(self, arena: Any, dtype: np.dtype) -> EarlyMemory:
        node = self._group.node
        pieces = arena.by_owner()
        sizes = [(high - low) * dtype.itemsize for low, high in pieces]
        block = node.allocate([*sizes, *[0] * (node.size - len(sizes))], "the sums that Optimizer.begin starts")
        mine = node.rank
        populated = mine >= len(sizes) or block.populate(mine, 0, sizes[mine])
        node.agree_populated(populated, block.what)
        return EarlyMemory(pieces, [segment.view(dtype) for segment in block.segments[: len(sizes)]])

    def missing(self, arena: Any, ranges: Sequence[Range]) -> list[Range] | None:
        """Return the part of element ranges that was not started; None if nothing was."""
        memory = self._memories.get(arena.key)
        left = list(ranges) if memory is None else without(ranges, memory.begun)
        return None if left == list(ranges) else left

    def forget(self, key: str, ranges: Sequence[Range]) -> None:
        """Discard ranges of an arena: their sums were used, or never will be. Every rank calls it."""
        self._dropped = self._open
        memory = self._memories.get(key)
        if memory is not None:
            memory.begun = without(memory.begun, ranges)

    def memory(self, arena: Any) -> EarlyMemory:
        """Return the memory of an arena's sums; this rank may store its other sums there too. Collective, inside one."""
        self._wait_for_dropped()
        return self._memories[arena.key]

    def catch_up(self) -> None:
        """Wait until this rank's started sums are complete. Inside a collective.

        Raises:
            Exception: an error of the thread.
        """
        self._hurry = True
        try:
            if self._last is not None:
                self._last.done.wait()
            if self._error is not None:
                raise self._error
        finally:
            self._hurry = False

    def wait(self) -> None:
        """Wait until all started sums are complete on all ranks of the node. Collective, inside one.

        Raises:
            Exception: an error of the thread.
        """
        with self._group.collective("sums that Optimizer.begin has started", synchronize=False) as call:
            self.catch_up()
            self._group.node.barrier(call)
        self._open = self._dropped = False

    def _wait_for_dropped(self) -> None:
        """Wait for discarded sums in flight: they would overwrite others. Collective, inside one."""
        if self._dropped:
            self.wait()

    # the thread

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    self._sum(job)
            except BaseException as error:  # raised by `wait`
                self._error = error
            finally:
                job.done.set()
            del job  # referenced memory cannot be freed

    def _sum(self, job: _Job) -> None:
        key = job.how.accumulate, job.form.messages
        summed = self._sums.get(key)
        if summed is None:
            finish = self._finish if self._threads else wait
            summed = self._sums[key] = PieceSum(self._inter, key[0], self._block, key[1], finish)
        summed.hand_out(job.arrays, job.pieces, job.how, job.put, job.form)

    def _finish(self, requests: Sequence[Any]) -> None:
        """Wait for messages; leave the core to others until the program also waits for them."""
        backoff = Backoff(_CEILING)
        for request in requests:
            backoff.reset()
            while not request.Test():
                if self._ending:
                    raise ClosedError("the strategy was closed while sums that Optimizer.begin has started travelled")
                if self._hurry:
                    os.sched_yield()
                else:
                    backoff.pause()

    # the end, as an attachment of the group

    def close(self) -> None:
        """End the thread after its pending sums, and free this object's resources. Collective over the group."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_END)
            if self._thread.is_alive():  # ranks are no longer in step
                self.abandon()
        if self._inter is not None and self._error is None:
            self._inter.Free()
        self._memories.clear()
        self._last = None

    def leave(self) -> Callable[[], None] | None:
        """End the thread at the end of the program."""
        self.abandon()
        return None

    def abandon(self) -> None:
        """End the thread at once."""
        self._ending = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_END)


@final
class EarlyArenaSum:
    """The sums of an `ArenaSum`; of arenas with pieces, parts of them may start before the step."""

    def __init__(self, group: ProcessGroup, sums: ArenaSum) -> None:
        """Serve an `ArenaSum` of a group's ranks."""
        self._group, self._sums, self.reduce_in_place = group, sums, sums.reduce_in_place
        self._started: EarlySums | None = None

    def sum_owned(self, arena: Gradients, ranges: Sequence[Range], how: Arithmetic, consume: Consume) -> None:
        """Call consume(low, high, sum) for this rank's part of the ranges, in order. Collective over `group.inter`."""
        missing = None if self._started is None else self._started.missing(arena, ranges)
        if missing is None or self._started is None:
            self._sums.sum_owned(arena, ranges, how, consume)
            return
        memory = self._started.memory(arena)
        self._sums.sum_owned(arena, missing, how, memory.put)
        self._started.wait()
        if self._group.inter is not None:
            # In the same blocks as without early sums: a norm is a sum over blocks.
            for low, high in self._sums.pieces_of(how.accumulate, arena).consumed(arena.owned(ranges)):
                consume(low, high, memory.of(low, high))

    def begin(self, arena: Gradients, ranges: Sequence[Range]) -> None:
        """Start to sum ranges of an arena with pieces; the next `sum_owned` of them uses the sums.

        Collective, inside one; all ranks of the node have arrived.
        """
        if self._started is None:
            self._started = EarlySums(self._group, BLOCK)
        self._started.begin(arena, of_node(arena), ranges, arithmetic(ReduceOp.SUM, arena.dtype, 1))

    def forget(self, key: str, ranges: Sequence[Range]) -> None:
        """Discard the started sums of ranges of an arena. Every rank calls it."""
        if self._started is not None:
            self._started.forget(key, ranges)
