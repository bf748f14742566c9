"""Keeping MPI out of a process that is no rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import Any

__all__ = ["LAUNCHER_PREFIXES", "keep_away", "start_server"]

# What launchers put into the environment of a rank: MPICH and relatives (Hydra, PMI), Open MPI (PRRTE, PMIx), MVAPICH.
LAUNCHER_PREFIXES = ("PMI_", "PMI2_", "MPI_", "HYDI_", "HYDRA_", "MPICH_", "MPIEXEC_", "OMPI_", "OPAL_", "ORTE_",
                     "PMIX_", "PRTE_", "MV2_", "JSM_")  # fmt: skip

REASON = (
    "mpi4py.MPI cannot be used in a process of Dataset.map(processes=True): it is no rank, and would hang. "
    'In the main program, put the import under `if __name__ == "__main__":`'
)

_BY_US = "mpistrat:"  # how PYTHONSAFEPATH for the forkserver begins: any text does, and PYTHONPATH as it was follows
_ROOT = os.path.dirname(os.path.abspath(__file__ + "/../../.."))
_starting = threading.Lock()


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
    if (said := os.environ.get("PYTHONSAFEPATH", "")).startswith(
        _BY_US
    ):  # not for programs that a user's function starts
        _set({"PYTHONSAFEPATH": None, "PYTHONPATH": said.removeprefix(_BY_US)})
    if not any(isinstance(finder, _NoMPI) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NoMPI())


def start_server(context: Any) -> None:
    """Start the forkserver, if it does not run yet: it imports this module, not the main program.

    It is a `python -c`, which would look for modules in the working directory first, and run a `json.py` that lies there. Python
    3.11 and later are told not to; Python 3.10 knows no such word that keeps PYTHONPATH.
    """
    from multiprocessing import forkserver

    server = getattr(forkserver, "_forkserver", None)
    others = [name for name in getattr(server, "_preload_modules", []) if name not in ("__main__", __name__)]
    context.set_forkserver_preload([__name__, *others])
    with _starting:
        before = {name: os.environ.get(name) for name in ("PYTHONSAFEPATH", "PYTHONPATH")}
        if not before["PYTHONSAFEPATH"]:
            os.environ["PYTHONSAFEPATH"] = _BY_US + (before["PYTHONPATH"] or "")
            if sys.path[:1] == [_ROOT]:  # the program lies beside the package, which need not be installed
                os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_ROOT, before["PYTHONPATH"]]))
        try:
            forkserver.ensure_running()
        finally:
            _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value:
            os.environ[name] = value
        else:
            os.environ.pop(name, None)


# Imported by the forkserver: its processes import the main program before they run anything else of ours.
if any("multiprocessing.forkserver" in word for word in getattr(sys, "orig_argv", [])):
    keep_away()
