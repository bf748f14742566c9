"""The doctor on a login node: one process, which itself starts no MPI and imports nothing that may crash."""

from __future__ import annotations

from collections.abc import Collection

from ..base.errors import ClusterError
from ..cluster.launchers import MPILibrary, choose_launcher, find_launchers, loaded_library
from .finding import Finding, problem
from .folders import check_shared_folder
from .launching import check_launchers
from .libraries import check_gpus, check_hdf5, check_loops
from .mpi import alone, check_library, check_start
from .pair import check_pair
from .probe import Probe
from .process import check_cores, check_interpreter, check_limits

__all__ = ["NEEDS", "check_login"]

NEEDS = ("gpu", "nccl", "cuda-aware-mpi", "parallel-hdf5")


def check_login(needs: Collection[str], limit: float, *, clean: bool = False) -> list[Finding]:
    """Return what is found on this machine.

    Args:
        needs: from `NEEDS`: what is missing of it is a problem.
        limit: seconds that each probe may take.
        clean: remove what this user's killed jobs left in /dev/shm.
    """
    environment = alone()
    probes = {name: Probe(f"mpistrat.doctor.{name}", env=environment) for name in ("mpi", "libraries")}
    library: MPILibrary | None = None
    findings = list(check_interpreter())
    here = [*check_cores(), *check_shared_folder(clean=clean), *check_limits()]
    try:
        library = loaded_library()
        findings += check_library(library)
    except ClusterError as error:
        findings.append(problem("MPI library", str(error), "Load your site's MPI module, or: pip install mpich"))
    found = [] if library is None else find_launchers(library)
    launchers = [] if library is None else list(check_launchers(library, found))
    outcome = probes["mpi"].finish(limit)
    if library is not None:
        findings += check_start(outcome, library, "cuda-aware-mpi" in needs)
    findings += launchers
    fitting = None if library is None else choose_launcher(library, found)
    ready = all(
        one.status != "problem" for one in findings + here if one.name in ("MPI start", "shared memory", "/dev/shm")
    )
    if library is not None and fitting is not None and ready:
        findings.append(check_pair(library, fitting, environment, limit))
    outcome = probes["libraries"].finish(limit)
    findings += [*check_loops(outcome), *check_hdf5(outcome, library, needs), *check_gpus(outcome, needs)]
    return findings + here
