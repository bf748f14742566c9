"""`mpistrat run --restarts`: restart a job's ranks in the same allocation until its program has ended properly.

A launcher's status is not enough: Open MPI's mpirun returns 0 after a node was lost, and always if ranks survive. So rank 0
records a proper end, and a rank records that it ends the job itself. Restarted ranks load the previous state from memory
(state/snapshot.py) or from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, final

from ..base.environment import RANK_PROCESS, RESTART_EXIT_CODE, STANDBY
from ..base.errors import MpistratError
from ..base.programs import isolated
from ..base.text import counted, printable
from ..cluster.launchers import allocation_of_job
from ..comm import job_files
from ..comm.monitor import leftovers
from ..state.snapshot import SnapshotFile
from .end_with_parent import end_with_parent
from .standby import Standby, environment_with

__all__ = ["supervise"]

Start = Callable[..., tuple[list[str], dict[str, str]]]

_TRIES = 3  # failures at one step before giving up
_ENDING = 10.0  # seconds that ranks have to end after their launcher, and vice versa
_REMOVING = 20.0  # seconds that nodes have to remove files
_LOOK = 1.0  # seconds between two checks for the reason that ranks recorded
_BRIEF = 60.0  # seconds: ranks that live longer without reporting steps may progress in another way
_BEGINNING = 30.0  # seconds that ranks have to start before a signal to save is forwarded
_SETTLING = 3.0  # seconds that they then have to install its handler


def supervise(start: Start, restarts: int, standby: bool = False, survive: bool = False) -> int:
    """Start ranks until their program has ended, was stopped, or has died too often; return the exit status.

    Args:
        start: returns the launcher's and program's command line, and additions to this process's environment, for a number of
            ranks (None for the requested one), and for standby ranks or not; after `mpistrat resize --strategy` it also gets the
            strategy and its number of servers.
        restarts: the most times that they are restarted.
        standby: start the next ranks before they are needed.
        survive: ranks continue without those that die.
    """
    if not leftovers.FOLDER.is_dir():
        _say(f"--restarts needs {leftovers.FOLDER} for a job's state, which does not exist")
        return 1
    job = job_files.new_key()
    swept = job_files.sweep(job)
    if swept:
        _say(f"removed files of {counted(len(swept), 'dead job')} from {leftovers.FOLDER}")
    held = job_files.lock(job)
    try:
        return _Supervisor(start, job, restarts, standby, survive).run()
    finally:
        job_files.remove(job)
        _remove_on_other_nodes(job)
        os.close(held)


def _remove_on_other_nodes(job: str) -> None:
    """Remove the files that killed ranks have left on the other nodes of a SLURM job."""
    nodes = allocation_of_job()
    count = len(nodes.living)
    if count > 1:
        command = ["srun", "--quiet", "--overlap", "--mpi=none", f"--nodes={count}", f"--ntasks={count}"]
        command += ["--ntasks-per-node=1", *([f"--exclude={','.join(nodes.lost)}"] if nodes.lost else [])]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            words = isolated(leftovers.__file__, "--job", job)
            subprocess.run([*command, *words], timeout=_REMOVING, capture_output=True, check=False)


@final
class _Supervisor:
    def __init__(self, start: Start, job: str, restarts: int, standby: bool, survive: bool) -> None:
        self._start, self._job, self._restarts = start, job, restarts
        self._has_standby, self._survives, self._made = standby, survive, 0
        self._standby: Standby | None = None
        self._launcher: subprocess.Popen[Any] | None = None
        self._state = job_files.state(job)
        self._signal = 0  # the signal to stop; no restart after it
        self._pending = 0  # a signal to save, which ranks can only handle once they have started
        self._resizing = False
        self._ranks_wanted: int | None = None
        self._strategy_wanted: tuple[str, int | None] | tuple[()] = ()

    def run(self) -> int:
        """Start the ranks, and restart them."""
        try:
            return self._run()
        finally:
            if self._standby is not None:
                self._standby.end()

    def _run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._forward)
        signal.signal(job_files.RESIZE, self._resize)
        generation = died = status = 0
        reached, word = [(-1, 0.0)] * _TRIES, self._state
        while not self._signal or self._pending:
            began, word[job_files.STEP], word[job_files.GENERATION] = time.monotonic(), 0, generation
            wanted = self._ranks_wanted, self._strategy_wanted
            self._launcher = self._launch({"MPISTRAT_JOB": self._job, "MPISTRAT_GENERATION": str(generation)})
            self._catch_up(wanted)
            status = self._wait(self._launcher, generation)
            self._launcher = None
            status = 128 - status if status < 0 else status
            if self._ended_well(generation, status):
                self._end_ranks(children=False)
                return 0
            # The launcher may report ranks that it killed after the first death.
            if word[job_files.STOPPED] > generation:
                status = RESTART_EXIT_CODE
            stops = bool(self._signal and not self._pending) or (status == RESTART_EXIT_CODE and not self._resizing)
            self._end_ranks(children=not stops)
            if stops:
                break
            lived = time.monotonic() - began
            generation = word[job_files.GENERATION] + 1  # survivors may have increased it too
            if self._resizing:
                self._resizing = False
                self._pending = self._pending if self._signal else 0
                under = f" under {self._strategy_wanted[0]}" if self._strategy_wanted else ""
                _say(f"started again on {counted(self._ranks_wanted or 0, 'rank')}{under}")
                continue
            reached = [*reached[1:], (word[job_files.STEP], lived)]
            told = f"the ranks have ended with status {status} after {lived:.0f} s"
            if died >= self._restarts:
                _say(told + (f", and were started again {counted(died, 'time')}: given up" if died else ""))
                return status or 1
            steps = {step for step, _ in reached}
            if len(steps) == 1 and (steps != {0} or all(0 < seconds < _BRIEF for _, seconds in reached)):
                _say(f"{told}, {_TRIES} times after step {reached[0][0]}: given up")
                return status or 1
            died += 1
            kept = self._step()
            where = f"from step {kept} in memory" if kept else "from the newest checkpoint"
            _say(f"{told}: started again {where} ({died} of {self._restarts})")
        return status or 128 + self._signal

    def _catch_up(self, started: tuple[int | None, tuple[Any, ...]]) -> None:
        """Forward requests that arrived while ranks were being started, with a number and a strategy."""
        if self._signal and not self._pending and self._launcher is not None:
            self._launcher.send_signal(self._signal)
        if (self._ranks_wanted, self._strategy_wanted) != started:
            self._resizing, self._pending = True, signal.SIGUSR1

    def _ended_well(self, generation: int, status: int) -> bool:
        """Return True if the program ended properly, by its ranks' records and, unless ranks survive, its launcher's status."""
        begun, done, ended = (
            self._state[word] > generation for word in (job_files.BEGUN, job_files.DONE, job_files.ENDED)
        )
        if self._survives:
            return done and not ended
        return status == 0 and (done or not begun)

    def _launch(self, environment: dict[str, str]) -> subprocess.Popen[Any]:
        """Start the ranks, or release standby ranks."""
        standby, self._standby = self._standby, None
        if standby is not None:
            if standby.launcher.poll() is None and standby.ranks == self._ranks_wanted:
                return standby.release(environment)
            standby.end()
        command, own = self._start(self._ranks_wanted, False, *self._strategy_wanted)
        return subprocess.Popen(command, env=environment_with(own, environment), preexec_fn=end_with_parent)

    def _stand_by(self) -> None:
        """Start the next ranks once the current ones have recorded their imported modules."""
        if self._has_standby and self._standby is None and job_files.mark(self._job, "modules").exists():
            self._made += 1
            command, own = self._start(self._ranks_wanted, True, *self._strategy_wanted)
            put = dict[str, str]()
            with contextlib.suppress(OSError, ValueError):
                _, put = job_files.imported(self._job)
            self._standby = Standby(command, {**own, "MPISTRAT_JOB": self._job}, put, self._made, self._ranks_wanted)

    def _wait(self, launcher: subprocess.Popen[Any], generation: int) -> int:
        """Return a launcher's status; kill one that outlives the recorded end of its ranks."""
        ended, ready = 0.0, time.monotonic() + _BEGINNING
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return launcher.wait(_LOOK)
            if self._state[job_files.BEGUN] > generation:
                ready = min(ready, time.monotonic() + _SETTLING)
            if self._pending and (self._state[job_files.STEP] or time.monotonic() >= ready):
                launcher.send_signal(self._pending)
                self._pending = 0
            self._stand_by()
            if not ended and self._state[job_files.ENDED] > generation:
                ended = time.monotonic()
            if ended and time.monotonic() - ended > _ENDING:
                self._end_ranks()

    def _forward(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal. No restart follows it, except after ranks are signalled to save.

        SIGUSR1 is forwarded once they have started: earlier it would kill them.
        """
        self._signal = number
        self._pending = number if number == signal.SIGUSR1 else 0
        if self._launcher is None or self._pending:
            return
        if not (number == signal.SIGINT and _in_foreground()):  # the terminal has sent it to the whole job
            with contextlib.suppress(ProcessLookupError):
                self._launcher.send_signal(number)

    def _resize(self, number: int, frame: FrameType | None) -> None:
        """Stop the ranks at the end of a step, to restart the number that `mpistrat resize` has written."""
        try:
            wanted, strategy, servers = job_files.asked_size(self._job)
            how = self._strategy_wanted if strategy is None else (strategy, servers)
            self._start(wanted, False, *how)
        except (OSError, ValueError, MpistratError) as error:
            _say(f"the job keeps its number of ranks: {error}")
            return
        if self._standby is not None and how != self._strategy_wanted:
            self._standby.ranks = -1  # with another strategy: they are not needed
        self._ranks_wanted, self._strategy_wanted = wanted, how
        if self._launcher is not None:
            self._resizing, self._pending = True, signal.SIGUSR1

    def _step(self) -> int:
        """Return the newest complete step in the snapshot files of this node; 0 without one."""
        found = list[tuple[float, int]]()
        for path in job_files.paths(self._job):
            with contextlib.suppress(OSError, ValueError):
                found.append((path.stat().st_mtime, SnapshotFile(path).newest()))
        return max(((at, step) for at, step in found if step), default=(0.0, 0))[1]

    def _end_ranks(self, children: bool = True) -> None:
        """Kill the ranks on this node that have outlived their launcher, and their children: they must not write any more."""
        deadline = time.monotonic() + _ENDING
        while (left := self._ranks(children)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    def _ranks(self, children: bool) -> list[int]:
        mark, waiting = f"MPISTRAT_JOB={self._job}".encode(), b""
        if self._standby is not None:
            waiting = f"{STANDBY}={self._standby.number}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                child = any(word.startswith(f"{RANK_PROCESS}=".encode()) for word in words)
                if mark in words and not (waiting and waiting in words) and (children or not child):
                    found.append(int(path.parent.name))
        return [pid for pid in found if pid != os.getpid()]


def _in_foreground() -> bool:
    """Return True if a terminal's Ctrl-C reaches this process's group."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _say(text: str) -> None:
    print(f"mpistrat run: {printable(text)}", file=sys.stderr, flush=True)
