"""Preemption: a request to stop on any rank, agreed by all ranks at one step boundary.

The request is a signal, or the time limit. On a node it is written to shared memory, and the barrier of a later collective
makes it visible to all (`Node.agree_later`); without a collective, `should_stop` makes one. Between nodes one call of
`Strategy.should_stop` starts a small non-blocking all-reduce, and the next call takes its result. No rank waits. All take the
result at the same call, so all stop at the same step, the one after the signal's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..base import log
from ..base.errors import explain
from ..base.waiting import wait_until
from ..comm.process_group import ProcessGroup

if TYPE_CHECKING:
    from ..comm.monitor.rank_monitor import RankMonitor

__all__ = [
    "SIGNALS",
    "StopAgreement",
    "StopAtPasses",
    "StopRequest",
    "StopTogether",
    "ask_to_stop",
    "catch_stop_signals",
    "last_moment",
    "stop_reason",
]

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)

# Seconds after which a second SIGTERM ends the program at once; launchers and schedulers may both forward the first.
_INSISTS = 1.0
_MARGIN, _SHARE = 60.0, 0.1  # seconds before the time limit, at most this share of the time left at the start
_LAST_WAIT = 1.0  # seconds at the end of the program

_requests: weakref.WeakSet[StopRequest] = weakref.WeakSet()
_before: dict[int, Any] = {}  # the previous handlers of the caught signals
_terminated: float | None = None  # when the first SIGTERM came
_reason = ""  # the reason to stop this process, "" without one
_process = 0


def catch_stop_signals() -> None:
    """Make SIGUSR1 and SIGTERM request a stop at a step boundary, instead of ending the program.

    `Strategy.should_stop` calls it at first. Call it at the start of the program, so that earlier signals count too. The
    program's own handlers are still called. A second SIGTERM, at least a second after the first, has its previous effect. So
    does every signal after the last strategy that called `should_stop` is closed, unless a stop was requested.

    Example:
        >>> ms.catch_stop_signals()  # doctest: +SKIP
    """
    global _process
    if _before and _process == os.getpid():
        return
    if threading.current_thread() is not threading.main_thread():
        remedy = "Call ms.catch_stop_signals() in the main thread, before threads start"
        log.once(
            logging.WARNING,
            f"should_stop: signals are not noticed: Python handles them in its main thread only. {remedy}",
        )
        return
    _process = os.getpid()
    for number in SIGNALS:
        _before[number] = signal.signal(number, _handle)


def _handle(number: int, frame: FrameType | None) -> None:
    global _terminated
    before = _before.get(number)
    if os.getpid() != _process:  # a forked child is not a rank
        _act(number, before)
        return
    now = time.monotonic()
    if number == signal.SIGTERM:
        if _terminated is not None and now - _terminated >= _INSISTS:
            _act(number, before)
            return
        _terminated = _terminated or now
    ask_to_stop(f"signal {signal.Signals(number).name}")
    if callable(before):
        before(number, frame)


def ask_to_stop(reason: str) -> None:
    """Request this process to stop at a step boundary, as a signal does; the first reason counts. From any thread."""
    global _reason
    _reason = _reason or reason
    for request in list(_requests):
        request.note()


def stop_reason() -> str:
    """Return the reason to stop this process, "" without one."""
    return _reason


def _act(number: int, before: Any) -> None:
    signal.signal(number, signal.SIG_DFL if before is None else before)
    os.kill(os.getpid(), number)


def release_signals() -> None:
    """Restore the previous handlers of signals, and forget received ones."""
    global _reason, _terminated
    _reason, _terminated = "", None
    for number, before in _before.items():
        if before is not None and signal.getsignal(number) is _handle:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(number, before)
    _before.clear()


def last_moment(end: float | None, margin: float | None, env: Mapping[str, str], now: float) -> float | None:
    """Return when to stop because of the time limit, in seconds since 1970; None without one.

    Args:
        end: when the job ends; default SLURM's value, from version 23.02 on.
        margin: seconds before that; default 60, but at most a tenth of the time that is left now.

    Raises:
        ValueError: SLURM's variable is not a number; it is named.

    Example:
        >>> last_moment(1000.0, None, {}, now=900.0), last_moment(None, 30.0, {"SLURM_JOB_END_TIME": "1000"}, now=0.0)
        (990.0, 970.0)
    """
    if end is None:
        text = env.get("SLURM_JOB_END_TIME", "")
        try:
            end = float(text) if text else None
        except ValueError:
            expected = "seconds since 1970"
            raise ValueError(explain("environment", "SLURM_JOB_END_TIME", expected=expected, got=repr(text))) from None
    if end is None:
        return None
    return end - (min(_MARGIN, _SHARE * max(end - now, 0.0)) if margin is None else margin)


@final
class StopRequest:
    """The request to stop this rank. One per strategy.

    With `spread` the watchdogs forward the request to the other ranks, if these don't agree at each step.

    Attributes:
        save_seconds: the time of a save: the request comes earlier by it, unless the program sets its own margin.
    """

    def __init__(self, group: ProcessGroup, spread: bool = False) -> None:
        self._environment = group.environment
        self._monitor: RankMonitor | None = group.monitor if spread else None
        self._asked = False
        self._last: float | None = None
        self.save_seconds = 0.0
        _requests.add(self)
        if _reason:
            self.note()

    def note(self) -> None:
        """Record a signal. The handler calls it."""
        if self._monitor is not None:
            self._monitor.stop = True

    def __bool__(self) -> bool:
        if not self._asked:
            self._begin()
        if not (_reason or (self._last is not None and time.time() >= self._last - self._ahead())):
            return self._monitor is not None and self._monitor.stop
        self.note()
        return True

    def _ahead(self) -> float:
        return 0.0 if self._environment.stop_before is not None else self.save_seconds

    def _begin(self) -> None:
        self._asked = True
        catch_stop_signals()
        settings = self._environment
        self._last = last_moment(settings.end_time, settings.stop_before, os.environ, time.time())

    def close(self) -> None:
        """Restore the signals' previous effect, if this was the last request that was checked, and no stop was requested.

        A rank that was asked to stop may get the signal again while it ends, and still ends with its own exit status.
        """
        _requests.discard(self)
        if self._asked and not _reason and not any(request._asked for request in _requests):
            release_signals()
        self._asked = False


class StopAgreement(ABC):
    """The agreement of a strategy's ranks to stop."""

    @abstractmethod
    def ask(self, wish: bool) -> bool:
        """Return whether to stop; `wish`: whether this rank was asked to. Collective or not: see the classes."""


@final
class StopTogether(StopAgreement):
    """The agreement of ranks that step together: they stop at the same step."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._agreed = self._attached = False
        self._wish, self._wishes = np.zeros(1, np.int8), np.zeros(1, np.int8)
        self._pending: Any = None
        self._asked_after = -1  # the node's count of barriers

    def ask(self, wish: bool) -> bool:
        """Return True from the call after a rank's wish on. Collective, but no rank waits."""
        if not self._agreed:
            self._agreed = self._ask_nodes(wish) if self._group.num_nodes > 1 else self._ask_node(wish)
        return self._agreed

    def _ask_node(self, wish: bool) -> bool:
        node = self._group.node
        if node.size > 1 and node.barriers == self._asked_after:  # without collectives no rank would ever see it
            with self._group.collective("should_stop"):
                pass
        found = node.agree_later(wish)
        self._asked_after = node.barriers
        return found

    def _ask_nodes(self, wish: bool) -> bool:
        from mpi4py import MPI

        group = self._group
        if not self._attached:
            self._attached = True
            group.attach(self)
        with group.collective("should_stop", synchronize=False):
            if self._take():
                return True
            self._wish[0] = wish
            self._pending = group.topology.comm.Iallreduce(self._wish, self._wishes, MPI.MAX)
        return False

    def _take(self) -> bool:
        if self._pending is None:
            return False
        while not self._pending.Test():  # MPI's own wait would occupy a core
            os.sched_yield()
        self._pending = None
        return bool(self._wishes[0])

    def close(self) -> None:
        """Complete the last agreement before its communicator is freed. Collective; the group calls it."""
        with self._group.collective("should_stop", "close"):
            self._take()

    def leave(self) -> Callable[[], None]:
        """See `Attachment.leave`."""
        return self._finish

    def abandon(self) -> None:
        """See `Attachment.abandon`."""
        self._pending = None

    def _finish(self) -> None:
        """Complete the pending request, as MPI requires; a lost rank may prevent it."""
        pending, self._pending = self._pending, None
        if pending is not None:
            wait_until(pending.Test, _LAST_WAIT)


@final
class StopAtPasses(StopAgreement):
    """The agreement of ranks that don't step together: in a pass each stops at its own step; after it they agree.

    `together` is the agreement of the ranks that step together with this one.
    """

    def __init__(self, group: ProcessGroup, together: StopAgreement, in_pass: Callable[[], bool]) -> None:
        self._group, self._together, self._in_pass = group, together, in_pass
        self._agreed = False

    def ask(self, wish: bool) -> bool:
        """Return whether to stop; True from the agreement of all ranks on.

        In a pass collective over the ranks that step together; else over all of them.
        """
        if self._agreed:
            return True
        if self._in_pass():
            return self._together.ask(wish)
        with self._group.collective("should_stop"):
            self._agreed = bool(self._group.agree(wish, "max"))
        return self._agreed
