"""What figures depend on: the machine, MPI, versions, ranks."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from ..base import loops
from ..base.cores import count_node_cores
from ..base.text import counted
from ..base.version import __version__

__all__ = ["caption", "layout", "machine", "version"]

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
    """Return the installed version of a package, None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return __version__ if package == "mpistrat" else None  # run from the checkout


def layout(about: Mapping[str, Any]) -> str:
    """Return MPI, ranks and nodes of what `machine` returned, in a few words.

    Example:
        >>> layout({"mpi": "MPICH Version:      5.0.2", "ranks": 4, "nodes": 2})
        'MPICH 5.0.2, 4 ranks, 2 hosts'
    """
    words = about["mpi"].replace("Open MPI v", "Open MPI ").replace("MPICH Version:", "MPICH").split()
    vendor = " ".join(words[: 3 if words[0] == "Open" else 2]).rstrip(",")
    hosts = "one host" if about["nodes"] == 1 else counted(about["nodes"], "host")
    return f"{vendor}, {counted(about['ranks'], 'rank')}, {hosts}"


def caption(machines: Sequence[Mapping[str, Any]]) -> str:
    """Return a line that says on what machine, with which versions and when."""
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
