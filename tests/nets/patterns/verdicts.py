"""What becomes of a program: equal to the plain one, a clear error, a documented difference, or wrong."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import mpistrat
from tests.nets.patterns.documented import DIFFERENCES

PACKAGE = f"{Path(mpistrat.__file__).parent}/"
# The form of mpistrat.errors.explain, and of errors of several ranks: "function: argument: what is wrong"
FORM = re.compile(r"^(ranks? [\d, -]+: )?`?[\w.]+(\(\))?`?( \w+)?: \S")
# On the rank that meets it: an error of one rank that the others only notice is no clear error of all.
SECOND_HAND = ("CollectiveMismatchError", "CollectiveTimeoutError", "PeerExitError", "RanksLostError")


@dataclass(frozen=True)
class Failure:
    """An exception of a program on one rank."""

    kind: str
    text: str
    ours: bool  # whether the package raised it
    place: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        frames = traceback.extract_tb(error.__traceback__)
        last = frames[-1].filename if frames else ""
        place = " < ".join(f"{frame.filename[-50:]}:{frame.lineno}" for frame in reversed(frames[-3:]))
        ours = type(error).__module__.startswith("mpistrat") or last.startswith(PACKAGE)
        return cls(type(error).__name__, str(error), ours, place)

    @property
    def line(self) -> str:
        """The error and where it was raised, in a line."""
        return f"{self.kind}: {self.text[:500]} @ {self.place}"

    @property
    def clear(self) -> bool:
        """Whether the package says in its form what was wrong."""
        return self.ours and bool(FORM.match(self.text)) and self.kind not in SECOND_HAND


def distance(got: Mapping[str, Any], wanted: Mapping[str, Any]) -> tuple[float, str]:
    """Return the largest difference of two results, relative to 1 + |number|, and where it is."""
    worst, where = 0.0, ""
    if set(got) != set(wanted):
        return float("inf"), f"results of other names: {sorted(set(got) ^ set(wanted))}"
    for name in wanted:
        a, b = np.asarray(got[name], np.float64), np.asarray(wanted[name], np.float64)
        if a.shape != b.shape:
            return float("inf"), f"{name}: shape {a.shape}, expected {b.shape}"
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        with np.errstate(invalid="ignore"):
            apart = np.where(same, 0.0, np.abs(a - b) / (1 + np.abs(b)))
        away = float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0.0))
        if away > worst:
            worst, where = away, f"{name}: {away:.2e}"
    return worst, where


def verdict(
    framework: str,
    config: Mapping[str, Any],
    failures: Sequence[Failure | None],
    reference: Failure | None,
    distances: Sequence[tuple[float, str]],
) -> tuple[str, str]:
    """Return the result of a program and what there is to say of it, from all ranks' outcomes."""
    texts = [failure.line for failure in failures if failure]
    failures = failures[:-1] if config.get("servers") else failures  # the last rank serves: steps are the workers'
    everywhere = bool(texts) and len(texts) == len(failures)
    clear = everywhere and all(f and f.ours for f in failures) and any(f and f.clear for f in failures)
    if reference is not None:
        same = everywhere and all(f and f.kind == reference.kind for f in failures)
        detail = f"plain: {reference.kind}: {reference.text[:300]} | package: {texts[:1]}"
        if not texts and any(d.covers(framework, config, reference.text) for d in DIFFERENCES):
            return "documented", detail
        return ("equal" if same else "error" if clear else "wrong"), detail
    if texts:
        text = " || ".join(sorted(set(texts)))[:1200]
        if not everywhere:
            text = f"an error on ranks {[rank for rank, f in enumerate(failures) if f]} only: {text}"
        return ("error" if clear else "wrong"), text
    away, where = max(distances)
    if away <= config["tolerance"]:
        return "equal", ""
    return ("documented" if any(d.covers(framework, config) for d in DIFFERENCES) else "wrong"), where
