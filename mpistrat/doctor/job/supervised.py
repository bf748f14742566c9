"""The step of an item whose ranks are restarted: `supervised.py supervise NUMBER LAUNCHER … PROGRAM …`.

NUMBER counts the launcher's words. With `start` as the first word it starts the ranks once. Launchers may not pass the
environment to other nodes: `env` before the program sets the variables of the job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from ...base.programs import program
from ...launcher.standby import environment_with
from ...launcher.supervise import supervise

__all__ = ["main"]

_STARTS = 2  # restarts, at most


def main(what: str, words: Sequence[str]) -> int:
    """Start ranks; with "supervise" restart them when one dies, and return the exit status."""
    if what == "start":
        _start(int(words[0]), words[1:])
    again = program("mpistrat.doctor.job.supervised", "start", *words)
    return supervise(lambda ranks, standby: (again, {}), _STARTS)


def _start(number: int, words: Sequence[str]) -> NoReturn:
    """Replace this process by the launcher, whose ranks are not its children."""
    settings = [f"{name}={os.environ[name]}" for name in ("MPISTRAT_JOB", "MPISTRAT_GENERATION")]
    os.execvpe(words[0], [*words[:number], "env", *settings, *words[number:]], environment_with())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
