"""The watchdog: a thread that watches over waits inside MPI.

A wait inside MPI cannot be left. So a thread of each process answers the other ranks' question where it is, and when a
collective takes too long it prints every rank's place and ends the job. Whatever ends the job on one rank, it makes the
others print why. It talks over a communicator of the group's own, needs MPI.THREAD_MULTIPLE, and costs a collective no
more than the storing of its place.
"""

from __future__ import annotations

import logging
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Any, final

import numpy as np

from ..._util import log
from ..._util.text import named
from ..agree import fingerprint, only_differences
from ..call import Call
from ..waiting import Backoff, Deadline
from . import abort, exit_report
from .abort import KEY_BYTES, Failures, failure_key
from .rank_monitor import ALL, POLL, Answer, Left, RankMonitor, lines

__all__ = ["Watchdog"]

_NEIGHBOUR = 2.0  # seconds of waiting after which, and between which, the next rank is compared
_ANSWER = 1.0  # seconds that the others have to answer
_GRACE = 5.0  # seconds after the timeout in which someone better placed may tell the story
_RELAY = 0.75  # seconds that rank 0 has to say who prints why the job ends, and to pass it on
_SPREAD = 0.3  # seconds that the others have to print it
_ASK, _PLACE, _LEFT, _END, _STOP, _FAIL, _VERDICT = 1, 2, 3, 4, 5, 6, 7
_HEAD = struct.Struct("<qqd?qqqd")  # an Answer but its time and texts
_NUMBER, _LAST = struct.Struct("<q"), struct.Struct("<qqq")
_LONGEST = 4096


@final
class GroupMonitor:
    """The watchdog's notes about one group."""

    def __init__(self, monitor: RankMonitor, comm: Any) -> None:
        self.monitor, self.comm = monitor, comm
        self.sending: list[tuple[Any, bytes]] = []
        self.sent, self.received = np.zeros(monitor.size, np.int64), 0  # messages: to each rank, and from all
        self.told_end = False  # whether this rank knows, or has told, why the job ends
        self.failures = Failures(monitor.size)  # of all ranks, if this is rank 0
        self.verdict: tuple[str | None] | None = None  # on this rank's own failure: see `tell_end`
        self.told_stop = False
        self.told_raw: set[str] = set()
        self.judged: tuple[Any, ...] | None = None
        self.start_place(None)

    def start_place(self, place: tuple[Any, ...] | None) -> None:
        self.judged = place
        self.warned = False
        self.asked_all = 0.0
        self.asked_next = 0.0 if place is None else place[0]

    def send(self, kind: int, data: bytes, rank: int) -> None:
        """Send without waiting: a rank that does not listen must not stop this one."""
        self.sending = [(request, kept) for request, kept in self.sending if not request.Test()]
        from mpi4py import MPI

        self.sending.append((self.comm.Isend([data, MPI.BYTE], rank, kind), data))
        self.sent[rank] += 1

    def _messages(self) -> Iterator[tuple[int, int, bytearray]]:
        """Source, kind and content of what came."""
        from mpi4py import MPI

        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG, status):
            source, kind = status.source, status.tag
            data = bytearray(status.Get_count(MPI.BYTE))
            self.comm.Recv([data, MPI.BYTE], source, kind)
            self.received += 1
            yield source, kind, data

    def receive(self) -> None:
        """Answer and note what came."""
        monitor = self.monitor
        for source, kind, data in self._messages():
            if kind == _ASK:
                said = monitor.answer(*_NUMBER.unpack(data))
                texts = b"\0".join(text.encode()[:_LONGEST] for text in (said.text, said.error))
                self.send(_PLACE, _HEAD.pack(*said[1:-2]) + texts, source)
            elif kind == _PLACE:
                text, _, error = data[_HEAD.size :].decode(errors="replace").partition("\0")
                monitor.answers[source] = Answer._make((monotonic(), *_HEAD.unpack_from(data), text, error))
            elif kind == _LEFT:
                monitor.left[source] = Left._make((*_LAST.unpack(data), monotonic()))
            elif kind == _STOP:
                monitor.stop = True
            elif kind == _END:
                self._hear_end(bytes(data))
            elif kind == _FAIL:
                self.failures.note(source, bytes(data[:KEY_BYTES]), bytes(data[KEY_BYTES:]), monotonic())
            elif kind == _VERDICT:
                self.verdict = (data[1:].decode() if data[:1] == b"p" else None,)

    def drain(self) -> None:
        """Receive what is still on its way, and forget it. Collective; nobody sends any more.

        MPI may give the freed communicator's context to the next one, whose ranks would take it for their own.
        """
        expected = np.zeros(1, np.int64)
        self.comm.Reduce_scatter_block(self.sent, expected)
        while self.received < expected[0]:
            for _ in self._messages():
                pass
            os.sched_yield()
        for request, _ in self.sending:
            request.Wait()

    def _tell_stop(self) -> None:
        """Tell all others that one of them was told to stop, through rank 0: they may all have been."""
        self.told_stop = True
        for rank in range(1, self.monitor.size) if self.monitor.rank == 0 else (0,):
            self.send(_STOP, b"!", rank)

    def tell_end(self, key: bytes, data: bytes) -> str | None:
        """Tell all others why the job ends, through rank 0; return who fails alike, in words, or None if one of these prints it.

        Ranks that all fail alike then send few messages, and print one text.
        """
        monitor = self.monitor
        if monitor.rank == 0:
            self.failures.note(0, key, data, monotonic())
        else:
            self.send(_FAIL, key + data, 0)
        self._receive_for(_RELAY, until=lambda: self.verdict is not None)
        if self.verdict is None:  # rank 0 cannot listen
            self._spread_end(data, range(monitor.size))
        self._receive_for(_SPREAD)
        return "" if self.verdict is None else self.verdict[0]

    def _judge_failures(self) -> None:
        """On rank 0: tell the ranks that fail who of them prints, and the others why the job ends."""
        verdicts = self.failures.verdicts(monotonic())
        for rank, words in verdicts.items():
            if rank == self.monitor.rank:
                self.verdict = (words,)
            else:
                self.send(_VERDICT, b"" if words is None else b"p" + words.encode(), rank)
        if verdicts and not self.told_end:
            self._hear_end(self.failures.reason, set(range(self.monitor.size)) - set(verdicts))

    def _spread_end(self, data: bytes, ranks: Iterable[int]) -> None:
        self.told_end = True
        for rank in ranks:
            if rank != self.monitor.rank:
                self.send(_END, data, rank)

    def _hear_end(self, data: bytes, others: Iterable[int] = ()) -> None:
        if self.told_end:
            return
        self._spread_end(data, others)
        exit_report.report_exit()
        if not abort.ending:
            abort.print_text(f"rank {self.monitor.rank} of {self.monitor.size}: {data.decode(errors='replace')}")

    def _receive_for(self, seconds: float, until: Callable[[], bool] = bool) -> None:
        backoff, deadline = Backoff(POLL / 10), Deadline(seconds)
        while not deadline.passed and not until():
            self.receive()
            self._judge_failures()
            backoff.pause()

    def look(self) -> None:
        """One round: messages, questions of this rank's own thread, and a judgement on how long it has been waiting."""
        self.receive()
        self._judge_failures()
        monitor = self.monitor
        if monitor.stop and not self.told_stop:
            self._tell_stop()
        wanted, monitor.wanted = monitor.wanted, ()
        self._ask(wanted)
        place, raw = monitor.place, monitor.raw
        if place is not None:
            if place is not self.judged:
                self.start_place(place)
            self._judge(place, monotonic())
        elif raw is not self.judged or raw is None:
            self.start_place(raw)
        else:
            self._judge_raw(raw, monotonic())

    def _ask(self, ranks: Iterable[int]) -> None:
        place = self.monitor.place
        question = _NUMBER.pack(-1 if place is None else place[2])
        for rank in ranks:
            if rank != self.monitor.rank:
                self.send(_ASK, question, rank)

    def _judge(self, place: tuple[float, Call, int], now: float) -> None:
        monitor, (start, call, _) = self.monitor, place
        waited = now - start
        gone = monitor.departed()
        if gone is not None and waited > POLL and not monitor.on_flags and monitor.place is place:
            texts = {monitor.rank: monitor.answer().text, gone: "has left the program"}
            abort.end_job(f"PeerExitError: {call.text} can never end:{lines(texts)}", monitor.left[gone].status or 1)
        self._compare_next(place, now)
        late = waited > call.timeout + (_GRACE if monitor.on_flags else 0)
        if not late and (self.warned or waited < monitor.warn_after):
            return
        fresh = self._ask_all(now)
        if fresh is not None:
            for rank, said in fresh.items():
                self._compare(place, rank, said)
            self._report(fresh, late, waited, call)

    def _ask_all(self, now: float) -> dict[int, Answer] | None:
        """Return what all ranks say that answer in time; None while they may."""
        monitor = self.monitor
        if not self.asked_all:
            self.asked_all = now
            self._ask(range(monitor.size))
            return None
        fresh = {rank: said for rank, said in monitor.answers.items() if said.time >= self.asked_all}
        if len(fresh) < monitor.size - 1 and now - self.asked_all < _ANSWER:
            return None
        self.asked_all = 0.0
        return fresh

    def _judge_raw(self, raw: tuple[float, str], now: float) -> None:
        """A call of MPI by the program itself may take as long as it likes, but not wait for a rank that has gone."""
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
            if name not in self.told_raw and monitor.rank == min(
                [monitor.rank, *(rank for rank, said in fresh.items() if said.in_mpi)]
            ):
                self.told_raw.add(name)  # the next one may take as long, and was told of
                log.logger.warning("comm.%s takes longer than %g s:%s", name, monitor.warn_after, lines(texts))

    def _texts(self, fresh: dict[int, Answer]) -> dict[int, str]:
        """Where each rank is, in words."""
        monitor = self.monitor
        texts = {r: fresh[r].text if r in fresh else "does not answer" for r in range(monitor.size)}
        texts[monitor.rank] = monitor.answer().text
        for rank in monitor.left:
            texts[rank] = "has left the program"
        return texts

    def _compare_next(self, place: tuple[float, Call, int], now: float) -> None:
        """Ask the next rank now and then. If any two ranks differ, so do some neighbours in the ring."""
        rank = (self.monitor.rank + 1) % self.monitor.size
        said = self.monitor.answers.get(rank)
        if said is not None:
            self._compare(place, rank, said)
        if now - self.asked_next > _NEIGHBOUR:
            self.asked_next = now
            self._ask([rank])

    def _compare(self, place: tuple[float, Call, int], rank: int, said: Answer) -> None:
        """End the job where another rank did something else in this rank's collective, or failed in it or before it."""
        monitor, (_, call, number) = self.monitor, place
        failed = (
            said.about == number and said.ago > _NEIGHBOUR and not monitor.on_flags and monitor.strayed(said.failed)
        )
        differs = said.number == number and said.tag != call.tag
        differed = said.about == number and said.print not in (0, fingerprint(call.text))
        if not (failed or differs or differed) or monitor.place is not place:
            return
        texts = {monitor.rank: monitor.answer().text, rank: said.text}
        if failed:
            texts[rank] += f"; #{said.failed} ended there {said.ago:.1f} s before by {said.error}"
            what = (
                f"{call.text} can never end: an error ended #{said.failed} on rank {rank}, which went on:{lines(texts)}"
            )
        else:
            what = f"the ranks entered different collectives:{lines(only_differences(texts))}"
        abort.end_job(f"CollectiveMismatchError: {what}")

    def _report(self, fresh: dict[int, Answer], late: bool, waited: float, call: Call) -> None:
        """The lowest rank that waits tells the story; the others do if it does not."""
        monitor = self.monitor
        waiting = [monitor.rank, *(r for r, said in fresh.items() if said.number >= 0 and (said.in_mpi or not late))]
        texts = self._texts(fresh)
        if not late:
            self.warned = True
            missing = len(fresh) < monitor.size - 1 or any(said.number != monitor.number for said in fresh.values())
            if monitor.rank == min(waiting):  # where all are in it, it has much to do
                level = logging.WARNING if missing else logging.INFO
                text = f"{call.text} takes longer than {monitor.warn_after:g} s; {ALL}"
                log.logger.log(level, "%s:%s", text, lines(texts))
        elif monitor.rank == min(waiting) or waited > call.timeout + _GRACE:
            text = f"{call.text} takes longer than {call.timeout:g} s; {ALL}:{lines(texts)}"
            abort.end_job(f"CollectiveTimeoutError: {text}")


@final
class Watchdog:
    """The thread that looks after all groups of this process. There is one, `Watchdog.instance`, from the first group on."""

    instance: Watchdog | None = None

    def __init__(self) -> None:
        self.lock = threading.RLock()  # who holds it may be sure that the thread makes no MPI call
        self._groups: list[GroupMonitor] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpistrat-watchdog", daemon=True)
        self._thread.start()

    @classmethod
    def add(cls, monitor: RankMonitor, comm: Any) -> None:
        """RankMonitor over a group.

        Args:
            monitor: what this rank is doing in it.
            comm: communicator of the group's ranks on which nobody else sends messages.
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
            abort.agree_who_prints = cls.tell_end
        monitor.watched = True
        with cls.instance.lock:
            cls.instance._groups.append(GroupMonitor(monitor, comm))

    @classmethod
    def remove(cls, monitor: RankMonitor, comm: Any = None) -> None:
        """Forget a group. Collective over its ranks if they are about to free its communicator, else not.

        Args:
            monitor: what `add` was given.
            comm: the communicator that will be freed: it is left without a message. None if it stays to the program's end.
        """
        monitor.watched = False
        mine: list[GroupMonitor] = []
        if cls.instance is not None:
            with cls.instance.lock:
                groups = cls.instance._groups
                mine = [group for group in groups if group.monitor is monitor]
                groups[:] = [group for group in groups if group.monitor is not monitor]
        if comm is not None:
            (
                mine[0] if mine else GroupMonitor(monitor, comm)
            ).drain()  # others may have a watchdog where this rank has none

    @classmethod
    def tell_left(cls, monitor: RankMonitor, ranks: Iterable[int]) -> None:
        """Tell ranks of other nodes that this one leaves the program. Call it after `stop`."""
        if cls.instance is None:
            return
        for group in cls.instance._groups:
            if group.monitor is monitor:
                for rank in ranks:
                    group.send(
                        _LEFT, _LAST.pack(monitor.number, monitor.failed(monitor.number), abort.exit_status()), rank
                    )

    @classmethod
    def tell_end(cls, text: str, reason: str) -> str | None:
        """Make the other ranks print why this one ends the job. Takes a second at most.

        Returns:
            Who else prints this text, in words to print behind it; None if this rank shall not print it, for another one does.
        """
        instance = cls.instance
        if instance is None or not instance._groups or not instance.lock.acquire(timeout=POLL):
            return ""
        try:
            group = max(instance._groups, key=lambda group: group.monitor.size)
            what = f"the job ends because of rank {group.monitor.rank}: {reason}"
            return group.tell_end(failure_key(text), what.encode()[:_LONGEST])
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
            if self.lock.acquire(timeout=POLL):
                try:
                    for group in self._groups:
                        group.look()
                finally:
                    self.lock.release()
            else:
                self._judge_alone()

    def _judge_alone(self) -> None:
        """While MPI must be left alone (NCCL is in flight) nobody can be asked."""
        for group in list(self._groups):
            monitor, place = group.monitor, group.monitor.place
            if place is not None and monotonic() - place[0] > place[1].timeout + _GRACE:
                abort.end_job(
                    f"CollectiveTimeoutError: {place[1].text} takes longer than {place[1].timeout:g} s:"
                    + lines({monitor.rank: monitor.answer().text})
                )
