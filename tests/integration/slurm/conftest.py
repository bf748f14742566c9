"""Fixtures of the tests in batch jobs."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def references(hosts, tmp_path_factory):
    """The digits job's weights under mpiexec over the two hosts."""
    from tests.harness.slurm_jobs import References

    return References(hosts, tmp_path_factory)
