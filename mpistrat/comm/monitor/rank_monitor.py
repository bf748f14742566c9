"""Position of each rank: the current call of this rank in a group, and the known state of the others."""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from time import monotonic
from typing import Any, NamedTuple, final

from ...base.agree import fingerprint
from ...base.frames import frame_of
from ...base.text import encoded, error_text, plural, ranges
from ...base.waiting import Backoff, wait_until
from ...cluster.forks import is_child, refusal, refuse_in_children
from ..call import Call
from ..recorder import GROUPS, RECORDER
from . import abort

__all__ = ["ALL", "POLL", "Answer", "Left", "RankMonitor", "lines", "monitored", "no_more_use", "user_line"]

POLL = 0.1  # seconds between two rounds of the watchdog
_ANSWER = 1.0  # seconds that the others have to answer
_FAILURES = 64  # number of failed collectives that are stored
_SHOWN = 400  # characters of an error

ALL = "all ranks must call it"
_groups = itertools.count(1)
_monitors: weakref.WeakSet[RankMonitor] = weakref.WeakSet()  # of this process's groups

_BLOCKING = [
    "Barrier", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather", "Allgatherv", "Alltoall",
    "Alltoallv", "Alltoallw", "Reduce", "Allreduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan",
    "Send", "Ssend", "Recv", "Sendrecv", "Sendrecv_replace", "Probe", "Mprobe", "barrier", "bcast", "gather",
    "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan", "send", "ssend", "recv",
    "sendrecv", "probe", "mprobe",
]  # fmt: skip


def _free_group() -> int:
    """Return a number for a new group, unused and not recently used, because events stay."""
    taken = {0, *(monitor.group for monitor in list(_monitors))}
    for number in itertools.islice(_groups, GROUPS):
        if number % GROUPS not in taken:
            break
    return number % GROUPS


def no_more_use(why: str) -> str:
    """Return the text of the error that every later collective of a group raises."""
    return f"this group of ranks can no longer be used: {why}. Close the strategy or group, and create a new one"


def user_line(thread: int) -> str:
    """Return `file:line` of a thread's current line of the user's code, outside this package, the standard library and others."""
    frame = frame_of(thread)
    innermost = "an unknown line"
    if frame is not None:
        innermost = _line(frame.f_code.co_filename, frame.f_lineno)
    while frame is not None:
        name = frame.f_code.co_filename
        if abort.is_user_code(name):
            return _line(name, frame.f_lineno)
        frame = frame.f_back
    return innermost


def _line(path: str, number: int) -> str:
    return f"{os.path.basename(path)}:{number}"  # pathlib takes 2 µs


class Answer(NamedTuple):
    """The state of a rank in its answer.

    Attributes:
        time: when it arrived.
        number, tag, seconds: its current collective, and for how long; -1, 0 and 0.0 outside collectives.
        about: number of the requesting rank's collective, -1 for none.
        print: fingerprint of the text of that one on this rank; 0 if it is unknown.
        failed: number of a collective that an error ended on this rank: that one, or else the last one that it could not enter; 0
            for none.
        ago: seconds since then.
        what, at, before, error: its current call, the program's line, its earlier events, and that error.
    """

    time: float
    number: int
    tag: int
    seconds: float
    about: int
    print: int
    failed: int
    ago: float
    what: str
    at: str
    before: str
    error: str

    @property
    def text(self) -> str:
        """The rank's position, in words."""
        return self.words((self.seconds, self.seconds), self.before)

    def words(self, seconds: tuple[float, float], before: str) -> str:
        """Return the position in words, of several ranks, which have been there for at least and at most these seconds."""
        low, high = (f"{length:.1f}" for length in seconds)
        span = "" if not seconds[1] else f" for {low} s" if low == high else f" for {low} to {high} s"
        return f"{self.what}{span}{self.at and f', at {self.at}'}{before and f'; before that {before}'}"

    @property
    def key(self) -> tuple[Any, ...]:
        """The common values of ranks at the same position."""
        return self.number, self.tag, self.about, self.print, self.failed, self.what, self.at, self.error

    def encode(self, room: int) -> bytes:
        """Return all but the time as bytes, with shorter texts if there is too little room."""
        for longest in (10_000, 300, 100, 0):
            words = [text[:longest] for text in self[-4:]]
            data = encoded(json.dumps([*self[1:-4], *words], ensure_ascii=False))
            if len(data) <= room:
                break
        return data

    @classmethod
    def decode(cls, data: bytes | bytearray) -> Answer:
        """Return an encoded answer with the current time."""
        return cls._make((monotonic(), *json.loads(data)))


class FailedCall(NamedTuple):
    """The time and error of a collective's failure on a rank, and whether it failed before data was sent."""

    time: float
    error: str
    on_entry: bool


class Left(NamedTuple):
    """The known state of a rank that left the program.

    Attributes:
        number: of its last collective.
        failed: of the last one that failed on entry, or of the last one if that failed; 0 for none.
        status: its exit status.
        time: when this rank received it.
    """

    number: int
    failed: int
    status: int
    time: float


@final
class RankMonitor:
    """The activity of this rank in one group, and the known state of the others.

    Attributes:
        rank, size: in the group.
        group: the number of this group among the process's groups of several ranks; see `comm.recorder`.
        current: (start, call, number) of this rank's current collective, or None.
        number: number of collectives that this rank has entered.
        acting: held by the thread that is in a collective.
        refusal: the error that the next collective raises, or None.
        on_flags: True if this rank waits on flags in shared memory, where it can raise by itself.
        on_time: True if this rank raises by itself when the time of its call is over.
        left: ranks of other nodes that left the program.
        failures: the collectives, by number, that failed on this rank since the ranks were last known to be in step.
        recent: returns the text of one of this rank's last collectives, by number; "" if it is unknown.
        raw: (start, name) of this rank's current blocking call on the program's communicator, or None.
        stop: True if this rank, or another one, was requested to stop; the watchdogs forward it to all others.
        default_timeout, warn_after: seconds.
    """

    def __init__(self, rank: int, size: int, default_timeout: float, warn_after: float) -> None:
        self.rank, self.size = rank, size
        self.group = _free_group() if size > 1 else 0
        self.default_timeout, self.warn_after = default_timeout, warn_after
        self.current: tuple[float, Call, int] | None = None
        self.number = 0
        self.acting = threading.RLock()
        self.refusal: Exception | None = None
        self.on_flags = self.on_time = False
        self.left: dict[int, Left] = {}
        self.failures: dict[int, FailedCall] = {}
        self.recent: Callable[[int], str] = lambda number: ""
        self.raw: tuple[float, str] | None = None
        self.stop = False
        self.thread = threading.get_ident()
        self.answers: dict[int, Answer] = {}
        self.wanted: tuple[int, ...] = ()
        self.watched = False
        _monitors.add(self)
        refuse_in_children(self)

    def refuse_in_child(self) -> None:
        """See `cluster.forks`. A single rank has no others to protect."""
        if self.size > 1:
            self.refusal = refusal()

    def refuse(self, text: str) -> None:
        """Raise `refusal`, if any, in the name of a collective."""
        if self.refusal is not None:
            raise type(self.refusal)(f"{text}: {self.refusal}")

    def fail(self, error: BaseException, on_entry: bool) -> None:
        """Record that an error ends this rank's current collective."""
        if self.current is not None:
            if len(self.failures) >= _FAILURES:
                self.failures.pop(next(iter(self.failures)))
            text = error_text(error)[:_SHOWN]
            self.failures[self.current[2]] = FailedCall(monotonic(), text, on_entry)

    def failed(self, about: int) -> int:
        """Return that collective if it failed here, else the last one that failed on entry; 0 for none."""
        failures = dict(self.failures)
        if about in failures:
            return about
        return max((number for number, failure in failures.items() if failure.on_entry), default=0)

    def out_of_step(self, failed: int) -> bool:
        """Return True if a rank that failed in a collective is no longer in step with this one.

        This rank is still in it, or has finished it.
        """
        return 0 < failed <= self.number and failed not in self.failures

    def departed(self) -> int | None:
        """Return a rank of another node that left without taking part in this rank's current collective, or None.

        If it failed in it, this rank gets a little time to receive that error.
        """
        late = monotonic() - _ANSWER
        for rank, left in list(self.left.items()):
            if self.number > left.number or (left.time < late and self.out_of_step(left.failed)):
                return rank
        return None

    def where(self, ranks: Iterable[int]) -> str:
        """Return the positions of some ranks and this one, as lines to append to an error. Takes a second."""
        ranks = tuple(ranks)
        start = monotonic()

        def answered() -> bool:
            return all(rank in self.answers and self.answers[rank].time >= start for rank in ranks)

        if self.watched:
            self.wanted = ranks
            wait_until(answered, _ANSWER + 2 * POLL, Backoff(POLL / 5))
        texts = {self.rank: self.answer().text}
        for rank in ranks:
            answer = self.answers.get(rank)
            texts[rank] = answer.text if answer is not None and answer.time >= start else "does not answer"
        return lines(texts)

    def answer(self, about: int = -1) -> Answer:
        """Return the state of this rank, for a rank in collective number `about`."""
        now, current, raw, at = monotonic(), self.current, self.raw, user_line(self.thread)
        known = self.recent(about)
        before = RECORDER.history()
        failed = self.failed(about)
        failure = self.failures.get(failed, FailedCall(now, "", False))
        more = about, fingerprint(known) if known else 0, failed, now - failure.time
        words = at, before, failure.error
        if current is not None:
            start, call, number = current
            what = f"in {call.brief} #{number}"
            return Answer(now, number, call.tag, now - start, *more, what, *words)
        if raw is not None:
            return Answer(now, -1, 0, now - raw[0], *more, f"in comm.{raw[1]}", *words)
        elsewhere = [other.current for other in list(_monitors) if other is not self and other.current is not None]
        if elsewhere:
            start, call, _ = min(elsewhere, key=lambda entered: entered[0])
            what = f"in {call.brief} of another group, after #{self.number}"
            return Answer(now, -1, 0, now - start, *more, what, *words)
        return Answer(now, -1, 0, 0.0, *more, f"not in a collective, after #{self.number}", *words)


def lines(texts: Mapping[int, str]) -> str:
    """Return a line for each different text with its ranks, each line after a line break.

    Example:
        >>> lines({2: "does not answer", 0: "in reduce #3", 1: "in reduce #3"})
        '\\n  ranks 0-1 in reduce #3\\n  rank 2 does not answer'
    """
    found: dict[str, list[int]] = {}
    for rank in sorted(texts):
        found.setdefault(texts[rank], []).append(rank)
    return "".join(
        f"\n  {plural(len(ranks), 'rank')} {', '.join(ranges(ranks))} {text}" for text, ranks in found.items()
    )


def monitored(comm: Any, monitor: RankMonitor) -> Any:
    """Return the same communicator, as an Intracomm whose blocking calls are recorded in `monitor`."""
    plain: Any = type(comm)
    own = _monitored_class(plain)(comm)
    own.monitor = monitor
    return own


@functools.cache
def _monitored_class(plain: Any) -> type[Any]:
    """Return a subclass of a communicator's class, which may record derived communicators (`cluster/world.py`)."""
    names = {name: _noted(getattr(plain, name)) for name in _BLOCKING if hasattr(plain, name)}
    return type("Intracomm", (plain,), {**names, "monitor": None, "__module__": __name__})


def _noted(plain: Callable[..., Any]) -> Callable[..., Any]:
    name = plain.__name__

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_child():
            raise refusal(f"comm.{name}")
        monitor = self.monitor
        if monitor is None or monitor.thread != threading.get_ident():
            return plain(self, *args, **kwargs)
        monitor.raw = monotonic(), name
        try:
            return plain(self, *args, **kwargs)
        finally:
            monitor.raw = None

    return method
