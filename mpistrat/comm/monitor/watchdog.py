"""The watchdog: a thread that watches over waits inside MPI.

A wait inside MPI cannot be left. So a thread of each process reports to other ranks, on request, which collective its rank is
in, and when a collective takes too long one of them has a survey made of all (`survey.py`), prints it and ends the job. When one
rank ends the job, the watchdogs of the others print why (`group_monitor.py` has both). They communicate over the group's own
communicator, need MPI.THREAD_MULTIPLE, and cost a collective no more than storing that it was entered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable
from time import monotonic
from typing import Any, final

from ...base import log
from ...cluster.world import is_loss
from ..mailbox import Mailbox
from ..node import Node
from . import abort, exit_report
from .group_monitor import GRACE, GroupMonitor
from .rank_monitor import POLL, RankMonitor, lines
from .survey import Nodes

__all__ = ["Watchdog"]


@final
class Watchdog:
    """The thread that monitors all groups of this process. There is one, `Watchdog.instance`, from the first group on."""

    instance: Watchdog | None = None

    def __init__(self) -> None:
        self.lock = threading.RLock()  # while it is held, the thread makes no MPI call
        self._groups: list[GroupMonitor] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpistrat-watchdog", daemon=True)
        self._thread.start()

    @classmethod
    def add(cls, monitor: RankMonitor, comm: Any, node: Node, nodes: Nodes) -> None:
        """Monitor a group, over a communicator of its ranks on which nothing else sends messages.

        Args:
            node: the ranks that share memory with this one.
            nodes: of the group.
        """
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            log.once(
                logging.WARNING,
                "MPI was started without THREAD_MULTIPLE: no watchdog runs, so a collective that hangs inside MPI is not "
                "noticed. Let mpi4py start MPI, or ask for THREAD_MULTIPLE",
            )
            return
        if cls.instance is None:
            cls.instance = cls()
            abort.agree_who_prints = cls.report_end
        monitor.watched = True
        with cls.instance.lock:
            cls.instance._groups.append(GroupMonitor(monitor, comm, node, nodes))

    @classmethod
    def remove(cls, monitor: RankMonitor, comm: Any = None) -> None:
        """Forget a group. With `comm`, its communicator, which is then without messages and may be freed, collective."""
        monitor.watched = False
        mailbox: Mailbox | None = None
        if cls.instance is not None:
            with cls.instance.lock:
                groups = cls.instance._groups
                for group in [group for group in groups if group.monitor is monitor]:
                    groups.remove(group)
                    group.board.release()
                    mailbox = group.mailbox
        if comm is not None:
            (mailbox or Mailbox(comm)).drain()  # others may have a watchdog where this rank has none

    @classmethod
    def report_left(cls, monitor: RankMonitor, ranks: Iterable[int]) -> None:
        """Report to ranks of other nodes that this one leaves the program. Call it after `stop`."""
        if cls.instance is None:
            return
        for group in cls.instance._groups:
            if group.monitor is monitor:
                group.report_left(ranks)

    @classmethod
    def report_end(cls, text: str, reason: str) -> str | None:
        """Make the other ranks print why this one ends the job. Takes a second at most.

        Returns:
            Which ranks have the same text, in words to print behind it; None if another rank prints it.
        """
        instance = cls.instance
        if instance is None or not instance._groups or not instance.lock.acquire(timeout=POLL):
            return ""
        try:
            group = max(instance._groups, key=lambda group: group.monitor.size)
            return group.report_end(text, reason)
        except Exception as error:
            if is_loss(error):
                return ""
            raise
        finally:
            instance.lock.release()

    @classmethod
    def stop(cls) -> None:
        """End the thread, before MPI ends."""
        if cls.instance is not None:
            cls.instance._stop.set()
            cls.instance._thread.join(5)

    def _run(self) -> None:
        from mpi4py import MPI

        while not self._stop.wait(POLL):
            if MPI.Is_finalized():
                return
            exit_report.answer(self._position, abort.end_job)
            if self.lock.acquire(timeout=POLL):
                try:
                    self._look_after_all()
                finally:
                    self.lock.release()
            else:
                self._judge_alone()

    def _look_after_all(self) -> None:
        """Look after the groups; no more after one where ranks were lost, which those who call MPI hear, too."""
        for group in list(self._groups):
            try:
                group.look()
            except Exception as error:
                if not is_loss(error):
                    raise
                self._groups.remove(group)

    def _position(self) -> str:
        """Where this rank is in the largest of its groups."""
        groups = list(self._groups)
        if not groups:
            return "in no group of several ranks"
        return max(groups, key=lambda group: group.monitor.size).monitor.answer().text

    def _judge_alone(self) -> None:
        """Enforce the timeouts while MPI must not be called (NCCL is in flight) and other ranks cannot be asked."""
        for group in list(self._groups):
            monitor, current = group.monitor, group.monitor.current
            if current is not None and monotonic() - current[0] > current[1].timeout + GRACE:
                abort.end_job(
                    f"CollectiveTimeoutError: {current[1].text} takes longer than {current[1].timeout:g} s:"
                    + lines({monitor.rank: monitor.answer().text})
                )
