"""How long tests take. Every run writes the seconds of each item into pytest's cache (`.pytest_cache/v/durations`).

`python -m tests.launch.durations` condenses them into `durations.json`, which is kept with the tests; choices within a
budget of time go by it: the seconds of an item by its function, where that is not what is usual for its kind.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

TABLE = Path(__file__).with_name("durations.json")
CACHE = "durations"
PAGE = "test_docs.py::test_page["
USUAL = {
    "pure": 0.016,
    "ranks": 0.07,
    "program": 2.5,
    "hosts": 4.0,
    "slurm": 6.0,
    "gpu": 0.5,
}  # seconds of an item of each kind


class Stopwatch:
    """Measures each item from its start to its end, on ranks as these do, who start for many, and keeps that in the cache."""

    def __init__(self, config: pytest.Config) -> None:
        self._cache = getattr(config, "cache", None)
        self._elsewhere: dict[str, float] = defaultdict(float)
        self._seconds: dict[str, float] = {}
        self._skipped: set[str] = set()  # which say nothing about those that run

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        since = time.monotonic()
        result = yield
        if item.nodeid not in self._skipped:
            self._seconds[item.nodeid] = round(self._elsewhere.get(item.nodeid, time.monotonic() - since), 3)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._skipped.add(report.nodeid)
        if getattr(report, "elsewhere", False):  # by ranks, or by a process beside this one, waited for or not
            self._elsewhere[report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        if self._cache is not None and self._seconds:
            self._cache.set(CACHE, {**self._cache.get(CACHE, {}), **self._seconds})


class Table:
    """What an item is expected to take."""

    def __init__(self) -> None:
        self._of_function = json.loads(TABLE.read_text()) if TABLE.exists() else {}

    def expected(self, nodeid: str, kind: str) -> float:
        """Seconds, of this item or its function's items as measured once, else as is usual for its kind."""
        return self._of_function.get(nodeid, self._of_function.get(nodeid.partition("[")[0], USUAL[kind]))


def condense(seconds: dict[str, float]) -> dict[str, float]:
    """The mean of each function that takes 0.3 s or more, and of each over hosts, in SLURM and of a job's end; of each page."""
    of_function = defaultdict(list)
    for nodeid, value in seconds.items():
        of_function[nodeid.partition("[")[0]].append(value)
    means = {function: round(mean(values), 2) for function, values in sorted(of_function.items())}
    chosen = {function: value for function, value in means.items() if value >= 0.3 or "/integration/" in function}
    return chosen | {nodeid: round(value, 2) for nodeid, value in seconds.items() if PAGE in nodeid}


if __name__ == "__main__":
    measured = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else ".pytest_cache/v/durations").read_text())
    TABLE.write_text(json.dumps({**Table()._of_function, **condense(measured)}, indent=0, sort_keys=True) + "\n")
