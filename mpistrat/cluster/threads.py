"""BLAS threads: as many as this rank's share of the cores, unless the user chose."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np

from ..log import once

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["available_cores", "count_node_cores", "set_blas_threads"]

_MOST_CORES = 4096  # of a node, by the highest core number

_USER_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)


def available_cores() -> list[int]:
    """Return the numbers of the cores that this process may run on. Not collective."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def count_node_cores(intra: MPI.Intracomm) -> int:
    """Return on how many cores the ranks of a node may run, together. Collective over `intra`."""
    from mpi4py import MPI

    mask = np.zeros(_MOST_CORES, np.uint8)
    mask[[core for core in available_cores() if core < _MOST_CORES]] = 1
    intra.Allreduce(MPI.IN_PLACE, mask, MPI.BOR)
    return max(1, int(np.count_nonzero(mask)))


def set_blas_threads(ranks_per_node: int, local_replicas: int = 1, node_cores: int | None = None) -> int | None:
    """Give BLAS each replica's share of the node's cores; warn of more threads than cores. Not collective.

    Nothing is changed where the user set OMP_NUM_THREADS, OPENBLAS_NUM_THREADS, MKL_NUM_THREADS, BLIS_NUM_THREADS or
    VECLIB_MAXIMUM_THREADS.

    Args:
        ranks_per_node: ranks on this node.
        local_replicas: replicas of this rank, which compute at the same time.
        node_cores: cores of all ranks of this node (`Topology.node_cores`). More than this rank's own where the
            launcher binds each rank to cores of its own. Default: the ranks share this rank's.

    Returns:
        The number of threads set, or None if nothing was changed.
    """
    own = len(available_cores())
    node_cores = own if node_cores is None else node_cores
    share = max(1, min(own, node_cores // ranks_per_node) // local_replicas)
    pools = _controller().select(user_api="blas")
    chosen = any(os.environ.get(name) for name in _USER_VARIABLES)
    if not chosen:
        pools.limit(limits=share)
    threads = max((pool["num_threads"] for pool in pools.info()), default=1) if chosen else share
    if threads * local_replicas * ranks_per_node > node_cores:
        fewer = f"set OMP_NUM_THREADS={share}, " if threads > share else ""
        once(
            logging.WARNING,
            f"{ranks_per_node} ranks with {local_replicas} replicas of {threads} BLAS threads share {node_cores} cores:"
            f" {fewer}start fewer ranks, or let the launcher give them more cores",
        )
    return None if chosen else share


def _controller() -> Any:
    """Return the thread pools loaded into this process. Looked up each time: a library may have come since."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController()
