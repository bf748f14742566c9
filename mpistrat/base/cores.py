"""The cores that this process may use, by its mask, its control group's quota and SLURM, and the number of BLAS threads."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .log import once

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Quota",
    "THREAD_VARIABLES",
    "allotted",
    "available_cores",
    "count_cores",
    "count_node_cores",
    "cpu_quota",
    "limit_new_libraries",
    "loop_threads",
    "set_blas_threads",
    "threads_per_core",
    "usable_cores",
]

_CPUS = Path("/sys/devices/system/cpu")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class Quota:
    """A limit of processor time of a control group, as set by `docker run --cpus=2` and Kubernetes.

    Attributes:
        cores: seconds of processor time per second.
        group: the kernel's number of the control group.
    """

    cores: float
    group: int


def available_cores() -> list[int]:
    """Return the numbers of the CPUs (hardware threads) that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def count_cores(cpus: Iterable[int]) -> int:
    """Return the number of cores of these CPUs: the hardware threads of one core count once."""
    return len({_siblings(cpu) for cpu in cpus})


def threads_per_core() -> int:
    """Return the number of hardware threads of a core of this machine."""
    first, _, last = _siblings(available_cores()[0]).replace(",", "-").partition("-")
    return 2 if last and last != first else 1


def cpu_quota() -> Quota | None:
    """Return the tightest quota of this process's control groups, None without one."""
    quotas = [quota for folder in _control_groups() if (quota := _read_quota(folder)) is not None]
    return min(quotas, key=lambda quota: quota.cores, default=None)


def allotted(name: str) -> int | None:
    """Return the number of CPUs in a variable of SLURM; None if SLURM itself binds processes to CPUs.

    A mask that leaves out CPUs of the machine is more reliable than the variable, which an mpiexec passes from the first node to
    all others.
    """
    text = os.environ.get(name, "")
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 7 and int(text)):
        return None
    return None if len(available_cores()) < (os.cpu_count() or 1) else int(text)


def usable_cores() -> int:
    """Return the number of cores that this process can keep busy, at least 1.

    The minimum of the cores of its mask, its control group's quota, and SLURM_CPUS_PER_TASK.
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
    """Yield the folders of this process's control group for processor time and of its ancestors."""
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
        # In a container the path may be the host's, while the tree starts at the container's own group.
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


_MOST_CORES = 4096  # of a node, by the highest core number

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

_limit: int | None = None  # of every library's threads, set by the last strategy
_modules = 0  # number of imported modules when it was set


def count_node_cores(intra: MPI.Intracomm) -> int:
    """Return the number of cores on which the ranks of a node may compute together. Collective over `intra`.

    The hardware threads of one core count once. If every rank's control group has a quota, their sum is the maximum.
    """
    mine = np.zeros(1, [("mask", np.uint8, _MOST_CORES // 8), ("group", np.int64), ("quota", np.float64)])
    mask = np.zeros(_MOST_CORES, np.uint8)
    mask[[core for core in available_cores() if core < _MOST_CORES]] = 1
    mine["mask"] = np.packbits(mask)
    quota = cpu_quota()
    mine["group"], mine["quota"] = (-1, 0.0) if quota is None else (quota.group, quota.cores)
    table = np.empty(intra.size, mine.dtype)
    intra.Allgather(mine.view(np.uint8), table.view(np.uint8))
    cpus = np.flatnonzero(np.unpackbits(np.bitwise_or.reduce(table["mask"], axis=0)))
    limits = [count_cores(cpus.tolist())]
    quotas = dict(zip(table["group"].tolist(), table["quota"].tolist(), strict=True))
    if -1 not in quotas:
        limits.append(int(sum(quotas.values())))
    node = allotted("SLURM_CPUS_ON_NODE")
    if node is not None:
        limits.append(node)
    return max(1, min(limits))


def set_blas_threads(ranks_per_node: int, local_replicas: int = 1, node_cores: int | None = None) -> int | None:
    """Set BLAS threads to each replica's share of the node's cores; warn of more threads than cores.

    If the user set OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, MKL_NUM_THREADS, BLIS_NUM_THREADS or VECLIB_MAXIMUM_THREADS, this rank
    has that number: its replicas share it, and for a single replica nothing changes. Libraries that are imported later are
    limited from the next `scope` on. Returns the number of threads set, or None if nothing changed.

    Args:
        ranks_per_node, local_replicas: numbers of those that compute at the same time.
        node_cores: cores of all ranks of this node (`Topology.node_cores`). More than this rank's own if the launcher binds each
            rank to its own cores. Default: the ranks share this rank's.
    """
    global _limit
    own = usable_cores()
    node_cores = own if node_cores is None else node_cores
    share = max(1, min(own, node_cores // ranks_per_node) // local_replicas)
    chosen = any(os.environ.get(name) for name in THREAD_VARIABLES)
    if chosen:
        running = max((pool["num_threads"] for pool in _controller().select(user_api="blas").info()), default=1)
        given = max(running, _given())  # an earlier strategy may have reduced it
        busy = max(1, given // local_replicas)
        _limit = busy if local_replicas > 1 else None
    else:
        _limit = busy = share
    _apply()
    if busy * local_replicas * ranks_per_node > node_cores * threads_per_core():
        fewer = f"set OMP_NUM_THREADS={share * local_replicas}, " if busy > share else ""
        once(
            logging.INFO if chosen and busy == 1 else logging.WARNING,  # one thread per rank is set on purpose
            f"{ranks_per_node} ranks with {local_replicas} replicas of {busy} BLAS threads share {node_cores} cores:"
            f" {fewer}start fewer ranks, or let the launcher give them more cores",
        )
    return _limit


def loop_threads(ranks_per_node: int, node_cores: int) -> int:
    """Return the number of threads of a rank's compiled loops: its share of the cores, or the user's setting.

    One thread updates the variables of all replicas of a rank, so replicas do not share them. At most the rank's cores.

    Args:
        ranks_per_node, node_cores: as for `set_blas_threads`.
    """
    own = usable_cores()
    return min(_given() or max(1, node_cores // ranks_per_node), own)


def limit_new_libraries() -> None:
    """Limit libraries that were imported since `set_blas_threads`. Cheap without any."""
    if _limit is not None and len(sys.modules) != _modules:
        _apply()


def _apply() -> None:
    global _modules
    if _limit is not None:
        _controller().limit(limits=_limit)
    _modules = len(sys.modules)


def _given() -> int:
    """Return the number of threads in the user's variables, 0 for none."""
    texts = [os.environ.get(name, "").split(",")[0].strip() for name in THREAD_VARIABLES]
    return max((int(text) for text in texts if text.isascii() and text.isdigit() and len(text) < 7), default=0)


def _controller() -> Any:
    """Return the thread pools loaded into this process; not cached, because libraries are loaded later."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
