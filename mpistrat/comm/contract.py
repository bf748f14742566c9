"""Fingerprints of collective calls: all ranks compare theirs before data moves, and mismatches become errors.

A `Call` is the fingerprint of one kind of collective: operation, name, dtype, shape and further detail. On a node its tag is
exchanged in every barrier (see `node`); between nodes the ranks compare tags at intervals (`compare`).
"""

from __future__ import annotations

from binascii import crc32
from collections import deque
from collections.abc import Hashable
from time import monotonic
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..errors import CollectiveMismatchError, ContextError, explain
from .agree import fingerprint, gather_text, mismatch

if TYPE_CHECKING:
    from .draws import Draws
    from .monitor.rank_monitor import RankMonitor
    from .node import Node

__all__ = ["TEXT_BYTES", "Call", "Comparison", "describe"]

_MASK = (1 << 63) - 1
_SERIES = 4096  # so many names are remembered
TEXT_BYTES = 1000  # of a text are shown; the tag covers all of it
_STAMP_BYTES = 100  # of them for what changes


def describe(op: str, name: str = "", dtype: Any = None, shape: Any = None, detail: Hashable = ()) -> str:
    """Return a collective in words, the same on every rank that means the same.

    Example:
        >>> describe("all_reduce", "w", np.float32, (4, 3))
        "all_reduce 'w' float32 (4, 3)"
    """
    words = [op]
    if name:
        words.append(repr(name))
    if dtype is not None:
        words.append(dtype if isinstance(dtype, str) else str(np.dtype(dtype)))
    if shape is not None:
        words.append(str(tuple(int(length) for length in shape)))
    if detail != ():
        words.append(detail if isinstance(detail, str) else repr(detail))
    return " ".join(words)


@final
class Call:
    """One kind of collective of one group, as a reusable context manager; `ProcessGroup.collective` makes and keeps it.

    Attributes:
        tag, text: fingerprint, and what it stands for, with `stamp`.
        kind: the fingerprint without it.
        series: operation and name.
        timeout: seconds that a rank waits in it.
        payload: the text as it is laid into shared memory: two bytes of length, then UTF-8.
    """

    __slots__ = (
        "_comparison",
        "_monitor",
        "_node",
        "_outer",
        "_shown",
        "_stamp",
        "_text",
        "kind",
        "payload",
        "series",
        "synchronize",
        "tag",
        "timeout",
    )

    def __init__(
        self,
        text: str,
        timeout: float,
        monitor: RankMonitor,
        node: Node,
        comparison: Comparison | None = None,
        synchronize: bool = False,
        series: str = "",
    ) -> None:
        self._text, self._stamp = text, ""
        self.series = series
        self.kind = self.tag = fingerprint(text)
        self.timeout = timeout
        shown, longest = text.encode(), TEXT_BYTES - _STAMP_BYTES
        if len(shown) > longest:
            shown = shown[: longest - 300] + f" …[{self.kind:x}]… ".encode() + shown[-250:]
        self._shown = shown
        self.payload = len(shown).to_bytes(2, "little") + shown
        self.synchronize = synchronize and node.size > 1
        self._monitor = monitor
        self._node = node
        self._comparison = comparison
        self._outer: Any = None

    @property
    def text(self) -> str:
        """What it is, in words."""
        return self._text + self._stamp

    @property
    def brief(self) -> str:
        """The same, cut after 600 characters."""
        return self._text[:600] + self._stamp

    def stamp(self, words: str) -> Call:
        """Say what else the ranks must do alike this time, and return the call. Before it is entered.

        For what changes from one call to the next: on a node it is compared each time, between nodes it makes no difference
        at once, but is found by the next comparison. At most 100 characters of ASCII.

        Example:
            >>> from mpistrat.comm.process_group import ProcessGroup
            >>> ProcessGroup.single().collective("step").stamp(", number 3").text
            'step, number 3'
        """
        self._stamp, more = words, words.encode()
        self.tag = (self.kind ^ (crc32(more) << 24)) or 1
        self.payload = (len(self._shown) + len(more)).to_bytes(2, "little") + self._shown + more
        return self

    def __enter__(self) -> Call:
        monitor = self._monitor
        if monitor.refusal is not None:
            monitor.refuse(self.text)
        if monitor.size == 1:
            return self
        if not monitor.acting.acquire(False):
            raise _crowded(self.text, monitor)
        monitor.number += 1
        self._outer = monitor.place
        monitor.place = (monotonic(), self, monitor.number)
        try:
            comparison = self._comparison
            if comparison is not None and comparison.due(self, monitor.number):
                self._node.barrier(self)
                comparison.compare(monitor)
            elif self.synchronize:
                self._node.barrier(self)
        except BaseException as error:
            monitor.fail(error, True)
            monitor.place = self._outer
            monitor.acting.release()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        monitor = self._monitor
        if monitor.size > 1:
            if error is not None:
                monitor.fail(error, False)
            monitor.place, self._outer = self._outer, None
            monitor.acting.release()


@final
class Comparison:
    """Compares the calls of all ranks over a communicator on which nothing else is reduced.

    Not every call is compared, but no difference is forgotten: what is compared is a number that depends on all calls so far.
    """

    def __init__(self, comm: Any, every: int, draws: Draws) -> None:
        from mpi4py import MPI

        self._draws = draws
        self._comm, self._min = comm, MPI.MIN
        self._pair, self._least = np.empty(2, np.int64), np.empty(2, np.int64)
        self._recent: deque[tuple[int, str]] = deque(maxlen=every)  # number and text
        self._last: dict[str, int] = {}  # kind of each operation and name
        self._rolling = 0
        self._every, self._compared = every, 0  # number of the call that was compared last

    def due(self, call: Call, number: int) -> bool:
        """Note a call. Return whether to compare now: one `every` calls, and when a series changes."""
        self._rolling = (self._rolling * 0x100000001B3 + (call.tag ^ self._draws.mark)) & _MASK
        self._recent.append((number, call.text))
        changed = self._last.get(call.series) != call.kind
        if changed:
            if len(self._last) >= _SERIES:  # at the same moment on every rank
                self._last.clear()
            self._last[call.series] = call.kind
        return changed or number - self._compared >= self._every

    def recent(self, number: int) -> str:
        """Return the text of a call, "" where it was not noted or is forgotten. Any thread."""
        return dict(self._recent.copy()).get(number, "")

    def compare(self, monitor: RankMonitor) -> None:
        """Check that all ranks made the same calls, up to the one that they are in. Collective.

        Where they did not, they go on in step: with the same number, and as if none had failed before.

        Raises:
            CollectiveMismatchError: on every rank, with what each of them did where they first differ.
        """
        self._pair[0], self._pair[1] = self._rolling, ~self._rolling  # the least of ~x tells the largest x
        self._comm.Allreduce(self._pair, self._least, self._min)
        before, self._compared = self._compared, monitor.number
        if self._least[0] == ~self._least[1]:
            return
        mine = [(at, text) for at, text in self._recent if at > before]
        self._rolling = 0
        self._last.clear()
        words = "\n".join(f"{at} {text}" for at, text in mine)
        calls = [
            {int(at): what for at, _, what in (line.partition(" ") for line in text.split("\n"))}
            for text in gather_text(self._comm, words)
        ]
        monitor.number = self._compared = max(max(own) for own in calls)
        if monitor.place is not None:
            monitor.place = (*monitor.place[:2], monitor.number)
        monitor.failures.clear()
        raise _first_difference(calls) or self._draws.differ(self._comm, range(self._comm.size), mine[-1][1])


def _first_difference(calls: list[dict[int, str]]) -> CollectiveMismatchError | None:
    """Return the error about the first of some calls, by number, in which the ranks differ; None where they do not.

    Ranks whose calls failed, while others still wait in them, are ahead of these.
    """
    last = max(max(own) for own in calls)
    for number in range(max(min(own) for own in calls), last + 1):
        texts = {rank: own.get(number, "nothing") for rank, own in enumerate(calls)}
        if len(set(texts.values())) > 1:
            return mismatch(texts, last - number)
    return None


def _crowded(text: str, monitor: RankMonitor) -> ContextError:
    """The error of a thread that comes while another one is in a collective: ranks would sum what does not belong together."""
    place = monitor.place
    inside = "another collective" if place is None else place[1].brief
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
