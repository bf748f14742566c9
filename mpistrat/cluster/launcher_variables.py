"""Environment variables of launchers (mpiexec, srun): size and rank, compared with MPI's."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ..base.errors import ClusterError, explain
from .launchers import family_to_load, imported_library
from .pmi import srun_remedy

__all__ = [
    "RANK_VARIABLES",
    "LoneRank",
    "check_launcher",
    "check_size",
    "launched_rank",
    "launched_size",
    "launcher_remedy",
    "lone_rank",
]

# Variable -> launcher. Each is set for a task by what started it; an MPI's own launcher comes before srun.
# SLURM_NTASKS is not among them: sbatch sets it for its script, which is one process and no task of srun.
# PMIx itself has no variable with a size.
_OTHERS = 3.0  # seconds in which rank 0 prints why none of them can start
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
    """Return how many processes the launcher started, and the variable that has the number.

    None if no launcher did, for instance in a batch script outside `srun`.
    """
    sizes = _launched_sizes()
    return next(((size, name) for name, size in sizes.items()), None)


def launched_rank() -> int | None:
    """Return the launcher's number of this process; None if no launcher started it, or has none."""
    launched = launched_size()
    text = os.environ.get(RANK_VARIABLES[launched[1]], "") if launched is not None else ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


@dataclass(frozen=True)
class LoneRank:
    """A process that MPI takes for the only one, of several that a launcher started.

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
    if len(sizes) > 1:  # an mpiexec within a job: its step is one of its own helpers, and may well be one task
        sizes.pop(_STEP, None)
    # Launchers may be nested (mpiexec -n 1 within a step of several tasks): it is enough that one of them meant 1.
    if comm_size != 1 or not sizes or 1 in sizes.values():
        return None
    name, size = next(iter(sizes.items()))
    if size == step:  # srun itself, by another MPI's protocol
        name = _STEP
    return LoneRank(
        f"{size} ranks, as {_SIZE_VARIABLES[name]} says ({name}={size})",
        f"1: each process is alone as rank 0 of 1, with {_library()}",
        _remedy(name),
    )


def check_size(comm_size: int) -> None:
    """Check that the launcher started one process, where COMM_WORLD has one rank.

    Raises:
        ClusterError: MPI sees one rank and the launcher started more: each process believes that it is rank 0 of 1.
    """
    lone = lone_rank(comm_size)
    if lone is not None:
        text = explain("check_size", "COMM_WORLD", expected=lone.expected, got=lone.got, remedy=lone.remedy)
        raise ClusterError(text)


def check_launcher(function: str) -> None:
    """Check, before MPI starts, that the mpiexec around this process is that of the MPI that mpi4py will load.

    One process raises; the others wait until the launcher ends them, or exit.

    Raises:
        ClusterError: on rank 0: each process would be alone as rank 0 of 1, or fail in MPI_Init.
    """
    sizes = _launched_sizes()
    by_openmpi, by_hydra = "OMPI_COMM_WORLD_SIZE" in sizes, "PMI_SIZE" in sizes and "MPI_LOCALNRANKS" in os.environ
    if by_openmpi == by_hydra or _STEP in sizes:  # none, or one within another
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
    remedy = f"Each process would be alone as rank 0 of 1, or fail in MPI_Init. {_remedy(name)}; mpistrat run chooses by itself"
    expected = f"the mpiexec of {library}, the MPI that mpi4py loads"
    raise ClusterError(explain(function, "launcher", expected=expected, got=got, remedy=remedy))


def _launched_sizes() -> dict[str, int]:
    """Return the sizes that the known variables hold, in the order of the table; other values are left out."""
    sizes = {}
    for name in _SIZE_VARIABLES:
        text = os.environ.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0:
            sizes[name] = int(text)
    return sizes


def _library() -> str:
    """Name the MPI that mpi4py uses, if it is loaded."""
    library = imported_library()
    return "the MPI that mpi4py uses" if library is None else f"mpi4py on {' '.join(library.text.split())[:60]}"


def launcher_remedy() -> str:
    """Return what to do where the launcher and MPI do not find each other; "" if no launcher started this."""
    launched = launched_size()
    return "" if launched is None else _remedy(launched[1])


def _remedy(name: str) -> str:
    if name == _STEP:
        remedy = srun_remedy(imported_library())
        return f"srun was not told the start-up protocol of this MPI: {remedy}. For one process: srun -n 1"
    mpiexec = Path(sys.executable).parent / "mpiexec"
    beside = f": {mpiexec}" if os.path.exists(mpiexec) else ""
    return (
        "The launcher belongs to another MPI than the one mpi4py was loaded with: start with the mpiexec of the same"
        f" MPI{beside}, or install mpi4py for the launcher's MPI"
    )
