"""One rank of a batch: the program that `mpiexec` starts on every rank to run tests there, or a process beside them.

It collects the files of the batch, runs the tests it was told, in the order it was told, and appends what happens to
`rank<k>.jsonl` line by line, so that the parent can follow and nothing is lost when the rank dies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest


class Reporter:
    """The pytest plugin of a process that runs tests for another one."""

    def __init__(self, folder: Path, nodeids: list[str], rank: int = 0) -> None:
        self.rank = rank
        self._nodeids = nodeids
        self._lines = open(folder / f"rank{rank}.jsonl", "a", buffering=1)  # noqa: SIM115

    def meet(self) -> None:
        """Wait for the others that run the same test."""

    def _tell(self, event: str, what: Any) -> None:
        self._lines.write(json.dumps([event, what], default=repr) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_id = {item.nodeid: item for item in items}
        items[:] = [by_id[nodeid] for nodeid in self._nodeids if nodeid in by_id]
        self._tell("missing", [nodeid for nodeid in self._nodeids if nodeid not in by_id])

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self._tell("start", item.nodeid)
        result = yield
        self._tell("done", item.nodeid)
        self.meet()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._tell("report", self._config.hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config


class RankReporter(Reporter):
    """That of a rank. A barrier after each test keeps the ranks together, so a hang is found where it is."""

    def __init__(self, folder: Path, nodeids: list[str]) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD.Dup()
        self._finalized = MPI.Is_finalized
        super().__init__(folder, nodeids, self._comm.rank)

    def meet(self) -> None:
        if not self._finalized():
            self._comm.Barrier()


def main(folder: Path) -> int:
    """Run the batch that `folder/batch.json` describes; tests that fail are no failure of this program."""
    batch = json.loads((folder / "batch.json").read_text())
    reporter = (RankReporter if batch["mpi"] else Reporter)(folder, batch["nodeids"])
    basetemp = folder / f"tmp{reporter.rank}"
    status = pytest.main([*batch["arguments"], "--basetemp", str(basetemp), *batch["files"]], plugins=[reporter])
    return 0 if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) else int(status)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
