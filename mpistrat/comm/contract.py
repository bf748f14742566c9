"""Collective calls: all ranks compare the fingerprints of their calls before data is sent, and mismatches become errors.

Sums on GPUs may be in flight between two collectives (`IN_FLIGHT`): each ends those of the one before, so that the host may start
the next forward and backward pass meanwhile.

On a node the tag of a `Collective` is exchanged in every barrier (see `node`). Between nodes the ranks compare each unexpected
call (`Comparison`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Any, Protocol, final

import numpy as np

from ..base.agree import all_alike, fingerprint, gather_text, mismatch
from ..base.errors import ClosedError, ContextError, RanksLostError, explain
from ..cluster.world import is_loss
from .call import Call
from .draws import Draws
from .monitor.rank_monitor import RankMonitor, no_more_use
from .node import Node
from .recorder import RECORDER

__all__ = ["IN_FLIGHT", "Collective", "Comparison", "InFlight"]

_MASK = (1 << 63) - 1
_PLACES = 4096  # expectations that are stored
_NAME_CHARACTERS = 80  # of a call in the recorder


class InFlight(Protocol):
    """Sums on GPUs that the host has not waited for."""

    def settle(self) -> None:
        """Wait for them. Raises if they never end."""

    def drop(self, error: BaseException) -> None:
        """End them after an error, because of which other ranks may never join them."""


IN_FLIGHT: list[InFlight] = []  # of this process
_ENDING = threading.Lock()


def _end_sums(end: Callable[[InFlight], None]) -> None:
    with _ENDING:
        while IN_FLIGHT:
            end(IN_FLIGHT.pop(0))


@final
class Collective(Call):
    """A call of one group, and the context in which it runs; `ProcessGroup.collective` creates and caches it."""

    __slots__ = ("_comparison", "_event", "_monitor", "_name", "_node", "_outer", "_synchronize")

    def __init__(
        self,
        text: str,
        timeout: float,
        series: str,
        monitor: RankMonitor,
        node: Node,
        comparison: Comparison | None,
        synchronize: bool,
    ) -> None:
        super().__init__(text, timeout, series)
        self._monitor, self._node, self._comparison = monitor, node, comparison
        self._synchronize = synchronize and node.size > 1
        self._outer: Any = None
        self._name, self._event = RECORDER.name("c", series[:_NAME_CHARACTERS], monitor.group), 0

    def __enter__(self) -> Collective:
        monitor = self._monitor
        if monitor.refusal is not None:
            monitor.refuse(self.text)
        if monitor.size == 1:
            return self
        if not monitor.acting.acquire(False):
            raise _second_thread(self.text, monitor)
        monitor.number += 1
        self._outer = monitor.current
        monitor.current = (monotonic(), self, monitor.number)
        self._event = RECORDER.begin(self._name, monitor.number)
        try:
            if IN_FLIGHT:
                _end_sums(lambda sums: sums.settle())
            comparison = self._comparison
            if comparison is not None and comparison.due(self, monitor.number):
                self._node.barrier(self)
                comparison.compare(monitor)
            elif self._synchronize:
                self._node.barrier(self)
        except BaseException as error:
            RECORDER.end(self._event)
            if self._comparison is not None:
                self._comparison.forget()  # ranks of this node may have recorded different calls
            monitor.fail(error, True)
            monitor.current = self._outer
            monitor.acting.release()
            self._refuse_where_lost(error)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        monitor = self._monitor
        if monitor.size > 1:
            if error is not None:
                monitor.fail(error, False)
                _end_sums(lambda sums: sums.drop(error))
            elif self._comparison is not None:
                self._comparison.ended = monitor.number
            RECORDER.end(self._event)
            if self.nbytes:
                RECORDER.count("bytes", self.nbytes)
            monitor.current, self._outer = self._outer, None
            monitor.acting.release()
            if error is not None:
                self._refuse_where_lost(error)

    def begin_again(self) -> None:
        RECORDER.begin_again(self._event)

    def _refuse_where_lost(self, error: BaseException) -> None:
        """Raise an error that reports lost ranks, now and in the next collectives, if a rank of the group has died.

        Raises:
            RanksLostError: a rank has died.
        """
        monitor = self._monitor
        if is_loss(error) and not isinstance(error, RanksLostError):
            monitor.refusal = RanksLostError(f"ranks were lost while rank {monitor.rank} was in {self.text}")
            raise monitor.refusal from error


@final
class Comparison:
    """A comparison of the calls of all ranks, over a communicator without other reductions.

    After each call, the ranks expect the call that followed it last time, or the first time the same call again. They compare an
    unexpected call before its data is sent. All ranks have the same expectations, so two ranks never send data for different
    calls: one with an unexpected call waits in the comparison, and the other waits for it, until the watchdog reports both. No
    difference is lost, because ranks compare a hash of all calls so far.

    Attributes:
        ended: number of the last call that ended on this rank without an error.
    """

    def __init__(self, comm: Any, every: int, draws: Draws) -> None:
        from mpi4py import MPI

        self._draws = draws
        self._comm, self._min, self._max = comm, MPI.MIN, MPI.MAX
        self._pair, self._least = np.empty(2, np.int64), np.empty(2, np.int64)
        self._recent: deque[tuple[int, str]] = deque(maxlen=every)  # number and text
        self._rolling = 0
        self._every, self._compared = every, 0  # number of the last compared call
        self.ended = 0
        self.forget()

    def forget(self) -> None:
        """Clear all expectations."""
        self._place = (0, 0, 0)  # kinds of the last two different calls, and the length of the later one's run
        self._next: dict[tuple[int, int, int], int] = {}  # the kind that followed

    def due(self, call: Call, number: int) -> bool:
        """Record a call. Return True if it must be compared now: if it is unexpected, and once in `every` calls."""
        self._rolling = (self._rolling * 0x100000001B3 + (call.tag ^ self._draws.mark)) & _MASK
        self._recent.append((number, call.text))
        before, last, times = place = self._place
        kind = call.kind
        self._place = (before, last, times + 1) if kind == last else (last, kind, 1)
        if self._next.get(place, last) == kind:
            return number - self._compared >= self._every
        if len(self._next) >= _PLACES:  # at the same moment on every rank
            self._next.clear()
        self._next[place] = kind
        return True

    def recent(self, number: int) -> str:
        """Return the text of a call, "" if it was not recorded or is no longer stored. Any thread."""
        return dict(self._recent.copy()).get(number, "")

    def compare(self, monitor: RankMonitor) -> None:
        """Raise unless all ranks made the same calls, up to the current one. Collective.

        After an error the ranks continue in step, as if no call had failed before. But the group becomes unusable if a call from
        the first difference on has ended on a rank, such as one that only sends, or was only started: a later call could receive
        its messages.

        Raises:
            CollectiveMismatchError: on every rank, with the call of each at the first difference.
        """
        self._pair[0], self._pair[1] = self._rolling, ~self._rolling  # the least of ~x is ~ the largest x
        self._comm.Allreduce(self._pair, self._least, self._min)
        before, self._compared = self._compared, monitor.number
        if self._least[0] == ~self._least[1]:
            return
        own = {at: text for at, text in self._recent if at > before}
        self._rolling = 0
        self.forget()
        # Ranks whose calls failed, while others still wait in them, are ahead of these.
        first, last = np.empty((2, 1), np.int64)
        self._comm.Allreduce(np.array([min(own)]), first, self._max)
        self._comm.Allreduce(np.array([max(own)]), last, self._max)
        monitor.number = self._compared = int(last[0])
        if monitor.current is not None:
            monitor.current = (*monitor.current[:2], monitor.number)
        monitor.failures.clear()
        texts = [own.get(number, "nothing") for number in range(int(first[0]), monitor.number + 1)]
        differ = np.flatnonzero(~all_alike(self._comm, [fingerprint(text) for text in texts]))
        if not differ.size:
            raise self._draws.differ(self._comm, range(self._comm.size), own[max(own)])
        at = int(differ[0])
        error = mismatch(dict(enumerate(gather_text(self._comm, texts[at]))), len(texts) - 1 - at)
        ended = np.empty(1, np.int64)
        self._comm.Allreduce(np.array([self.ended]), ended, self._max)
        if ended[0] >= first[0] + at and monitor.refusal is None:
            why = f"ranks made different calls, whose messages may be pending ({error})"
            monitor.refusal = ClosedError(no_more_use(why))
        raise error


def _second_thread(text: str, monitor: RankMonitor) -> ContextError:
    """Return the error of a thread that enters a collective while another is in one: ranks would sum unrelated values."""
    current = monitor.current
    inside = "another collective" if current is None else current[1].brief
    expected = "one thread of a rank at a time in collectives"
    remedy = "Make all collective calls in one thread, or under a lock, in the same order on every rank"
    return ContextError(
        explain(
            text,
            "",
            expected=expected,
            got=f"a second one while the first is in {inside}",
            remedy=remedy,
            rank=monitor.rank,
        )
    )
