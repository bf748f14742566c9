"""Processes that multiprocessing starts for a rank, by spawn or a forkserver, are not ranks.

They inherit the launcher's variables and import the main program again. An MPI that starts in them would act as the rank: it
fails, hangs or keeps the job from ending. So they run this file before all else. It removes the variables; mpi4py.MPI, which many
programs import at their top, can then be imported but not used. This file needs only the standard library.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["VARIABLES", "become_no_rank", "install", "is_no_rank"]

# Variables that launchers set for a rank: MPICH and relatives (Hydra, PMI), Open MPI (PRRTE, PMIx), MVAPICH, jsrun,
# Flux, srun. SLURM's other variables describe the allocation.
VARIABLES = ("PMI_", "PMI2_", "MPI_", "HYDI_", "HYDRA_", "MPICH_", "MPIEXEC_", "OMPI_", "OPAL_", "ORTE_", "PMIX_", "PRTE_",
              "MV2_", "JSM_", "FLUX_", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID")  # fmt: skip
_REASON = (
    "mpi4py.MPI cannot be used in a process that multiprocessing has started, such as one of Dataset.map(processes=True) or a "
    "worker of a DataLoader: it is not a rank, and would hang (MPI.{}). It imports the main program, so put code that uses MPI "
    'under `if __name__ == "__main__":`'
)
_STARTS = "from multiprocessing.spawn import", "from multiprocessing.forkserver import"


class _NoMPI(ModuleType):
    """A stand-in for mpi4py.MPI, which never starts here."""

    @staticmethod
    def Is_initialized() -> bool:
        """Return False, like MPI before its start."""
        return False

    Is_finalized = Is_initialized

    def __getattr__(self, name: str) -> Any:
        # pickle looks up unknown names in each module and ignores AttributeError; MPI's own names begin with capitals.
        kind = RuntimeError if name[:1].isupper() else AttributeError
        raise kind(_REASON.format(name))


class _NoMPIFinder(Loader):
    """An entry of sys.meta_path that replaces mpi4py.MPI."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of mpi4py.MPI, None for other modules."""
        return ModuleSpec(name, self) if name == "mpi4py.MPI" else None

    def exec_module(self, module: ModuleType) -> None:
        """Make the empty module unusable."""
        module.__class__ = _NoMPI


def become_no_rank() -> None:
    """Make this process, which must not call MPI, no longer look like a rank."""
    for name in list(os.environ):
        if name.startswith(VARIABLES):
            del os.environ[name]
    if not is_no_rank():
        sys.meta_path.insert(0, _NoMPIFinder())


def is_no_rank() -> bool:
    """Return True if multiprocessing has started this process for a rank."""
    return any(type(finder).__name__ == _NoMPIFinder.__name__ for finder in sys.meta_path)


def install() -> None:
    """Make the processes that multiprocessing will start for this one, by spawn or a forkserver, run this file first."""
    from multiprocessing import util

    start: Any = util.spawnv_passfds
    if hasattr(start, "without_rank"):
        return

    def spawnv_passfds(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        return start(path, [_begun(word) for word in args], passfds)

    spawnv_passfds.without_rank = True  # type: ignore[attr-defined]
    util.spawnv_passfds = spawnv_passfds


def _begun(word: Any) -> Any:
    """Return the program of `python -c` after a run of this file; other words unchanged."""
    if not isinstance(word, str) or not word.startswith(_STARTS):
        return word
    file = os.path.abspath(__file__)
    return f"g = {{'__name__': 'no_rank'}}; exec(open({file!r}, encoding='utf-8').read(), g); g['become_no_rank'](); {word}"
