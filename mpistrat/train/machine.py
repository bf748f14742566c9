"""Facts about the machine and the program of a run: hosts, memory, commit, and files of output."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from ..data.memory_limit import bytes_of

__all__ = ["RankPlace", "commit", "peak_memory", "place_of"]

_STATUS, _MEMINFO = Path("/proc/self/status"), Path("/proc/meminfo")
_GIT_SECONDS = 5.0


class RankPlace(NamedTuple):
    """The place of one rank.

    Attributes:
        host: the name of its node.
        devices: names of its devices.
        cores: the cores that the node's ranks may use together.
        memory: bytes of its node; None if unknown.
        output: the absolute path of the file that gets its output; "" if there is none.
    """

    host: str
    devices: tuple[str, ...]
    cores: int
    memory: int | None
    output: str


def place_of(topology: Any) -> RankPlace:
    """Return the place of this rank. Local.

    Args:
        topology: the ranks, a `Topology`.
    """
    host = topology.hostname or os.uname().nodename
    return RankPlace(host, tuple(topology.devices), topology.node_cores, bytes_of(_MEMINFO, "MemTotal"), _output())


def peak_memory() -> int | None:
    """Return the most bytes of memory that this process has used at once, shared pages included; None if unknown. Local.

    Example:
        >>> peak_memory() is None or peak_memory() > 1_000_000
        True
    """
    return bytes_of(_STATUS, "VmHWM")


def _output() -> str:
    try:
        if stat.S_ISREG(os.fstat(1).st_mode):
            path = os.readlink("/proc/self/fd/1")
            return path if os.path.isfile(path) else ""
    except OSError:
        pass
    return ""


def commit() -> str:
    """Return the commit of the Git repository that has the program, with "-dirty" if files differ; "" without one. Local.

    The program is the script, or in a notebook or shell the current folder.
    """
    script = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    folder = script.parent if script.is_file() else Path()
    words = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_SECONDS, check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):  # there is no git, or a slow file system
        return ""
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else ""
