"""The probe on every rank: it collects facts and tries transfers; rank 0 reports the findings."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from typing import Any

from ..base.agree import gather_text
from ..base.cores import available_cores, threads_per_core, usable_cores
from ..base.devices import bus_ids, default_devices, gpu_identities
from ..base.environment import RANK_PROCESS, STARTED, Environment
from ..base.errors import ClusterError
from ..base.text import ranges
from ..cluster.launcher_variables import lone_rank, pmi2_remedy
from ..cluster.launchers import imported_library
from ..cluster.resolvers.tf_config import TFConfigClusterResolver
from ..cluster.topology import Topology
from ..comm.gpu import nccl_available
from ..comm.gpu_support import ask
from ..comm.process_group import ProcessGroup
from ..parameter_server.roles import Roles
from .compare import compare
from .finding import Finding, problem, warning
from .folders import check_temporary_folder, readable_by_others, segments_of_this_process
from .launching import TOO_LONG
from .libraries import amd_alone, gpus_of_machine, reachable_gpus
from .mpi import LEVELS
from .probe import report, step
from .process import blas_threads, machine, open_files, versions
from .transfers import check_all_reduce, check_clocks, check_gpu_aware, check_nccl, check_windows

__all__ = ["facts", "main"]


def main(limit: float, needs: Sequence[str]) -> None:
    """Start MPI and examine all ranks; a collective is given up after `limit` seconds. Collective."""
    step("import mpi4py.MPI")
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    library = imported_library()
    report(vendor=MPI.get_vendor()[0], pmi2_remedy=pmi2_remedy(library) if library is not None else "")
    step("MPI_Init_thread")
    MPI.Init_thread(MPI.THREAD_MULTIPLE)
    lone = lone_rank(MPI.COMM_WORLD.size)
    if lone is not None:
        _report(problem("launch", f"expected {lone.expected}; got {lone.got}", lone.remedy))
    else:
        _look(limit, needs)
    step("MPI_Finalize")
    MPI.Finalize()


def _look(limit: float, needs: Sequence[str]) -> None:
    step("meeting the other ranks")
    topology = Topology.create(devices=["cpu:0"])
    comm, leads = topology.comm, topology.rank == 0
    rows = [json.loads(text) for text in gather_text(comm, json.dumps(facts(topology, needs)))]
    if leads:
        report(ranks=rows)
        for finding in compare(rows):
            _report(finding)
        library = imported_library()
        if library is not None and os.environ.get("SLURM_MPI_TYPE") == "pmi2" and (remedy := pmi2_remedy(library)):
            _report(warning("srun", f"it succeeded this time, but {TOO_LONG.format(library=library)}", remedy))
    step("comparing clocks")
    clocks = check_clocks(topology)
    step("looking at the temporary folder")
    found = [clocks, check_temporary_folder(topology)]
    if leads:
        for finding in found:
            _report(finding)
    if all(row["settings"] == rows[0]["settings"] and "role_error" not in row for row in rows):
        _try(
            topology, limit, all(row["gpus"] for row in rows)
        )  # with different settings the ranks refuse to meet, as they should
    topology.close()


def _try(topology: Topology, limit: float, gpus: bool) -> None:
    leads = topology.rank == 0
    step("making the ranks' shared memory")
    environment = replace(Environment.read(), abort_after=limit, warn_after=limit)
    group = ProcessGroup.create(topology, environment)
    step("all-reduce")
    finding: Finding | None = check_all_reduce(group)
    if leads:
        _report(finding)
    step("windows")
    for finding in check_windows(group):
        if leads:
            _report(finding)
    finding = _segments(topology.comm)
    if leads:
        _report(finding)
    group.close()
    if gpus:
        _try_gpus(topology, environment)


def _try_gpus(topology: Topology, environment: Environment) -> None:
    """Sum arrays on the GPUs that the ranks take. Collective."""
    local_size = topology.ranks_per_node[topology.node_index]
    own = Topology.create(devices=default_devices(topology.local_rank, local_size))
    group = ProcessGroup.create(own, environment)
    for name, check in (("sum by NCCL", check_nccl), ("sum of GPUs' memory by MPI", check_gpu_aware)):
        step(name)
        finding = check(group)
        if topology.rank == 0:
            _report(finding)
    group.close()
    own.close()


def _segments(comm: Any) -> Finding | None:
    """Check whether others may read files of /dev/shm that any rank has mapped. Collective."""
    mine = readable_by_others(segments_of_this_process())
    told = [text for text in gather_text(comm, "" if mine is None else json.dumps(asdict(mine))) if text]
    return Finding(**json.loads(told[0])) if told else None


def _report(finding: Finding | None) -> None:
    if finding is not None:
        report(finding=asdict(finding))


def facts(topology: Topology, needs: Collection[str]) -> dict[str, Any]:
    """Return the facts about this rank, for JSON. MPI is running."""
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
        "machine": machine(),
        "node": topology.node_index,
        "local_rank": topology.local_rank,
        **_role(topology),
        "gpus": [uuid for uuid, _ in gpus],
        "buses": bus_ids(),
        "reachable_gpus": reachable_gpus(),
        "node_gpus": len(gpus_of_machine()),
        "cores": ",".join(ranges(cores)),
        "core_list": cores,
        "node_cores": topology.node_cores * threads_per_core(),
        "machine_cores": os.cpu_count() or 1,
        "threads": threads or max(1, share),
        "threads_set": why,
        "mpi": mpi,
        "files": open_files(),
        "thread_level": LEVELS[topology.thread_level],
        "versions": {**versions(), "MPI": mpi},
        "settings": _settings(),
        "missing": _missing(needs, bool(gpus), no_gpu),
    }


def _role(topology: Topology) -> dict[str, Any]:
    """Return this rank's role, and the variable that sets it."""
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
    """Return the variables that this package reads and that must be equal on all ranks."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith("MPISTRAT_")
        and not name.startswith(("MPISTRAT_LOG", "MPISTRAT_TEST", RANK_PROCESS, STARTED))
    }


def _missing(needs: Collection[str], gpu: bool, no_gpu: str) -> dict[str, str]:
    """Return the reasons why this rank lacks some of the user's needs."""
    found = {}
    if "gpu" in needs and not gpu:
        found["gpu"] = no_gpu or "there is none"
    if "nccl" in needs and (reason := nccl_available()):
        found["nccl"] = reason
    if "cuda-aware-mpi" in needs and not ask(amd=amd_alone()):
        found["cuda-aware-mpi"] = "the MPI library reports no support for GPU memory"
    if "parallel-hdf5" in needs:
        import h5py

        if not h5py.get_config().mpi:
            found["parallel-hdf5"] = f"h5py {h5py.version.version} is serial"
    return found


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
