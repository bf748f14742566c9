"""The benchmarks by name, what they may take, and one after the other."""

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
_MEMORY = 1 << 30  # bytes a rank, at most; and at most a quarter of what its node has left


@dataclass(frozen=True)
class Report:
    """What one benchmark found.

    Attributes:
        name: the benchmark.
        result: its figures; None where it was left out.
        left_out: why it was.
        seconds: that it took.
    """

    name: str
    result: Result | None
    left_out: str
    seconds: float


def run(comm: Any, names: Iterable[str], *, quick: bool, folder: str, tell: Callable[[Report], None]) -> dict[str, Any]:
    """Run benchmarks, tell each one's report as it comes, and return all for JSON. Collective.

    Args:
        comm: all ranks.
        names: keys of `BENCHMARKS`.
        quick: few sizes and short measurements.
        folder: for files, which are removed at the end.
        tell: is called on every rank.

    Raises:
        ShardError: on every rank, where one cannot write into `folder`.
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
