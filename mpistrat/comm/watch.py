"""Position of each rank: the current call of this rank in a group, and what is known about the others."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, NamedTuple, final

from . import abort

if TYPE_CHECKING:
    from .contract import Call

__all__ = ["ALL", "POLL", "Answer", "Watch", "lines", "user_place"]

POLL = 0.1  # seconds between two looks of the watchdog
_ANSWER = 1.0  # seconds that the others have to answer

ALL = "all ranks must call it"


def user_place(thread: int) -> str:
    """Return `file:line` of where the user's own code is in a thread.

    That is the innermost line outside this package, the standard library and installed packages.
    """
    frame = sys._current_frames().get(thread)
    innermost = "an unknown line"
    if frame is not None:
        innermost = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    while frame is not None:
        name = frame.f_code.co_filename
        if abort.is_user_code(name):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return innermost


class Answer(NamedTuple):
    """What a rank said about itself. `number` is -1 outside collectives; `in_mpi` if it waits where it cannot raise."""

    time: float
    number: int
    tag: int
    seconds: float
    in_mpi: bool
    text: str


@final
class Watch:
    """What this rank is doing in one group, and what is known of the others.

    Attributes:
        rank, size: in the group.
        place: (start, call, number) of the collective that this rank is in, or None.
        number: how many collectives this rank has entered.
        acting: held by the thread that is in a collective.
        refusal: the error that the next collective raises, None while all is well.
        on_flags: whether this rank waits on flags in shared memory, where it can raise by itself.
        left: ranks of other nodes that left the program: how many collectives they had entered, and their exit status.
        raw: (start, name) of the blocking call on the program's communicator that this rank is in, or None.
        stop: whether this rank, or another one, was told to stop; who sets it lets all others know.
        default_timeout, warn_after: seconds.
    """

    def __init__(self, rank: int, size: int, default_timeout: float, warn_after: float) -> None:
        self.rank, self.size = rank, size
        self.default_timeout, self.warn_after = default_timeout, warn_after
        self.place: tuple[float, Call, int] | None = None
        self.number = 0
        self.acting = threading.RLock()
        self.refusal: Exception | None = None
        self.on_flags = False
        self.left: dict[int, tuple[int, int]] = {}
        self.raw: tuple[float, str] | None = None
        self.stop = False
        self.thread = threading.get_ident()
        self.answers: dict[int, Answer] = {}
        self.wanted: tuple[int, ...] = ()
        self.watched = False

    def refuse(self, text: str) -> None:
        """Raise the error that stands in the way of a collective."""
        if self.refusal is not None:
            raise type(self.refusal)(f"{text}: {self.refusal}")

    def departed(self) -> int | None:
        """Return a rank of another node that left before the collective this rank is in, or None."""
        return next((rank for rank, (last, _) in self.left.items() if self.number > last), None)

    def where(self, ranks: Iterable[int]) -> str:
        """Return, as lines to append to an error, where some ranks and this one are. Takes a second."""
        ranks = tuple(ranks)
        start = monotonic()
        if self.watched:
            self.wanted = ranks
            while monotonic() - start < _ANSWER + 2 * POLL:
                if all(rank in self.answers and self.answers[rank].time >= start for rank in ranks):
                    break
                sleep(POLL / 5)
        texts = {self.rank: self.answer().text}
        for rank in ranks:
            answer = self.answers.get(rank)
            texts[rank] = answer.text if answer is not None and answer.time >= start else "does not answer"
        return lines(texts)

    def answer(self) -> Answer:
        """Return where this rank is."""
        now, place, at = monotonic(), self.place, user_place(self.thread)
        raw = self.raw
        if place is None and raw is not None:
            return Answer(now, -1, 0, now - raw[0], True, f"in comm.{raw[1]} for {now - raw[0]:.1f} s, at {at}")
        if place is None:
            return Answer(now, -1, 0, 0.0, False, f"not in a collective, after #{self.number}, at {at}")
        start, call, number = place
        text = f"in {call.brief} #{number} for {now - start:.1f} s, at {at}"
        return Answer(now, number, call.tag, now - start, not self.on_flags, text)


def lines(texts: dict[int, str]) -> str:
    """Return one line for each rank, each after a line break."""
    return "".join(f"\n  rank {rank} {texts[rank]}" for rank in sorted(texts))
