"""The start-up protocol (PMI) between srun and an MPI library: the value of `srun --mpi=`."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence

from .launchers import MPILibrary

__all__ = [
    "fitting_pmi",
    "offered_pmis",
    "pmi2_remedy",
    "srun_environment",
    "srun_remedy",
    "unset_variable",
    "wanted_pmis",
]

_SECONDS = 20
_NETMOD = "MPIR_CVAR_CH4_NETMOD"  # the network layer that MPICH uses, of those that it was built with


def wanted_pmis(library: MPILibrary) -> tuple[str, ...]:
    """Return the protocols that a library speaks, the best first; () for a library that is not known here.

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
    """Return what `srun --mpi=list` offers, [] where there is no srun or it fails.

    The words differ between versions of SLURM: "pmi2", "pmix", "pmix_v4", "cray_shasta", "none".
    """
    try:
        reply = subprocess.run([srun, "--mpi=list"], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = re.findall(r"\b(?:none|pmi2|pmix(?:_v\d+)?|cray_shasta|openmpi)\b", reply.stdout + reply.stderr)
    return [] if reply.returncode else list(dict.fromkeys(found))


def srun_environment(library: MPILibrary | None, pmi: str) -> dict[str, str]:
    """Return the variables without which a library's ranks do not start under `srun --mpi=`.

    SLURM's PMI2 reads lines of 1 KB. MPICH over UCX writes longer ones, with which MPI_Init fails, or hangs now and then;
    over libfabric they are short. An MPICH that was built with UCX alone has no such choice: only its own mpiexec starts it.
    An unknown library (None) may be the MPICH of a wheel, and no other is known to mind.

    Example:
        >>> srun_environment(MPILibrary("MPICH", "5.0.2", "", device="ch4:ucx ofi"), "pmi2")
        {'MPIR_CVAR_CH4_NETMOD': 'ofi'}
    """
    if pmi == "pmi2" and (library is None or (library.netmods[:1] == ("ucx",) and "ofi" in library.netmods)):
        return {_NETMOD: "ofi"}
    return {}


def pmi2_remedy(library: MPILibrary) -> str:
    """Return what to do before a library's ranks can start under `srun --mpi=pmi2`; "" if nothing.

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
    # Intel MPI is linked to no PMI but its own launcher's: it loads what this variable names.
    if library.name == "Intel MPI" and not os.environ.get("I_MPI_PMI_LIBRARY"):
        return "I_MPI_PMI_LIBRARY=/path/to/libpmi2.so, which comes with SLURM"
    return ""


def srun_remedy(library: MPILibrary | None) -> str:
    """Return what to do where srun was not told the protocol of a library; None for an unknown one.

    SLURM is not asked what it offers: thousands of ranks may want to know at once.

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
