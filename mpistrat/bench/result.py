"""The results of a benchmark, and their text.

Figures depend on the machine, MPI, versions and ranks.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ..base import loops
from ..base.cores import count_node_cores
from ..base.text import counted, duration
from ..base.version import __version__

__all__ = [
    "Result",
    "Setting",
    "caption",
    "layout",
    "machine",
    "version",
]


PACKAGES = ("mpistrat", "numpy", "mpi4py", "h5py")


def machine(comm: Any, packages: Sequence[str] = PACKAGES) -> dict[str, Any]:
    """Return processor, cores and memory of a node, MPI, versions, date, ranks and nodes. Collective."""
    from mpi4py import MPI

    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    leaders = np.empty(1, np.int32)
    comm.Allreduce(np.array([node.rank == 0], np.int32), leaders)
    cores = count_node_cores(node)
    node.Free()
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": _cpu(),
        "cores": cores,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.platform(),
        "python": platform.python_version(),
        "mpi": MPI.Get_library_version().splitlines()[0].strip("\0 "),
        "versions": {name: version(name) for name in packages},
        "ranks": comm.size,
        "nodes": int(leaders[0]),
        "compiled_loops": bool(loops.used()[0]),
    }


def version(package: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return __version__ if package == "mpistrat" else None  # run from the checkout


def layout(about: Mapping[str, Any]) -> str:
    """Describe MPI, ranks and nodes of a result of `machine`.

    Example:
        >>> layout({"mpi": "MPICH Version:      5.0.2", "ranks": 4, "nodes": 2})
        'MPICH 5.0.2, 4 ranks, 2 hosts'
    """
    words = about["mpi"].replace("Open MPI v", "Open MPI ").replace("MPICH Version:", "MPICH").split()
    vendor = " ".join(words[: 3 if words[0] == "Open" else 2]).rstrip(",")
    hosts = "one host" if about["nodes"] == 1 else counted(about["nodes"], "host")
    return f"{vendor}, {counted(about['ranks'], 'rank')}, {hosts}"


def caption(machines: Sequence[Mapping[str, Any]]) -> str:
    """Return a line with the machine, versions and date."""
    about = machines[0]
    versions = {name: number for each in machines for name, number in each["versions"].items() if number}
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB · {named} · {about['date']}"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), platform.machine())


_LARGE = 1 << 18  # elements: 1 MB
_LONGEST = 15.0  # seconds of one case


def _rate(value: float) -> str:
    return f"{value:,.0f}/s" if value >= 10 else f"{value:.1f}/s"


def _bandwidth(value: float) -> str:
    return f"{value / 1e9:.2f} GB/s" if value >= 1e9 else f"{value / 1e6:.1f} MB/s"


_TEXTS: Mapping[str, Callable[[float], str]] = {
    "seconds": duration, "per second": _rate, "bytes per second": _bandwidth,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """The limits of a benchmark.

    Attributes:
        comm: all ranks.
        quick: few sizes and short measurements.
        folder: for files, which are removed at the end.
        memory: bytes that each rank may use.
    """

    comm: Any
    quick: bool
    folder: str
    memory: float

    def budget(self, seconds: float) -> float:
        """Return the seconds for a measurement."""
        return seconds / 8 if self.quick else seconds

    def by_size(
        self, sizes: Mapping[str, int], copies: int, times: int, measure: Callable[[int], dict[str, float]]
    ) -> tuple[dict[str, dict[str, float]], str]:
        """Return the seconds of operations by size, and a note on sizes too large for this machine. Collective.

        Args:
            sizes: numbers of float32 elements, by label, in ascending order; `quick` uses the first ones, up to 1 MB.
            copies: of the elements, in a rank's memory at once.
            times: least repetitions of each operation.
            measure: returns the seconds of each operation on a number of elements; collective.
        """
        values: dict[str, dict[str, float]] = {}
        each = 0.0  # seconds of all operations per element
        for label, count in sizes.items():
            if self.quick and count > _LARGE:
                break
            if 4 * copies * count > self.memory:
                return values, f"{label} and more left out: too much memory."
            if each * count * times > self.budget(_LONGEST):
                return values, f"{label} and more left out: too slow here."
            values[label] = measure(count)
            if count >= _LARGE:  # smaller ones take the time of a message
                each = sum(values[label].values()) / count
        return values, ""


@dataclass(frozen=True)
class Result:
    """The result of a benchmark.

    Attributes:
        title: the measured quantity.
        unit: of the values: "seconds", "per second" or "bytes per second".
        first_column: the kind of the cases.
        values: by case, and then by contender; a dash shows a missing one.
        against: (ours, raw): a last column shows the speed-up of the first.
        note: explains the values.
    """

    title: str
    unit: str
    first_column: str
    values: Mapping[str, Mapping[str, float]]
    against: tuple[str, str] | None = None
    note: str = ""
    columns: list[str] = field(init=False)

    def __post_init__(self) -> None:
        names = dict.fromkeys(name for values in self.values.values() for name in values)
        object.__setattr__(self, "columns", list(names))

    def header(self) -> list[str]:
        """Return the headings of the columns of `rows`."""
        return [self.first_column, *self.columns, *(["speed-up"] if self.against else [])]

    def rows(self) -> list[list[str]]:
        """Return the lines of a table, as text."""
        text = _TEXTS[self.unit]
        lines = []
        for case, values in self.values.items():
            line = [case, *(text(values[name]) if name in values else "–" for name in self.columns)]
            if self.against is not None:
                ours, raw = (values[name] for name in self.against)
                line.append(f"{raw / ours if self.unit == 'seconds' else ours / raw:.2f} ×")
            lines.append(line)
        return lines

    def document(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {"title": self.title, "unit": self.unit, "values": {case: dict(v) for case, v in self.values.items()}}
