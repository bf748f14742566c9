"""Jobs of `mpistrat job` for tests on a real SLURM: the digits job, rendered, submitted, and its weights."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import digits_jobs
from tests.launch.launcher import ROOT, MpiEnv, launch
from tests.launch.slurm import Job, Slurm, mpi_type

TRAIN = """
from mpistrat.examples import digits
digits.main()
"""
PROGRAM = ("train.py", *digits_jobs.COMMON)
TWO_BY_TWO = ("--nodes", "2", "--ranks-per-node", "2")


def launcher_words(mpi: MpiEnv, launcher: str) -> list[str]:
    """The options for `mpistrat job` that start an MPI's ranks by "srun" or by "mpiexec" within the job."""
    environment = ["--venv", str(Path(mpi.python).parent.parent)]
    if launcher == "srun":
        return ["--mpi", mpi_type(mpi), *environment]
    return ["--launcher", "openmpi" if "Open MPI" in mpi.vendor else "mpich", *environment]


def render(mpi: MpiEnv, folder: Path, *words: str) -> Path:
    """Let `mpistrat job` write a script into a folder."""
    script = folder / "job.sh"
    command = [mpi.python, "-m", "mpistrat", "job", "--name", "digits", "--output", str(script), *words]
    reply = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert reply.returncode == 0, reply.stderr
    return script


def submit(slurm: Slurm, mpi: MpiEnv, launcher: str, folder: Path, *words: str) -> Job:
    """Render a job and submit it; `train.py` is the digits job if the folder has no other."""
    if not (folder / "train.py").exists():
        (folder / "train.py").write_text(TRAIN)
    return slurm.submit(render(mpi, folder, *launcher_words(mpi, launcher), *words))


@contextlib.contextmanager
def lost_host(slurm: Slurm) -> Iterator[str]:
    """Have SLURM lose the second host, by its name, for a `with` block."""
    lost = slurm.hosts.names[1]
    slurm.ok("scontrol", "update", f"nodename={lost}", "state=down", "reason=test")
    try:
        yield lost
    finally:
        slurm.run("scontrol", "update", f"nodename={lost}", "state=resume")  # where it has not come back by itself


class References:
    """The weights of the same program under mpiexec, made once for each MPI and program."""

    def __init__(self, hosts: Any, factory: pytest.TempPathFactory) -> None:
        self._hosts, self._factory = hosts, factory
        self._made: dict[tuple, dict] = {}

    def weights(self, mpi: MpiEnv, *words: str, ranks: int = 4, over_hosts: bool = True) -> dict:
        """With two ranks on each host, or all on this machine."""
        key = (mpi.name, ranks, over_hosts, *words)
        if key not in self._made:
            folder = self._factory.mktemp(f"mpiexec-{mpi.name}")
            (folder / "train.py").write_text(TRAIN)
            program = [str(folder / "train.py"), *digits_jobs.COMMON, "--strategy", "multi_worker_mirrored", *words]
            program += ["--output", str(folder)]
            result = launch(program, ranks, mpi, 150, hosts=self._hosts if over_hosts else None)
            assert result.returncode == 0, result
            self._made[key] = digits_jobs.weights(folder)
        return self._made[key]


def same_bits(first: dict, second: dict) -> bool:
    """Whether two sets of weights have the same names and bits."""
    return sorted(first) == sorted(second) and all(first[name].tobytes() == second[name].tobytes() for name in first)
