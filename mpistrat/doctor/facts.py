"""What one rank says of itself, for the table of all ranks."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from ..cluster.cores import available_cores, threads_per_core, usable_cores
from ..cluster.devices import gpu_identities
from ..cluster.resolvers.tf_config import TFConfigClusterResolver
from ..cluster.topology import Topology
from ..comm.gpu import nccl_available
from ..environment import Environment
from ..errors import ClusterError
from ..parameter_server.roles import Roles
from .cores import blas_threads, core_ranges
from .interpreter import versions
from .libraries import gpus_of_machine
from .mpi_probe import LEVELS, gpu_support

__all__ = ["facts"]


def facts(topology: Topology, needs: Collection[str]) -> dict[str, Any]:
    """Return what this rank knows of itself, as JSON can hold it. MPI is running.

    Args:
        topology: of all ranks.
        needs: what the user cannot do without.
    """
    from mpi4py import MPI

    cores = available_cores()
    threads, why = blas_threads()
    share = min(usable_cores(), topology.node_cores // topology.ranks_per_node[topology.node_index])
    gpus, no_gpu = gpu_identities()
    vendor, version = MPI.get_vendor()
    mpi = f"{vendor} {'.'.join(map(str, version))}"
    return {
        "rank": topology.rank,
        "host": topology.hostname,
        "node": topology.node_index,
        "local_rank": topology.local_rank,
        **_role(topology),
        "gpus": [uuid for uuid, _ in gpus],
        "node_gpus": len(gpus_of_machine()),
        "cores": core_ranges(cores),
        "core_list": cores,
        "node_cores": topology.node_cores * threads_per_core(),
        "machine_cores": os.cpu_count() or 1,
        "threads": threads or max(1, share),
        "threads_set": why,
        "mpi": mpi,
        "thread_level": LEVELS[topology.thread_level],
        "versions": {**versions(), "MPI": mpi},
        "settings": _settings(),
        "missing": _missing(needs, bool(gpus), no_gpu),
    }


def _role(topology: Topology) -> dict[str, Any]:
    """Return this rank's role, and who says so."""
    try:
        if os.environ.get("TF_CONFIG", "").strip():
            resolver = TFConfigClusterResolver()
            cluster = {name: len(tasks) for name, tasks in resolver.cluster_spec().as_dict().items()}
            role = "none" if resolver.task_type is None else f"{resolver.task_type} {resolver.task_id or 0}"
            return {"role": role, "role_by": "TF_CONFIG", "cluster": str(resolver.cluster_spec()), "tasks": cluster}
        environment = Environment.read()
        if environment.strategy == "parameter_server":
            roles = Roles.of_counts(topology.size, environment.num_ps or 1)
            server = topology.rank in roles.servers
            number = (roles.servers if server else roles.workers).index(topology.rank)
            return {"role": f"{'ps' if server else 'worker'} {number}", "role_by": "MPISTRAT_STRATEGY"}
        return {"role": f"worker {topology.rank}", "role_by": "MPISTRAT_STRATEGY" if environment.strategy else ""}
    except (ClusterError, ValueError) as error:
        return {"role": "?", "role_by": "", "role_error": str(error)}


def _settings() -> dict[str, str]:
    """Return the variables that this package reads and that all ranks must have alike."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("MPISTRAT_")
        and not name.startswith(("MPISTRAT_LOG", "MPISTRAT_TEST", "MPISTRAT_RANK_PROCESS"))
    }


def _missing(needs: Collection[str], gpu: bool, no_gpu: str) -> dict[str, str]:
    """Return why this rank lacks what the user needs."""
    found = {}
    if "gpu" in needs and not gpu:
        found["gpu"] = no_gpu or "there is none"
    if "nccl" in needs and (reason := nccl_available()):
        found["nccl"] = reason
    if "cuda-aware-mpi" in needs and not gpu_support():
        found["cuda-aware-mpi"] = "the MPI library says that it takes no memory of GPUs, or cannot be asked"
    if "parallel-hdf5" in needs:
        import h5py

        if not h5py.get_config().mpi:
            found["parallel-hdf5"] = f"h5py {h5py.version.version} is serial"
    return found
