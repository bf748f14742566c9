"""Environment variables of launchers (mpiexec, srun): size and rank, compared with MPI's.

Also the start-up protocol (PMI) between srun and an MPI library, which is the value of `srun --mpi=`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import ClusterError, explain
from .launchers import MPILibrary, family_to_load, imported_library

__all__ = [
    "RANK_VARIABLES",
    "LoneRank",
    "check_launcher",
    "check_size",
    "fitting_pmi",
    "launched_rank",
    "launched_size",
    "launcher_remedy",
    "lone_rank",
    "offered_pmis",
    "pmi2_remedy",
    "srun_environment",
    "srun_remedy",
    "unset_variable",
    "wanted_pmis",
]


_SECONDS = 20
_NETMOD = "MPIR_CVAR_CH4_NETMOD"  # the network layer that MPICH uses, one of those it was built with


def wanted_pmis(library: MPILibrary) -> tuple[str, ...]:
    """Return the protocols that a library supports, the best first; () for an unknown library.

    Some MPICHs are built with PMIx, those of the wheels are not, and the library does not show it.

    Example:
        >>> wanted_pmis(MPILibrary("Cray MPICH", "8.1.28", "MPI VERSION    : CRAY MPICH version 8.1.28"))
        ('cray_shasta', 'pmi2')
    """
    if library.family == "openmpi":
        return ("pmix",)
    if "CRAY" in library.text.upper():
        return ("cray_shasta", "pmi2")
    return ("pmi2",) if library.family == "mpich" else ()


def fitting_pmi(library: MPILibrary, offered: Sequence[str]) -> str | None:
    """Return the value of `srun --mpi=` with which a library's ranks find each other, None if none is offered.

    Example:
        >>> fitting_pmi(MPILibrary("Open MPI", "5.0.11", ""), ["none", "pmi2", "pmix_v4"])
        'pmix_v4'
    """
    for wanted in wanted_pmis(library):
        found = [name for name in offered if name == wanted or name.startswith(f"{wanted}_v")]
        if found:
            return min(found, key=len)
    return None


def offered_pmis(srun: str = "srun") -> list[str]:
    """Return the protocols that `srun --mpi=list` offers, [] if there is no srun or it fails.

    The words differ between versions of SLURM: "pmi2", "pmix", "pmix_v4", "cray_shasta", "none".
    """
    try:
        reply = subprocess.run([srun, "--mpi=list"], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = re.findall(r"\b(?:none|pmi2|pmix(?:_v\d+)?|cray_shasta|openmpi)\b", reply.stdout + reply.stderr)
    return [] if reply.returncode else list(dict.fromkeys(found))


def srun_environment(library: MPILibrary | None, pmi: str) -> dict[str, str]:
    """Return the variables that a library's ranks need to start under `srun --mpi=`.

    SLURM's PMI2 reads lines of 1 KB. MPICH over UCX writes longer ones, so that MPI_Init fails, or sometimes hangs; over
    libfabric they are short. An MPICH built with UCX alone has no such choice: only its own mpiexec starts it. An unknown library
    (None) may be the MPICH of a wheel, and others ignore the variable.

    Example:
        >>> srun_environment(MPILibrary("MPICH", "5.0.2", "", device="ch4:ucx ofi"), "pmi2")
        {'MPIR_CVAR_CH4_NETMOD': 'ofi'}
    """
    if pmi == "pmi2" and (library is None or (library.netmods[:1] == ("ucx",) and "ofi" in library.netmods)):
        return {_NETMOD: "ofi"}
    return {}


def pmi2_remedy(library: MPILibrary) -> str:
    """Return what to do so that a library's ranks can start under `srun --mpi=pmi2`; "" for nothing.

    Example:
        >>> pmi2_remedy(MPILibrary("MPICH", "5.0.2", "", device="ch4:ucx"))
        'Start with its own mpiexec in the batch script: mpistrat job --launcher mpich'
    """
    if library.netmods[:1] != ("ucx",) or os.environ.get(_NETMOD, "ucx") != "ucx":
        return ""
    mpiexec = "tart with its own mpiexec in the batch script: mpistrat job --launcher mpich"
    settings = [f"{name}={value}" for name, value in srun_environment(library, "pmi2").items()]
    return f"export {' '.join(settings)}, or s{mpiexec}" if settings else f"S{mpiexec}"


def unset_variable(library: MPILibrary) -> str:
    """Return the setting that a library needs under srun and this process lacks; "" if none."""
    netmod = srun_environment(library, "pmi2").get(_NETMOD)
    if netmod and not os.environ.get(_NETMOD):
        return f"{_NETMOD}={netmod}"
    # Intel MPI is linked only to its own launcher's PMI: it loads the library that this variable names.
    if library.name == "Intel MPI" and not os.environ.get("I_MPI_PMI_LIBRARY"):
        return "I_MPI_PMI_LIBRARY=/path/to/libpmi2.so, which comes with SLURM"
    return ""


def srun_remedy(library: MPILibrary | None) -> str:
    """Return what to do if srun did not use a library's protocol; None for an unknown library.

    SLURM is not queried for its protocols, because thousands of ranks may call this at once.

    Example:
        >>> srun_remedy(MPILibrary("MPICH", "5.0.2", ""))
        'use srun --mpi=pmi2, or mpistrat job --mpi pmi2; srun --mpi=list shows what this SLURM has'
    """
    known = wanted_pmis(library) if library is not None else ()
    if library is None or not known:
        use = "use srun --mpi=pmix (Open MPI), --mpi=pmi2 (MPICH) or --mpi=cray_shasta (Cray MPICH)"
    else:
        use = f"use srun --mpi={known[0]}, or mpistrat job --mpi {known[0]}"
        use += "".join(f"; where it is not offered, --mpi={other}" for other in known[1:])
        setting = unset_variable(library)
        use += f"; export {setting}" if setting else ""
    return f"{use}; srun --mpi=list shows what this SLURM has"


# Variable -> launcher. Each is set by the launcher of a task; an MPI's own launcher comes before srun. SLURM_NTASKS is
# left out: sbatch sets it for its script, which is one process and not a task of srun. PMIx itself has no variable with
# a size.
_OTHERS = 3.0  # seconds in which rank 0 prints why no rank can start
_STEP = "SLURM_STEP_NUM_TASKS"
_SIZE_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpiexec",
    "PMI_SIZE": "the mpiexec of MPICH or a relative, or a PMI launcher",
    "JSM_NAMESPACE_SIZE": "jsrun",
    "FLUX_JOB_SIZE": "flux run",
    _STEP: "srun",
}
RANK_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "MV2_COMM_WORLD_SIZE": "MV2_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
    "JSM_NAMESPACE_SIZE": "JSM_NAMESPACE_RANK",
    "FLUX_JOB_SIZE": "FLUX_TASK_RANK",
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
}


def launched_size() -> tuple[int, str] | None:
    """Return the number of processes that the launcher started, and the variable that contains it.

    None without a launcher, for instance in a batch script outside `srun`.
    """
    sizes = _launched_sizes()
    return next(((size, name) for name, size in sizes.items()), None)


def launched_rank() -> int | None:
    """Return the launcher's number of this process; None without a launcher or a number."""
    launched = launched_size()
    text = os.environ.get(RANK_VARIABLES[launched[1]], "") if launched is not None else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


@dataclass(frozen=True)
class LoneRank:
    """A process that MPI considers the only one, of several that a launcher started.

    Attributes:
        expected: the launcher's number of ranks.
        got: MPI's.
        remedy: what to do.
    """

    expected: str
    got: str
    remedy: str


def lone_rank(comm_size: int) -> LoneRank | None:
    """Return what is wrong with a COMM_WORLD of one rank; None if the launcher started one, or it has more."""
    sizes = _launched_sizes()
    step = sizes.get(_STEP)
    if len(sizes) > 1:  # an mpiexec within a job: its step is its own helper's, which may be one task
        sizes.pop(_STEP, None)
    # Launchers may be nested (mpiexec -n 1 within a step of several tasks): one that started 1 is enough.
    if comm_size != 1 or not sizes or 1 in sizes.values():
        return None
    name, size = next(iter(sizes.items()))
    if size == step:  # srun itself, with another MPI's protocol
        name = _STEP
    return LoneRank(
        f"{size} ranks, as {_SIZE_VARIABLES[name]} reports ({name}={size})",
        f"1: each process is alone as rank 0 of 1, with {_library()}",
        _remedy(name),
    )


def check_size(comm_size: int) -> None:
    """Raise if COMM_WORLD has one rank and the launcher started several.

    Raises:
        ClusterError: MPI sees one rank and the launcher started more: each process believes that it is rank 0 of 1.
    """
    lone = lone_rank(comm_size)
    if lone is not None:
        text = explain("COMM_WORLD", "", expected=lone.expected, got=lone.got, remedy=lone.remedy)
        raise ClusterError(text)


def check_launcher(function: str) -> None:
    """Raise, before MPI starts, unless the mpiexec around this process belongs to the MPI that mpi4py will load.

    One process raises; the others wait until the launcher ends them, or exit.

    Raises:
        ClusterError: on rank 0: each process would be alone as rank 0 of 1, or fail in MPI_Init.
    """
    sizes = _launched_sizes()
    by_openmpi, by_hydra = "OMPI_COMM_WORLD_SIZE" in sizes, "PMI_SIZE" in sizes and "MPI_LOCALNRANKS" in os.environ
    if by_openmpi == by_hydra or _STEP in sizes:  # neither, or nested
        return
    name, launcher = ("OMPI_COMM_WORLD_SIZE", "Open MPI") if by_openmpi else ("PMI_SIZE", "MPICH or a relative")
    found = family_to_load() if sizes[name] > 1 else None
    if found is None:
        return
    family, pmix = found
    if (family == "openmpi") == by_openmpi or (by_openmpi and pmix):
        return
    if launched_rank():
        time.sleep(_OTHERS)
        sys.exit(1)
    library = "Open MPI" if family == "openmpi" else "MPICH"
    got = f"that of {launcher} ({name}={sizes[name]})"
    remedy = (
        f"Each process would be alone as rank 0 of 1, or fail in MPI_Init. {_remedy(name)}; use mpistrat run instead"
    )
    expected = f"the mpiexec of {library}, the MPI that mpi4py loads"
    raise ClusterError(explain(function, "launcher", expected=expected, got=got, remedy=remedy))


def _launched_sizes() -> dict[str, int]:
    """Return the valid sizes in the known variables, in the order of the table."""
    sizes = {}
    for name in _SIZE_VARIABLES:
        text = os.environ.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0:
            sizes[name] = int(text)
    return sizes


def _library() -> str:
    """Return the name of the MPI that mpi4py uses, if it is loaded."""
    library = imported_library()
    return "the MPI that mpi4py uses" if library is None else f"mpi4py on {' '.join(library.text.split())[:60]}"


def launcher_remedy() -> str:
    """Return what to do if the launcher and MPI do not find each other; "" without a launcher."""
    launched = launched_size()
    return "" if launched is None else _remedy(launched[1])


def _remedy(name: str) -> str:
    if name == _STEP:
        remedy = srun_remedy(imported_library())
        return f"srun did not use the start-up protocol of this MPI: {remedy}. For one process: srun -n 1"
    mpiexec = Path(sys.executable).parent / "mpiexec"
    beside = f": {mpiexec}" if os.path.exists(mpiexec) else ""
    return (
        "The launcher belongs to another MPI than the one mpi4py was loaded with: start with the mpiexec of the same"
        f" MPI{beside}, or install mpi4py for the launcher's MPI"
    )
