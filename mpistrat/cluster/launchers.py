"""The launchers on this machine, whose they are, and which one starts the MPI that mpi4py loads."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .mpi_library import Family, MPILibrary

__all__ = ["Launcher", "choose_launcher", "find_launchers", "mismatch"]

_NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi", "orterun")
_SECONDS = 20
USER = "$MPIEXEC"

# What `--version` says -> whose it is. Open MPI 4 calls its launcher OpenRTE; Hydra is that of MPICH and its relatives.
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
        name: of the MPI that it belongs to; "" where it does not say.
        version: of that MPI.
        family: which libraries it starts.
        where: it was found: "$MPIEXEC", "with the MPI library", "with Python" or "PATH".
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
    """Return the mpiexecs at hand, one of each MPI in a folder, the nearest first.

    The user's word ($MPIEXEC) comes first, then what was installed with the MPI library, with Python, and on PATH. Each is
    run with `--version`.
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
    said = f"it belongs to {whose}, and mpi4py loads {library}"
    if launcher.family != library.family:
        return said
    if library.family == "openmpi" and launcher.version.split(".")[0] != library.version.split(".")[0]:
        return said
    return ""


def choose_launcher(library: MPILibrary, launchers: Sequence[Launcher]) -> Launcher | None:
    """Return the first launcher that starts a library's ranks, None if there is none."""
    return next((launcher for launcher in launchers if not mismatch(library, launcher)), None)


def _candidates(library: MPILibrary | None) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the words of launchers that exist, and where they were found."""
    given = os.environ.get("MPIEXEC", "")
    try:
        words = shlex.split(given)
    except ValueError:  # a quotation mark that nothing closes
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
            if path.is_file() and os.access(path, os.X_OK):
                yield (str(path),), where


def _ask(command: tuple[str, ...], where: str) -> Launcher:
    """Return what a launcher says that it is."""
    try:
        reply = subprocess.run([command[0], "--version"], capture_output=True, text=True, timeout=_SECONDS)
        name, version, family = _kind(reply.stdout + reply.stderr)
    except (OSError, subprocess.TimeoutExpired):
        name, version, family = _kind("")
    return Launcher(command, name, version, family, where)


def _kind(said: str) -> tuple[str, str, Family]:
    for pattern, name, family in _KINDS:
        found = re.search(pattern, said, re.DOTALL)
        if found:
            return name, found[1], family
    return "", "", "other"
