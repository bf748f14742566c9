"""Process sets: collectives of some of the ranks, by themselves, side by side, and what ranks that differ are told."""

import gc

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ClosedError, CollectiveMismatchError, ContextError


@pytest.fixture
def strategy():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        yield strategy


def own_set(strategy, *sets):
    """The one of some disjoint sets in which this rank is."""
    made = [strategy.process_set(ranks) for ranks in sets]
    return next(each for each in made if each.included)


@pytest.mark.ranks(3, 4)
@pytest.mark.hosts(2, ranks_per_host=2)
def test_two_at_once(strategy):
    """Each in its own order, and as often as it likes."""
    rank, size = strategy.rank, strategy.size
    some = own_set(strategy, [2, 0], [r for r in range(size) if r not in (0, 2)])
    ranks = [0, 2] if rank in (0, 2) else [r for r in range(size) if r not in (0, 2)]
    assert some.ranks == tuple(ranks)
    assert (some.size, some.rank) == (len(ranks), ranks.index(rank))
    for _ in range(1 + 3 * (rank in (0, 2))):
        assert some.all_reduce("SUM", {"r": np.array([rank]), "one": 1.0}) == {"r": [sum(ranks)], "one": len(ranks)}
    assert some.all_reduce("MEAN", np.full(3, float(rank))).tolist() == [np.mean(ranks)] * 3
    assert some.all_gather(np.full(rank, rank)).tolist() == [r for r in ranks for _ in range(r)]
    assert some.all_gather_object(f"of {rank}") == [f"of {r}" for r in ranks]
    for root in ranks:
        assert some.broadcast(np.array([rank, 7]), root=root).tolist() == [root, 7]
        assert some.broadcast_object({rank}, root=root) == {root}
    some.barrier(name="there")
    n = len(ranks)
    assert some.reduce_scatter("SUM", np.arange(n) + rank).tolist() == [n * some.rank + sum(ranks)]
    assert some.all_to_all(np.full(n, rank)).tolist() == ranks
    value, received = some.all_to_all(np.full(n, rank), splits=[n] + [0] * (n - 1))
    assert (value.tolist(), received.tolist()) == (
        ([r for r in ranks for _ in range(n)], [n] * n) if some.rank == 0 else ([], [0] * n)
    )
    assert strategy.all_gather_object(rank) == list(range(size))


@pytest.mark.ranks(2, 3)
def test_in_a_step(strategy):
    some = own_set(strategy, *([r] for r in range(strategy.size - 2)), range(strategy.size - 2, strategy.size))

    def step():
        return some.all_reduce("SUM", 1), ms.get_replica_context().all_reduce("SUM", 1)

    assert strategy.run(step) == (some.size, strategy.size)


@pytest.mark.ranks(1, 2, 3)
def test_overlapping_sets(strategy):
    """Also of one rank, and of all."""
    size = strategy.size
    sets = [strategy.process_set(range(low, size)) for low in range(size)]
    for low, some in enumerate(sets):
        assert some.included == (strategy.rank >= low)
        if some.included:
            assert some.all_gather_object(strategy.rank) == list(range(low, size))


@pytest.mark.ranks(2)
def test_ranks_with_several_replicas():
    """One value of each rank; in a step by a merge_call."""
    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        both = strategy.process_set([0, 1])
        assert both.all_reduce("SUM", np.array([1.0])).tolist() == [2]
        with pytest.raises(ContextError, match="merge_call"):
            strategy.run(lambda: both.all_reduce("SUM", 1))
        merged = strategy.run(lambda: ms.get_replica_context().merge_call(lambda s: both.all_reduce("SUM", 1)))
        assert strategy.local_results(merged) == (2, 2)


@pytest.mark.ranks(3)
def test_outside(strategy):
    """An error at once, and none waits for it."""
    some = strategy.process_set([0, 1])
    assert repr(some) == "<ProcessSet of ranks 0, 1>"
    if strategy.rank == 2:
        assert (some.included, some.rank, some.size, some.comm) == (False, None, 2, None)
        for call in (
            lambda: some.all_reduce("SUM", 1),
            lambda: some.reduce_scatter("SUM", [1, 2]),
            lambda: some.all_to_all([1, 2]),
            lambda: some.all_gather(np.ones(1)),
            lambda: some.broadcast(1, root=0),
            lambda: some.broadcast_object(1, root=0),
            some.all_gather_object,
            some.barrier,
        ):
            with pytest.raises(ContextError, match=r"expected a call by ranks 0, 1, got one outside of the set"):
                call()
    else:
        assert some.comm.allgather(strategy.rank) == [0, 1]
        with pytest.raises(ValueError, match=r"root: expected one of ranks 0, 1, got 2"):
            some.broadcast(1, root=2)
        with pytest.raises(ValueError, match=r"timeout"):
            some.barrier(timeout=0)
    strategy.barrier()


@pytest.mark.ranks(3)
def test_differences_are_told_with_the_name_of_the_set(strategy):
    some = strategy.process_set([0, 2])
    if some.included:
        told = r"'process set of ranks 0, 2'"
        with pytest.raises(CollectiveMismatchError, match=told):
            some.all_reduce("SUM", np.zeros(2 + strategy.rank))
        with pytest.raises(CollectiveMismatchError, match=told):
            some.barrier() if strategy.rank else some.all_gather_object()
        assert some.all_gather_object(strategy.rank) == [0, 2]


@pytest.mark.ranks(2, 3)
def test_wrong_ranks(strategy):
    """Also on one rank: told on every rank, and the next call works."""
    size = strategy.size
    for wrong in ([], [0, 0], [size], [-1], [0.5]):
        with pytest.raises(ValueError, match=rf"different ranks from 0 to {size - 1}"):
            strategy.process_set(wrong)
        with pytest.raises(ValueError, match=rf"different ranks from 0 to {size - 1}"):
            strategy.process_set(wrong if strategy.rank else [0])
    with pytest.raises(CollectiveMismatchError, match=r"process_set: .*rank 0: rank 0"):
        strategy.process_set([1] if strategy.rank else [0])
    with pytest.raises(ContextError):
        strategy.run(lambda: strategy.process_set([0]))
    assert strategy.process_set(range(size)).all_reduce("SUM", 1) == size


@pytest.mark.ranks(2, 3)
def test_closing():
    strategy = ms.MultiWorkerMirroredStrategy()
    one, other = strategy.process_set([0, 1]), strategy.process_set([0, 1])
    if one.included:
        one.close()
        one.close()
        with pytest.raises(ClosedError):
            one.barrier()
        assert other.all_reduce("SUM", 1) == 2
    strategy.close()
    if other.included:
        with pytest.raises(ClosedError):
            other.all_reduce("SUM", 1)


LATE = """
import time
import mpistrat as ms

strategy = ms.MultiWorkerMirroredStrategy()
some = strategy.process_set([0, 2])
if strategy.rank == 0:
    some.barrier()
time.sleep(40)
"""


@pytest.mark.ranks(2, 3)
def test_sets_that_all_ranks_have_forgotten_are_freed(strategy):
    """They are freed when the next one is made, in whichever order ranks forget them, and no others."""
    rank, size = strategy.rank, strategy.size
    kept = strategy.process_set([0, size - 1])
    total, cycle, late = float(size * (size - 1) // 2), [], None
    comms = []
    for number in range(12):
        made = strategy.process_set(range(size))
        comms.append(made._group.topology.comm)
        assert made.all_reduce("SUM", float(rank)) == total
        if number == 3 and rank:
            late = made  # rank 0 has forgotten it long before
        if number == 5:
            cycle += [made, cycle]
        if number == 7:
            request = made.all_reduce_async("SUM", np.ones(2))
        if number == 9:
            users = made.comm
    del made
    strategy.process_set([0])
    open_ones = [number for number, comm in enumerate(comms) if comm]  # a freed communicator is false
    assert open_ones == [3, 5, 7, 9]
    assert request.wait().tolist() == [size] * 2
    assert users.allreduce(1) == size
    if kept.included:
        assert kept.all_reduce("SUM", 1) == 2
    del late, cycle, request
    gc.collect()
    strategy.process_set([0])
    assert [number for number, comm in enumerate(comms) if comm] == [9]


TOO_MANY = """
import mpistrat as ms
from mpi4py import MPI
held = []
try:
    while len(held) < 5000: held.append(MPI.COMM_WORLD.Dup())
except MPI.Exception:
    pass
for act in (ms.MultiWorkerMirroredStrategy, None):
    if act is None:
        for comm in held[-6:]: comm.Free()
        strategy = ms.MultiWorkerMirroredStrategy()
        act = lambda: [strategy.process_set([0, 1]) for _ in range(6)]
    try:
        act()
    except ms.errors.LayoutError as error:
        print(error, flush=True)
"""


def test_no_more_communicators_is_an_error_with_a_remedy(mpi, mpi_run):
    if mpi.name != "mpich":
        pytest.skip("only MPICH has so few")
    result = mpi_run(TOO_MANY, 2, timeout=60)
    assert result.stdout.count("expected a new communicator of MPI, got none") == 4, result
    assert result.stdout.count("MultiWorkerMirroredStrategy: ") == result.stdout.count("Strategy.process_set: ") == 2, (
        result
    )


def test_who_is_waited_for_in_which_set(mpi_run):
    result = mpi_run(LATE, 3, timeout=60, env={"MPISTRAT_WARN_AFTER": "1", "MPISTRAT_ABORT_AFTER": "3"})
    assert result.returncode != 0
    assert "CollectiveTimeoutError: ProcessSet.barrier 'process set of ranks 0, 2'" in result.stderr
