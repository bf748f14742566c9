"""The digits job over two hosts of two ranks: the weights of one rank alone, and the same bits twice."""

from __future__ import annotations

import pytest

from tests.harness import digits_jobs


@pytest.mark.hosts(2, ranks_per_host=2)
@pytest.mark.parametrize("all_reduce", ["auto", "hierarchical", "mpi", "reduction_to_one_device"])
def test_weights_over_two_hosts(mpi_tmp_path, all_reduce: str) -> None:
    from mpi4py import MPI

    words = ("--strategy", "multi_worker_mirrored", "--all-reduce", all_reduce)
    names = ("job", "again") if all_reduce == "auto" else ("job",)  # twice over TCP takes long
    for name in names:
        summary = digits_jobs.run(mpi_tmp_path / name, *words)
    assert summary["ranks"] == 4
    if MPI.COMM_WORLD.rank == 0:
        digits_jobs.run_alone(mpi_tmp_path / "alone")
        job, again, alone = (digits_jobs.weights(mpi_tmp_path / name) for name in (names[0], names[-1], "alone"))
        assert digits_jobs.difference(job, alone) < 1e-9
        assert all(job[name].tobytes() == again[name].tobytes() for name in job)
    MPI.COMM_WORLD.Barrier()
