"""Group monitor: a rank's watchdog for one group of ranks, and its messages to those of the others.

The watchdog is a thread, because a wait inside MPI cannot be interrupted. On request it reports to other ranks which collective
its rank is in. When a collective takes too long, one of them requests a survey of all (`survey.py`), prints it and ends the job.
When one rank ends the job, the watchdogs of the others print why. They communicate over the group's own communicator and need
MPI.THREAD_MULTIPLE; the cost for a collective is one store on entry.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, final

from ...base import log
from ...base.agree import fingerprint, only_differences
from ...base.text import encoded, plural, ranges
from ...base.waiting import Backoff, Deadline
from ...cluster.world import is_loss, loses_ranks
from ..call import Call
from ..mailbox import Mailbox
from ..node import Node
from . import abort, exit_report, survey
from .abort import KEY_BYTES, Failures, failure_key
from .board import Board
from .rank_monitor import ALL, POLL, Answer, Left, RankMonitor, lines
from .survey import Nodes, Place, Surveys

__all__ = [
    "GRACE",
    "GroupMonitor",
    "Watchdog",
]


_NEIGHBOUR = 2.0  # seconds of waiting before, and between, comparisons with the next rank
GRACE = 5.0  # seconds after the timeout in which a better informed rank may report it
_TOGETHER = 0.1  # seconds in which ranks of a node with equal errors find each other
_RELAY = 0.75  # seconds that rank 0 has to choose the rank that prints why the job ends, and to forward it
_SPREAD = 0.3  # seconds that the others have to print it, and
_HOP = 0.1  # for each rank that forwards it
_ASK, _REPLY, _LEFT, _END, _STOP, _FAIL, _VERDICT = 1, 2, 3, 4, 5, 6, 7
_NUMBER, _RANGE, _LAST = struct.Struct("<q"), struct.Struct("<qq"), struct.Struct("<qqq")
_LONGEST = 4096


@final
class GroupMonitor:
    """The watchdog's state of one group, and its messages there."""

    def __init__(
        self,
        monitor: RankMonitor,
        comm: Any,
        node: Node,
        nodes: Nodes,
        bear: Callable[[BaseException, Any], None] | None,
    ) -> None:
        self.monitor, self.mailbox = monitor, Mailbox(comm, bear)
        self.board = Board(node.boards(), node.rank, node.sync)
        self.surveys = Surveys(monitor, self.mailbox, self.board, nodes, node.has_left)
        self._nodes, self._node_ranks = nodes, nodes.ranks_of(nodes.index)
        self._asked_node: tuple[float, set[int]] = (0.0, set())  # request time, and ranks of the node
        self.end_sent = False  # this rank has sent or received why the job ends
        self.failures = Failures(monitor.size)  # of all ranks, if this is rank 0
        self.reporters: set[int] = set()  # ranks that have sent these failures
        self.verdict: tuple[str | None] | None = None  # on this rank's own failure: see `report_end`
        self.stop_sent = self.stop_forwarded = False
        self.warned_calls: set[str] = set()
        self.judged: tuple[Any, ...] | None = None
        # The wait for which a survey was requested, and True to end the job.
        self.wanted: tuple[tuple[Any, ...] | None, bool] = (None, False)
        self.start_wait(None)

    def start_wait(self, current: tuple[Any, ...] | None) -> None:
        self.judged = current
        self.warned = False
        self.again = 0.0  # time of the next survey of a wait that takes too long
        self.asked_next = 0.0 if current is None else current[0]

    def receive(self) -> None:
        """Handle the messages that have arrived."""
        monitor = self.monitor
        for source, kind, data in self.mailbox.poll():
            if kind == _ASK:
                self.mailbox.send(monitor.answer(*_NUMBER.unpack(data)).encode(_LONGEST), source, _REPLY)
            elif kind == _REPLY:
                monitor.answers[source] = Answer.decode(data)
            elif kind in survey.KINDS:
                self.surveys.receive(source, kind, data)
            elif kind == _LEFT:
                monitor.left[source] = Left._make((*_LAST.unpack(data), monotonic()))
            elif kind == _STOP:
                self._receive_stop(*_RANGE.unpack_from(data))
            elif kind == _END:
                self._receive_end(bytes(data[_RANGE.size :]), *_RANGE.unpack_from(data))
            elif kind == _FAIL:
                self._note_failures(source, data)
            elif kind == _VERDICT:
                self.verdict = (data[1:].decode() if data[:1] == b"p" else None,)

    def _send_stop(self) -> None:
        """Send a request to stop to all nodes, through rank 0: all ranks may have one, and one of a node sends it."""
        self.stop_sent = True
        if self.board.stopped:
            return
        self.board.note_stop()
        if self.monitor.rank == 0:
            self._receive_stop(0, self._nodes.count)
        else:
            self.mailbox.send(_RANGE.pack(0, self._nodes.count), 0, _STOP)

    def _receive_stop(self, low: int, high: int) -> None:
        """Accept a request to stop, and forward it to a range of nodes, of which the first is this rank's."""
        if not self.stop_forwarded:
            self.stop_forwarded = self.stop_sent = self.monitor.stop = True
            self.board.note_stop()
            self._forward(_STOP, b"", low, high)

    def report_left(self, ranks: Iterable[int]) -> None:
        """Report to ranks of other nodes that this one leaves the program."""
        last = _LAST.pack(self.monitor.number, self.monitor.failed(self.monitor.number), abort.exit_status())
        for rank in ranks:
            self.mailbox.send(last, rank, _LEFT)

    def report_end(self, text: str, reason: str) -> str | None:
        """Send all nodes why the job ends, through rank 0; return ranks with equal errors, in words, or None if one prints it.

        So ranks with equal errors send few messages, and print one text. The lowest of those on a node sends for all.
        """
        monitor, key = self.monitor, failure_key(text)
        data = encoded(f"the job ends because of rank {monitor.rank}: {reason}")[:_LONGEST]
        self.board.note_failure(key)
        self._receive_for(_TOGETHER)
        alike = [self._node_ranks[index] for index in self.board.failing(key)]
        if min(alike) < monitor.rank:
            return None
        message = b"".join(map(_NUMBER.pack, [len(alike), *alike])) + key + data
        if monitor.rank == 0:
            self._note_failures(0, message)
        else:
            self.mailbox.send(message, 0, _FAIL)
        self._receive_for(_RELAY, until=lambda: self.verdict is not None)
        if self.verdict is None:  # rank 0 cannot receive
            self._spread_end(data)
        self._receive_for(_SPREAD + _HOP * survey.height(self._nodes.count))
        return "" if self.verdict is None else self.verdict[0]

    def _note_failures(self, source: int, message: bytes | bytearray) -> None:
        """Record, on rank 0, ranks of a node with equal errors."""
        end = (1 + _NUMBER.unpack_from(message)[0]) * _NUMBER.size
        key, reason = bytes(message[end : end + KEY_BYTES]), bytes(message[end + KEY_BYTES :])
        for (rank,) in _NUMBER.iter_unpack(message[_NUMBER.size : end]):
            self.failures.note(rank, key, reason, monotonic())
        self.reporters.add(source)

    def _judge_failures(self) -> None:
        """Send, on rank 0, to the failing ranks which of them prints, and to the others why the job ends."""
        verdicts = self.failures.verdicts(monotonic())
        for rank, words in verdicts.items():
            if rank == self.monitor.rank:
                self.verdict = (words,)
            elif rank in self.reporters:
                self.mailbox.send(b"" if words is None else b"p" + encoded(words), rank, _VERDICT)
        if verdicts and not self.end_sent:
            self._spread_end(self.failures.reason)
            self._print_end(self.failures.reason)

    def _spread_end(self, data: bytes) -> None:
        """Send all nodes why the job ends, by ranks that forward it; or all ranks, if one that forwards it may have died."""
        self.end_sent = True
        if not loses_ranks():
            self._forward(_END, data, 0, self._nodes.count)
            return
        for rank in range(self.monitor.size):
            if rank != self.monitor.rank:
                self.mailbox.send(_RANGE.pack(0, 1) + data, rank, _END)

    def _forward(self, kind: int, data: bytes, low: int, high: int) -> None:
        """Send data to a range of nodes, the first of which is this rank's; to two ranks each, because one may not receive."""
        for first, last in survey.parts(low + 1, high):
            ranks = self._nodes.after(first - low)
            self.mailbox.send(_RANGE.pack(first, last) + data, ranks[0], kind)
            if len(ranks) > 1:
                self.mailbox.send(_RANGE.pack(first, last) + data, ranks[1], kind)
            elif first + 1 < last:
                rank = self._nodes.after(first + 1 - low)[0]
                self.mailbox.send(_RANGE.pack(first + 1, last) + data, rank, kind)

    def _receive_end(self, data: bytes, low: int, high: int) -> None:
        if not self.end_sent:
            self.end_sent = True
            self._forward(_END, data, low, high)
            self._print_end(data)

    def _print_end(self, data: bytes) -> None:
        """Print why the job ends, on the first rank of each node, and end if MPI continues without this rank."""
        exit_report.report_exit()
        if abort.ending:
            return
        if self.monitor.rank == self._node_ranks[0] or loses_ranks():
            abort.print_text(f"rank {self.monitor.rank} of {self.monitor.size}: {data.decode(errors='replace')}")
        abort.end_where_nobody_does()

    def _receive_for(self, seconds: float, until: Callable[[], bool] = bool) -> None:
        backoff, deadline = Backoff(POLL / 10), Deadline(seconds)
        while not deadline.passed and not until():
            self.receive()
            self._judge_failures()
            backoff.pause()

    def look(self) -> None:
        """Execute one round: messages, requests of this rank's own thread, and a check for a long wait."""
        self.receive()
        self._judge_failures()
        monitor = self.monitor
        monitor.stop = monitor.stop or self.board.stopped
        if monitor.stop and not self.stop_sent:
            self._send_stop()
        wanted, monitor.wanted = monitor.wanted, ()
        self._ask(wanted)
        self.board.write(monitor.answer)
        self._read_board()
        self.surveys.look()
        current, raw = monitor.current, monitor.raw
        waiting = raw if current is None else current
        if waiting is not self.judged or waiting is None:
            self.start_wait(waiting)
        result, self.surveys.result = self.surveys.result, None
        if current is not None:
            self._judge(current, monotonic())
            if result is not None and self.wanted[0] is current:
                self._report(current, result)
        elif raw is not None:
            self._judge_raw(raw, monotonic())
            if result is not None and self.wanted[0] is raw:
                self._report_raw(raw, result)

    def _ask(self, ranks: Iterable[int]) -> None:
        """Request the positions of ranks: of this node's on its board, of others by messages."""
        current = self.monitor.current
        about = -1 if current is None else current[2]
        near = {*ranks} & {*self._node_ranks} - {self.monitor.rank}
        if near:
            self._asked_node = self.board.ask(about), near | self._asked_node[1]  # some may still answer
        for rank in {*ranks} - near - {self.monitor.rank}:
            self.mailbox.send(_NUMBER.pack(about), rank, _ASK)

    def _read_board(self) -> None:
        since, ranks = self._asked_node
        for rank in sorted(ranks):
            answer = self.board.read(self._node_ranks.index(rank), since)
            if answer is not None:
                self.monitor.answers[rank] = answer._replace(time=monotonic())
                ranks.discard(rank)

    def _judge(self, current: tuple[float, Call, int], now: float) -> None:
        monitor, (start, call, _) = self.monitor, current
        gone = monitor.departed()
        if gone is not None and now - start > POLL and not monitor.on_flags and monitor.current is current:
            texts = {monitor.rank: monitor.answer().text, gone: "has left the program"}
            abort.end_job(f"PeerExitError: {call.text} can never end:{lines(texts)}", monitor.left[gone].status or 1)
        self._compare_next(current, now)
        self._want(current, now, self._late(call), current[2])

    def _judge_raw(self, raw: tuple[float, str], now: float) -> None:
        """Check a call of MPI by the program: it may take any time, unless it waits for a rank that has left."""
        self.warned = self.warned or raw[1] in self.warned_calls
        self._want(raw, now, self.monitor.default_timeout, -1)
        if self.warned:
            self.warned_calls.add(raw[1])  # the next one may take as long, without another report

    def _late(self, call: Call) -> float:
        """Return the seconds after which a collective takes too long; a rank that can raise by itself gets a little longer."""
        return call.timeout + (GRACE if self.monitor.on_flags or self.monitor.on_time else 0)

    def _want(self, waiting: tuple[Any, ...], now: float, late: float, about: int) -> None:
        """Request a survey if this rank has waited too long and none covers this wait yet."""
        ends = now - waiting[0] > late
        since = max(self.again, waiting[0] + late) if ends else waiting[0] + self.monitor.warn_after
        if now < since or (self.warned and not ends):
            return
        covered = since if ends else waiting[0] + self.monitor.warn_after / 2  # includes ranks that came a little later
        if self.board.surveyed >= covered:
            self.warned = True
            if ends:
                self.again = self.board.surveyed + GRACE
            return
        due = since + self.surveys.depth * survey.STAGGER
        attempt = int((now - due) // survey.PATIENCE)
        if attempt >= 0 and self.board.claimed < due + attempt * survey.PATIENCE:
            self.wanted = waiting, ends
            self.surveys.want(about, attempt)

    def _texts(self, places: Sequence[Place]) -> dict[int, str]:
        """Return the position of each rank, in words."""
        monitor = self.monitor
        texts = dict.fromkeys(range(monitor.size), "does not answer") | survey.texts(places)
        return texts | dict.fromkeys(monitor.left, survey.LEFT.text)

    def _compare_next(self, current: tuple[float, Call, int], now: float) -> None:
        """Query the next rank periodically. If any two ranks differ, so do some neighbours in the ring."""
        rank = (self.monitor.rank + 1) % self.monitor.size
        answer = self.monitor.answers.get(rank)
        if answer is not None:
            self._compare(current, rank, answer)
        if now - self.asked_next > _NEIGHBOUR:
            self.asked_next = now
            self._ask([rank])

    def _compare(self, current: tuple[float, Call, int], rank: int, answer: Answer) -> None:
        """End the job if another rank made another call in this rank's collective, or failed in it or before it."""
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
            what = f"{call.text} can never end: an error ended #{answer.failed} on rank {rank}, which continued:{lines(texts)}"
        else:
            what = f"the ranks entered different collectives:{lines(only_differences(texts))}"
        abort.end_job(f"CollectiveMismatchError: {what}")

    def _report(self, current: tuple[float, Call, int], places: Sequence[Place]) -> None:
        """Print the positions of all ranks; end the job if that has taken too long."""
        monitor, (start, call, _) = self.monitor, current
        for place in places:
            self._compare(current, place.ranks[0], place.answer)
        texts = self._texts(places)
        if monotonic() - start > self._late(call) and monitor.current is current:
            text = f"{call.text} takes longer than {call.timeout:g} s; {ALL}:{lines(texts)}"
            abort.end_job(f"CollectiveTimeoutError: {text}")
            return
        count = sum(len(place.ranks) for place in places)
        missing = count < monitor.size or any(place.answer.number != monitor.number for place in places)
        level = logging.WARNING if missing else logging.INFO  # if all ranks are in it, it is merely slow
        text = f"{call.text} takes longer than {monitor.warn_after:g} s; {ALL}"
        log.logger.log(level, "%s:%s", text, lines(texts))

    def _report_raw(self, raw: tuple[float, str], places: Sequence[Place]) -> None:
        """Print the positions of all ranks; end the job if one of them has left."""
        monitor, (start, name) = self.monitor, raw
        here = {rank for place in places if place.answer.text != survey.LEFT.text for rank in place.ranks}
        silent = [rank for rank in range(monitor.size) if rank not in here]
        if silent and monotonic() - start > monitor.default_timeout and monitor.raw is raw:
            who = f"{plural(len(silent), 'rank')} {', '.join(ranges(silent))}"
            abort.end_job(
                f"PeerExitError: comm.{name} takes longer than {monitor.default_timeout:g} s, and {who} can no longer take part:"
                + lines(self._texts(places))
            )
        elif not self.wanted[1]:
            text = f"comm.{name} takes longer than {monitor.warn_after:g} s"
            log.logger.warning("%s:%s", text, lines(self._texts(places)))


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
    def add(
        cls,
        monitor: RankMonitor,
        comm: Any,
        node: Node,
        nodes: Nodes,
        bear: Callable[[BaseException, Any], None] | None = None,
    ) -> None:
        """Monitor a group, over a communicator of its ranks without other messages.

        Args:
            node: the ranks that share memory with this one.
            nodes: of the group.
            bear: see `Mailbox`.
        """
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            log.once(
                logging.WARNING,
                "MPI was started without THREAD_MULTIPLE: no watchdog runs, so a collective that hangs inside MPI is not "
                "noticed. Let mpi4py start MPI, or request THREAD_MULTIPLE",
            )
            return
        if cls.instance is None:
            cls.instance = cls()
            abort.agree_who_prints = cls.report_end
        monitor.watched = True
        with cls.instance.lock:
            cls.instance._groups.append(GroupMonitor(monitor, comm, node, nodes, bear))

    @classmethod
    def remove(cls, monitor: RankMonitor, comm: Any = None) -> None:
        """Stop monitoring a group. With `comm`, drain its communicator, which may then be freed; collective."""
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
            (mailbox or Mailbox(comm)).drain()  # others may have a watchdog even if this rank has none

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
        """Make the other ranks print why this one ends the job. Takes at most a second.

        Returns:
            The ranks with the same text, in words to print after it; None if another rank prints it.
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
        """Check the groups; stop checking one whose ranks were lost, which callers of MPI notice too."""
        for group in list(self._groups):
            try:
                group.look()
            except Exception as error:
                if not is_loss(error, note=False):
                    raise
                self._groups.remove(group)

    def _position(self) -> str:
        """Return the position of this rank in the largest of its groups."""
        groups = list(self._groups)
        if not groups:
            return "in no group of several ranks"
        return max(groups, key=lambda group: group.monitor.size).monitor.answer().text

    def _judge_alone(self) -> None:
        """Enforce the timeouts while MPI must not be called and other ranks cannot be queried."""
        for group in list(self._groups):
            monitor, current = group.monitor, group.monitor.current
            if current is not None and monotonic() - current[0] > current[1].timeout + GRACE:
                abort.end_job(
                    f"CollectiveTimeoutError: {current[1].text} takes longer than {current[1].timeout:g} s:"
                    + lines({monitor.rank: monitor.answer().text})
                )
