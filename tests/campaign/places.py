"""Where jobs of the campaign of kills run: on this machine, or on two hosts in jobs of a real SLURM."""

from __future__ import annotations

import abc
import contextlib
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

from tests.launch.hosts import Hosts
from tests.launch.slurm import ENDED, Job, Slurm

__all__ = ["Here", "Place", "Running", "TwoHosts", "processes_of"]

_LOOK = 2.0  # seconds between two questions to SLURM whether a job has ended without a message


class Running(abc.ABC):
    """A job that was started."""

    @abc.abstractmethod
    def poll(self) -> int | None:
        """Return its status, None while it runs."""

    @abc.abstractmethod
    def end(self) -> None:
        """End it."""


class Place(abc.ABC):
    """Where jobs run."""

    hosts = 1

    @abc.abstractmethod
    def start(self, folder: Path, words: Sequence[str], environment: dict[str, str]) -> Running:
        """Start a command in a folder; what it says is in `stderr` there."""

    @abc.abstractmethod
    def kill(self, host: str, pid: int) -> bool:
        """Kill a rank, as whoever is no process of the job does; return whether it lived."""

    @abc.abstractmethod
    def stacks(self, python: str) -> str:
        """Return what `mpistrat stacks` says of the job's ranks."""

    @abc.abstractmethod
    def files(self, key: str) -> list[str]:
        """Return the files in shared memory that have a job's key in their name."""

    def close(self) -> None:  # noqa: B027
        """Nothing more is started."""


@final
class Here(Place):
    """This machine."""

    def start(self, folder: Path, words: Sequence[str], environment: dict[str, str]) -> Running:
        with (folder / "stderr").open("w") as errors:
            process = subprocess.Popen(
                words, env={**os.environ, **environment}, cwd=folder, stdout=subprocess.DEVNULL, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        return _Process(process)

    def kill(self, host: str, pid: int) -> bool:
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            return False
        return True

    def stacks(self, python: str) -> str:
        return _said([python, "-m", "mpistrat", "stacks"])

    def files(self, key: str) -> list[str]:
        return [name for name in os.listdir("/dev/shm") if key in name]


@final
class _Process(Running):
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


@final
class TwoHosts(Place):
    """Two isolated hosts of a real SLURM; needs root, iproute2 and SLURM."""

    hosts = 2

    def __init__(self) -> None:
        self._hosts = Hosts(2)
        self.slurm = Slurm(self._hosts)

    def start(self, folder: Path, words: Sequence[str], environment: dict[str, str]) -> Running:
        lines = ["#!/bin/bash", "#SBATCH --nodes=2 --ntasks-per-node=2 --output=stderr --open-mode=truncate"]
        lines += [shlex.join(words), "echo $? > status.part", "mv status.part status"]
        (folder / "job.sh").write_text("\n".join(lines) + "\n")
        return _Batch(self.slurm.submit(folder / "job.sh", env=environment), folder)

    def kill(self, host: str, pid: int) -> bool:
        command = [*self._hosts.enter(host, "/"), "kill", "-KILL", str(pid)]
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0

    def stacks(self, python: str) -> str:
        return "\n".join(
            _said([*self._hosts.enter(name), python, "-m", "mpistrat", "stacks"]) for name in self._hosts.names
        )

    def files(self, key: str) -> list[str]:
        names = {host: self._hosts.inside(host, "ls", "/dev/shm").split() for host in self._hosts.names}
        return [f"{host}: {name}" for host, found in names.items() for name in found if key in name]

    def close(self) -> None:
        self.slurm.close()
        self._hosts.close()


@final
class _Batch(Running):
    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._folder, self._look = job, folder, time.monotonic() + _LOOK

    def poll(self) -> int | None:
        status = self._folder / "status"
        if status.exists():
            return int(status.read_text())
        if time.monotonic() > self._look:
            self._look = time.monotonic() + _LOOK
            if all(state in ENDED for state in self._job.states()):
                return int(status.read_text()) if status.exists() else 1
        return None

    def end(self) -> None:
        self._job.slurm.run("scancel", "--full", "--signal=KILL", self._job.number)
        self._job.wait(60)


def processes_of(folder: Path) -> list[str]:
    """Return the processes of a job that was started in a folder, on any host of this machine."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"CAMPAIGN={folder}".encode() in (path / "environ").read_bytes().split(b"\0"):
                words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"process {path.name}: {words}")
    return found


def _said(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout + done.stderr
