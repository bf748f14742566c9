"""Time that goes on only where a test says so: what it measures does not depend on the machine."""

from __future__ import annotations

import threading
import types

import pytest


class Clock:
    """Stands for the module `time`: a sleep is over at once, and nothing else takes any time.

    Attributes:
        now: the time.
        asked: set whenever `perf_counter` is asked, as before a wait that is measured.
    """

    def __init__(self) -> None:
        self.now, self.asked = 100.0, threading.Event()

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        now = self.now
        self.asked.set()
        return now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def replace_time(self, monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType) -> None:
        """Make these modules ask this clock, whether they have imported `time` or its functions."""
        for module in modules:
            for name in ("time", "monotonic", "perf_counter", "sleep"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, self if name == "time" else getattr(self, name))
