"""A program on several ranks beside one process: a planted fault is named by step, rank and tensor, and no correct program is."""

from __future__ import annotations

from pathlib import Path

import pytest

import mpistrat as ms
from tests.harness.shadow_programs import Net, first_difference, recorded

# fault: the step, the ranks ("all", "last", or "first" for those with other rows), the operation, and words of the text
FAULTS = {
    "divisor": (1, "all", "gradient of inner", "its own rows"),
    "skipped": (1, "last", "gradient of inner", "adds zeros"),
    "twice": (1, "last", "gradient of inner", "2 times what it should be"),
    "stale": (3, "last", "hidden", "weights of this rank"),
    "rate": (1, "all", "parameter inner after the update", "learning rate"),
    "order": (1, "", "input", "read in another order"),
    "all rows": (2, "", "input", ""),
    "labels": (2, "last", "input", "argument [0][0] is that of row"),
    "written": (3, "all", "parameter outer at the start of the step", "A write between the steps"),
}


@pytest.fixture
def folder(tmp_path_factory):
    from mpi4py import MPI

    return MPI.COMM_WORLD.bcast(str(tmp_path_factory.mktemp("shadow")))


def _long_net():
    """Return the seed of a program whose steps have rows for each rank, and whose optimizer sums them."""
    nets = (Net(seed) for seed in range(200))
    return next(each.seed for each in nets if each.batch > 12 and len(each.x) > 60 and not each.rule and not each.sums)


@pytest.mark.ranks(3)
def test_each_fault_is_named_by_its_step_rank_and_tensor(folder):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    seed = _long_net()
    recorded(folder, Net(seed), comm)
    assert first_difference(folder, Net(seed), comm) is None
    for fault, (step, ranks, operation, words) in FAULTS.items():
        found = first_difference(folder, Net(seed, fault), comm)
        assert found is not None, fault
        assert (found.step, found.operation) == (step, operation), (fault, str(found))
        assert words in str(found), (fault, str(found))
        expected = {"all": tuple(range(comm.size)), "last": (comm.size - 1,)}.get(ranks, found.ranks)
        assert found.ranks == expected, (fault, str(found))


@pytest.mark.ranks(1, 2, 3, 4)
def test_no_correct_program_differs(folder):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for seed in range(3 * comm.size, 3 * comm.size + 3):  # others on each number of ranks
        recorded(folder, Net(seed), comm)
        assert first_difference(folder, Net(seed), comm) is None, seed


@pytest.mark.ranks(2)
def test_errors_reach_all_ranks(folder, tmp_path):
    """A folder that one rank cannot read, or whose file is cut short; a run that is recorded on two ranks."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    recorded(folder, Net(0), comm)
    with pytest.raises(ValueError, match="folder: expected a recorded run, got a folder without one"):
        first_difference(folder if comm.rank else str(tmp_path / "none"), Net(0), comm)
    if comm.rank == 0:
        data = (Path(folder) / "step-000001.npz").read_bytes()
        (tmp_path / "step-000001.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="folder: expected a recorded step, got a damaged one"):
        first_difference(folder if comm.rank else str(tmp_path), Net(0), comm)
    with pytest.raises(ValueError, match="expected one process"), ms.shadow.record(tmp_path, steps=1):
        Net(0)(comm)
    two = ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match="one replica on each rank"), ms.shadow.compare(folder):
        two.run(lambda: None)
    two.close()


@pytest.mark.ranks(2)
def test_a_few_elements_are_enough_for_differences_of_whole_tensors(folder):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    seed = _long_net()
    recorded(folder, Net(seed), comm, elements=4)
    assert first_difference(folder, Net(seed), comm) is None
    found = first_difference(folder, Net(seed, "skipped"), comm)
    assert found is not None
    assert found.ranks == (1,)
