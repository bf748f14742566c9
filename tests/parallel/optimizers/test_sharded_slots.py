"""Nodes that keep a part of the slots each: the bits of nodes that keep all, and files of both that are the same.

Nodes are ranks without shared memory, or made up on this machine: of 3 ranks one of two and one of one. Gradients are integers,
whose sums are exact in any order, so results must be the same bits.
"""

import secrets

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.base.files import PAGE
from mpistrat.comm import job_files
from mpistrat.state.checkpoint import Checkpoint
from tests.harness.process_groups import set_layout
from tests.models import optimizer_reference as reference
from tests.models.optimizer_states import assert_same, state_of

SIZES = (70_001, 15, 1, 66_177)
LAYOUTS = ("private", "nodes")
pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(params=LAYOUTS)
def opened(request, monkeypatch):
    """A function that makes a strategy over nodes that are alike in all tests of a layout."""
    set_layout(request.param, monkeypatch)
    return lambda sharded, **more: ms.MultiWorkerMirroredStrategy(sharded_slots=sharded, **more)


def make(strategy, build, dtype="float64", sizes=SIZES):
    rng = np.random.default_rng(99)
    with strategy.scope():
        variables = [ms.Variable(rng.normal(size=size), name=f"v{i}", dtype=dtype) for i, size in enumerate(sizes)]
        return variables, build(ms.optimizers)


def train(strategy, variables, optimizer, steps, which=None, aggregate=True):
    """Take steps by whole numbers; `which` of the variables have a gradient in a step, default all."""

    def step(number):
        chosen = range(len(variables)) if which is None else which(number)
        for i in chosen:
            rng = np.random.default_rng((number, i, strategy.rank if aggregate else 0))
            variables[i].grad[...] = rng.integers(-8, 9, size=variables[i].shape)
        pairs = [(v.grad if i in chosen else None, v) for i, v in enumerate(variables)]
        optimizer.apply_gradients(pairs, experimental_aggregate_gradients=aggregate)

    for number in steps:
        strategy.run(step, args=(number,))


def both_ways(opened, build, dtype="float64", sizes=SIZES, steps=range(4), **more):
    """Return the state after some steps of nodes that keep a part each, and of those that keep all."""
    found = []
    for sharded in (True, False):
        with opened(sharded) as strategy:
            variables, optimizer = make(strategy, build, dtype, sizes)
            train(strategy, variables, optimizer, steps, **more)
            assert variables[0].arena.sharded == sharded
            found.append(state_of(variables, optimizer))
    return found


def test_every_rule_gives_the_same_bits(opened):
    for name, (build, _, _) in reference.cases().items():
        found, expected = both_ways(opened, build, steps=range(2))
        if name.startswith(("adafactor", "lamb")):  # norms of weights are added up in another order
            for key, array in expected.items():
                np.testing.assert_allclose(found[key], array, rtol=1e-11, atol=1e-14, err_msg=f"{name} {key}")
        else:
            assert_same(found, expected, name)


def test_what_all_rules_have_in_common_gives_the_same_bits(opened):
    for name, said in reference.SETTINGS.items():
        # The fifth step may overwrite weights with their averages, though it does not update them.
        found, expected = both_ways(opened, lambda o: o.Adam(0.03, **said), steps=range(5))  # noqa: B023
        assert_same(found, expected, name)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_weights_of_fewer_bits(opened, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    found, expected = both_ways(opened, lambda o: o.Adam(0.03), dtype, (300_003, 7, 300_001))
    assert found["v0"].dtype == dtype and found["v0 momentum"].dtype == np.float32
    assert_same(found, expected)


def test_gradients_that_were_summed_already(opened):
    found, expected = both_ways(opened, lambda o: o.Momentum(0.05), aggregate=False)
    assert_same(found, expected)


@pytest.mark.parametrize("clip", [None, 10.0])
def test_some_variables_at_a_time(opened, clip):
    """Those of the first node only have many rounds more than the others'; no node waits for ever."""
    turns = ([0], [3], [0, 2], [1], [0, 1, 2, 3])
    sizes = (1_000_001, 33, 1, 1_000_001)
    found, expected = both_ways(
        opened, lambda o: o.Adam(0.5, clipnorm=clip), "float32", sizes, range(5), which=turns.__getitem__
    )
    assert_same(found, expected)


def test_each_element_is_kept_once(opened):
    from mpi4py import MPI

    with opened(None) as strategy:
        variables, optimizer = make(strategy, lambda o: o.Adam(0.1))
        train(strategy, variables, optimizer, range(1))
        arena = variables[0].arena
        mine, owners = optimizer._core.slots.of(arena), strategy.extended.process_group
        assert [array.size for array in mine.arrays.values()] == [mine.high - mine.low] * 2
        count = owners.slices * owners.num_nodes
        ranges = sorted(r for r in MPI.COMM_WORLD.allgather((mine.low, mine.high)) if r[0] < r[1])
        assert len(ranges) == count
        assert [low for low, _ in ranges] == [0, *(high for _, high in ranges[:-1])] and ranges[-1][1] == arena.used
        page = PAGE // 8
        for low, high in ranges:
            assert abs(high - low - arena.used / count) <= page
            assert any((low - v.offset) % page == 0 and v.offset <= low < v.offset + v.size for v in variables)


def test_small_arenas_are_kept_by_every_node(opened):
    with opened(True) as strategy:
        variables, optimizer = make(strategy, lambda o: o.Adam(0.1), sizes=(1000,))
        train(strategy, variables, optimizer, range(1))
        assert not variables[0].arena.sharded


@pytest.mark.parametrize("writers", ["all", "rank 0"])
@pytest.mark.parametrize("sharded", [True, False])
def test_checkpoints_of_both_ways(opened, sharded, writers, mpi_tmp_path, monkeypatch):
    """What one way has saved the other one goes on with; where rank 0 alone reaches the file, too."""
    import h5py

    def build(o):
        return o.Adam(0.03, use_ema=True, gradient_accumulation_steps=2)

    if writers != "all":
        monkeypatch.setattr(Checkpoint, "_writers", lambda self, beside: [0])
    with opened(False) as strategy:
        variables, optimizer = make(strategy, build)
        train(strategy, variables, optimizer, range(3))
        middle = state_of(variables, optimizer)
        train(strategy, variables, optimizer, range(3, 6))
        end = state_of(variables, optimizer)
    path = mpi_tmp_path / "saved.h5"
    with opened(sharded) as strategy:
        variables, optimizer = make(strategy, build)
        train(strategy, variables, optimizer, range(3))
        strategy.save(path)
    with h5py.File(path) as file:
        saved = {name: file["variables"][name][...] for name in file["variables"]}
        for name, slots in file["optimizers/0/slots"].items():
            saved.update({f"{name} {slot}": array[...] for slot, array in slots.items()})
    assert_same(saved, middle)
    with opened(not sharded) as strategy:
        variables, optimizer = make(strategy, build)
        strategy.restore(path)
        assert_same(state_of(variables, optimizer), middle)
        train(strategy, variables, optimizer, range(3, 6))
        assert_same(state_of(variables, optimizer), end)


def test_snapshots_have_all_slots_on_every_node(opened, monkeypatch):
    from mpi4py import MPI

    key = MPI.COMM_WORLD.bcast(secrets.token_hex(8))
    monkeypatch.setenv("MPISTRAT_JOB", key)
    try:
        for sharded in (None, True):
            with opened(sharded) as strategy:
                variables, optimizer = make(strategy, lambda o: o.Adam(0.03))
                train(strategy, variables, optimizer, range(2))
                assert variables[0].arena.sharded == bool(sharded)
                expected = state_of(variables, optimizer)
                strategy.take_snapshot(2, {})
                train(strategy, variables, optimizer, range(2, 4))
                snapshot = strategy.newest_snapshot()
                assert snapshot is not None
                strategy.restore_snapshot(snapshot)
                assert_same(state_of(variables, optimizer), expected)
                job_files.remove(key)
    finally:
        MPI.COMM_WORLD.Barrier()
        job_files.remove(key)


def test_sums_in_the_order_of_replicas(opened):
    found = []
    for sharded in (True, False):
        with opened(sharded, cross_device_ops=ms.OrderedAllReduce()) as strategy:
            variables, optimizer = make(strategy, lambda o: o.Adam(0.03))
            train(strategy, variables, optimizer, range(3))
            assert variables[0].arena.sharded == sharded
            found.append(state_of(variables, optimizer))
    assert_same(*found)


def test_who_shares_slots_unasked(opened, monkeypatch):
    for ops, expected in ((None, True), ("HierarchicalAllReduce", True), ("MpiAllReduce", False)):
        with opened(None, cross_device_ops=ops and getattr(ms, ops)()) as strategy:
            assert strategy.extended.placement.arenas.sharded == expected
    with opened(None, cross_device_ops=ms.OrderedAllReduce()) as strategy:
        assert not strategy.extended.placement.arenas.sharded


def test_ranks_must_agree(opened):
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    sharded = rank == size - 1 or (size == 4 and rank == 2) or None  # the last node's in both layouts
    with pytest.raises(ms.errors.CollectiveMismatchError, match="sharded_slots"):
        opened(sharded)


class Fails(ms.optimizers.Optimizer):
    def update(self, gradient, weights, slots, step, rate, scratch):
        if step == 2:
            raise ZeroDivisionError("in the middle")
        weights -= rate * gradient


def test_after_an_error_in_a_step_there_is_no_other(opened):
    """Messages are under way then, which the next step would take for its own."""
    with opened(True) as strategy:
        group = strategy.extended.process_group
        if group.num_nodes * group.slices < strategy.size:
            pytest.skip("all ranks must fail alike")
        variables, optimizer = make(strategy, lambda o: Fails(0.1))
        train(strategy, variables, optimizer, range(1))
        with pytest.raises(ZeroDivisionError):
            train(strategy, variables, optimizer, range(1, 2))
        with pytest.raises(
            ms.errors.ClosedError,
            match="no longer be used: .* messages between nodes pending: ZeroDivisionError: in the .* create a new",
        ):
            train(strategy, variables, optimizer, range(2, 3))
