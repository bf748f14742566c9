"""Steps whose gradients and weights travel between nodes in fewer bytes: against NumPy, and what steps can do beside.

Nodes are ranks without shared memory, or made up on this machine: of 3 ranks one of two and one of one.
"""

import functools

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arena.pieces import round_size
from mpistrat.arena.wire import wire_named
from mpistrat.base.partition import blocks
from mpistrat.cluster.topology import Topology
from mpistrat.state.checkpoint import Checkpoint
from tests.harness.process_groups import fake_nodes, set_layout
from tests.models import optimizer_reference as reference
from tests.models.optimizer_states import assert_same, state_of

SIZES = (150_001, 15, 250_001)
RATE = np.float32(0.25)
WIRES = ("bfloat16", "int8")
pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(params=["private", "nodes"])
def opened(request, monkeypatch):
    """A function that makes a strategy over nodes that are alike in all tests of a layout."""
    set_layout(request.param, monkeypatch)

    def opened(wire, **more):
        return ms.MultiWorkerMirroredStrategy(communication_options=ms.CommunicationOptions(wire=wire), **more)

    return opened


@functools.cache
def starts():
    rng = np.random.default_rng(99)
    return [rng.normal(size=size).astype(np.float32) for size in SIZES]


def make(strategy, build, **more):
    with strategy.scope():
        variables = [ms.Variable(value, name=f"v{i}", **more) for i, value in enumerate(starts())]
        return variables, build(ms.optimizers)


@functools.lru_cache(maxsize=64)
def gradient(number, i, rank, largest=1000):
    """Multiples of 1/8 with large ones among them: sums over the ranks of a node are exact."""
    rng = np.random.default_rng((number, i, rank))
    values = rng.integers(-64, 65, size=SIZES[i]) / 8
    values[rng.integers(0, SIZES[i], size=9)] *= largest
    return values.astype(np.float32)


def train(strategy, variables, optimizer, steps, largest=1000):
    def step(number):
        for i, variable in enumerate(variables):
            variable.grad[...] = gradient(number, i, strategy.rank, largest)
        optimizer.apply_gradients([(v.grad, v) for v in variables])

    for number in steps:
        strategy.run(step, args=(number,))


def sent(wire, values):
    """What others read of numbers that travel in one message."""
    message, out = np.empty(wire.nbytes(values.size), np.uint8), np.empty_like(values)
    wire.encode(np.ascontiguousarray(values), message)
    wire.decode(message, out)
    return out


def expected_of(strategy, variables, wire, steps):
    """The weights after steps of plain gradient descent, and what was not sent of them, of the whole arena."""
    arena, group = variables[0].arena, strategy.extended.process_group
    node_of = group.topology.node_of if group.environment.shared_memory else range(strategy.size)
    weights, unsent = np.zeros(arena.used, np.float32), np.zeros(arena.used, np.float32)
    lost = np.zeros((group.num_nodes, arena.used), np.float32)
    for v, start in zip(variables, starts(), strict=True):
        weights[v.offset : v.offset + v.size] = start
    for number in steps:
        node_sums = np.zeros_like(lost)
        for rank, node in enumerate(node_of):
            for i, v in enumerate(variables):
                node_sums[node, v.offset : v.offset + v.size] += gradient(number, i, rank)
        for of_slice in arena._pieces:
            for owner, piece in enumerate(of_slice):
                for low, high in blocks([piece], round_size(group.num_nodes, arena.dtype)):
                    part, total = slice(low, high), np.zeros(high - low, np.float32)
                    for node in range(group.num_nodes):
                        own = node_sums[node, part] + lost[node, part]
                        total += own if node == owner else sent(wire, own)
                        if wire.feeds_back and node != owner:
                            lost[node, part] = own - sent(wire, own)
                    meant = weights[part] + unsent[part]
                    meant -= RATE * total
                    change = meant - weights[part]
                    meant = weights[part] + change  # rounded, where the two are far apart
                    weights[part] += sent(wire, change)
                    unsent[part] = meant - weights[part]
    return weights, unsent


@pytest.mark.parametrize("wire", WIRES)
def test_against_numpy(opened, wire):
    with opened(wire) as strategy:
        variables, optimizer = make(strategy, lambda o: o.SGD(float(RATE)))
        train(strategy, variables, optimizer, range(4))
        assert variables[0].arena.sharded
        weights, unsent = expected_of(strategy, variables, wire_named(wire), range(4))
        assert np.abs(unsent).max() > 0
        found = state_of(variables, optimizer)
        for v in variables:
            where = slice(v.offset, v.offset + v.size)
            np.testing.assert_array_equal(found[v.name], weights[where])
            np.testing.assert_array_equal(found[f"{v.name} wire_residual"], unsent[where])


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("some", [0, 1, 2])
def test_what_steps_can_do_beside(opened, wire, some):
    """Clipping, averages, accumulation, a third of all at a time: float32's weights, but for what the forms lose."""
    for name, said in list(reference.SETTINGS.items())[some::3]:
        found = []
        for form in (wire, None):
            with opened(form) as strategy:
                variables, optimizer = make(strategy, lambda o: o.Momentum(2.0**-12, **said))  # noqa: B023
                train(strategy, variables, optimizer, range(5), largest=1)
                found.append({v.name: v.numpy() for v in variables})
                moved = np.abs(starts()[2] - found[-1]["v2"]).max()
        off = np.abs(found[0]["v2"] - found[1]["v2"])
        assert off.max() <= (0.01 if wire == "bfloat16" else 0.2) * moved, name
        assert off.max() > 0, name


def test_checkpoints_of_all_forms(opened, mpi_tmp_path):
    """One that has what was not sent goes on with the same bits; others take or leave it."""

    def build(o):
        return o.Adam(0.03)

    path, plain = mpi_tmp_path / "saved.h5", mpi_tmp_path / "plain.h5"
    with opened("bfloat16") as strategy:
        variables, optimizer = make(strategy, build)
        train(strategy, variables, optimizer, range(3))
        strategy.save(path)
        middle = state_of(variables, optimizer)
        train(strategy, variables, optimizer, range(3, 5))
        end = state_of(variables, optimizer)
        strategy.restore(path)
        assert_same(state_of(variables, optimizer), middle)
    with opened("bfloat16") as strategy:
        variables, optimizer = make(strategy, build)
        strategy.restore(path)
        train(strategy, variables, optimizer, range(3, 5))
        assert_same(state_of(variables, optimizer), end)
    with opened(None, sharded_slots=False) as strategy:
        variables, optimizer = make(strategy, build)
        strategy.restore(path)
        train(strategy, variables, optimizer, range(0))
        optimizer._core.join(strategy)
        strategy.restore(path)
        train(strategy, variables, optimizer, range(3, 4))
        strategy.save(plain)
        assert not any("residual" in name for name in state_of(variables, optimizer))
        left = state_of(variables, optimizer)
    with opened("int8") as strategy:
        variables, optimizer = make(strategy, build)
        strategy.restore(plain)
        found = state_of(variables, optimizer)
        assert {name: found[name].tobytes() for name in left} == {name: a.tobytes() for name, a in left.items()}
        train(strategy, variables, optimizer, range(4, 5))
        assert np.isfinite(variables[0].numpy()).all()


@pytest.mark.parametrize("late", [False, True])
def test_what_was_not_sent_is_restored_with_the_weights(opened, mpi_tmp_path, late):
    """Before an optimizer that is made later, or keeps averages, takes its slots: a value that is assigned then is that value."""

    def build(o):
        return o.SGD(float(RATE), use_ema=not late)

    def restored(strategy):
        variables, optimizer = make(strategy, (lambda _: None) if late else build)
        strategy.restore(path)
        return variables, optimizer or build(ms.optimizers)

    path = mpi_tmp_path / "saved.h5"
    with opened("bfloat16") as strategy:
        variables, optimizer = make(strategy, build)
        train(strategy, variables, optimizer, range(2))
        strategy.save(path)
        train(strategy, variables, optimizer, range(2, 3))
        end = state_of(variables, optimizer)
    with opened("bfloat16") as strategy:
        variables, optimizer = restored(strategy)
        train(strategy, variables, optimizer, range(2, 3))
        assert_same(state_of(variables, optimizer), end)
    with opened("bfloat16") as strategy:
        variables, optimizer = restored(strategy)
        for variable in variables:
            variable.assign(np.full(variable.shape, 0.5, np.float32))
        strategy.run(lambda: optimizer.apply_gradients([(np.zeros(v.shape, np.float32), v) for v in variables]))
        assert all((variable.numpy() == 0.5).all() for variable in variables)


@pytest.mark.parametrize("wire", WIRES)
def test_restored_on_another_number_of_nodes(wire, mpi_tmp_path, monkeypatch):
    """All ranks are nodes when it is saved, and two or one when it is restored: each weight has what was not sent of it."""
    from mpi4py import MPI

    options, path = ms.CommunicationOptions(wire=wire), mpi_tmp_path / "saved.h5"
    with monkeypatch.context() as patch:
        patch.setenv("MPISTRAT_SHARED_MEMORY", "0")
        with ms.MultiWorkerMirroredStrategy(communication_options=options) as strategy:
            variables, optimizer = make(strategy, lambda o: o.SGD(float(RATE)))
            train(strategy, variables, optimizer, range(2))
            strategy.save(path)
            saved = state_of(variables, optimizer)
    if MPI.COMM_WORLD.size > 2:
        found = [r // 2 for r in range(MPI.COMM_WORLD.size)]
        monkeypatch.setattr(Topology, "create", lambda comm=None, **more: fake_nodes(comm or MPI.COMM_WORLD, found))
    with ms.MultiWorkerMirroredStrategy(communication_options=options) as strategy:
        variables, optimizer = make(strategy, lambda o: o.SGD(float(RATE)))
        strategy.restore(path)
        train(strategy, variables, optimizer, range(0))
        several = strategy.extended.process_group.num_nodes > 1
        assert several == (strategy.size > 2)
        restored = state_of(variables, optimizer)
        assert all((restored[v.name] == saved[v.name]).all() for v in variables)
        train(strategy, variables, optimizer, range(2, 3))
        after = state_of(variables, optimizer)
        summed = sum(gradient(2, 2, rank) for rank in range(strategy.size))
        meant = saved["v2"] + (saved["v2 wire_residual"] if several else 0) - RATE * summed
        off = np.abs(after["v2"] + after.get("v2 wire_residual", 0) - meant)
        assert off.max() <= np.abs(RATE * summed).max() * (0.1 if several else 1e-6)


@pytest.mark.parametrize("rule", ["SGD", "Adam"])
@pytest.mark.parametrize("made", [True, False])
@pytest.mark.parametrize("writers", ["all", "rank 0"])
def test_a_file_of_what_was_just_restored_has_what_was_not_sent(opened, rule, made, writers, mpi_tmp_path, monkeypatch):
    """Saved before the first step, of an optimizer that is there or not yet."""
    if writers != "all":
        monkeypatch.setattr(Checkpoint, "_writers", lambda self, beside: [0])
    build, wire = (lambda o: getattr(o, rule)(0.25)), "bfloat16"
    first, again = mpi_tmp_path / "first.h5", mpi_tmp_path / "again.h5"
    with opened(wire) as strategy:
        variables, optimizer = make(strategy, build)
        train(strategy, variables, optimizer, range(2))
        strategy.save(first)
        saved = state_of(variables, optimizer)
        assert saved["v2 wire_residual"].any()
    with opened(wire) as strategy:
        if made:
            make(strategy, build)
        else:
            with strategy.scope():
                alone = [ms.Variable(value, name=f"v{i}") for i, value in enumerate(starts())]
                assert alone
        strategy.restore(first)
        strategy.save(again)
    with opened(wire) as strategy:
        variables, optimizer = make(strategy, build)
        strategy.restore(again)
        train(strategy, variables, optimizer, range(2, 3))
        found = state_of(variables, optimizer)
    with opened(wire) as strategy:
        variables, optimizer = make(strategy, build)
        strategy.restore(first)
        train(strategy, variables, optimizer, range(2, 3))
        assert_same(found, state_of(variables, optimizer))


@pytest.mark.parametrize("wire", WIRES)
def test_a_value_that_is_assigned_is_that_value(opened, wire):
    with opened(wire) as strategy:
        variables, optimizer = make(strategy, lambda o: o.SGD(float(RATE)))
        train(strategy, variables, optimizer, range(2))
        values = [np.full(v.shape, 0.1, np.float32) for v in variables]
        for v, value in zip(variables, values, strict=True):
            v.assign(value)
        before = [slots["wire_residual"] for _, slots in optimizer._core.memory.each_slots(optimizer)]
        assert not any(array.any() for array in before)
        train(strategy, variables, optimizer, range(2, 3))
        after = state_of(variables, optimizer)
        meant = after["v2"] + after["v2 wire_residual"]
        summed = sum(gradient(2, 2, rank) for rank in range(strategy.size))
        assert np.abs(meant - (0.1 - RATE * summed)).max() <= np.abs(RATE * summed).max() * (
            0.01 if wire == "bfloat16" else 0.1
        )


def test_constraints_hold(opened):
    """Of every weight; and what was not sent of weights that a constraint holds back does not add up from step to step."""
    with opened("int8") as strategy:

        def half(w):
            return np.where(np.arange(w.size) < w.size // 2, np.maximum(w, 0), np.float32(0.1))

        variables, optimizer = make(strategy, lambda o: o.SGD(float(RATE)), constraint=half)
        train(strategy, variables, optimizer, range(6), largest=1)
        found, middle = state_of(variables, optimizer), SIZES[2] // 2
        assert (found["v2"][:middle] >= 0).all() and (found["v2"][:middle] == 0).any()
        assert (found["v2"][middle:] == np.float32(0.1)).all()
        largest = RATE * 8 * strategy.size
        assert 0 < np.abs(found["v2 wire_residual"]).max() <= 1.1 * largest / 254


@pytest.mark.parametrize("wire", WIRES)
def test_a_refused_step_leaves_nothing(opened, wire):
    with opened(wire) as strategy:
        variables, optimizer = make(strategy, lambda o: o.SGD(float(RATE), check_numerics=True))
        train(strategy, variables, optimizer, range(2))
        middle = state_of(variables, optimizer)

        def bad():
            for i, v in enumerate(variables):
                v.grad[...] = gradient(7, i, strategy.rank)
            if strategy.rank == strategy.size - 1:
                variables[2].grad[1234] = np.inf
                variables[0].grad[77] = np.nan
            optimizer.apply_gradients([(v.grad, v) for v in variables])

        with pytest.raises(FloatingPointError, match=f"rank {strategy.size - 1}: 1 that"):
            strategy.run(bad)
        assert_same(state_of(variables, optimizer), middle)
        for arena, slots in optimizer._core.slots._arenas.items():
            assert slots.form is arena.form if wire == "bfloat16" else not slots.form.unsent.array.any()
        train(strategy, variables, optimizer, range(2, 3))
        assert all(np.isfinite(v.numpy()).all() for v in variables)


def test_several_optimizers_and_small_arenas(opened):
    with opened("int8") as strategy:
        variables, first = make(strategy, lambda o: o.SGD(float(RATE)))
        with strategy.scope():
            second = ms.optimizers.Adam(0.1)
            small = ms.Variable(np.zeros(100, np.float64), name="small")

        def step(optimizer, chosen):
            for v in chosen:
                v.grad[...] = 1 + strategy.rank
            optimizer.apply_gradients([(v.grad, v) for v in chosen])

        for _ in range(3):
            strategy.run(step, args=(first, variables[:1]))
            strategy.run(step, args=(second, [*variables[1:], small]))
        total = strategy.size * (strategy.size + 1) / 2
        np.testing.assert_allclose(variables[0].numpy(), starts()[0] - 3 * RATE * total, atol=0.01 * total)
        assert "wire_residual" in second.slots(variables[2]) and "wire_residual" not in second.slots(small)
        assert small.arena.form.exact


def test_ranks_must_agree(opened):
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    wire = "int8" if rank == size - 1 or (size == 4 and rank == 2) else "bfloat16"  # the last node's in both layouts
    with pytest.raises(ms.errors.CollectiveMismatchError, match="wire='int8'"):
        opened(wire)


def test_where_there_is_nothing_to_encode(opened):
    with pytest.raises(ValueError, match="got sharded_slots=False"):
        opened("bfloat16", sharded_slots=False)
    with pytest.raises(ValueError, match="got local_steps, whose"):
        opened("bfloat16", local_steps=4)
    with pytest.raises(ValueError, match="got MpiAllReduce, which"):
        opened("int8", cross_device_ops=ms.MpiAllReduce())
    with pytest.raises(ValueError, match="got OrderedAllReduce, which"):
        opened("int8", replicas=8)
    with opened("int8", cross_device_ops=ms.HierarchicalAllReduce()) as strategy:
        assert strategy.extended.placement.arenas.sharded


@pytest.mark.hosts(2, ranks_per_host=2)
def test_on_one_node_nothing_is_rounded_and_over_hosts_all_have_the_same_bits():
    from mpi4py import MPI

    found = []
    for wire in ("int8", None):
        with ms.MultiWorkerMirroredStrategy(communication_options=ms.CommunicationOptions(wire=wire)) as strategy:
            variables, optimizer = make(strategy, lambda o: o.Adam(0.03))
            train(strategy, variables, optimizer, range(2))
            several = strategy.extended.process_group.num_nodes > 1
            assert variables[0].arena.form.exact == (not several or wire is None)
            found.append(np.concatenate([v.numpy() for v in variables]))
    assert (found[0] == found[1]).all() != several
    np.testing.assert_array_equal(found[0], MPI.COMM_WORLD.bcast(found[0]))
