"""Time that goes on only where a test says so: what it measures does not depend on the machine."""

from __future__ import annotations

import types

import pytest


class Clock:
    """Stands for the module `time`: a sleep is over at once, and nothing else takes any time."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def replace_time(self, monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType) -> None:
        """Make these modules ask this clock, whether they have imported `time` or its functions."""
        for module in modules:
            for name in ("time", "monotonic", "perf_counter", "sleep"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, self if name == "time" else getattr(self, name))
