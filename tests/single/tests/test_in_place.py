"""pytest inside a job that runs already: tests for that many ranks run on them, nothing starts an mpiexec."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.launcher import ROOT, launch

FILE = """
import os
import pytest

def comm():
    from mpi4py import MPI
    return MPI.COMM_WORLD

@pytest.mark.ranks(1, 2, 3)
def test_here():
    assert comm().allreduce(1) == 2

@pytest.mark.ranks(2)
def test_one_rank_fails():
    assert comm().rank == 0, "wrong here"

@pytest.mark.ranks(2)
def test_after_it():
    comm().Barrier()

@pytest.mark.ranks(3, 4)
def test_elsewhere():
    assert False

def test_pure():
    assert False

def test_program(mpi_run):
    mpi_run("", 2)

def test_hosts(hosts):
    assert False
"""


@pytest.fixture
def run(mpi, tmp_path: Path):
    (tmp_path / "test_it.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nranks_timeout = 20\n")

    def run(*words: str):
        program = ["-m", "pytest", "-p", "tests.launch.launcher_plugin", "-rs", *words, "test_it.py"]
        return launch(program, 2, mpi, 60, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})

    return run


def test_what_fits_runs_and_the_rest_is_skipped_with_a_reason(run):
    result = run("--with-mpi")
    first, second = result.out
    assert "3 passed, 7 skipped" in first
    for reason in ("for other ranks than 2", "needs no ranks", "starts programs on ranks itself", "needs hosts"):
        assert reason in first
    assert second == ""
    assert "rank 1 of 2: test_it.py::test_one_rank_fails" in result.err[1]
    assert "wrong here" in result.err[1]
    assert result.returncode != 0


def test_a_failure_of_one_rank_stops_all_where_the_first_shall(run):
    result = run("--with-mpi", "-x")
    assert not result.timed_out
    assert "2 passed" in result.out[0]  # here test_one_rank_fails passed; test_after_it did not begin


def test_ranks_without_the_option_are_told(run):
    result = run()
    assert not result.timed_out
    assert "add --with-mpi" in result.stderr
