"""The timeline of Horovod's calls: a file of Chrome's trace format, with a row for each tensor."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, final

__all__ = ["TensorTimeline"]


@final
class TensorTimeline:
    """A file of events. Open it in `chrome://tracing` or https://ui.perfetto.dev. Any thread.

    Args:
        path: the file, which is replaced.
        cycles: True to make each cycle of the negotiation an event, too.
    """

    def __init__(self, path: str, cycles: bool) -> None:
        self.cycles = cycles
        self._start, self._lock = time.time(), threading.Lock()
        self._file = open(path, "w")  # noqa: SIM115
        begin = {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": self._now()}}
        self._file.write(f"[{json.dumps(begin)}")
        self._file.flush()

    def _now(self, seconds: float | None = None) -> int:
        return int(1e6 * ((time.time() if seconds is None else seconds) - (0 if seconds is None else self._start)))

    def _write(self, *events: dict[str, Any]) -> None:
        with self._lock:
            if not self._file.closed:
                self._file.write("".join(f",\n{json.dumps({**event, 'pid': 0})}" for event in events))
                self._file.flush()

    def cycle(self) -> None:
        """Write the start of a cycle."""
        if self.cycles:
            self._write({"name": "CYCLE_START", "ph": "i", "s": "g", "ts": self._now(time.time())})

    def call(self, name: str, kind: str, asked: float, started: float) -> None:
        """Write a call that ends now.

        Args:
            name: of the tensor, whose row it is.
            kind: the operation.
            asked, started: when this rank called it, and when all ranks had, in seconds since 1970.
        """
        word, end = kind.upper(), time.time()
        spans = ((f"NEGOTIATE_{word}", asked, started), (word, started, end))
        self._write(*({
            "name": what, "ph": "X", "tid": name, "ts": self._now(low), "dur": int(1e6 * (high - low)), "args": {"tensor": name},
        } for what, low, high in spans))  # fmt: skip

    def close(self) -> None:
        """End the file."""
        with self._lock:
            if not self._file.closed:
                self._file.write("]\n")
                self._file.close()
