"""srun without the --mpi= that fits starts each task as rank 0 of 1: an error at once, on every task, with the remedy."""

from __future__ import annotations

import pytest

PROGRAM = "import mpistrat as ms; ms.MultiWorkerMirroredStrategy(); print('trained')"


@pytest.mark.parametrize("how", ["none", "other"])
def test_singletons(slurm, mpi, how: str) -> None:
    from tests.launch.slurm import mpi_type

    if how == "other" and mpi_type(mpi) == "pmi2":
        pytest.skip("MPICH's wheel ends by itself where it finds PMIx: test_mpich_by_pmix")
    option = "--mpi=none" if how == "none" else "--mpi=pmi2"
    reply = slurm.run("srun", "-N2", "-n4", "--label", "--kill-on-bad-exit=0", option, mpi.python, "-c", PROGRAM)
    assert reply.returncode == 1, reply
    for task in range(4):
        own = [line for line in reply.err.splitlines() if line.startswith(f"{task}: ") and "ClusterError: " in line]
        assert len(own) == 1, reply
        for words in ("expected 4 ranks", "SLURM_STEP_NUM_TASKS=4", "rank 0 of 1", f"use srun --mpi={mpi_type(mpi)}"):
            assert words in own[0]
    assert "trained" not in reply.out


def test_mpich_by_pmix(slurm, slurm_mpi) -> None:
    """The MPICH of the wheels speaks no PMIx: MPI itself says so, and no task trains alone."""
    from tests.launch.slurm import mpi_type

    if mpi_type(slurm_mpi) == "pmix" or slurm.why_no_pmix:
        pytest.skip("about MPICH under srun --mpi=pmix")
    reply = slurm.run("srun", "-N2", "-n2", "--mpi=pmix", slurm_mpi.python, "-c", PROGRAM)
    assert reply.returncode != 0 and "trained" not in reply.out and "PMIx" in reply.err, reply
