"""Tests inside a job that runs already: `srun -n 4 python -m pytest --with-mpi tests`, without an mpiexec within.

Every rank runs the same pytest. Tests that are marked for as many ranks as the job has, and for as many hosts as those are on,
run where they are; the others are skipped with the reason. On other hosts than theirs some take other ways on each rank, and
hang. Rank 0 shows the run; another rank shows what failed on it.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.launch.tiers import kind

SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MPI_SIZE")  # how launchers tell their processes how many they are


def wanted(config: pytest.Config) -> bool:
    """Whether this process is a rank of a job whose ranks shall run the tests; UsageError where it cannot be told."""
    if getattr(config.option, "with_mpi", False):
        return True
    if any(os.environ.get(name, "1") not in ("", "1") for name in SIZES):
        raise pytest.UsageError("this process is one of several ranks: add --with-mpi to run the tests on them")
    return False


class InPlace:
    """The pytest plugin of such a rank. Ranks meet after each test, and know whether it failed on one of them."""

    def __init__(self, config: pytest.Config) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD.Dup()
        self.size, self.vendor = self._comm.size, MPI.get_vendor()[0]
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self._by_host = sorted(size for size in self._comm.allgather(0 if node.rank else node.size) if size)
        node.Free()
        self._failed, self._config = False, config

    def pytest_sessionstart(self) -> None:
        if self._comm.rank:
            self._config.get_terminal_writer()._file = open(os.devnull, "w")  # noqa: SIM115

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if reason := self._why_not(item):
                item.add_marker(pytest.mark.skip(reason=reason))

    def _why_not(self, item: pytest.Item) -> str:
        layout = item.callspec.params.get("_layout") if hasattr(item, "callspec") else None
        if layout is not None:
            if layout.ranks != self.size:
                return f"for other ranks than {self.size} of a job"
            hosts = layout.hosts or 1
            wanted = [self.size // hosts] * hosts
            return "" if self._by_host == wanted else f"for {hosts} host{'s' * (hosts > 1)} with {wanted[0]} ranks each"
        return {"pure": "needs no ranks", "program": "starts programs on ranks itself"}.get(
            kind(item), "needs hosts of its own"
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item):
        self._failed = False
        result = yield
        if self._comm.allreduce(self._failed) and item.config.option.maxfail:
            item.session.shouldfail = "a rank failed"
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed |= report.failed
        if report.failed and self._comm.rank:
            sys.stderr.write(f"rank {self._comm.rank} of {self.size}: {report.nodeid}\n{report.longreprtext}\n")
