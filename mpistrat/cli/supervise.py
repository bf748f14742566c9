"""`mpistrat run --restarts`: start a job's ranks again, in the same allocation, until its program has ended as it should.

Launchers' statuses do not tell that (Open MPI's mpirun says 0 after a node was lost): rank 0 leaves a mark when it ends. The
ranks that are started find the state of those before in memory (strategy/snapshot.py), or in the newest checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, final

from .._util.text import counted
from ..cluster.allocation import allocation_of_job
from ..comm import job_files
from ..comm.agree import Ranks
from ..comm.monitor import leftovers
from ..environment import RESTART_EXIT_CODE
from ..strategy.snapshot import SnapshotFile
from .command import DONE, PROBLEM, Command
from .standby import NUMBER, Standby

__all__ = ["COMMAND", "supervise"]

Start = Callable[[int | None, bool], tuple[list[str], dict[str, str]]]

_TRIES = 3  # at one step, before it is given up
_ENDING = 10.0  # seconds that ranks have to end after their launcher, and it after them
_REMOVING = 20.0  # seconds that nodes have to remove files
_LOOK = 1.0  # seconds between two looks whether they have said why they end


def supervise(start: Start, restarts: int, standby: bool = False) -> int:
    """Start ranks until their program has ended, or was told to stop, or has died too often; return the exit status.

    Args:
        start: returns a launcher's words, with the program's, and what is added to this process's environment, for another
            number of ranks than was asked for, or None; and of ranks that wait to be the next ones, or not.
        restarts: how often they are started again.
        standby: whether the next ranks are there before they are needed.
    """
    if not leftovers.FOLDER.is_dir():
        _say(f"--restarts keeps a job's state in {leftovers.FOLDER}, which is not there")
        return PROBLEM
    swept = job_files.sweep()
    if swept:
        _say(f"removed what {counted(len(swept), 'job')} had left in {leftovers.FOLDER}")
    job = secrets.token_hex(8)
    held = job_files.lock(job)
    try:
        return _Supervisor(start, job, restarts, standby).run()
    finally:
        job_files.remove(job)
        _remove_on_other_nodes(job)
        os.close(held)


def _remove_on_other_nodes(job: str) -> None:
    """Remove what ranks that did not end by themselves have left on the other nodes of a SLURM job."""
    nodes = allocation_of_job()
    count = len(nodes.living)
    if count > 1:
        command = ["srun", "--quiet", "--overlap", "--mpi=none", f"--nodes={count}", f"--ntasks={count}"]
        command += ["--ntasks-per-node=1", *([f"--exclude={','.join(nodes.lost)}"] if nodes.lost else [])]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            words = ["sh", "-c", f"rm -f {job_files.mark(job, '')}*"]
            subprocess.run([*command, *words], timeout=_REMOVING, capture_output=True, check=False)


@final
class _Supervisor:
    def __init__(self, start: Start, job: str, restarts: int, standby: bool) -> None:
        self._start, self._job, self._restarts = start, job, restarts
        self._has_standby, self._made = standby, 0
        self._standby: Standby | None = None
        self._launcher: subprocess.Popen[Any] | None = None
        self._stopping = self._resizing = False
        self._ranks_wanted: int | None = None

    def run(self) -> int:
        """Start the ranks, and start them again."""
        try:
            return self._run()
        finally:
            if self._standby is not None:
                self._standby.end()

    def _run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._forward)
        signal.signal(job_files.RESIZE, self._resize)
        generation = died = 0
        reached, word = [-1] * _TRIES, job_files.progress(self._job)
        while True:
            began, word[0], word[1] = time.monotonic(), 0, generation
            for what in ("ended", "stopped"):
                job_files.mark(self._job, what).unlink(missing_ok=True)
            self._launcher = self._launch({"MPISTRAT_JOB": self._job, "MPISTRAT_GENERATION": str(generation)})
            status = self._wait(self._launcher)
            status = 128 - status if status < 0 else status
            done = job_files.mark(self._job, "done").exists()
            if done or (status == 0 and not job_files.mark(self._job, "begun").exists()):
                return 0
            # The launcher may tell of ranks that it has killed after the first.
            if job_files.mark(self._job, "stopped").exists():
                status = RESTART_EXIT_CODE
            if self._stopping or (status == RESTART_EXIT_CODE and not self._resizing):
                return status
            self._end_ranks()
            generation = word[1] + 1  # ranks may have gone on without some, too
            if self._resizing:
                self._resizing = False
                _say(f"started again on {counted(self._ranks_wanted or 0, 'rank')}")
                continue
            reached = [*reached[1:], word[0]]
            told = f"the ranks have ended with status {status} after {time.monotonic() - began:.0f} s"
            if died >= self._restarts:
                _say(told + (f", and were started again {counted(died, 'time')}: given up" if died else ""))
                return status or 1
            if len(set(reached)) == 1:
                _say(f"{told}, {_TRIES} times after step {reached[0]}: given up")
                return status or 1
            died += 1
            kept = self._step()
            where = f"from step {kept} in memory" if kept else "from the newest checkpoint"
            _say(f"{told}: started again {where} ({died} of {self._restarts})")

    def _launch(self, environment: dict[str, str]) -> subprocess.Popen[Any]:
        """Start the ranks, or have those begin that wait for it."""
        standby, self._standby = self._standby, None
        if standby is not None:
            if standby.launcher.poll() is None and self._start(self._ranks_wanted, True)[0] == standby.command:
                return standby.release(environment)
            standby.end()
        command, own = self._start(self._ranks_wanted, False)
        return subprocess.Popen(command, env={**os.environ, **own, **environment})

    def _stand_by(self) -> None:
        """Have the next ranks wait, once those of now have told what they have imported."""
        if self._has_standby and self._standby is None and job_files.mark(self._job, "modules").exists():
            self._made += 1
            command, own = self._start(self._ranks_wanted, True)
            self._standby = Standby(command, own | {"MPISTRAT_JOB": self._job}, self._made)

    def _wait(self, launcher: subprocess.Popen[Any]) -> int:
        """Return a launcher's status; one that lives on when the ranks have told why the job ends is killed."""
        ended = 0.0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return launcher.wait(_LOOK)
            self._stand_by()
            if not ended and job_files.mark(self._job, "ended").exists():
                ended = time.monotonic()
            if ended and time.monotonic() - ended > _ENDING:
                self._end_ranks()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Pass a signal on; after one nothing is started again."""
        self._stopping = True
        if self._launcher is not None and number != signal.SIGINT:  # which the terminal sends to all of a job
            with contextlib.suppress(ProcessLookupError):
                self._launcher.send_signal(number)

    def _resize(self, number: int, frame: FrameType | None) -> None:
        """Have the ranks stop at a step's end, to start as many as `mpistrat resize` has written."""
        with contextlib.suppress(OSError, ValueError):
            self._ranks_wanted = int(job_files.mark(self._job, "size").read_text())
            self._resizing = True
            if self._launcher is not None:
                self._launcher.send_signal(signal.SIGUSR1)

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
        mark, waiting = f"MPISTRAT_JOB={self._job}".encode(), b""
        if self._standby is not None:
            waiting = f"{NUMBER}={self._standby.number}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                if mark in words and not (waiting and waiting in words) and int(path.parent.name) != os.getpid():
                    found.append(int(path.parent.name))
        return found


def _say(text: str) -> None:
    print(f"mpistrat run: {text}", file=sys.stderr, flush=True)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", nargs="?", type=int, metavar="JOB",
        help="the process of `mpistrat run --restarts`; default the only one of yours on this machine",
    )  # fmt: skip
    parser.add_argument("ranks", type=int, metavar="N", help="how many ranks go on")


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    jobs = job_files.supervisors()
    if args.ranks < 1:
        print(f"error: expected a number of ranks ≥ 1, got {args.ranks}", file=sys.stderr)
        return PROBLEM
    if args.job is None and len(jobs) == 1:
        args.job = next(iter(jobs))
    if args.job not in jobs:
        here = f"here are {', '.join(map(str, jobs))}" if jobs else "there is none here"
        asked = "name one job" if args.job is None else f"process {args.job} is no `mpistrat run --restarts` of yours"
        print(f"error: {asked}: {here}", file=sys.stderr)
        return PROBLEM
    job_files.ask_for_size(jobs[args.job], args.ranks)
    os.kill(args.job, job_files.RESIZE)
    print(f"the job goes on with {counted(args.ranks, 'rank')} when its ranks have stopped")
    return DONE


COMMAND = Command(
    summary="have a running job go on with another number of ranks",
    text="""\
Have a job that `mpistrat run --restarts` started go on with more ranks, or fewer. Its ranks are told to stop, as before a
time limit: a program that saves then, and ends with status 42 (ms.RESTART_EXIT_CODE), goes on where it was. Results are
those of the same global batches.""",
    examples=("mpistrat resize 4", "mpistrat resize 12345 2"),
    arguments=_arguments,
    run=_run,
    collective=False,
)
