"""The timeline of a run: what each rank did when, from the flight recorder; traces for Perfetto, and who makes others wait."""

from __future__ import annotations

from .stragglers import RankTimes, times
from .trace import save, span

__all__ = ["RankTimes", "save", "span", "times"]
