"""Benchmarks of the package alone: `mpistrat bench`. The repository's benchmarks/, which compares with other packages,
imports measurements, timing and colours from here."""

from __future__ import annotations

from .suite import BENCHMARKS, Report, run

__all__ = ["BENCHMARKS", "Report", "run"]
