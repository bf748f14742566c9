"""Flight recorder: the last events of this rank, each collective, wait, input and save, in memory that outlives it.

A ring with 32 bytes per event. The memory is an unnamed file. The process that reports killed ranks (`monitor.exit_report`) also
has its descriptor: it reads a rank's last events after its death, and `mpistrat top` reads them while it runs. An event costs
less than a microsecond; the numbers are in docs/watching.md. The threads of events, and numbers, such as rows, are known in this
process only.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
from collections import deque
from collections.abc import Iterator
from time import perf_counter_ns
from typing import Any, NamedTuple, final

import numpy as np

from ..base.text import encoded

__all__ = ["GROUPS", "KINDS", "RECORDER", "THREADS", "Event", "Recorder", "Ring"]

# Layout of the memory; `monitor/exit_report_process.py`, which imports nothing, also contains it.
MAGIC = b"mpistre2"
HEAD_BYTES = 64  # magic, number of events that fit, bytes of names
NAMES_BYTES = 65536 - HEAD_BYTES
EVENTS_AT = HEAD_BYTES + NAMES_BYTES
# begin and end in ns of the monotonic clock (end 0 while it lasts), identity, ns of waiting in it
EVENT_WORDS = 4
_HEAD, _NAME = struct.Struct("<8sqq"), struct.Struct("<HBx")  # length, kind

# Identity of an event: its name in the lowest bits, then the group, then the number.
_NAME_BITS, _GROUP_BITS = 14, 12
_NAMES, GROUPS = 1 << _NAME_BITS, 1 << _GROUP_BITS  # the most that are distinguished
_NUMBER_AT = _NAME_BITS + _GROUP_BITS
_NUMBERS = (1 << (63 - _NUMBER_AT)) - 1
THREADS = 256  # that are distinguished
_SAMPLED_NS = 100_000_000  # between two samples of the memory
_PAGE_BYTES = mmap.PAGESIZE
#: Kinds of events, by letter.
KINDS = {
    "r": "run", "c": "collective", "i": "input", "s": "save", "p": "parameter server", "u": "user", "o": "other",
}  # fmt: skip


class Event(NamedTuple):
    """One event.

    Attributes:
        kind: a letter of `KINDS`.
        text: its name.
        group: of a collective: its group among this process's groups of several ranks (`GROUPS`).
        number: of a collective: its number in its group.
        begin, end: in ns of the monotonic clock; end 0 while it lasts.
        waited: ns of it spent waiting for other ranks.
    """

    kind: str
    text: str
    group: int
    number: int
    begin: int
    end: int
    waited: int


@final
class Ring:
    """The events in a recorder's memory, as arrays in order of their beginnings.

    Attributes:
        names: kind and text of each name.
        begin, end, waited: ns.
        number, group, name: of each event; name is an index into names.
        thread: of each event, an index into `Recorder.threads`; 0 if unknown.
    """

    def __init__(self, memory: bytes | bytearray | memoryview | mmap.mmap, threads: bytes | None = None) -> None:
        magic, capacity, used = _HEAD.unpack_from(memory, 0)
        if magic != MAGIC:
            raise ValueError("not the memory of a recorder")
        self.names: list[tuple[str, str]] = []
        at = HEAD_BYTES
        while at < HEAD_BYTES + used:
            length, kind = _NAME.unpack_from(memory, at)
            at += _NAME.size
            self.names.append((chr(kind), bytes(memory[at : at + length]).decode(errors="replace")))
            at += length
        words = np.frombuffer(memory, np.int64, capacity * EVENT_WORDS, EVENTS_AT).reshape(capacity, EVENT_WORDS)
        used_at = np.flatnonzero(words[:, 0])
        order = used_at[np.argsort(words[used_at, 0], kind="stable")]
        rows = words[order]
        self.thread = np.zeros(len(order), np.uint8) if threads is None else np.frombuffer(threads, np.uint8)[order]
        self.begin, self.end, self.waited = rows[:, 0], rows[:, 1], rows[:, 3]
        what = rows[:, 2]
        self.number, self.group = what >> _NUMBER_AT, what >> _NAME_BITS & (GROUPS - 1)
        self.name = np.minimum(what & (_NAMES - 1), max(len(self.names) - 1, 0))

    def __len__(self) -> int:
        return len(self.begin)


@final
class Recorder:
    """A recorder of this process's events. There is one, `RECORDER`.

    Attributes:
        waited: ns that this rank has waited for others on its node so far; counted by `Node.barrier`.
        descriptor: of the memory; None if other processes cannot get it.
        threads: the names of the threads that recorded events, MainThread first.
    """

    def __init__(self) -> None:
        self.waited = 0
        self.threads: list[str] = []
        self.descriptor: int | None = None
        self._next = 0
        self._names: dict[tuple[str, str], int] = {}
        self._use(bytearray(EVENTS_AT + 8 * EVENT_WORDS), 1)

    def open(self, events: int) -> None:
        """Allocate room for `events` events, unless it was done before; for 0 only the last one is stored."""
        if self.descriptor is not None or self._mask:
            return
        capacity = 1 << max(0, events - 1).bit_length()
        size = EVENTS_AT + 8 * EVENT_WORDS * capacity
        memory: Any
        try:
            self.descriptor = os.memfd_create("mpistrat-recorder")
            os.ftruncate(self.descriptor, size)
            memory = mmap.mmap(self.descriptor, size)
        except (AttributeError, OSError):  # no such system, or no memory
            memory = bytearray(size)
        names = dict(self._names)
        self._names.clear()
        self._use(memory, capacity)
        for kind, text in names:  # in order, so with the same numbers
            self.name(kind, text)
        os.register_at_fork(after_in_child=self._forget)

    def _use(self, memory: Any, capacity: int) -> None:
        self._memory, self._mask = memory, capacity - 1
        self._words = memoryview(memory).cast("q")
        self._thread_of = bytearray(capacity)
        self.threads[:], self._own = [threading.main_thread().name], threading.local()
        self._counts: dict[str, deque[tuple[int, int]]] = {}
        self._sampled = 0
        self._names_used = 0
        _HEAD.pack_into(memory, 0, MAGIC, capacity, 0)
        if not self._names:
            self.name("o", "other")

    def _forget(self) -> None:
        """Use separate memory in a forked child, which must not write into its parent's."""
        self._names.clear()
        self.descriptor = None
        self._use(bytearray(EVENTS_AT + 8 * EVENT_WORDS), 1)

    def name(self, kind: str, text: str, group: int = 0) -> int:
        """Return the argument of `begin`: the number of a name, stored once for all groups, and that of a group.

        If half of the memory is used, it is the number of the name's first word: so thousands of variables, each with its own
        collectives, leave room for later names. If it is full, it is the number of "other".
        """
        return self._number(kind, text) | (group % GROUPS) << _NAME_BITS

    def _number(self, kind: str, text: str) -> int:
        key = (kind, text)
        known = self._names.get(key)
        if known is None and self._names_used > NAMES_BYTES // 2:
            text = text.partition(" ")[0]
            key = (kind, text)
            known = self._names.get(key)
        if known is not None:
            return known
        shown = encoded(text)[:200]
        at = HEAD_BYTES + self._names_used
        if self._names_used + _NAME.size + len(shown) > NAMES_BYTES or len(self._names) >= _NAMES:
            return 0
        _NAME.pack_into(self._memory, at, len(shown), ord(kind))
        self._memory[at + _NAME.size : at + _NAME.size + len(shown)] = shown
        self._names_used += _NAME.size + len(shown)
        _HEAD.pack_into(self._memory, 0, MAGIC, self._mask + 1, self._names_used)
        self._names[key] = len(self._names)
        return self._names[key]

    def begin(self, name: int, number: int = 0, clock: Any = perf_counter_ns) -> int:
        """Record the start of an event; pass the result to `end`."""
        at = self._next
        self._next = at + 1
        thread = getattr(self._own, "number", None)  # identifiers of threads are used again
        self._thread_of[at & self._mask] = self._new_thread() if thread is None else thread
        at = (EVENTS_AT >> 3) + (at & self._mask) * EVENT_WORDS
        words = self._words
        words[at + 1] = 0
        words[at + 2] = (number & _NUMBERS) << _NUMBER_AT | name
        words[at + 3] = -self.waited
        words[at] = clock()
        return at

    def _new_thread(self) -> int:
        thread, number = threading.current_thread(), 0
        if thread is not threading.main_thread():
            number = min(len(self.threads), THREADS - 1)
            if number == len(self.threads):
                self.threads.append(thread.name)
        self._own.number = number
        return number

    def begin_again(self, at: int) -> None:
        """Let a begun event begin now. This rank's own work, on a GPU, lasted until now."""
        words = self._words
        if at < len(words):
            words[at + 3] = -self.waited
            words[at] = perf_counter_ns()

    def end(self, at: int, clock: Any = perf_counter_ns) -> None:
        """Record the end of an event."""
        words = self._words
        if at < len(words):  # in the current memory
            words[at + 3] += self.waited
            words[at + 1] = clock()

    def count(self, name: str, value: int) -> None:
        """Record a number of this moment, such as "rows" of a batch, and now and then the memory. Any thread."""
        now = perf_counter_ns()
        self._count(name, now, value)
        if now - self._sampled >= _SAMPLED_NS:
            self._sampled = now
            resident = _resident()
            if resident is not None:
                self._count("memory", now, resident)

    def _count(self, name: str, now: int, value: int) -> None:
        samples = self._counts.get(name)
        if samples is None:
            samples = self._counts[name] = deque(maxlen=self._mask)  # for MPISTRAT_EVENTS=0 none
        samples.append((now, value))

    def counts(self) -> dict[str, list[tuple[int, int]]]:
        """Return the last values of `count` by name: ns of the monotonic clock, and number."""
        return {name: list(samples.copy()) for name, samples in self._counts.copy().items()}

    @contextlib.contextmanager
    def span(self, kind: str, text: str, number: int = 0) -> Iterator[None]:
        """Return a context that is recorded as an event."""
        at = self.begin(self.name(kind, text), number)
        try:
            yield
        finally:
            self.end(at)

    def history(self, count: int = 3) -> str:
        """Return the last events that have ended, in words, the newest first; "" without any. Any thread."""
        now, ended = perf_counter_ns(), [event for event in self.last(count + 4) if event.end]
        words = [f"{event.text} ({(event.end - event.begin) / 1e6:.3g} ms)" for event in ended[:count]]
        if not words:
            return ""
        return f"{', '.join(words)}, the last of which ended {(now - ended[0].end) / 1e9:.3g} s ago"

    def ring(self) -> Ring:
        """Return a copy of the current events."""
        return Ring(bytes(self._memory), bytes(self._thread_of))

    def last(self, count: int) -> list[Event]:
        """Return the last events, the newest first. Any thread."""
        found, names = [], {number: key for key, number in self._names.copy().items()}
        newest = self._next - 1
        for index in range(newest, max(newest - min(count, self._mask + 1), -1), -1):
            at = (EVENTS_AT >> 3) + (index & self._mask) * EVENT_WORDS
            begin, end, what, waited = self._words[at : at + EVENT_WORDS].tolist()
            kind, text = names.get(what & (_NAMES - 1), ("o", "other"))
            group, number = what >> _NAME_BITS & (GROUPS - 1), what >> _NUMBER_AT
            found.append(Event(kind, text, group, number, begin, end, waited if end else waited + self.waited))
        return found


def _resident() -> int | None:
    """Return the bytes of this process in memory; None if the system does not say."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(64).split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return None


#: Of this process.
RECORDER = Recorder()
