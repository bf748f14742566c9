"""`mpistrat doctor --ranks` over isolated hosts: what it says of nodes."""

from __future__ import annotations

import os

import pytest

from tests.harness.doctor_runs import DoctorRun, rank_program
from tests.launch.launcher import ROOT


@pytest.fixture
def doctor(mpi_run, hosts):
    """A run of the doctor on two ranks on each of two hosts."""

    def run(variables: dict[int, dict[str, str]]) -> DoctorRun:
        result = mpi_run(rank_program(variables), 4, timeout=90, hosts=hosts, env={"OMP_NUM_THREADS": "1"})
        return DoctorRun(result.returncode, result.out[0], result.stderr)

    return run


def test_two_healthy_hosts(doctor):
    found = doctor({})
    assert found.status == 0 and found.bad() == []
    assert [(row["host"], row["node"], row["local_rank"]) for row in found.document["ranks"]] == [
        ("h1", 0, 0), ("h1", 0, 1), ("h2", 1, 0), ("h2", 1, 1),
    ]  # fmt: skip
    assert found.finding("ranks")["what"] == "4 on 2 nodes"
    assert "shared between nodes" in found.finding("temporary folder")["what"]  # the hosts have one file system


def test_what_differs_between_hosts(doctor, tmp_path):
    (tmp_path / "numpy-9.9.9.dist-info").mkdir()
    (tmp_path / "numpy-9.9.9.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 9.9.9\n")
    found = doctor({rank: {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"} for rank in (2, 3)})
    finding = found.finding("versions")
    assert finding["status"] == "problem" and "between hosts" in finding["what"]
    assert "ranks 2, 3: 9.9.9" in finding["what"]
