"""The benchmarks by name, their memory, and the run of several."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..data.memory_limit import available_memory
from . import all_reduce, constants, hdf5_input, training_step, window
from .measure import largest
from .result import Result, Setting, machine

__all__ = ["BENCHMARKS", "Report", "run"]

BENCHMARKS: Mapping[str, Callable[[Setting], Result | str]] = {
    "all_reduce": all_reduce.measure,
    "step": training_step.measure,
    "constants": constants.measure,
    "window": window.measure,
    "input": hdf5_input.measure,
}
_MEMORY = 1 << 30  # bytes per rank, at most; and at most a quarter of its node's free memory


@dataclass(frozen=True)
class Report:
    """The report of one benchmark.

    Attributes:
        name: the benchmark.
        result: its figures; None if it was skipped.
        left_out: the reason for skipping it.
        seconds: its duration.
    """

    name: str
    result: Result | None
    left_out: str
    seconds: float


def run(comm: Any, names: Iterable[str], *, quick: bool, folder: str, tell: Callable[[Report], None]) -> dict[str, Any]:
    """Run benchmarks, pass each one's report to `tell`, and return all for JSON. Collective.

    Args:
        comm: all ranks.
        names: keys of `BENCHMARKS`.
        quick: few sizes and short measurements.
        folder: for files, which are removed at the end.
        tell: called on every rank.

    Raises:
        ShardError: on every rank, if one cannot write to `folder`.
    """
    load = os.getloadavg()[0]
    document: dict[str, Any] = {
        "machine": machine(comm), "load_before": round(load, 1), "quick": quick, "benchmarks": {}, "left_out": {},
    }  # fmt: skip
    about = document["machine"]
    available = available_memory()
    share = _MEMORY if available is None else available / 4 / -(-about["ranks"] // about["nodes"])
    setting = Setting(comm, quick, folder, -largest(comm, -min(_MEMORY, share)))
    for name in names:
        start = time.perf_counter()
        found = BENCHMARKS[name](setting)
        spent = largest(comm, time.perf_counter() - start)
        if isinstance(found, str):
            report = Report(name, None, found, spent)
            document["left_out"][name] = found
        else:
            report = Report(name, found, "", spent)
            document["benchmarks"][name] = {**found.document(), "measured_in_seconds": round(spent, 1)}
        tell(report)
    return document
