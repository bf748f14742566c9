"""A script goes to the batch system, through its own command and no shell."""

from __future__ import annotations

import re
import subprocess

from ..errors import JobError, explain
from .schedulers import SCHEDULERS

__all__ = ["submit"]


def submit(script: str, scheduler: str) -> str:
    """Give a script to the batch system and return the job's id.

    Args:
        script: the text of the script.
        scheduler: slurm, pbs, lsf or flux.

    Raises:
        JobError: there is no such command here, or it refused.
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
        raise JobError(explain("submit", "", expected=f"that {command} takes the script", got=got))
    return found[1]
