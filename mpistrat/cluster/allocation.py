"""The nodes of a SLURM job, of which some may be lost: with `--no-kill` the job goes on without them."""

from __future__ import annotations

import os
import subprocess
from typing import NamedTuple, final

__all__ = ["Allocation", "allocation_of_job"]

_PATIENCE = 20.0  # seconds for SLURM's answer
_FAILED = (
    "down",
    "fail",
    "error",
    "unknown",
)  # the states of a node on which nothing can be started; "*": it does not answer


@final
class Allocation(NamedTuple):
    """The nodes of the job that this process is in, by name; both empty outside of SLURM, and where it does not answer."""

    living: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def share(self, ranks: int) -> int:
        """Return how many of so many ranks the living nodes take, as many each as before; at least one.

        Example:
            >>> Allocation(("n1", "n3"), ("n2",)).share(12)
            8
        """
        return max(1, ranks * len(self.living) // (len(self.living) + len(self.lost))) if self.lost else ranks


def allocation_of_job() -> Allocation:
    """Return the nodes of the SLURM job that this process is in. It asks SLURM, which takes failed ones out of the job."""
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
