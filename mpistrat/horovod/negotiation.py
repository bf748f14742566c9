"""Negotiation: the calls that all ranks of a process set have made, matched by name, and their order.

Each rank sends its calls to rank 0. Rank 0 answers with a decision, the complete calls, and every rank runs these in the
order of the decision. Without calls, nothing is sent.

The first decision about a name gives it a number. Then messages have one bit for each number, and text only for calls that
are new or that differ from the last ones of their names: other rows of an all-gather, for instance.
"""

from __future__ import annotations

import functools
import json
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from ..base.errors import by_rank
from ..base.text import named

__all__ = ["Coordinator", "Decision", "Form", "Key", "RankCalls", "has_text", "left_in"]

Key = tuple[int, str]  # number of a process set, name of a call
Form = dict[str, Any]  # of a call: kind, dtypes, shapes and more, as JSON has it

_NUMBERS = 8192  # names that have a number; others are sent as text
_KEPT = 256  # cached messages by numbers alone, packed, unpacked and decided
_SHOWN = "shapes", "dtypes", "device", "op", "root", "pre", "post", "members", "number"
_WITH_JOIN = "allreduce", "barrier"


class Decision(NamedTuple):
    """A call that runs now, or fails, on all ranks of its process set.

    Attributes:
        key: the process set and the name.
        form: the call of the lowest rank; with "rows" or "splits" of each rank, in the order of the set.
        error: the reason of a failure; "" if it runs.
    """

    key: Key
    form: Form
    error: str = ""


def _packed(numbers: Sequence[int], content: Form) -> bytes:
    head = _head_of(tuple(numbers))
    return head + json.dumps(content, separators=(",", ":")).encode() if content else head


@functools.lru_cache(_KEPT)
def _head_of(numbers: tuple[int, ...]) -> bytes:
    bits = np.zeros(max(numbers) + 1 if numbers else 0, np.uint8)
    bits[list(numbers)] = 1
    head = np.packbits(bits).tobytes()
    return struct.pack("<I", len(head)) + head


@functools.lru_cache(_KEPT)
def _numbers_in(head: bytes) -> tuple[int, ...]:
    return tuple(np.flatnonzero(np.unpackbits(np.frombuffer(head, np.uint8))).tolist())


def _unpacked(data: bytes) -> tuple[tuple[int, ...], Form]:
    """Return the numbers and the rest of a message.

    Example:
        >>> _unpacked(_packed([1, 9], {"left": 2}))
        ((1, 9), {'left': 2})
    """
    (length,) = struct.unpack_from("<I", data)
    text = data[4 + length :]
    return _numbers_in(data[4 : 4 + length]), json.loads(text) if text else {}


def has_text(data: bytes) -> bool:
    """Return True if a message has more than numbers.

    Example:
        >>> has_text(_packed([1, 9], {})), has_text(_packed([], {"left": 2}))
        (False, True)
    """
    return len(data) > 4 + int(struct.unpack_from("<I", data)[0])


def left_in(data: bytes) -> tuple[int, str] | None:
    """Return the rank that has left and the reason, "" for a shutdown, if a decision ends all ranks."""
    left = _unpacked(data)[1].get("left") if has_text(data) else None
    return None if left is None else (int(left[0]), str(left[1]))


@final
class RankCalls:
    """One rank's side: its calls as messages for rank 0, and the decisions of rank 0.

    Attributes:
        changes: how often a number has changed its meaning.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._numbers: dict[Key, int] = {}
        self._sent: dict[Key, Form] = {}  # the last form that was sent
        self._decided: dict[int, Decision] = {}  # the last decision about a number

    def message(self, calls: Sequence[tuple[Key, Form]], leaves: str | None) -> bytes:
        """Return the message with new calls.

        Args:
            calls: keys and forms.
            leaves: the reason why this rank makes no more calls, "" for a shutdown; None if it continues.
        """
        numbers, texts = [], []
        for key, form in calls:
            number, sent = self._numbers.get(key), self._sent.get(key)
            if number is not None and (sent is form or sent == form):
                numbers.append(number)
                continue
            texts.append([*key, form])
            if not form.get("once"):
                self._sent[key] = form
        content: Form = {"calls": texts} if texts else {}
        if leaves is not None:
            content["leaves"] = leaves
        return _packed(numbers, content)

    def decisions(self, data: bytes) -> list[Decision]:
        """Return the calls of a decision in their order, without names unknown here."""
        numbers, content = _unpacked(data)
        found = [self._decided[number] for number in numbers if number in self._decided]
        for number, name_of_set, name, form, error in content.get("decided", ()):
            key = (name_of_set, name)
            found.append(Decision(key, form, error))
            if number >= 0:
                self._numbers[key], self._decided[number] = number, found[-1]
                self.changes += 1
            elif key not in self._numbers:
                self._sent.pop(key, None)
        return sorted(found, key=lambda one: one.form.get("kind") == "join")


@final
class Coordinator:
    """Rank 0's side: the calls of all ranks, and the decisions.

    Args:
        size: the number of ranks.
        ranks_of: returns the ranks of a process set by its number, None if there is no such set.
        warn_after: seconds until a call missing on some ranks is reported; 0 for never.
        limit: seconds until it fails.
        warn: prints a text.
    """

    def __init__(
        self,
        size: int,
        ranks_of: Callable[[int], Sequence[int] | None],
        warn_after: float,
        limit: float,
        warn: Callable[[str], None],
    ) -> None:
        self._size, self._ranks_of, self._warn_after, self._limit, self._warn = size, ranks_of, warn_after, limit, warn
        self._asked: dict[Key, dict[int, Form]] = {}  # calls that some ranks have made
        self._since: dict[Key, float] = {}  # when the first rank made them
        self._last: list[dict[Key, Form]] = [{} for _ in range(size)]
        self._keys = list[Key]()  # by number
        self._numbers: dict[Key, int] = {}
        self._changed = set[Key]()  # with a text since the last decision
        self._ready: dict[Key, str] = {}  # and the error, or ""
        self._joined: list[int] = []
        self._warned = set[Key]()
        self._left: tuple[int, str] | None = None
        self._latest = [b""] * size  # message of each rank
        self._repeated = set[bytes]()  # messages that equal the decision after all ranks have sent them
        self._held: dict[int, float] = {}  # times of ranks that sent the same such message, without other pending calls

    def take(self, rank: int, data: bytes) -> None:
        """Take the message of a rank. A repeated one is held unread until all ranks have sent it."""
        now = time.monotonic()
        alone = not self._asked and rank not in self._held
        if alone and data in self._repeated and all(self._latest[other] == data for other in self._held):
            self._latest[rank], self._held[rank] = data, now
            return
        self._read_held()
        self._latest[rank] = data
        self._read(rank, data, now)

    def _read_held(self) -> None:
        """Read the held messages: not all ranks have sent the same."""
        held, self._held = self._held, {}
        for rank, since in held.items():
            self._read(rank, self._latest[rank], since)

    def _read(self, rank: int, data: bytes, now: float) -> None:
        numbers, content = _unpacked(data)
        if content:
            self._repeated.clear()
        for number in numbers:
            key = self._keys[number]
            self._ask(rank, key, self._last[rank][key], now)
        for name_of_set, name, form in content.get("calls", ()):
            key = (name_of_set, name)
            if not form.get("once"):
                self._last[rank][key] = form
            self._changed.add(key)
            self._ask(rank, key, form, now)
        if "leaves" in content and self._left is None:
            self._left = (rank, content["leaves"])

    def _ask(self, rank: int, key: Key, form: Form, now: float) -> None:
        asked = self._asked.setdefault(key, {})
        asked[rank] = form
        self._since.setdefault(key, now)
        if form["kind"] == "join":
            self._joined.append(rank)
            for other in self._asked:
                self._look(other)
        else:
            self._look(key)

    def _look(self, key: Key) -> None:
        """Record a call that is complete."""
        asked, ranks = self._asked[key], self._ranks_of(key[0])
        if ranks is None:
            self._ready[key] = f"{key[1]}: its process set was removed"
        elif len(asked) == len(ranks) or (
            not all(form["kind"] == "join" for form in asked.values())
            and all(rank in asked or rank in self._joined for rank in ranks)
        ):
            self._ready[key] = ""

    def decide(self) -> tuple[bytes, set[int]] | None:
        """Return a decision and the ranks that need it; None if there is nothing to decide."""
        if len(self._held) == self._size:
            self._held.clear()
            return self._latest[0], set(range(self._size))
        if not self._ready and self._left is None:
            return None
        numbers, texts, concerned = list[int](), list[Any](), set[int]()
        for key, error in self._ready.items():
            asked = self._asked.pop(key)
            del self._since[key]
            self._warned.discard(key)
            ranks = self._ranks_of(key[0]) or sorted(asked)
            concerned.update(ranks)
            if not error and (key in self._changed or len(asked) < len(ranks)):
                error = _difference(key[1], asked, ranks)
            if error:
                texts.append([-1, *key, {}, error])
            elif key in self._numbers and key not in self._changed:
                numbers.append(self._numbers[key])
            else:
                texts.append([self._number(key, asked), *key, self._common(asked, ranks), ""])
                self._changed.discard(key)
            if key not in self._numbers:
                self._changed.discard(key)
                for rank in asked:
                    self._last[rank].pop(key, None)
        self._ready.clear()
        content: Form = {"decided": texts} if texts else {}
        if self._left is not None:
            content["left"] = self._left
            concerned.update(range(self._size))
        data = _packed(sorted(numbers), content)
        if not content and not self._asked and all(each == data for each in self._latest):
            if len(self._repeated) >= _KEPT:
                self._repeated.clear()
            self._repeated.add(data)
        return data, concerned

    def _number(self, key: Key, asked: dict[int, Form]) -> int:
        if key not in self._numbers:
            if asked[min(asked)].get("once") or len(self._keys) >= _NUMBERS:
                return -1
            self._numbers[key] = len(self._keys)
            self._keys.append(key)
        return self._numbers[key]

    def _common(self, asked: dict[int, Form], ranks: Sequence[int]) -> Form:
        form = asked[min(asked)]
        if form["kind"] == "allgather":
            return {**form, "rows": [asked[rank]["shapes"] for rank in ranks]}
        if form["kind"] == "alltoall":
            return {**form, "splits": [asked[rank]["splits"] for rank in ranks]}
        if form["kind"] == "join":
            last = self._joined[-1]
            self._joined.clear()
            return {**form, "last": last}
        return form

    def look_for_stalls(self) -> None:
        """Report calls that some ranks lack for long, and fail those lacking for too long."""
        self._read_held()
        now = time.monotonic()
        for key, since in self._since.items():
            waited, asked = now - since, self._asked[key]
            if waited < min(self._warn_after or self._limit, self._limit) or asked[min(asked)]["kind"] == "join":
                continue
            ranks = self._ranks_of(key[0]) or ()
            lacking = [rank for rank in ranks if rank not in asked and rank not in self._joined]
            text = f"{key[1]}: {named('rank', sorted(asked))} waited {waited:.0f} s for {named('rank', lacking)}"
            if waited >= self._limit:
                self._ready[key] = (
                    f"{text}, which did not call it. The order of calls is free, but each rank must make all"
                )
            elif self._warn_after and key not in self._warned:
                self._warned.add(key)
                self._warn(text)


def _difference(name: str, asked: dict[int, Form], ranks: Sequence[int]) -> str:
    """Describe the difference between the calls of one name; "" if they fit."""
    kinds = {rank: form["kind"] for rank, form in sorted(asked.items())}
    if len(set(kinds.values())) > 1:
        return f"{name}: the ranks call different operations: {by_rank(kinds)}"
    kind = kinds[min(kinds)]
    if len(asked) < len(ranks) and kind not in _WITH_JOIN:
        gone = named("rank", [rank for rank in ranks if rank not in asked])
        return f"{name}: {kind} cannot run after {gone} called join; only {' and '.join(_WITH_JOIN)} can"
    for word in _SHOWN:
        values = {rank: str(_compared(kind, word, form.get(word))) for rank, form in sorted(asked.items())}
        if len(set(values.values())) > 1:
            return f"{name}: the ranks call {kind} with different {_WORDS.get(word, word)}: {by_rank(values)}"
    return ""


_WORDS = {
    "device": "devices",
    "pre": "prescale_factor",
    "post": "postscale_factor",
    "root": "root_rank",
    "number": "process sets",
}


def _compared(kind: str, word: str, value: Any) -> Any:
    """Return the values that ranks must have equal: for a gather or all-to-all, all but the first dimension."""
    if word == "shapes" and kind in ("allgather", "alltoall"):
        return [["any", *shape[1:]] if shape else [] for shape in value]
    return value
