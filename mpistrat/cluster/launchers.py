"""The MPI library that mpi4py loads, found without starting MPI; the launchers on this machine, and the one that starts it.

Also the nodes of a SLURM job. Some may be lost: with `--no-kill` the job continues without them.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast, final

from ..base.errors import ClusterError, explain
from ..base.programs import program

__all__ = [
    "Allocation",
    "Family",
    "Launcher",
    "MPILibrary",
    "allocation_of_job",
    "choose_launcher",
    "family_to_load",
    "find_launchers",
    "imported_library",
    "loaded_library",
    "mismatch",
]


_PATIENCE = 20.0  # seconds for SLURM's answer
_FAILED = ("down", "fail", "error", "unknown")  # states of a node without new processes; "*": it does not answer


@final
class Allocation(NamedTuple):
    """The nodes of this process's job, by name; both empty outside of SLURM, or if it does not answer."""

    living: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def share(self, ranks: int) -> int:
        """Return the number of ranks for the living nodes, in proportion to `ranks` on all nodes; at least one.

        Example:
            >>> Allocation(("n1", "n3"), ("n2",)).share(12)
            8
        """
        return max(1, ranks * len(self.living) // (len(self.living) + len(self.lost))) if self.lost else ranks


def allocation_of_job() -> Allocation:
    """Return the nodes of this process's SLURM job. Queries SLURM, which removes failed ones from the job."""
    first, job = os.environ.get("SLURM_JOB_NODELIST", ""), os.environ.get("SLURM_JOB_ID", "")
    if not first or not job:
        return Allocation()
    try:
        names = _reply("scontrol", "show", "hostnames", first).split()
        left = _reply(
            "scontrol", "show", "hostnames", _reply("squeue", "--noheader", f"--jobs={job}", "--format=%N")
        ).split()
        lines = _reply("sinfo", "--noheader", "--Node", f"--nodes={first}", "--format=%N %T").splitlines()
    except (OSError, subprocess.SubprocessError):
        return Allocation()
    failed = {name for name, state in map(str.split, lines) if state.startswith(_FAILED) or "*" in state}
    living = tuple(name for name in names if name in left and name not in failed)
    return Allocation(living, tuple(name for name in names if name not in living)) if living else Allocation()


def _reply(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True).stdout.strip()


Family = Literal["mpich", "openmpi", "other"]

_ASK_SECONDS = 60  # for a cold file system
_FAMILIES: dict[str, Family] = {
    "MPICH": "mpich",
    "MPICH2": "mpich",
    "Intel MPI": "mpich",
    "MVAPICH": "mpich",
    "MVAPICH2": "mpich",
    "Open MPI": "openmpi",
    "Spectrum MPI": "openmpi",
}
_ASK = str(Path(__file__).with_name("ask_library.py"))
_DEVICE = r"Device:[ \t]+(\S.*?)[ \t]*(?:\n|$)"  # "MPICH Device:      ch4:ucx ofi"


@dataclass(frozen=True)
class MPILibrary:
    """The MPI library that a Python's mpi4py loads.

    Attributes:
        name: in mpi4py: "MPICH", "Open MPI", "Intel MPI", …
        version: as "5.0.2".
        text: the first line of its own version text.
        path: its file; "" if the system does not show it.
        mpi4py: version of mpi4py.
        device: the network layers that MPICH and its relatives were built with: "ch4:ucx ofi".
    """

    name: str
    version: str
    text: str
    path: str = ""
    mpi4py: str = ""
    device: str = ""

    @property
    def family(self) -> Family:
        """The launchers that start it: "mpich" for MPICH and its relatives, "openmpi", or "other"."""
        return _FAMILIES.get(self.name, "other")

    @property
    def survives(self) -> bool:
        """True if it can continue when a rank dies (ULFM), as Open MPI 5 unless built without it.

        Example:
            >>> MPILibrary("Open MPI", "5.0.11", "").survives, MPILibrary("MPICH", "5.0.2", "").survives
            (True, False)
        """
        return self.family == "openmpi" and int(self.version.split(".")[0]) >= 5

    @property
    def netmods(self) -> tuple[str, ...]:
        """The network layers that it was built with, the default one first; () if unknown.

        Example:
            >>> MPILibrary("MPICH", "5.0.2", "", device="ch4:ucx ofi").netmods
            ('ucx', 'ofi')
        """
        return tuple(re.split(r"[ ,]+", self.device.partition(":")[2].strip())) if ":" in self.device else ()

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def imported_library() -> MPILibrary | None:
    """Return the MPI library that mpi4py has loaded in this process, None if it has not. Loads none."""
    module = sys.modules.get("mpi4py.MPI")
    if module is None:
        return None
    name, version = module.get_vendor()
    return _library(name, version, module.Get_library_version())


def family_to_load() -> tuple[Family, bool] | None:
    """Return the family of the MPI library that mpi4py will load here, and True if it supports PMIx.

    None if mpi4py was built for one library, and so does not choose, or has loaded it. Does not start MPI.
    """
    if "mpi4py.MPI" in sys.modules:
        return None
    try:
        _mpiabi: Any = importlib.import_module("mpi4py._mpiabi")  # its own import uses it first: no search is repeated
        abi = _mpiabi._get_mpiabi()
        family = next(family for family in ("mpich", "openmpi") if family == abi)
        library = _mpiabi._dlopen_libmpi(_mpiabi.LIBMPI or os.environ.get("MPI4PY_LIBMPI"))
        return cast(Family, family), hasattr(library, "PMIx_Init")
    except Exception:  # not a public interface of mpi4py
        return None


def loaded_library(python: str = sys.executable) -> MPILibrary:
    """Return the MPI library that a Python's mpi4py loads. Does not start MPI.

    Raises:
        ClusterError: there is no mpi4py, or it finds no MPI library.
    """
    expected = "an MPI library"
    try:
        words = program(_ASK, python=python)
        reply = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(explain("mpi4py", "python", expected=expected, got=str(error))) from error
    if reply.returncode:
        got = (reply.stderr.strip().splitlines() or [f"exit status {reply.returncode}"])[-1]
        remedy = (
            "Load your site's MPI module, or add the folder of its libmpi to LD_LIBRARY_PATH, "
            "or install a wheel: pip install mpich"
        )
        raise ClusterError(explain("mpi4py", python, expected=expected, got=got, remedy=remedy))
    try:
        return _library(**json.loads(reply.stdout.splitlines()[-1]))
    except (IndexError, ValueError, TypeError):
        got = f"{reply.stdout.strip()[-200:]!r}"
        raise ClusterError(explain("mpi4py", python, expected="an answer of a Python", got=got)) from None


def _library(name: str, version: Sequence[int], text: str, path: str = "", mpi4py: str = "") -> MPILibrary:
    """Return a library from mpi4py's values and its version text."""
    text = text.strip("\0 \n")
    device = "".join(re.findall(_DEVICE, text)[:1])
    return MPILibrary(name, ".".join(map(str, version)), text.splitlines()[0].strip(), path, mpi4py, device)


_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi", "orterun")
_SECONDS = 20
USER = "$MPIEXEC"

# Output of `--version` -> MPI. Open MPI 4 calls its launcher OpenRTE; Hydra belongs to MPICH and its relatives.
_KINDS: tuple[tuple[str, str, Family], ...] = (
    (r"\(Open ?MPI\) v?(\d[\w.]*)", "Open MPI", "openmpi"),
    (r"\(OpenRTE\) v?(\d[\w.]*)", "Open MPI", "openmpi"),
    (r"Spectrum\W*MPI\D*(\d[\w.]*)", "Spectrum MPI", "openmpi"),
    (r"Intel\(R\) MPI Library.*?Version (\d[\w.]*)", "Intel MPI", "mpich"),
    (r"HYDRA build details:\s+Version:\s+(\d[\w.]*)", "MPICH", "mpich"),
)


@dataclass(frozen=True)
class Launcher:
    """A program that starts ranks.

    Attributes:
        command: its words, the path first.
        name: of its MPI; "" if unknown.
        version: of that MPI.
        family: of the libraries that it starts.
        where: its origin: "$MPIEXEC", "with the MPI library", "with Python" or "PATH".
    """

    command: tuple[str, ...]
    name: str
    version: str
    family: Family
    where: str

    @property
    def path(self) -> str:
        """The program's file."""
        return self.command[0]

    def __str__(self) -> str:
        whose = f"{self.name} {self.version}" if self.name else "an MPI that it does not name"
        return f"{shlex.join(self.command)} of {whose}"


def find_launchers(library: MPILibrary | None = None) -> list[Launcher]:
    """Return the available mpiexecs, one for each MPI in a folder, the nearest first.

    The user's choice ($MPIEXEC) comes first, then those installed with the MPI library, with Python, and on PATH. Each is run
    with `--version`.
    """
    launchers: dict[tuple[str, ...], Launcher] = {}
    files = set()
    for command, where in _candidates(library):
        file = os.path.realpath(command[0])
        if file in files:
            continue
        files.add(file)
        launcher = _ask(command, where)
        launchers.setdefault((os.path.dirname(file), launcher.name, launcher.version), launcher)
    return list(launchers.values())


def mismatch(library: MPILibrary, launcher: Launcher) -> str:
    """Return why a launcher cannot start a library's ranks, "" if it can.

    Ranks whose launcher belongs to another MPI are each alone, as rank 0 of 1, or fail at the start.

    Example:
        >>> hydra = Launcher(("mpiexec",), "MPICH", "4.0.2", "mpich", "PATH")
        >>> mismatch(MPILibrary("Open MPI", "5.0.11", ""), hydra)
        'it belongs to MPICH 4.0.2, and mpi4py loads Open MPI 5.0.11'
    """
    if launcher.where == USER and launcher.family == "other":
        return ""
    whose = f"{launcher.name} {launcher.version}" if launcher.name else "an MPI that it does not name"
    reason = f"it belongs to {whose}, and mpi4py loads {library}"
    if launcher.family != library.family:
        return reason
    if library.family == "openmpi" and launcher.version.split(".")[0] != library.version.split(".")[0]:
        return reason
    return ""


def choose_launcher(library: MPILibrary, launchers: Sequence[Launcher]) -> Launcher | None:
    """Return the first launcher that starts a library's ranks, None if there is none."""
    return next((launcher for launcher in launchers if not mismatch(library, launcher)), None)


def _candidates(library: MPILibrary | None) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the command lines of existing launchers, and their origins."""
    given = os.environ.get("MPIEXEC", "")
    try:
        words = shlex.split(given)
    except ValueError:  # an unclosed quotation mark
        words = [given]
    found = shutil.which(words[0]) if words else None
    if found:
        yield (found, *words[1:]), USER
    folders = []
    if library is not None and library.path:  # PREFIX/lib/libmpi.so, PREFIX/lib/x86_64-linux-gnu/libmpi.so
        folders = [(parent / "bin", "with the MPI library") for parent in list(Path(library.path).parents)[1:4]]
    folders.append((Path(sys.executable).parent, "with Python"))
    folders += [(Path(folder), "PATH") for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    for folder, where in folders:
        for name in _NAMES:
            path = folder / name
            if os.path.isfile(path) and os.access(path, os.X_OK):  # they skip unreadable folders
                yield (str(path),), where


def _ask(command: tuple[str, ...], where: str) -> Launcher:
    """Return a launcher described by its `--version`."""
    try:
        reply = subprocess.run([command[0], "--version"], capture_output=True, text=True, timeout=_SECONDS)
        name, version, family = _kind(reply.stdout + reply.stderr)
    except (OSError, subprocess.TimeoutExpired):
        name, version, family = _kind("")
    return Launcher(command, name, version, family, where)


def _kind(text: str) -> tuple[str, str, Family]:
    for pattern, name, family in _KINDS:
        found = re.search(pattern, text, re.DOTALL)
        if found:
            return name, found[1], family
    return "", "", "other"
