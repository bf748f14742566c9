"""`mpistrat run --restarts`: start a job's ranks again, in the same allocation, until its program has ended as it should.

Launchers' statuses do not tell that (Open MPI's mpirun says 0 after a node was lost): rank 0 leaves a mark when it ends. The
ranks that are started find the state of those before in memory (strategy/snapshot.py), or in the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any, final

from .._util.text import counted
from ..comm import job_files
from ..strategy.preemption import RESTART_EXIT_CODE
from ..strategy.snapshot import SnapshotFile
from .command import PROBLEM

__all__ = ["supervise"]

_TRIES = 3  # at one step, before it is given up
_ENDING = 10.0  # seconds that ranks have to end after their launcher


def supervise(command: Sequence[str], environment: dict[str, str], restarts: int) -> int:
    """Start a command until its program has ended, or was told to stop, or has died too often; return the exit status.

    Args:
        command: a launcher's words, with the program's.
        environment: what is added to this process's.
        restarts: how often it is started again.
    """
    if not job_files.FOLDER.is_dir():
        _say(f"--restarts keeps a job's state in {job_files.FOLDER}, which is not there")
        return PROBLEM
    swept = job_files.sweep()
    if swept:
        _say(f"removed what {counted(len(swept), 'job')} had left in {job_files.FOLDER}")
    job = secrets.token_hex(8)
    held = job_files.lock(job)
    try:
        return _Supervisor(command, {**os.environ, **environment, "MPISTRAT_JOB": job}, job, restarts).run()
    finally:
        job_files.remove(job)
        os.close(held)


@final
class _Supervisor:
    def __init__(self, command: Sequence[str], environment: dict[str, str], job: str, restarts: int) -> None:
        self._command, self._environment, self._job, self._restarts = list(command), environment, job, restarts
        self._launcher: subprocess.Popen[Any] | None = None
        self._stopping = False

    def run(self) -> int:
        """Start the ranks, and start them again."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._forward)
        generation, reached, word = 0, [-1] * _TRIES, job_files.step_word(self._job)
        while True:
            began, word[0] = time.monotonic(), 0
            self._environment["MPISTRAT_GENERATION"] = str(generation)
            self._launcher = subprocess.Popen(self._command, env=self._environment)
            status = self._launcher.wait()
            status = 128 - status if status < 0 else status
            done = job_files.mark(self._job, "done").exists()
            if done or (status == 0 and not job_files.mark(self._job, "begun").exists()):
                return status if done and status == RESTART_EXIT_CODE else 0
            if self._stopping or status == RESTART_EXIT_CODE:
                return status
            self._end_ranks()
            reached = [*reached[1:], word[0]]
            told = f"the ranks have ended with status {status} after {time.monotonic() - began:.0f} s"
            if generation >= self._restarts:
                _say(f"{told}, and were started again {counted(generation, 'time')}: given up")
                return status or 1
            if len(set(reached)) == 1:
                _say(f"{told}, {_TRIES} times after step {reached[0]}: given up")
                return status or 1
            generation += 1
            kept = self._step()
            where = f"from step {kept} in memory" if kept else "from the newest checkpoint"
            _say(f"{told}: started again {where} ({generation} of {self._restarts})")

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on; after one nothing is started again."""
        self._stopping = True
        if self._launcher is not None and number != signal.SIGINT:  # which the terminal sends to all of a job
            with contextlib.suppress(ProcessLookupError):
                self._launcher.send_signal(number)

    def _step(self) -> int:
        """Return the newest step that is whole in memory on this node; 0 without one."""
        newest = 0
        for path in job_files.paths(self._job):
            with contextlib.suppress(OSError, ValueError):
                newest = max(newest, SnapshotFile(path).newest())
        return newest

    def _end_ranks(self) -> None:
        """Kill the ranks on this node that have outlived their launcher: they must not write any more."""
        deadline = time.monotonic() + _ENDING
        while (left := self._ranks()) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _ranks(self) -> list[int]:
        mark, found = f"MPISTRAT_JOB={self._job}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0") and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return found


def _say(text: str) -> None:
    print(f"mpistrat run: {text}", file=sys.stderr, flush=True)
