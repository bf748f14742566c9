"""A batch: tests of one layout (an MPI, a number of ranks, perhaps hosts), run in one `mpiexec` and followed as they finish.

A test that hangs or kills a rank ends its `mpiexec`; the tests after it are started again in a new one.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launcher import Job, MpiEnv, texts

STARTUP = 120.0  # seconds until the first test starts: interpreters, imports, MPI_Init, collection
AFTER_FAILURE = 5.0  # seconds the other ranks get to finish a test that failed on one
LOOK = 2.0  # seconds between two counts of the ranks that live
ENDING = 30.0  # seconds from the last test to the end of the ranks
RESTARTS = 8
RANK = str(Path(__file__).with_name("launcher_rank.py"))  # the program of each rank


@dataclass(frozen=True)
class Layout:
    """Where a test runs: under which MPI, on how many ranks, over how many hosts (0: this machine)."""

    mpi: str
    ranks: int
    hosts: int = 0

    def __str__(self) -> str:
        if not self.mpi:
            return "the process beside"
        shape = f"{self.hosts}x{self.ranks // self.hosts}" if self.hosts else f"np{self.ranks}"
        return f"{self.mpi}-{shape}"


@dataclass
class Outcome:
    """A test's reports, by rank, and what went wrong beyond them (a hang, a dead rank), if anything."""

    reports: list[list[dict[str, Any]]]
    problem: str | None = None


@dataclass
class _Rank:
    """What one rank has told so far."""

    offset: int = 0
    started: set[str] = field(default_factory=set)
    done: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    reports: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))


class Batch:
    """Runs its items in order; `outcome` waits for the next one."""

    def __init__(self, layout: Layout, items: Sequence[pytest.Item], limits: dict[str, float]) -> None:
        self.layout = layout
        self._config = items[0].config
        self._pending = [item.nodeid for item in items]
        self._files = {item.nodeid: str(item.path) for item in items}
        self._limits = limits
        self._job: Job | None = None
        self._starts = 0

    def outcome(self, nodeid: str, mpi: MpiEnv | None = None, hosts: Any = None, names: Any = None) -> Outcome:
        """Wait until every rank has finished this test, or cannot."""
        if self._job is None:
            if self._starts > RESTARTS:
                return Outcome([], f"not run: the ranks of {self.layout} were lost {self._starts} times before")
            self._start(mpi, hosts, names)
        self._pending.remove(nodeid)
        problem = self._follow(nodeid)
        if problem is None and not self._pending:
            problem = self._finish()
        reports = [rank.reports[nodeid] for rank in self._ranks]
        if problem:
            problem += "\n" + texts(*self._job.outputs())
            self.close()
        return Outcome(reports, problem)

    def close(self) -> None:
        """End the ranks, if they still run."""
        if self._job is not None:
            self._job.end()
            shutil.rmtree(self._job.folder, ignore_errors=True)
            self._job = None

    def _start(self, mpi: MpiEnv | None, hosts: Any, names: dict[str, str]) -> None:
        assert mpi is not None
        folder = self._described("--capture=tee-sys", "--with-mpi")
        env = {"MPISTRAT_TEST_MPIS": json.dumps(names), "MPISTRAT_TEST_LAYOUT": str(self.layout)}
        program = [mpi.python, "-m", "mpi4py", RANK, str(folder)]
        self._job = Job(program, self.layout.ranks, mpi, folder, env=env, hosts=hosts, cwd=self._config.rootpath)

    def _described(self, *words: str) -> Path:
        """A new folder with what the ranks read: which tests to run, and how."""
        self._starts += 1
        folder = Path(tempfile.mkdtemp(prefix="mpistrat-batch-"))
        option = self._config.option
        arguments = [
            "-q", "--no-header", "--no-summary", f"--tb={option.tbstyle if option.tbstyle != 'no' else 'short'}",
            "-p", "no:cacheprovider", "-p", "tests.launch.launcher_plugin", *words,
            "--continue-on-collection-errors", "--tier", option.tier, f"--rootdir={self._config.rootpath}",
            *(["-c", str(self._config.inipath)] if self._config.inipath else []),
        ]  # fmt: skip
        batch = {
            "mpi": self.layout.mpi,
            "nodeids": self._pending,
            "files": list(dict.fromkeys(self._files[nodeid] for nodeid in self._pending)),
            "arguments": arguments,
        }
        (folder / "batch.json").write_text(json.dumps(batch))
        self._ranks = [_Rank() for _ in range(self.layout.ranks)]
        return folder

    def _follow(self, nodeid: str) -> str | None:
        """Read what the ranks tell until this test is done on all; otherwise say why it never will be."""
        assert self._job is not None
        limit, running, pause = self._limits[nodeid], False, 0.005
        deadline, why = time.monotonic() + STARTUP, f"no test started within {STARTUP:.0f} s"
        look, lost = time.monotonic() + LOOK, False
        while True:
            ended = self._job.poll() is not None  # asked before reading, so that nothing written later is missed
            self._read()
            if any(nodeid in rank.missing for rank in self._ranks):
                return "the ranks did not collect this test"
            if all(nodeid in rank.done for rank in self._ranks):
                return None
            if ended:
                return f"a rank died: mpiexec ended with status {self._job.poll()}; {self._places(nodeid)}"
            if time.monotonic() > look:  # MPICH's mpiexec misses a rank's end now and then
                before, lost = lost, self._job.living("launcher_rank.py") < self.layout.ranks
                if running and before and lost:
                    places = self._places(nodeid)
                    self._job.end()
                    return f"a rank died: mpiexec has not noticed; {places}"
                look = time.monotonic() + LOOK
            if not running and any(nodeid in rank.started for rank in self._ranks):
                running, deadline, why = True, time.monotonic() + limit, f"a hang: not finished after {limit:g} s"
            if running and time.monotonic() + AFTER_FAILURE < deadline and self._failed(nodeid):
                deadline, why = time.monotonic() + AFTER_FAILURE, "one rank failed and others still wait"
            if time.monotonic() > deadline:
                places = self._places(nodeid)
                self._job.end(stacks=True)
                return f"{why}; {places}"
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def _finish(self) -> str | None:
        """After the last test the ranks must end by themselves, and well."""
        assert self._job is not None
        status = self._job.wait(ENDING)
        if status == 0:
            self.close()
            return None
        if status is None:
            self._job.end(stacks=True)
            return f"all tests of {self.layout} were done, but the ranks did not end within {ENDING:.0f} s"
        return f"all tests of {self.layout} were done, but then mpiexec ended with status {status}"

    def _failed(self, nodeid: str) -> bool:
        return any(report["outcome"] == "failed" for rank in self._ranks for report in rank.reports[nodeid])

    def _places(self, nodeid: str) -> str:
        words = []
        for number, rank in enumerate(self._ranks):
            state = "done" if nodeid in rank.done else "in it" if nodeid in rank.started else "not yet in it"
            words.append(f"rank {number} {state}")
        return ", ".join(words)

    def _read(self) -> None:
        assert self._job is not None
        for number, rank in enumerate(self._ranks):
            path = self._job.folder / f"rank{number}.jsonl"
            if not path.exists() or os.path.getsize(path) == rank.offset:
                continue
            with open(path, "rb") as lines:
                lines.seek(rank.offset)
                text = lines.read()
            whole = text[: text.rfind(b"\n") + 1]
            rank.offset += len(whole)
            for line in whole.splitlines():
                event, what = json.loads(line)
                if event == "report":
                    rank.reports[what["nodeid"]].append(what)
                else:
                    known = getattr(rank, {"start": "started"}.get(event, event))
                    known.update(what if event == "missing" else [what])


class Beside(Batch):
    """Tests without ranks, run in one other process while this one follows ranks: on two cores, in half the time."""

    def __init__(self, items: Sequence[pytest.Item], limits: dict[str, float]) -> None:
        super().__init__(Layout("", 1), items, limits)

    def begin(self) -> None:
        """Start the process. It sees the environment that this one sees."""
        option = self._config.option
        mpis = [f"--mpi-env={word}" for word in option.mpi_env] + [f"--mpi-only={word}" for word in option.mpi_only]
        folder = self._described("--chosen", *mpis)
        names = ("TMPDIR", "PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "OMP_NUM_THREADS", "OMPI_MCA_osc")
        env = {name: os.environ.get(name) for name in names}
        alone = MpiEnv("", sys.executable, (), "")
        self._job = Job([sys.executable, RANK, str(folder)], 1, alone, folder, env=env, cwd=self._config.rootpath)

    def _start(self, mpi: MpiEnv | None, hosts: Any, names: dict[str, str]) -> None:
        self.begin()

    def _failed(self, nodeid: str) -> bool:
        return False  # nobody waits for it
