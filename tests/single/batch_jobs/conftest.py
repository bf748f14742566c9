"""Runs scripts where every command of a batch system is a stub that writes down how it was called."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

RECORD = '#!/bin/bash\nprintf "%s\\0" "${0##*/}" "$#" "$@" >> "$CALLS"\n'
LAUNCHERS = ("srun", "mpirun", "mpiexec", "jsrun", "flux")
STUBS = (*LAUNCHERS, "scontrol", "module", "conda", "sbatch", "qsub", "bsub", "apptainer")
VARIABLES = {
    "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_CPUS_PER_TASK": "3", "SLURM_ARRAY_JOB_ID": "16",
    "SLURM_ARRAY_TASK_ID": "4", "PBS_JOBID": "17.host", "PBS_ARRAY_INDEX": "4", "PBS_O_WORKDIR": ".",
    "PBS_NODEFILE": "/dev/null", "LSB_JOBID": "17", "LSB_JOBINDEX": "4",
}  # fmt: skip


def parse_calls(text: bytes) -> list[list[str]]:
    """Every call: the command, then its arguments."""
    words = iter(text.decode().split("\0")[:-1])
    return [[name, *(next(words) for _ in range(int(next(words))))] for name in words]


@dataclass
class Ran:
    status: int
    stdout: str
    stderr: str
    calls: list[list[str]]

    def of(self, *names: str) -> list[list[str]]:
        return [call for call in self.calls if call[0] in names]


@dataclass
class Machine:
    """A folder with stubs, of which some may do more than write down their arguments."""

    folder: Path

    def __post_init__(self) -> None:
        (self.folder / "bin").mkdir(parents=True)
        for name in STUBS:
            self.stub(name, "")

    def stub(self, name: str, does: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(RECORD + does)
        path.chmod(0o755)

    def environment(self, **variables: str) -> dict[str, str]:
        path = f"{self.folder / 'bin'}:/usr/bin:/bin"
        return {"PATH": path, "CALLS": str(self.folder / "calls"), **VARIABLES, **variables}

    def start(self, script: str, **variables: str) -> subprocess.Popen[str]:
        (self.folder / "script").write_text(script)
        venv = self.folder / ".venv/bin/activate"
        venv.parent.mkdir(parents=True, exist_ok=True)
        venv.write_text("")
        return subprocess.Popen(
            ["/bin/bash", "script"], cwd=self.folder, env=self.environment(**variables), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def run(self, script: str, **variables: str) -> Ran:
        process = self.start(script, **variables)
        out, err = process.communicate(timeout=30)
        return Ran(process.returncode, out, err, self.calls())

    def calls(self) -> list[list[str]]:
        path = self.folder / "calls"
        found = parse_calls(path.read_bytes()) if path.exists() else []
        path.unlink(missing_ok=True)
        return found


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "machine")


@pytest.fixture
def machine_of(tmp_path: Path) -> Callable[[str], Machine]:
    return lambda name: Machine(tmp_path / name)


@pytest.fixture
def on_path(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The stubs are what this process finds, too."""
    for name, value in machine.environment(PATH=f"{machine.folder / 'bin'}:{os.environ['PATH']}").items():
        monkeypatch.setenv(name, value)
    return machine
