"""The package's own benchmarks, for the user's machine: `mpistrat bench`. What they share with benchmarks/ lies here."""

from __future__ import annotations

from .suite import BENCHMARKS, Report, run

__all__ = ["BENCHMARKS", "Report", "run"]
