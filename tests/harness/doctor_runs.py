"""Runs of `mpistrat doctor` for tests: in a clean environment, with a /dev/shm of their own, on ranks, and what they found."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch.launcher import ROOT, MpiEnv


@dataclass
class DoctorRun:
    """The exit status and the output of a run of the doctor."""

    status: int
    out: str
    err: str

    @functools.cached_property
    def document(self) -> dict[str, Any]:
        assert self.out[:1] == "{", f"exit status {self.status}\n{self.out}\n{self.err}"
        return json.loads(self.out)

    def findings(self, name: str) -> list[dict[str, str]]:
        return [finding for finding in self.document["findings"] if finding["name"] == name]

    def finding(self, name: str) -> dict[str, str]:
        found = self.findings(name)
        assert len(found) == 1, f"{name}: {self.out}{self.err}"
        return found[0]

    def names(self) -> set[str]:
        return {finding["name"] for finding in self.document["findings"]}

    def bad(self) -> list[dict[str, str]]:
        return [finding for finding in self.document["findings"] if finding["status"] != "OK"]


@functools.cache
def why_no_mounts() -> str:
    """Why this machine cannot have a /dev/shm for one process; empty where it can."""
    reply = subprocess.run([*_own_mounts("size=1m"), "true"], capture_output=True, text=True, timeout=30)
    return f"no /dev/shm of one's own here: {reply.stderr.strip()}" if reply.returncode else ""


def _own_mounts(options: str, before: str = "true") -> list[str]:
    """The words that run what follows them with an empty /dev/shm, after a command."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    setup = f'mount -t tmpfs -o {options} shm /dev/shm && {{ {before}; }} && exec "$@"'
    return ["unshare", *user, "--mount", "sh", "-c", setup, "sh"]


def clean_environment(
    mpi: MpiEnv, extra: Mapping[str, str] | None = None, first: Sequence[Path] = ()
) -> dict[str, str]:
    """The environment of a user who has activated the environment of this MPI and nothing else."""
    folders = [*map(str, first), str(Path(mpi.python).parent), "/usr/bin", "/bin"]
    home = os.environ.get("HOME", "/")
    return {"PATH": os.pathsep.join(folders), "HOME": home, "PYTHONPATH": str(ROOT), **(extra or {})}


def run_doctor(
    mpi: MpiEnv,
    *words: str,
    env: Mapping[str, str] | None = None,
    first: Sequence[Path] = (),
    shm: str = "size=2g",
    before: str = "true",
    status: int = 0,
) -> DoctorRun:
    """Run `mpistrat doctor --json` as on a login node.

    `first` are folders in front of PATH, `shm` options of the mount of /dev/shm, and `before` a command that runs in there.
    """
    command = [*_own_mounts(shm, before), mpi.python, "-m", "mpistrat", "doctor", "--json", *words]
    reply = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=clean_environment(mpi, env, first), cwd="/"
    )
    assert reply.returncode == status, reply.stdout + reply.stderr
    return DoctorRun(reply.returncode, reply.stdout, reply.stderr)


def rank_program(variables: Mapping[int, Mapping[str, str]], *words: str, prelude: str = "") -> str:
    """A program for `mpi_run` that becomes `mpistrat doctor --ranks --json`, with variables of its own on some ranks."""
    return f"""
import os, sys, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK") or 0)
os.environ.update({ {rank: dict(own) for rank, own in variables.items()}!r}.get(rank, {{}}))
{prelude}
os.chdir("/")  # Python imports from there first
os.execv(sys.executable, [sys.executable, "-m", "mpistrat", "doctor", "--ranks", "--json", *{list(words)!r}])
"""


def documented(title: str) -> set[str]:
    """The findings that docs/doctor.md explains under a title."""
    part = (ROOT / "docs/doctor.md").read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    items = [line.split(": ")[0] for line in part.splitlines() if line.startswith("- **")]
    return {name for item in items for names in re.findall(r"\*\*([^*]+)\*\*", item) for name in names.split(", ")}
