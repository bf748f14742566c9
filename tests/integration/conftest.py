"""Fixtures of the tests over isolated hosts."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def references(hosts, tmp_path_factory):
    """The digits job's weights under mpiexec over the two hosts."""
    from integration.slurm_jobs import References

    return References(hosts, tmp_path_factory)
