"""A program on several ranks beside one process: a planted fault is named by step, rank and tensor, and no correct program is."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpistrat as ms
from tests.harness.shadow_programs import Net, expect_faults, first_difference, recorded

# fault: the step, the ranks ("all", "last", or "first" for those with other rows), the operation, and words of the text
FAULTS = {
    "divisor": (1, "all", "gradient of inner", "its own rows"),
    "skipped": (1, "last", "gradient of inner", "adds zeros"),
    "twice": (1, "last", "gradient of inner", "2 times what it should be"),
    "one skipped": (1, "last", "gradient of outer", "1 of 3 gradients differ. rank 2 adds zeros"),
    "one thrice": (1, "last", "gradient of outer", "It has rank 2's 3 times what it should be"),
    "one NaN": (1, "last", "gradient of outer", "rank 2 adds NaN or infinity"),
    "stale": (3, "last", "hidden", "weights of this rank"),
    "rate": (1, "all", "parameter inner after the update", "learning rate"),
    "order": (1, "", "input", "read in another order"),
    "all rows": (2, "", "input", ""),
    "labels": (2, "last", "input", "argument [0][0] is that of row"),
    "written": (3, "all", "parameter outer at the start of the step", "A write between the steps"),
}


def _long_net():
    """Return the seed of a program whose steps have rows for each rank, and whose optimizer sums them."""
    nets = (Net(seed) for seed in range(200))
    return next(each.seed for each in nets if each.batch > 12 and len(each.x) > 60 and not each.rule and not each.sums)


@pytest.mark.ranks(3)
def test_each_fault_is_named_by_its_step_rank_and_tensor(mpi_tmp_path):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    seed = _long_net()
    recorded(mpi_tmp_path, Net(seed), comm)
    assert first_difference(mpi_tmp_path, Net(seed), comm) is None
    expect_faults(mpi_tmp_path, FAULTS, lambda fault: Net(seed, fault), comm)


@pytest.mark.ranks(1, 2, 3, 4)
def test_no_correct_program_differs(mpi_tmp_path):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for seed in range(3 * comm.size, 3 * comm.size + 3):  # others on each number of ranks
        recorded(mpi_tmp_path, Net(seed), comm)
        assert first_difference(mpi_tmp_path, Net(seed), comm) is None, seed


@pytest.mark.ranks(2)
def test_errors_reach_all_ranks(mpi_tmp_path, tmp_path):
    """A folder that one rank cannot read, or whose file is cut short; a run that is recorded on two ranks."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    recorded(mpi_tmp_path, Net(0), comm)
    with pytest.raises(ValueError, match="folder: expected a recorded run, got a folder without one"):
        first_difference(mpi_tmp_path if comm.rank else str(tmp_path / "none"), Net(0), comm)
    if comm.rank == 0:
        data = (Path(mpi_tmp_path) / "step-000001.npz").read_bytes()
        (tmp_path / "step-000001.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="folder: expected a recorded step, got a damaged one"):
        first_difference(mpi_tmp_path if comm.rank else str(tmp_path), Net(0), comm)
    with pytest.raises(ValueError, match="expected one process"), ms.shadow.record(tmp_path, steps=1):
        Net(0)(comm)
    two = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match="one replica on each rank"), ms.shadow.compare(mpi_tmp_path):
        two.run(lambda: None)
    two.close()


@pytest.mark.ranks(2)
def test_a_few_elements_are_enough_for_differences_of_whole_tensors(mpi_tmp_path):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    seed = _long_net()
    recorded(mpi_tmp_path, Net(seed), comm, elements=4)
    assert first_difference(mpi_tmp_path, Net(seed), comm) is None
    found = first_difference(mpi_tmp_path, Net(seed, "skipped"), comm)
    assert found is not None
    assert found.ranks == (1,)
