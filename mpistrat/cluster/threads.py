"""BLAS threads: as many as this rank's share of the cores, unless the user chose."""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ..log import once
from .cores import allotted, available_cores, count_cores, cpu_quota, threads_per_core, usable_cores

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["THREAD_VARIABLES", "available_cores", "count_node_cores", "limit_new_libraries", "set_blas_threads"]

_MOST_CORES = 4096  # of a node, by the highest core number

THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)

_limit: int | None = None  # of every library's threads, since the last strategy was made
_modules = 0  # that were imported when it was set


def count_node_cores(intra: MPI.Intracomm) -> int:
    """Return on how many cores the ranks of a node may compute, together. Collective over `intra`.

    The hardware threads of one core count once. Where every rank's control group has a quota, no more than these.
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
    """Give BLAS each replica's share of the node's cores; warn of more threads than cores.

    Where the user set OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, MKL_NUM_THREADS, BLIS_NUM_THREADS or VECLIB_MAXIMUM_THREADS,
    that is what this rank has: its replicas share it, and for a single one nothing is changed. Libraries that are imported
    later obey from the next `scope` on.

    Args:
        ranks_per_node: ranks on this node.
        local_replicas: replicas of this rank, which compute at the same time.
        node_cores: cores of all ranks of this node (`Topology.node_cores`). More than this rank's own where the
            launcher binds each rank to cores of its own. Default: the ranks share this rank's.

    Returns:
        The number of threads set, or None if nothing was changed.
    """
    global _limit
    own = usable_cores()
    node_cores = own if node_cores is None else node_cores
    share = max(1, min(own, node_cores // ranks_per_node) // local_replicas)
    chosen = any(os.environ.get(name) for name in THREAD_VARIABLES)
    if chosen:
        running = max((pool["num_threads"] for pool in _controller().select(user_api="blas").info()), default=1)
        given = max(running, _given())  # an earlier strategy may have divided it
        busy = max(1, given // local_replicas)
        _limit = busy if local_replicas > 1 else None
    else:
        _limit = busy = share
    _apply()
    if busy * local_replicas * ranks_per_node > node_cores * threads_per_core():
        fewer = f"set OMP_NUM_THREADS={share * local_replicas}, " if busy > share else ""
        once(
            logging.INFO if chosen and busy == 1 else logging.WARNING,  # who says one thread a rank has thought of it
            f"{ranks_per_node} ranks with {local_replicas} replicas of {busy} BLAS threads share {node_cores} cores:"
            f" {fewer}start fewer ranks, or let the launcher give them more cores",
        )
    return _limit


def limit_new_libraries() -> None:
    """Let libraries obey that were imported since `set_blas_threads`. Cheap where there are none."""
    if _limit is not None and len(sys.modules) != _modules:
        _apply()


def _apply() -> None:
    global _modules
    if _limit is not None:
        _controller().limit(limits=_limit)
    _modules = len(sys.modules)


def _given() -> int:
    """Return the number of threads that the user's variables name, 0 where they name none."""
    texts = [os.environ.get(name, "").split(",")[0].strip() for name in THREAD_VARIABLES]
    return max((int(text) for text in texts if text.isascii() and text.isdigit() and len(text) < 7), default=0)


def _controller() -> Any:
    """Return the thread pools loaded into this process. Looked up each time: a library may have come since."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
