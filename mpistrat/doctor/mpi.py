"""MPI: the library, its start, its thread level, one-sided calls, shared memory, GPUs.

A probe, this module as a program, starts MPI alone and tries what a strategy needs of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

import numpy as np

from ..cluster.launchers import MPILibrary
from .finding import Finding, ok, problem, warning
from .libraries import amd_alone
from .probe import Outcome, report, step

__all__ = ["LEVELS", "alone", "check_library", "check_start", "main"]

LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
_NBYTES = 1 << 16

_OWN = (
    "PMI_",
    "PMI2_",
    "PMIX_",
    "OMPI_",
    "OPAL_",
    "PRTE_",
    "ORTE_",
    "HYDI_",
    "HYDRA_",
    "MPIEXEC_",
    "MV2_",
    "JSM_",
    "FLUX_",
)
_USERS = ("OMPI_MCA_", "OPAL_MCA_", "PMIX_MCA_", "PRTE_MCA_", "OMPI_ALLOW_")  # settings that a user exports, too
_STEP = ("SLURM_STEP", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID", "SLURM_PMI")


def alone(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which a process does not look like a launcher's rank."""
    env = os.environ if env is None else env
    return {name: value for name, value in env.items() if name.startswith(_USERS) or not name.startswith(_OWN + _STEP)}


def check_library(library: MPILibrary) -> Iterator[Finding]:
    """Report the MPI that mpi4py loads, and its options for ranks that die."""
    where = f" from {library.path}" if library.path else ""
    yield ok("MPI library", f"{library}{where}, loaded by mpi4py {library.mpi4py}")
    ways = "mpistrat run --restarts 20 restarts the job"
    if library.survives:
        ways += "; with --survive programs of ms.survive continue without a restart"
    yield ok("death of a rank", ways)


def check_start(outcome: Outcome, library: MPILibrary, gpu_needed: bool) -> Iterator[Finding]:
    """Yield the results of starting MPI in a process alone."""
    level = outcome.get("level")
    if level is None:
        remedy = (
            "In a job, not on a login node, it may work: srun -n 1 mpistrat doctor. If not there either, see what python -c "
            '"from mpi4py import MPI" says, and ask the site'
        )
        yield problem("MPI start", f"{outcome.step} in a process alone {outcome.end()}", remedy)
        return
    noise = ""
    if "OSC UCX component" in outcome.stderr:
        noise = (
            "Open MPI will print lines about OSC UCX, which do not matter here: export OMPI_MCA_osc=^ucx silences them"
        )
    said = f"MPI {outcome.get('standard')} started in a process alone, in {outcome.get('seconds'):.1f} s"
    yield ok("MPI start", said, noise)
    yield _thread_level(level)
    yield from _gpu(outcome.get("gpu"), gpu_needed)
    tried = dict(record["tried"] for record in outcome.records if "tried" in record)
    for name, done in (
        ("one-sided calls", "put, get, add and compare-and-swap give what they should"),
        ("shared memory", "MPI makes memory that the ranks of a node share"),
    ):
        if name in tried:
            failed = tried[name]
        elif outcome.step == name:
            failed = outcome.end()
        else:
            continue
        yield problem(name, failed, _remedy(name, library)) if failed else ok(name, done)
    if outcome.step == "MPI_Finalize" and not outcome.ended_well:
        yield problem(
            "MPI end", f"MPI_Finalize {outcome.end()}", "Programs will seem to fail at their end: ask the site"
        )


def _thread_level(level: int) -> Finding:
    if level == len(LEVELS) - 1:
        return ok("thread level", "MPI_THREAD_MULTIPLE")
    return warning(
        "thread level",
        f"MPI grants MPI_THREAD_{LEVELS[level]}: no watchdog thread will report missing ranks of a collective that hangs",
        "Use an MPI that was built with MPI_THREAD_MULTIPLE (MVAPICH: export MV2_ENABLE_AFFINITY=0)",
    )


def _gpu(answer: bool | None, needed: bool) -> Iterator[Finding]:
    name = "CUDA-aware MPI"
    said = {
        True: "the MPI library says that it takes memory of GPUs",
        False: "the MPI library says that it does not take memory of GPUs",
        None: "the MPI library cannot be asked whether it takes memory of GPUs",
    }[answer]
    if needed and not answer:
        remedy = (
            "Use the site's MPI with CUDA, not a wheel; Cray: mpistrat job --gpu-mpi; Open MPI 4: export "
            "OMPI_MCA_opal_cuda_support=1; "
            "or do without: mpistrat copies through host memory, or uses NCCL"
        )
        yield problem(name, said, remedy)
    else:
        yield ok(name, said if answer else f"{said}: arrays on GPUs go through NCCL or host memory")


def _remedy(name: str, library: MPILibrary) -> str:
    if name == "shared memory":
        return "See /dev/shm below; export MPISTRAT_SHARED_MEMORY=0 keeps a private copy in every rank"
    if library.family == "openmpi":
        return "export OMPI_MCA_osc=^ucx leaves out the component that needs a network card; ParameterServerStrategy needs this"
    return "Ask the site for an MPI with one-sided communication; ParameterServerStrategy needs it"


def main() -> None:
    """Start MPI, try one-sided calls and shared memory, end MPI; report the results."""
    step("import mpi4py.MPI")
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    step("MPI_Init_thread")
    start = perf_counter()
    level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
    report(seconds=perf_counter() - start, level=level, standard=".".join(map(str, MPI.Get_version())))
    step("asking about GPUs")
    from ..comm.gpu_support import ask

    report(gpu=ask(amd=amd_alone()))
    for name, attempt in (("one-sided calls", _try_one_sided), ("shared memory", _try_shared_memory)):
        step(name)
        failed = ""
        try:
            attempt(MPI)
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        report(tried=[name, failed])
    step("MPI_Finalize")
    MPI.Finalize()


def _try_one_sided(mpi: Any) -> None:
    from ..comm.window import RemoteWindow

    window = RemoteWindow.allocate(mpi.COMM_WORLD, _NBYTES, "the doctor's trial")
    window.put(0, [(8, np.full(16, 7, np.uint8))])
    found = np.zeros(16, np.uint8)
    window.get(0, 8, found)
    before = window.fetch_and_add(0, 0, 5), window.fetch_and_add(0, 0, 4)
    right = bool((found == 7).all()) and before == (0, 5) and window.get_word(0, 0) == 9
    window.close()
    if not right:
        raise RuntimeError("what was put is not what was read")


def _try_shared_memory(mpi: Any) -> None:
    from ..comm.window import SharedWindow

    window = SharedWindow(mpi.COMM_WORLD, mpi.COMM_WORLD, [_NBYTES], "the doctor's trial")
    window.put_word(0, 8, 3)
    right = window.populate(0, _NBYTES) and window.get_word(0, 8) == 3
    window.close()
    if not right:
        raise RuntimeError("what was stored is not what was read")


if __name__ == "__main__":
    main()
