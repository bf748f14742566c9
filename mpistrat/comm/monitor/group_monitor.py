"""The watchdog: a thread that watches over waits inside MPI.

A wait inside MPI cannot be left. So a thread of each process reports to other ranks, on request, which collective its rank is
in, and when a collective takes too long it prints that of every rank and ends the job. When one rank ends the job, the watchdogs
of the others print why. They communicate over the group's own communicator, need MPI.THREAD_MULTIPLE, and cost a collective no
more than storing that it was entered.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, final

from ..._util import log
from ..._util.text import named
from ...cluster.world import is_loss
from ..agree import fingerprint, only_differences
from ..call import Call
from ..mailbox import Mailbox
from ..waiting import Backoff, Deadline
from . import abort, exit_report
from .abort import KEY_BYTES, Failures, failure_key
from .rank_monitor import ALL, POLL, Answer, Left, RankMonitor, lines

__all__ = ["Watchdog"]

_NEIGHBOUR = 2.0  # seconds of waiting after which, and between which, the next rank is compared
_ANSWER = 1.0  # seconds that the others have to answer
_GRACE = 5.0  # seconds after the timeout in which a rank that knows more may report it
_RELAY = 0.75  # seconds that rank 0 has to decide who prints why the job ends, and to forward it
_SPREAD = 0.3  # seconds that the others have to print it
_ASK, _REPLY, _LEFT, _END, _STOP, _FAIL, _VERDICT = 1, 2, 3, 4, 5, 6, 7
_HEAD = struct.Struct("<qqd?qqqd")  # an Answer but its time and texts
_NUMBER, _LAST = struct.Struct("<q"), struct.Struct("<qqq")
_LONGEST = 4096


@final
class GroupMonitor:
    """The watchdog's state of one group, and its messages there."""

    def __init__(self, monitor: RankMonitor, comm: Any) -> None:
        self.monitor, self.mailbox = monitor, Mailbox(comm)
        self.end_sent = False  # whether this rank has sent or received why the job ends
        self.failures = Failures(monitor.size)  # of all ranks, if this is rank 0
        self.verdict: tuple[str | None] | None = None  # on this rank's own failure: see `report_end`
        self.stop_sent = False
        self.warned_calls: set[str] = set()
        self.judged: tuple[Any, ...] | None = None
        self.start_wait(None)

    def start_wait(self, current: tuple[Any, ...] | None) -> None:
        self.judged = current
        self.warned = False
        self.asked_all = 0.0
        self.asked_next = 0.0 if current is None else current[0]

    def receive(self) -> None:
        """Handle the messages that have arrived."""
        monitor = self.monitor
        for source, kind, data in self.mailbox.poll():
            if kind == _ASK:
                answer = monitor.answer(*_NUMBER.unpack(data))
                texts = b"\0".join(text.encode()[:_LONGEST] for text in (answer.text, answer.error))
                self.mailbox.send(_HEAD.pack(*answer[1:-2]) + texts, source, _REPLY)
            elif kind == _REPLY:
                text, _, error = data[_HEAD.size :].decode(errors="replace").partition("\0")
                monitor.answers[source] = Answer._make((monotonic(), *_HEAD.unpack_from(data), text, error))
            elif kind == _LEFT:
                monitor.left[source] = Left._make((*_LAST.unpack(data), monotonic()))
            elif kind == _STOP:
                monitor.stop = True
            elif kind == _END:
                self._receive_end(bytes(data))
            elif kind == _FAIL:
                self.failures.note(source, bytes(data[:KEY_BYTES]), bytes(data[KEY_BYTES:]), monotonic())
            elif kind == _VERDICT:
                self.verdict = (data[1:].decode() if data[:1] == b"p" else None,)

    def _send_stop(self) -> None:
        """Forward a request to stop to all others, through rank 0: they may all have one."""
        self.stop_sent = True
        for rank in range(1, self.monitor.size) if self.monitor.rank == 0 else (0,):
            self.mailbox.send(b"!", rank, _STOP)

    def report_end(self, key: bytes, data: bytes) -> str | None:
        """Send all others why the job ends, through rank 0; return who fails alike, in words, or None if one of these prints it.

        Ranks that all fail alike then send few messages, and print one text.
        """
        monitor = self.monitor
        if monitor.rank == 0:
            self.failures.note(0, key, data, monotonic())
        else:
            self.mailbox.send(key + data, 0, _FAIL)
        self._receive_for(_RELAY, until=lambda: self.verdict is not None)
        if self.verdict is None:  # rank 0 cannot receive
            self._spread_end(data, range(monitor.size))
        self._receive_for(_SPREAD)
        return "" if self.verdict is None else self.verdict[0]

    def _judge_failures(self) -> None:
        """On rank 0: send the ranks that fail who of them prints, and the others why the job ends."""
        verdicts = self.failures.verdicts(monotonic())
        for rank, words in verdicts.items():
            if rank == self.monitor.rank:
                self.verdict = (words,)
            else:
                self.mailbox.send(b"" if words is None else b"p" + words.encode(), rank, _VERDICT)
        if verdicts and not self.end_sent:
            self._receive_end(self.failures.reason, set(range(self.monitor.size)) - set(verdicts))

    def _spread_end(self, data: bytes, ranks: Iterable[int]) -> None:
        self.end_sent = True
        for rank in ranks:
            if rank != self.monitor.rank:
                self.mailbox.send(data, rank, _END)

    def _receive_end(self, data: bytes, others: Iterable[int] = ()) -> None:
        if self.end_sent:
            return
        self._spread_end(data, others)
        exit_report.report_exit()
        if not abort.ending:
            abort.print_text(f"rank {self.monitor.rank} of {self.monitor.size}: {data.decode(errors='replace')}")
            abort.end_where_nobody_does()

    def _receive_for(self, seconds: float, until: Callable[[], bool] = bool) -> None:
        backoff, deadline = Backoff(POLL / 10), Deadline(seconds)
        while not deadline.passed and not until():
            self.receive()
            self._judge_failures()
            backoff.pause()

    def look(self) -> None:
        """One round: messages, questions of this rank's own thread, and whether it has waited too long."""
        self.receive()
        self._judge_failures()
        monitor = self.monitor
        if monitor.stop and not self.stop_sent:
            self._send_stop()
        wanted, monitor.wanted = monitor.wanted, ()
        self._ask(wanted)
        current, raw = monitor.current, monitor.raw
        if current is not None:
            if current is not self.judged:
                self.start_wait(current)
            self._judge(current, monotonic())
        elif raw is not self.judged or raw is None:
            self.start_wait(raw)
        else:
            self._judge_raw(raw, monotonic())

    def _ask(self, ranks: Iterable[int]) -> None:
        current = self.monitor.current
        question = _NUMBER.pack(-1 if current is None else current[2])
        for rank in ranks:
            if rank != self.monitor.rank:
                self.mailbox.send(question, rank, _ASK)

    def _judge(self, current: tuple[float, Call, int], now: float) -> None:
        monitor, (start, call, _) = self.monitor, current
        waited = now - start
        gone = monitor.departed()
        if gone is not None and waited > POLL and not monitor.on_flags and monitor.current is current:
            texts = {monitor.rank: monitor.answer().text, gone: "has left the program"}
            abort.end_job(f"PeerExitError: {call.text} can never end:{lines(texts)}", monitor.left[gone].status or 1)
        self._compare_next(current, now)
        late = waited > call.timeout + (_GRACE if monitor.on_flags else 0)
        if not late and (self.warned or waited < monitor.warn_after):
            return
        fresh = self._ask_all(now)
        if fresh is not None:
            for rank, answer in fresh.items():
                self._compare(current, rank, answer)
            self._report(fresh, late, waited, call)

    def _ask_all(self, now: float) -> dict[int, Answer] | None:
        """Return the answers of all ranks that answer in time; None while more may come."""
        monitor = self.monitor
        if not self.asked_all:
            self.asked_all = now
            self._ask(range(monitor.size))
            return None
        fresh = {rank: answer for rank, answer in monitor.answers.items() if answer.time >= self.asked_all}
        if len(fresh) < monitor.size - 1 and now - self.asked_all < _ANSWER:
            return None
        self.asked_all = 0.0
        return fresh

    def _judge_raw(self, raw: tuple[float, str], now: float) -> None:
        """End the job where a call of MPI by the program waits for a rank that has gone; others may take any time."""
        monitor, (start, name) = self.monitor, raw
        waited = now - start
        late = waited > monitor.default_timeout and now >= self.asked_next
        if not late and (self.warned or waited < monitor.warn_after):
            return
        fresh = self._ask_all(now)
        if fresh is None:
            return
        texts = self._texts(fresh)
        silent = [rank for rank in range(monitor.size) if rank != monitor.rank and rank not in fresh]
        if late and silent and monitor.raw is raw:
            who = named("rank", silent)
            abort.end_job(
                f"PeerExitError: comm.{name} takes longer than {monitor.default_timeout:g} s, and {who} can no longer take part:"
                + lines(texts)
            )
        self.asked_next = now + _GRACE
        if not self.warned:
            self.warned = True
            if name not in self.warned_calls and monitor.rank == min(
                [monitor.rank, *(rank for rank, answer in fresh.items() if answer.in_mpi)]
            ):
                self.warned_calls.add(name)  # the next one may take as long, and is not reported again
                log.logger.warning("comm.%s takes longer than %g s:%s", name, monitor.warn_after, lines(texts))

    def _texts(self, fresh: dict[int, Answer]) -> dict[int, str]:
        """The position of each rank, in words."""
        monitor = self.monitor
        texts = {r: fresh[r].text if r in fresh else "does not answer" for r in range(monitor.size)}
        texts[monitor.rank] = monitor.answer().text
        for rank in monitor.left:
            texts[rank] = "has left the program"
        return texts

    def _compare_next(self, current: tuple[float, Call, int], now: float) -> None:
        """Ask the next rank now and then. If any two ranks differ, so do some neighbours in the ring."""
        rank = (self.monitor.rank + 1) % self.monitor.size
        answer = self.monitor.answers.get(rank)
        if answer is not None:
            self._compare(current, rank, answer)
        if now - self.asked_next > _NEIGHBOUR:
            self.asked_next = now
            self._ask([rank])

    def _compare(self, current: tuple[float, Call, int], rank: int, answer: Answer) -> None:
        """End the job where another rank did something else in this rank's collective, or failed in it or before it."""
        monitor, (_, call, number) = self.monitor, current
        failed = (
            answer.about == number
            and answer.ago > _NEIGHBOUR
            and not monitor.on_flags
            and monitor.out_of_step(answer.failed)
        )
        differs = answer.number == number and answer.tag != call.tag
        differed = answer.about == number and answer.print not in (0, fingerprint(call.text))
        if not (failed or differs or differed) or monitor.current is not current:
            return
        texts = {monitor.rank: monitor.answer().text, rank: answer.text}
        if failed:
            texts[rank] += f"; #{answer.failed} ended there {answer.ago:.1f} s before by {answer.error}"
            what = f"{call.text} can never end: an error ended #{answer.failed} on rank {rank}, which went on:{lines(texts)}"
        else:
            what = f"the ranks entered different collectives:{lines(only_differences(texts))}"
        abort.end_job(f"CollectiveMismatchError: {what}")

    def _report(self, fresh: dict[int, Answer], late: bool, waited: float, call: Call) -> None:
        """Print what all ranks do: the lowest rank that waits, or another where that does not."""
        monitor = self.monitor
        waiting = [
            monitor.rank,
            *(r for r, answer in fresh.items() if answer.number >= 0 and (answer.in_mpi or not late)),
        ]
        texts = self._texts(fresh)
        if not late:
            self.warned = True
            missing = len(fresh) < monitor.size - 1 or any(answer.number != monitor.number for answer in fresh.values())
            if monitor.rank == min(waiting):  # where all are in it, it takes long by itself
                level = logging.WARNING if missing else logging.INFO
                text = f"{call.text} takes longer than {monitor.warn_after:g} s; {ALL}"
                log.logger.log(level, "%s:%s", text, lines(texts))
        elif monitor.rank == min(waiting) or waited > call.timeout + _GRACE:
            text = f"{call.text} takes longer than {call.timeout:g} s; {ALL}:{lines(texts)}"
            abort.end_job(f"CollectiveTimeoutError: {text}")


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
    def add(cls, monitor: RankMonitor, comm: Any) -> None:
        """Monitor a group, over a communicator of its ranks on which nothing else sends messages."""
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
            cls.instance._groups.append(GroupMonitor(monitor, comm))

    @classmethod
    def remove(cls, monitor: RankMonitor, comm: Any = None) -> None:
        """Forget a group. With `comm`, its communicator, which is then without messages and may be freed, collective."""
        monitor.watched = False
        mailbox: Mailbox | None = None
        if cls.instance is not None:
            with cls.instance.lock:
                groups = cls.instance._groups
                mailbox = next((group.mailbox for group in groups if group.monitor is monitor), None)
                groups[:] = [group for group in groups if group.monitor is not monitor]
        if comm is not None:
            (mailbox or Mailbox(comm)).drain()  # others may have a watchdog where this rank has none

    @classmethod
    def report_left(cls, monitor: RankMonitor, ranks: Iterable[int]) -> None:
        """Report to ranks of other nodes that this one leaves the program. Call it after `stop`."""
        if cls.instance is None:
            return
        for group in cls.instance._groups:
            if group.monitor is monitor:
                last = _LAST.pack(monitor.number, monitor.failed(monitor.number), abort.exit_status())
                for rank in ranks:
                    group.mailbox.send(last, rank, _LEFT)

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
            what = f"the job ends because of rank {group.monitor.rank}: {reason}"
            return group.report_end(failure_key(text), what.encode()[:_LONGEST])
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
                    for group in list(self._groups):
                        self._look(group)
                finally:
                    self.lock.release()
            else:
                self._judge_alone()

    def _look(self, group: GroupMonitor) -> None:
        """Look after a group; no more where ranks were lost, which those who call MPI hear, too."""
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
            if current is not None and monotonic() - current[0] > current[1].timeout + _GRACE:
                abort.end_job(
                    f"CollectiveTimeoutError: {current[1].text} takes longer than {current[1].timeout:g} s:"
                    + lines({monitor.rank: monitor.answer().text})
                )
