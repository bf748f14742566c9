"""The timeline of a run from the flight recorder: traces for Perfetto, time shares of each rank, and stragglers."""

from __future__ import annotations

from .stragglers import RankTimes, times
from .trace import save, span

__all__ = ["RankTimes", "save", "span", "times"]
