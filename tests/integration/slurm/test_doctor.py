"""`mpistrat doctor` on a real SLURM of two hosts: what srun offers, ranks that it starts, and tasks that it starts alone."""

from __future__ import annotations

import pytest

from tests.harness.doctor_runs import DoctorRun

DOCTOR = ("-m", "mpistrat", "doctor", "--json")


def test_login_node(slurm, slurm_mpi):
    from tests.launch.slurm import mpi_type

    reply = slurm.run(slurm_mpi.python, *DOCTOR, env={"MPIEXEC": slurm_mpi.mpiexec[0]})
    found = DoctorRun(reply.returncode, reply.out, reply.err)
    over_ucx = ["srun"] if slurm_mpi.vendor == "MPICH" else []
    assert [one["name"] for one in found.bad() if one["name"] not in ("leftovers", "segments")] == over_ucx
    assert f"srun --mpi={mpi_type(slurm_mpi)} python train.py" in found.finding("srun")["what"]
    if over_ucx:
        assert "MPIR_CVAR_CH4_NETMOD=ofi" in found.finding("srun")["remedy"]


def test_ranks(slurm, slurm_mpi):
    from tests.launch.slurm import exported, mpi_type

    start = ("srun", "-N2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", f"--mpi={mpi_type(slurm_mpi)}")
    words = (*start, slurm_mpi.python, *DOCTOR, "--ranks", "--time-limit", "110")
    reply = slurm.run(*words, timeout=140, env=exported(slurm_mpi))
    assert reply.returncode == 0, reply
    found = DoctorRun(reply.returncode, reply.out, reply.err)
    assert found.bad() == [] and [row["node"] for row in found.document["ranks"]] == [0, 0, 1, 1]


def test_mpich_over_ucx_under_pmi2_is_named(slurm, slurm_mpi):
    """Whether the lines fit by luck, MPI_Init fails, or hangs: the variable that helps is named."""
    if slurm_mpi.vendor != "MPICH":
        pytest.skip("about MPICH")
    start = ("srun", "-N2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "--mpi=pmi2")
    reply = slurm.run(*start, slurm_mpi.python, *DOCTOR, "--ranks", "--time-limit", "30", timeout=140)
    found = DoctorRun(reply.returncode, reply.out, reply.err)
    assert [one["name"] for one in found.bad()] == (["MPI start"] if reply.returncode else ["srun"]), reply
    assert "MPIR_CVAR_CH4_NETMOD=ofi" in found.bad()[0]["remedy"] and "belongs to another MPI" not in reply.out


@pytest.mark.parametrize("kill", [0, 1])
def test_tasks_that_are_each_rank_0_of_1_are_told_once(slurm, mpi, kill):
    from tests.launch.slurm import mpi_type

    start = ("srun", "-N2", "-n4", f"--kill-on-bad-exit={kill}", "--mpi=none")
    reply = slurm.run(*start, mpi.python, *DOCTOR, "--ranks", "--time-limit", "110", timeout=140)
    assert reply.returncode, reply  # srun's own where it ends the others
    finding = DoctorRun(reply.returncode, reply.out, reply.err).finding("launch")  # one document, or it is no JSON
    assert finding["status"] == "problem" and "SLURM_STEP_NUM_TASKS=4" in finding["what"]
    assert f"use srun --mpi={mpi_type(mpi)}" in finding["remedy"]
