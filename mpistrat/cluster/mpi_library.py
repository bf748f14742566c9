"""Which MPI library mpi4py loads, asked in a process of its own that never starts MPI; and which it has loaded here."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from ..errors import ClusterError, explain

__all__ = ["Family", "MPILibrary", "family_to_load", "imported_library", "loaded_library"]

Family = Literal["mpich", "openmpi", "other"]

_SECONDS = 60  # for a cold file system
_FAMILIES: dict[str, Family] = {
    "MPICH": "mpich",
    "MPICH2": "mpich",
    "Intel MPI": "mpich",
    "MVAPICH": "mpich",
    "MVAPICH2": "mpich",
    "Open MPI": "openmpi",
    "Spectrum MPI": "openmpi",
}
_ASK = """
import sys
if sys.path[:1] == [""]: del sys.path[0]  # the current folder, which -c puts first: a json.py there is not ours
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
name, version = MPI.get_vendor()
try:
    lines = open("/proc/self/maps").read().splitlines()
except OSError:
    lines = []
paths = [line.split(maxsplit=5)[-1] for line in lines if " r-xp " in line and "/" in line]
paths = [path for path in paths if path.rpartition("/")[2].startswith("libmpi")]
print(json.dumps({"name": name, "version": version, "said": MPI.Get_library_version(), "path": (paths or [""])[0],
                  "mpi4py": mpi4py.__version__}))
"""
_DEVICE = r"Device:[ \t]+(\S.*?)[ \t]*(?:\n|$)"  # "MPICH Device:      ch4:ucx ofi"


@dataclass(frozen=True)
class MPILibrary:
    """The MPI library that a Python's mpi4py loads.

    Attributes:
        name: as mpi4py calls it: "MPICH", "Open MPI", "Intel MPI", …
        version: as "5.0.2".
        text: the first line of what the library says of itself.
        path: its file; "" where the system does not tell.
        mpi4py: version of mpi4py.
        device: what MPICH and its relatives say of the network layers that they were built with: "ch4:ucx ofi".
    """

    name: str
    version: str
    text: str
    path: str = ""
    mpi4py: str = ""
    device: str = ""

    @property
    def family(self) -> Family:
        """Which launchers start it: "mpich" for MPICH and its relatives, "openmpi", or "other"."""
        return _FAMILIES.get(self.name, "other")

    @property
    def netmods(self) -> tuple[str, ...]:
        """The network layers that it was built with, the one that it takes by itself first; () where it does not say.

        Example:
            >>> MPILibrary("MPICH", "5.0.2", "", device="ch4:ucx ofi").netmods
            ('ucx', 'ofi')
        """
        return tuple(re.split(r"[ ,]+", self.device.partition(":")[2].strip())) if ":" in self.device else ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def imported_library() -> MPILibrary | None:
    """Return the MPI library that mpi4py has loaded in this process, None if it has not yet. Loads none."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None:
        return None
    name, version = module.get_vendor()
    return _library(name, version, module.Get_library_version())


def family_to_load() -> tuple[Family, bool] | None:
    """Return the family of the MPI library that mpi4py will load here, and whether it speaks PMIx.

    None where mpi4py was built for one library, and so does not ask, or has loaded it. MPI is not started.
    """
    if "mpi4py.MPI" in sys.modules:
        return None
    try:
        _mpiabi: Any = importlib.import_module(
            "mpi4py._mpiabi"
        )  # its own import asks it first: nothing is looked for twice
        abi = _mpiabi._get_mpiabi()
        family = next(family for family in ("mpich", "openmpi") if family == abi)
        library = _mpiabi._dlopen_libmpi(_mpiabi.LIBMPI or os.environ.get("MPI4PY_LIBMPI"))
        return cast(Family, family), hasattr(library, "PMIx_Init")
    except Exception:  # not an interface that mpi4py promises
        return None


def loaded_library(python: str = sys.executable) -> MPILibrary:
    """Return the MPI library that a Python's mpi4py loads. Starts MPI nowhere.

    Args:
        python: the interpreter to ask.

    Raises:
        ClusterError: there is no mpi4py, or it finds no MPI library.
    """
    expected = "an MPI library"
    try:
        reply = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(explain("loaded_library", "python", expected=expected, got=str(error))) from error
    if reply.returncode:
        said = (reply.stderr.strip().splitlines() or [f"exit status {reply.returncode}"])[-1]
        remedy = (
            "Load your site's MPI module, or add the folder of its libmpi to LD_LIBRARY_PATH, "
            "or install a wheel: pip install mpich"
        )
        raise ClusterError(explain("loaded_library", python, expected=expected, got=said, remedy=remedy))
    try:
        return _library(**json.loads(reply.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        got = f"{reply.stdout.strip()[-200:]!r}"
        raise ClusterError(explain("loaded_library", python, expected="an answer of a Python", got=got)) from None


def _library(name: str, version: Sequence[int], said: str, path: str = "", mpi4py: str = "") -> MPILibrary:
    """Return what mpi4py and the library say of themselves."""
    said = said.strip("\0 \n")
    device = "".join(re.findall(_DEVICE, said)[:1])
    return MPILibrary(name, ".".join(map(str, version)), said.splitlines()[0].strip(), path, mpi4py, device)
