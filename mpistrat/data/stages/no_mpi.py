"""Keeping MPI out of a process that is no rank."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["LAUNCHER_PREFIXES", "keep_away", "preload"]

# What launchers put into the environment of a rank: MPICH and relatives (Hydra, PMI), Open MPI (PRRTE, PMIx), MVAPICH.
LAUNCHER_PREFIXES = ("PMI_", "PMI2_", "MPI_", "HYDI_", "HYDRA_", "MPICH_", "MPIEXEC_", "OMPI_", "OPAL_", "ORTE_",
                     "PMIX_", "PRTE_", "MV2_", "JSM_")  # fmt: skip

REASON = (
    "mpi4py.MPI cannot be used in a process of Dataset.map(processes=True): it is no rank, and would hang. "
    'In the main program, put the import under `if __name__ == "__main__":`'
)


class _NoMPI:
    """An entry of sys.meta_path that finds no MPI."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name == "mpi4py.MPI":
            raise ImportError(REASON, name=name)
        return None


def keep_away() -> None:
    """Make this process one that does not take itself for a rank. Call it in processes of `map` only."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the rank, which then ends this process
    for name in list(os.environ):
        if name.startswith(LAUNCHER_PREFIXES):
            del os.environ[name]
    if not any(isinstance(finder, _NoMPI) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NoMPI())


def preload(context: Any) -> None:
    """Make the forkserver, if it does not run yet, import this module first, and not the main program."""
    from multiprocessing import forkserver

    server = getattr(forkserver, "_forkserver", None)
    others = [name for name in getattr(server, "_preload_modules", []) if name not in ("__main__", __name__)]
    context.set_forkserver_preload([__name__, *others])


# Imported by the forkserver: its processes import the main program before they run anything else of ours.
if any("multiprocessing.forkserver" in word for word in getattr(sys, "orig_argv", [])):
    keep_away()
