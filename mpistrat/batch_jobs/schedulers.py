"""The batch systems: how to submit a script, which launchers start ranks, and what a job may request."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from typing import final

from ..base.errors import JobError, explain

__all__ = ["LAUNCHERS", "SCHEDULERS", "BatchSystem", "submit"]


@final
@dataclass(frozen=True)
class BatchSystem:
    """A batch system.

    Attributes:
        title: its display name.
        submit: the command that reads a script from stdin.
        by: the command to submit a file, for comments.
        job_id: pattern of that command's output; group 1 is the job.
        launchers: launchers that can start the ranks in a job, the usual one first.
        takes: requests that it supports, of: array, preemption, ps_nodes, memory, qos, mail, stage.
        index: variable with the index of an array's task.
        directives: options that a site profile may add to the script.
    """

    title: str
    submit: tuple[str, ...]
    by: str
    job_id: str
    launchers: tuple[str, ...]
    takes: frozenset[str]
    index: str
    directives: frozenset[str]


_SLURM = """
    --begin --clusters --comment --constraint --contiguous --core-spec --dependency --distribution --exclude --exclusive
    --gres --gres-flags --hint --licenses --mem-per-cpu --mem-per-gpu --network --nice --nodelist --oversubscribe
    --reservation --sockets-per-node --switches --threads-per-core --tmp
"""

SCHEDULERS = {
    "slurm": BatchSystem(
        "SLURM",
        ("sbatch", "--parsable"),
        "sbatch FILE",
        r"^(\d+)(?:;\S+)?$",
        ("srun", "openmpi", "mpich"),
        frozenset({"array", "preemption", "ps_nodes", "memory", "qos", "mail", "stage"}),
        "SLURM_ARRAY_TASK_ID",
        frozenset(_SLURM.split()),
    ),
    "pbs": BatchSystem(
        "PBS",
        ("qsub",),
        "qsub FILE",
        r"^(\d+(?:\[\])?\S*)$",
        ("mpich", "openmpi", "pals"),
        frozenset({"array", "memory", "mail"}),
        "PBS_ARRAY_INDEX",
        frozenset({"-l", "-W", "-p"}),
    ),
    "lsf": BatchSystem(
        "LSF",
        ("bsub",),
        "bsub < FILE",
        r"Job <(\d+)>",
        ("jsrun",),
        frozenset({"array", "mail"}),
        "LSB_JOBINDEX",
        frozenset({"-alloc_flags", "-core_isolation", "-U", "-w"}),
    ),
    "flux": BatchSystem(
        "Flux",
        ("flux", "batch"),
        "flux batch FILE",
        r"^(\S+)$",
        ("flux",),
        frozenset(),
        "",
        frozenset({"--exclusive", "--requires", "--dependency", "--urgency", "--begin-time"}),
    ),
}

LAUNCHERS = tuple(dict.fromkeys(launcher for scheduler in SCHEDULERS.values() for launcher in scheduler.launchers))


def submit(script: str, scheduler: str) -> str:
    """Submit a script through the batch system's own command, without a shell, and return the job's id.

    Args:
        script: the text of the script.
        scheduler: slurm, pbs, lsf or flux.

    Raises:
        JobError: the command is missing or rejected the script.
    """
    system = SCHEDULERS[scheduler]
    command = " ".join(system.submit)
    try:
        done = subprocess.run(system.submit, input=script.encode(), capture_output=True, check=False)
    except OSError as error:
        remedy = f"Submit where {system.title} is installed, or choose another --scheduler"
        raise JobError(
            explain("submit", "", expected=f"the command {command}", got=str(error), remedy=remedy)
        ) from None
    said, complaint = (stream.decode(errors="replace").strip() for stream in (done.stdout, done.stderr))
    found = re.search(system.job_id, said, re.MULTILINE)
    if done.returncode or not found:
        got = complaint or said or f"exit status {done.returncode}"
        raise JobError(explain("submit", "", expected=f"{command} to accept the script", got=got))
    return found[1]
