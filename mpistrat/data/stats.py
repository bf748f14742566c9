"""Counters of each stage of a chain, and of a rank's steps."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ..base.text import decimal_size, plural, printable

__all__ = ["InputStats", "StageStats"]


@dataclass
class StageStats:
    """Counters of one stage on this rank, over all epochs; counters that do not apply stay 0.

    Attributes:
        rows: rows or elements made.
        calls: calls of the user's function.
        seconds: time spent in these calls or in reading, summed over threads.
        bytes_read: bytes read from files, as stored there; pages of a memory map count each time.
        chunk_reads: chunks read as a whole.
        files: files opened.
        skipped: files skipped by on_error="skip".
        waits: chunks that another rank or thread was already reading.
        wait_seconds: time spent waiting for these chunks, for a thread that decodes a chunk, or for rows of other nodes;
            for `prefetch`, the loop's wait for the thread that reads ahead.
        bytes_received: bytes of rows received from other nodes.
    """

    rows: int = 0
    calls: int = 0
    seconds: float = 0.0
    bytes_read: int = 0
    chunk_reads: int = 0
    files: int = 0
    skipped: int = 0
    waits: int = 0
    wait_seconds: float = 0.0
    bytes_received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False, compare=False)

    @property
    def samples_per_second(self) -> float:
        """Rows per second of reading; 0 if a stage does not count either."""
        return self.rows / self.seconds if self.seconds else 0.0

    @classmethod
    def reading(cls, parts: Iterable[StageStats]) -> StageStats:
        """Return the summed reading and waiting counters of several readers."""
        total = cls()
        for part in parts:
            read = {"bytes_read": part.bytes_read, "chunk_reads": part.chunk_reads}
            total.add(**read, wait_seconds=part.wait_seconds)
        return total

    def add(self, **amounts: float) -> None:
        """Add to some of the counters, from any thread.

        Example:
            >>> stats = StageStats()
            >>> stats.add(calls=1, seconds=0.25)
            >>> print(stats)
            1 call, 0.25 s
        """
        with self._lock:
            counts = self.__dict__
            for name, amount in amounts.items():
                counts[name] += amount

    def __str__(self) -> str:
        shown = [
            self.rows and _counted(self.rows, "row"),
            self.calls and _counted(self.calls, "call"),
            self.seconds and f"{self.seconds:.3g} s",
            self.samples_per_second and f"{self.samples_per_second:,.0f} samples/s",
            self.bytes_read and f"{decimal_size(self.bytes_read)} read",
            self.chunk_reads and _counted(self.chunk_reads, "chunk read"),
            self.files and _counted(self.files, "file"),
            self.skipped and f"{_counted(self.skipped, 'file')} skipped",
            self.waits and _counted(self.waits, "wait"),
            self.wait_seconds and f"{self.wait_seconds:.3g} s waited",
            self.bytes_received and f"{decimal_size(self.bytes_received)} received",
        ]
        return ", ".join(text for text in shown if text)


@dataclass
class InputStats:
    """Counters of one rank's input, over all epochs.

    Attributes:
        steps: steps delivered.
        samples: rows delivered to this rank's replicas.
        bytes: their size in bytes.
        wait_seconds: time the training loop waited for them.
        seconds: duration of the loops over the dataset, from an epoch's first step to its end.
        stages: each stage's description and its counters, or None, from the source on.
    """

    steps: int = 0
    samples: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0
    seconds: float = 0.0
    stages: tuple[tuple[str, StageStats | None], ...] = ()

    @property
    def samples_per_second(self) -> float:
        """Rows of this rank per second of the loops; 0 before the first."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def input_bound(self) -> float:
        """The fraction of the loops' time spent waiting for input, from 0 to 1."""
        return self.wait_seconds / self.seconds if self.seconds else 0.0

    def snapshot(self, stages: tuple[tuple[str, StageStats | None], ...]) -> InputStats:
        """Return a fixed copy with these stages."""
        held = tuple((text, None if counters is None else replace(counters)) for text, counters in stages)
        return replace(self, stages=held)

    def __str__(self) -> str:
        head = (
            f"{_counted(self.steps, 'step')}, {_counted(self.samples, 'sample')}, {decimal_size(self.bytes)} in"
            f" {self.seconds:.3g} s: {self.samples_per_second:,.0f} samples/s, input-bound {self.input_bound:.0%}"
        )
        width = max((len(text) for text, _ in self.stages), default=0)
        lines = (f"  {text:{width}}  {counters or ''}".rstrip() for text, counters in self.stages)
        return printable("\n".join([head, *lines]), keep="\n")


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {plural(number, noun)}"
