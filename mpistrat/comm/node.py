"""Node group: barrier and shared memory of the ranks of one node, with staging buffers for small messages.

The barrier is an array of flags in shared memory. Rank r counts the barriers it has reached in its own flag and waits until every
other flag has reached that count. Next to the flag are two tag words, used alternately: a rank may be one barrier ahead of
another, never two, so a tag is not overwritten until every rank has compared it. `loops.meet` is `Node._meet` in C, on the same
memory; long waits and errors are handled here for both.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any, final

import numpy as np

from ..base import loops
from ..base.agree import first_rank, mismatch
from ..base.errors import ClosedError, CollectiveTimeoutError, PeerExitError
from ..base.text import binary_size, named
from ..base.waiting import Backoff, Deadline
from . import shared_memory
from .call import TEXT_BYTES, Call
from .draws import Draws
from .monitor.board import BOARD_BYTES
from .monitor.rank_monitor import ALL, RankMonitor, no_more_use
from .recorder import RECORDER
from .shared_memory import SharedBlock
from .window import Fence

__all__ = ["SMALL", "STAGING_BYTES", "Node"]

STAGING_BYTES = 1 << 20  # for each rank, twice
SMALL = 1 << 16  # bytes of a rank that are exchanged in the barrier that compares the call
FLAG_RANKS = 16  # with more ranks MPI's own barrier is faster than polling every flag

# The control page of a rank, in words of 8 bytes: barriers it has reached, two tags, its state, and its request.
_PAGE = 4096
_SEQUENCE, _TAG, _STATE, _REQUEST = 0, 1, 3, 4
_TEXT = (64, 64 + TEXT_BYTES + 2)  # bytes; the texts of the tags
_BOARD = _PAGE - BOARD_BYTES  # byte; the watchdogs' data
_HERE, _LEFT, _GAVE_UP, _REFUSES = 0, 1, 2, 3  # states; added to _LEFT, times _STATES, is the exit status
_STATES = 4
_POISON = -1  # the tag of a rank that gave up: no call has it

_SPIN, _YIELDS = 2000, 1500  # ns of spinning, then number of yields: about 1 ms
_FEW_YIELDS = 20  # if ranks share cores, where long yielding takes time from a rank that has not arrived
_DIFFERENT, _LATE = -1, -2  # results of `_meet`
_START, _GROWTH = 5e-5, 1.01  # seconds of the first sleep; the end of a wait of 50 ms is noticed within half a ms


@final
class Node:
    """The ranks of this node that share memory with this one. `ProcessGroup` creates it.

    Attributes:
        rank, size: among these ranks; 0 and 1 if memory is private.
        ranks: their numbers in the whole group.
        draws: this rank's draws from its datasets.
        shared: True if memory is shared with other ranks, if there are any.
        barriers: number of barriers so far.
        halves: the staging buffers of even barriers, and of odd ones; see `staging`.
    """

    def __init__(
        self,
        monitor: RankMonitor,
        comm: Any = None,
        world: Any = None,
        ranks: Sequence[int] = (0,),
        cores: int | None = None,
    ) -> None:
        """Set up control pages and staging buffers. Collective over `world`; not collective without it.

        Without `comm`, the ranks of this node, all memory is private; `ranks` are their numbers in `world`. With fewer `cores`
        than ranks, a waiting rank sleeps early.
        """
        self.ranks, self.size = tuple(ranks), len(ranks)
        self.rank = 0 if comm is None else int(comm.rank)
        self.shared = self.size > 1
        self._crowded = cores is not None and cores < self.size
        self._monitor, self._comm, self._world = monitor, comm, world
        self._blocks: list[SharedBlock] = []
        self._starts: list[int] = []
        self._segments: list[tuple[int, SharedBlock, int]] = []
        self.barriers = 0
        self.draws = Draws()
        self._laid: list[bytes | None] = [None, None]
        self._plain = Call("barrier of the node", monitor.default_timeout)
        self._control: SharedBlock | None = None
        if self.shared:
            self._open_control()
        elif world is not None and world.size > 1:  # other nodes share memory, and check theirs
            shared_memory.check_others(world, "the ranks' flags")
        self.halves = self._open_staging()

    def _open_control(self) -> None:
        sizes = [self.size * _PAGE] + [0] * (self.size - 1)
        self._control = control = shared_memory.allocate_shared(self._comm, self._world, sizes, "the ranks' flags")
        self._fence = Fence()
        self._sync = self._fence.sync
        memory: Any = control.segments[0]
        self._bytes = memoryview(memory)
        self._flags = self._bytes.cast("q")
        words = _PAGE // 8
        self._own = self.rank * words
        self._others = [rank * words for rank in range(self.size) if rank != self.rank]
        self._other_tags = [[i + _TAG + half for i in self._others] for half in (0, 1)]
        self._by_flags = self.size <= FLAG_RANKS
        table = memory.view(np.int64).reshape(self.size, words)
        self._tags = [table[:, _TAG + half] for half in (0, 1)]

    def _open_staging(self) -> list[np.ndarray]:
        block = self.allocate([2 * STAGING_BYTES] * self.size, "the ranks' staging room")
        populated = block.populate(self.rank, 0, 2 * STAGING_BYTES)
        self.agree_populated(populated, block.what)
        rooms = block.memory.reshape(self.size, 2 * STAGING_BYTES)
        return [rooms[:, :STAGING_BYTES], rooms[:, STAGING_BYTES:]]

    # barrier

    def barrier(self, call: Call | None = None) -> None:
        """Wait for the ranks of this node, and raise unless they make the same call. Collective on the node.

        Raises:
            CollectiveMismatchError: on every rank of the node, with the call of each.
            CollectiveTimeoutError: a rank did not arrive within `call.timeout` seconds.
            PeerExitError: a rank that did not arrive has left the program.
        """
        if self.size == 1:
            return
        if call is None:
            call = self._plain
        self.barriers = sequence = self.barriers + 1
        half = sequence & 1
        if self._laid[half] is not call.payload:
            self._lay(half, call)
        tag = call.tag ^ self.draws.mark
        waited = self._by_flags and not self._crowded and loops.meet(self._bytes, self.rank, sequence, tag, _SPIN)
        if waited is False:
            waited = self._meet(sequence, tag)
        if waited >= 0:
            RECORDER.waited += waited
        elif waited == _DIFFERENT or self._wait(sequence, tag, _LATE - waited, call) == _DIFFERENT:
            self._differ(half, call)

    def _meet(self, sequence: int, tag: int) -> int:
        """Return, like `loops.meet`, the ns that this rank waited, _DIFFERENT, or _LATE less the ns."""
        began = perf_counter_ns()
        flags = self._flags
        flags[self._own + _TAG + (sequence & 1)] = tag
        self._sync()
        flags[self._own] = sequence
        if not self._by_flags:
            self._comm.Barrier()
            return self._compare(sequence, tag, began)
        for i in self._others:
            while flags[i] < sequence:
                if perf_counter_ns() - began < _SPIN or self._comes(i, sequence):
                    continue
                return _LATE - (perf_counter_ns() - began)
        return self._compare(sequence, tag, began)

    def _compare(self, sequence: int, tag: int, began: int) -> int:
        """Return the same after all have arrived."""
        waited, half = perf_counter_ns() - began, sequence & 1
        self._sync()
        if self._by_flags:
            flags = self._flags
            for i in self._other_tags[half]:
                if flags[i] != tag:
                    return _DIFFERENT
        elif np.count_nonzero(self._tags[half] != tag):  # many ranks at once: 128 in 1.4 µs, one by one in 3.5
            return _DIFFERENT
        return waited

    def _lay(self, half: int, call: Call) -> None:
        """Write the text of a call for the others."""
        self._laid[half] = call.payload
        start = self.rank * _PAGE + _TEXT[half]
        self._bytes[start : start + len(call.payload)] = call.payload

    def _comes(self, i: int, sequence: int) -> bool:
        """Return True if a rank arrives soon; yield to others meanwhile."""
        flags, yield_core = self._flags, os.sched_yield
        for _ in range(_FEW_YIELDS if self._crowded else _YIELDS):
            if flags[i] >= sequence:
                return True
            yield_core()
        return False

    def _wait(self, sequence: int, tag: int, waited: int, call: Call) -> int:
        """Wait for late ranks, checking for all possible failures. Return the result of `_meet`."""
        began = perf_counter_ns() - waited
        backoff, deadline = Backoff(yields=0, start=_START, growth=_GROWTH), Deadline(call.timeout)
        self._monitor.on_flags = True
        try:
            while self._missing(sequence):
                backoff.pause()
                self._comm.Iprobe()  # MPI sends buffered messages to other ranks only during calls
                self._check_gone(sequence, call)
                if deadline.passed:
                    self._give_up(sequence, call)
        finally:
            self._monitor.on_flags = False
        waited = self._compare(sequence, tag, began)
        RECORDER.waited += max(0, waited)
        return waited

    def _missing(self, sequence: int) -> list[int]:
        """Return the offsets of the flags of ranks that have not arrived."""
        return [i for i in self._others if self._flags[i] < sequence]

    def _check_gone(self, sequence: int, call: Call) -> None:
        """Raise if a rank that has not arrived never will."""
        flags = self._flags
        for i in self._missing(sequence):
            state, status = flags[i + _STATE] % _STATES, flags[i + _STATE] // _STATES
            if state == _HERE or flags[i] >= sequence:  # it may have arrived just before it left
                continue
            rank = self.ranks[i * 8 // _PAGE]
            if state == _LEFT:
                raise self._peer_exit(rank, call, status)
            if state == _REFUSES:
                why = no_more_use(f"an error on rank {rank} left transfers pending")
                self._monitor.refusal = ClosedError(why)
                raise ClosedError(f"{call.text}: {why}")
            self._refuse_all(f"rank {rank} gave up waiting in an earlier collective")
            raise CollectiveTimeoutError(f"{call.text}: rank {rank} gave up waiting in an earlier collective")
        gone = self._monitor.departed()
        if gone is not None:
            raise self._peer_exit(gone, call, self._monitor.left[gone].status)

    def _peer_exit(self, rank: int, call: Call, status: int) -> PeerExitError:
        how = f" with status {status}" if status else ""
        text = f"rank {rank} left the program{how} while rank {self._monitor.rank} was in {call.text}"
        return PeerExitError(text, status)

    def _give_up(self, sequence: int, call: Call) -> None:
        """Raise after a wait that took too long; ranks that arrive later find the poisoned tag and raise too."""
        missing = [self.ranks[i * 8 // _PAGE] for i in self._missing(sequence)]
        if not missing:
            return
        who = named("rank", missing)
        text = f"{call.text}: rank {self._monitor.rank} waited {call.timeout:g} s for {who}"
        half = sequence & 1
        self._lay(half, Call(f"gave up ({text})", call.timeout))
        self._flags[self._own + _TAG + half] = _POISON
        self._flags[self._own + _STATE] = _GAVE_UP
        self._sync()
        self._refuse_all(text)
        raise CollectiveTimeoutError(f"{text}; {ALL}:{self._monitor.where(missing)}")

    def _refuse_all(self, text: str) -> None:
        self._monitor.refusal = CollectiveTimeoutError(f"an earlier collective failed: {text}")

    def _differ(self, half: int, call: Call) -> None:
        texts, gave_up = {}, False
        for index, rank in enumerate(self.ranks):
            start = index * _PAGE + _TEXT[half]
            length = int.from_bytes(self._bytes[start : start + 2], "little")
            texts[rank] = bytes(self._bytes[start + 2 : start + 2 + length]).decode(errors="replace")
            gave_up |= self._flags[index * _PAGE // 8 + _TAG + half] == _POISON
        if not gave_up and len(set(texts.values())) == 1:
            raise self.draws.differ(self._comm, self.ranks, call.text)
        error = mismatch(texts)
        if not gave_up:
            raise error
        text = f"{call.text}: rank {self._monitor.rank} arrived too late: {error}"
        self._refuse_all(text)
        raise CollectiveTimeoutError(text)

    def agree_later(self, request: bool) -> bool:
        """Return True if a rank requested it in a call before the last barrier. Collective on the node; no rank waits.

        A request is stored with the number of barriers before it. The ranks call this after the same barriers. A request that is
        older than the last barrier was stored before any rank left that, so all see it; newer ones are ignored.
        """
        if self.size == 1:
            return request
        flags, own, sequence = self._flags, self._own + _REQUEST, self.barriers
        if request and not flags[own]:
            flags[own] = sequence + 1
        self._sync()
        return 0 < flags[own] <= sequence or any(0 < flags[i + _REQUEST] <= sequence for i in self._others)

    def leave(self, status: int = 0) -> None:
        """Publish, at the end of the program, that this rank will not arrive again, and its exit status if known."""
        if self._control is not None:
            self._flags[self._own + _STATE] = _LEFT + _STATES * status
            self._sync()

    def refuse(self) -> None:
        """Publish that this rank enters no other collective of the group: the others must not wait for it."""
        if self._control is not None and self._flags[self._own + _STATE] == _HERE:
            self._flags[self._own + _STATE] = _REFUSES
            self._sync()

    def has_left(self, index: int) -> bool:
        """Return True if a rank of the node, by its rank there, has left the program."""
        return self._control is not None and self._flags[index * _PAGE // 8 + _STATE] % _STATES == _LEFT

    def boards(self) -> list[memoryview]:
        """Return the memory of this node's ranks for their watchdogs; see `monitor.board`."""
        if self._control is None:
            return [memoryview(bytearray(BOARD_BYTES))]
        return [self._bytes[rank * _PAGE + _BOARD : (rank + 1) * _PAGE] for rank in range(self.size)]

    # memory

    def sync(self) -> None:
        """Order this rank's loads and stores of shared memory before and after it. Any thread.

        A writer calls it between the data and the flag, a reader between the flag and the data.
        """
        if self._control is not None:
            self._sync()

    def staging(self) -> np.ndarray:
        """Return the staging buffer of every rank of the node for the next barrier.

        Write `staging()[node.rank]` before `barrier()`, read the others after it, in the same list. The next barrier has other
        buffers, so one barrier is enough; two barriers later these are reused.

        Returns:
            uint8 array (ranks of the node, STAGING_BYTES).
        """
        return self.halves[(self.barriers + 1) & 1]

    def allocate(self, nbytes: Sequence[int], what: str) -> SharedBlock:
        """Allocate a block of memory with a segment for each rank of the node. Collective over all ranks of the group.

        `nbytes` are the sizes of the segments, equal on each rank of the node; `what` names the use of the memory in errors.

        Raises:
            SharedMemoryError: on every rank, if the shared memory of any node is too small.
        """
        sizes = [int(n) for n in nbytes]
        if self.shared:
            block = shared_memory.allocate_shared(self._comm, self._world, sizes, what)
        else:
            if self._world is not None:  # other nodes share memory, and check theirs
                shared_memory.check_others(self._world, what)
            block = shared_memory.allocate_private(sizes[0], what)
        self._blocks.append(block)
        for index, segment in enumerate(block.segments):
            if segment.nbytes:
                start = segment.ctypes.data
                at = bisect_right(self._starts, start)
                self._starts.insert(at, start)
                self._segments.insert(at, (start + segment.nbytes, block, index))
        return block

    def agree_populated(self, populated: bool, what: str) -> None:
        """Compare the results of `SharedBlock.populate` on all ranks. Collective over all ranks of the group.

        Raises:
            SharedMemoryError: on every rank, if it was False on any.
        """
        if self._world is None:
            return
        rank = first_rank(self._world, not populated)
        if rank is not None:
            left = np.array([shared_memory.free_space() or 0], np.int64)
            self._world.Bcast(left, rank)
            raise shared_memory.out_of_memory(what, rank, f"{binary_size(int(left[0]))} are free")

    def locate(self, array: np.ndarray) -> tuple[SharedBlock, int, int] | None:
        """Return (block, rank of the node, byte offset) of an array inside a segment, else None."""
        address = array.__array_interface__["data"][0]
        at = bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        end, block, index = self._segments[at]
        return (block, index, address - self._starts[at]) if address < end and not block.closed else None

    def close(self) -> None:
        """Free all memory without views. Local."""
        self.halves = []
        self._starts, self._segments = [], []
        for block in self._blocks:
            block.close()
        self._blocks = []
        if self._control is not None:
            control, self._control = self._control, None
            self._sync = lambda: None
            self._tags = []
            self._flags.release()
            self._bytes.release()
            control.close()
            self._fence.close()
