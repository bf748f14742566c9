"""The cores that this process may use: by its mask, by the quota of its control group, by what SLURM allots."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Quota", "allotted", "available_cores", "count_cores", "cpu_quota", "threads_per_core", "usable_cores"]

_CPUS = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Quota:
    """Processor time that a control group may use, as `docker run --cpus=2` and Kubernetes' limits set it.

    Attributes:
        cores: seconds of processor time a second.
        group: tells control groups apart, by the number that the kernel gives them.
    """

    cores: float
    group: int


def available_cores() -> list[int]:
    """Return the numbers of the CPUs (hardware threads) that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def count_cores(cpus: Iterable[int]) -> int:
    """Return how many cores these CPUs are: the hardware threads of one core count once."""
    return len({_siblings(cpu) for cpu in cpus})


def threads_per_core() -> int:
    """Return how many hardware threads a core of this machine has."""
    first, _, last = _siblings(available_cores()[0]).replace(",", "-").partition("-")
    return 2 if last and last != first else 1


def cpu_quota() -> Quota | None:
    """Return the tightest quota of this process's control groups, None where there is none."""
    quotas = [quota for folder in _control_groups() if (quota := _read_quota(folder)) is not None]
    return min(quotas, key=lambda quota: quota.cores, default=None)


def allotted(name: str) -> int | None:
    """Return a number of CPUs that SLURM tells in a variable; None where it binds processes to them itself.

    Where the mask leaves CPUs of the machine out, it says more than the variable, which an mpiexec hands
    from the first node to all others.
    """
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 7 and int(text)):
        return None
    return None if len(available_cores()) < (os.cpu_count() or 1) else int(text)


def usable_cores() -> int:
    """Return how many cores this process can keep busy, at least 1.

    The cores of its mask, if not fewer are its control group's quota or SLURM_CPUS_PER_TASK.
    """
    quota = cpu_quota()
    limits = [count_cores(available_cores())]
    if quota is not None:
        limits.append(int(quota.cores))
    task = allotted("SLURM_CPUS_PER_TASK")
    if task is not None:
        limits.append(task)
    return max(1, min(limits))


def _siblings(cpu: int) -> str:
    """Return the hardware threads of a CPU's core, as the system writes them: "0,32" or "0-1"."""
    try:
        return (_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _control_groups() -> Iterator[Path]:
    """Yield the folders of this process's control group for processor time and of all that it lies in."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS
        if controllers:  # version 1: a tree for each controller; version 2 has one
            root = next((_CGROUPS / name for name in (controllers, "cpu") if (_CGROUPS / name).is_dir()), _CGROUPS)
        elif not (root / "cgroup.controllers").exists() and (root / "unified").is_dir():
            root = root / "unified"
        group = root / path.lstrip("/")
        # In a container the path may be the host's, and the tree begins at the container's own group.
        yield from (folder for folder in (group, *group.parents) if folder == root or root in folder.parents)


def _read_quota(folder: Path) -> Quota | None:
    try:
        if (folder / "cpu.max").exists():
            words = (folder / "cpu.max").read_text().split()
        else:
            words = [(folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")]
        quota, period = (float(word) for word in words)  # "max 100000": no quota
        return Quota(quota / period, folder.stat().st_ino) if quota > 0 and period > 0 else None
    except (OSError, ValueError):
        return None
