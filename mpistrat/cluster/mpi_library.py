"""Which MPI library mpi4py loads, asked in a process of its own that never starts MPI; and which it has loaded here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Literal

from ..errors import ClusterError, explain

__all__ = ["Family", "MPILibrary", "imported_library", "loaded_library"]

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
text = MPI.Get_library_version().strip("\\0 \\n").splitlines()[0].strip()
print(json.dumps({"name": name, "version": ".".join(map(str, version)), "text": text, "path": (paths or [""])[0],
                  "mpi4py": mpi4py.__version__}))
"""


@dataclass(frozen=True)
class MPILibrary:
    """The MPI library that a Python's mpi4py loads.

    Attributes:
        name: as mpi4py calls it: "MPICH", "Open MPI", "Intel MPI", …
        version: as "5.0.2".
        text: the first line of what the library says of itself.
        path: its file; "" where the system does not tell.
        mpi4py: version of mpi4py.
    """

    name: str
    version: str
    text: str
    path: str = ""
    mpi4py: str = ""

    @property
    def family(self) -> Family:
        """Which launchers start it: "mpich" for MPICH and its relatives, "openmpi", or "other"."""
        return _FAMILIES.get(self.name, "other")

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def imported_library() -> MPILibrary | None:
    """Return the MPI library that mpi4py has loaded in this process, None if it has not yet. Not collective; loads none."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None:
        return None
    name, version = module.get_vendor()
    text = module.Get_library_version().strip("\0 \n").splitlines()[0].strip()
    return MPILibrary(name, ".".join(map(str, version)), text)


def loaded_library(python: str = sys.executable) -> MPILibrary:
    """Return the MPI library that a Python's mpi4py loads. Not collective; starts MPI nowhere.

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
        return MPILibrary(**json.loads(reply.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        got = f"{reply.stdout.strip()[-200:]!r}"
        raise ClusterError(explain("loaded_library", python, expected="an answer of a Python", got=got)) from None
