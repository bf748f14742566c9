"""Local steps: nodes train by themselves, and take outer steps; against a NumPy model of DiLoCo in float64.

Nodes are ranks without shared memory, or made up on this machine: of 3 ranks one of two and one of one.
"""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.cluster import world
from mpistrat.errors import RanksLostError
from mpistrat.optimizers.rule import BlockUpdate
from mpistrat.step.outer import OuterSteps
from tests.harness.local_steps import (
    BUILDS,
    LAYOUTS,
    SIZES,
    Model,
    assert_same,
    gradient_of,
    make,
    of_node,
    opened,
    state_of,
    train,
)
from tests.harness.process_groups import nodes_of, set_layout

pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(params=LAYOUTS)
def layout(request, monkeypatch):
    set_layout(request.param, monkeypatch)
    return request.param


@pytest.mark.parametrize("rule", ["sgd", "adam"])
def test_against_diloco_in_numpy(layout, rule):
    with opened(3) as strategy:
        model = Model(nodes_of(strategy.size, layout))
        build = {"sgd": lambda o: o.SGD(0.05), "adam": lambda o: o.Adam(0.01)}[rule]
        variables, optimizer = make(strategy, build)
        for number in range(8):  # two outer steps, and two steps more
            train(strategy, variables, optimizer, [number])
            getattr(model, rule)({"sgd": 0.05, "adam": 0.01}[rule], number)
            if number % 3 == 2:
                model.outer_step(0.7, 0.9)
            model.check(strategy, variables)
            assert strategy.nodes_differ == (number % 3 != 2)
        strategy.outer_step()  # cuts a round short
        model.outer_step(0.7, 0.9)
        model.check(strategy, variables)
        assert not strategy.nodes_differ
        train(strategy, variables, optimizer, [8, 9])
        assert strategy.nodes_differ  # the next round is a whole one
        train(strategy, variables, optimizer, [10])
        assert not strategy.nodes_differ


def test_every_step_is_synchronous_training_of_sgd(layout):
    """Means of weights after each step of SGD, from gradients of the means over nodes' rows, are those of one step together."""
    with opened(1, 1.0, 0.0) as strategy:
        variables, optimizer = make(strategy, lambda o: o.SGD(0.05))
        train(strategy, variables, optimizer, range(4))
        found = [v.numpy() for v in variables]
    rng = np.random.default_rng(99)
    expected = [rng.normal(size=size) for size in SIZES]
    for number in range(4):
        for i, weights in enumerate(expected):
            parts = [gradient_of(weights, number, i, replica, strategy.size) for replica in range(strategy.size)]
            expected[i] = weights - 0.05 * np.sum(parts, axis=0)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


def test_between_outer_steps_nothing_that_needs_equal_nodes_is_done(layout, mpi_tmp_path):
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS["sgd"])
        with strategy.scope():
            other = ms.optimizers.SGD(0.1)
            free = ms.Variable(1.0, name="free")
        train(strategy, variables, optimizer, range(1))
        refused = pytest.raises(ms.errors.ContextError, match="outer_step")
        for act in (
            lambda: strategy.save(mpi_tmp_path / "no.h5"),
            lambda: strategy.begin_save(mpi_tmp_path / "no.h5"),
            lambda: strategy.restore(mpi_tmp_path / "no.h5", strict=False),
            lambda: variables[0].assign(np.zeros(SIZES[0])),
            lambda: variables[0].scatter_update(ms.IndexedSlices(np.zeros(1), np.array([0]))),
            lambda: train(strategy, variables, other, range(1)),
        ):
            with refused:
                act()
        free.assign(2.0)  # no optimizer updates it
        strategy.outer_step()
        variables[0].assign(np.full(SIZES[0], 3.0))
        strategy.save(mpi_tmp_path / "yes.h5")
        before = nodes_of(strategy.size, layout)
        train(strategy, variables, other, range(2))  # another optimizer's round; what was assigned is its anchor
        model = Model(before)
        for weights in (model.anchor, *model.weights):
            weights[0] = np.full(SIZES[0], 3.0)
        for number in range(2):
            model.sgd(0.1, number)
        model.outer_step(0.7, 0.9)
        np.testing.assert_allclose(variables[0].numpy(), model.anchor[0], rtol=1e-12)


@pytest.mark.parametrize("build", BUILDS)
def test_a_local_step_sums_and_updates_in_one_pass(layout, build, monkeypatch):
    """What updates weights gets the gradients of the node's ranks, and whole slices: no sums that were formed apart."""
    seen = []
    for name in ("update", "accumulate"):
        plain = getattr(BlockUpdate, name)
        monkeypatch.setattr(
            BlockUpdate,
            name,
            lambda self, target, parts, *more, plain=plain: (
                seen.append((target.size, len(parts))) or plain(self, target, parts, *more)
            ),
        )
    with opened(10) as strategy:
        variables, optimizer = make(strategy, BUILDS[build], sizes=(400_000,))
        train(strategy, variables, optimizer, range(2))
        nodes = nodes_of(strategy.size, layout)
        assert {count for _, count in seen} <= {nodes.count(nodes[strategy.rank])}
        # A slice has up to 400,000 elements, of which NumPy would take 65,536 at a time. Of 3 ranks on two nodes one has none.
        assert len(seen) == 2 or (layout == "nodes" and strategy.size == 3 and not seen)


def test_sums_are_clipped_by_the_norm_of_the_node(layout):
    limit = 0.5
    with opened(10) as strategy:
        variables, optimizer = make(strategy, lambda o: o.SGD(1.0, global_clipnorm=limit))
        model = Model(nodes_of(strategy.size, layout))
        node = of_node(strategy, layout)
        gradients = [gradient for _, gradient in model.gradients(node, 0)]
        norm = np.sqrt(sum((g**2).sum() for g in gradients))
        assert norm > limit
        train(strategy, variables, optimizer, range(1))
        for variable, before, gradient in zip(variables, model.weights[node], gradients, strict=True):
            np.testing.assert_allclose(variable.numpy(), before - gradient * limit / norm, rtol=1e-12, atol=1e-12)


def test_a_sum_of_one_node_that_is_not_finite_is_an_error_on_all(layout):
    with opened(10) as strategy:
        variables, optimizer = make(strategy, lambda o: o.SGD(1.0, check_numerics=True))
        last = strategy.rank == strategy.size - 1

        def step():
            gradients = [np.full(v.shape, np.nan if last and v is variables[0] else 1.0) for v in variables]
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

        with pytest.raises(FloatingPointError, match=f"rank {strategy.size - 1}: {SIZES[0]} that are not"):
            strategy.run(step)


def test_gradients_that_were_summed_already_are_taken_as_they_are(layout):
    with opened(2, 1.0, 0.0) as strategy:
        variables, optimizer = make(strategy, lambda o: o.SGD(1.0))
        before = state_of(variables)

        def step():
            ones = [np.full(v.shape, 1.0) for v in variables]
            optimizer.apply_gradients(list(zip(ones, variables, strict=True)), experimental_aggregate_gradients=False)

        strategy.run(step)
        for variable, start in zip(variables, before, strict=True):
            np.testing.assert_allclose(variable.numpy(), start - 1, rtol=1e-12, atol=1e-12)


def test_constraints_hold_after_local_and_outer_steps(layout):
    with opened(2) as strategy:
        variables, optimizer = make(strategy, lambda o: o.SGD(0.5), constraint=lambda w: np.clip(w, -0.1, 0.1))
        for number in range(4):
            train(strategy, variables, optimizer, [number])
            assert all(np.abs(v.numpy()).max() <= 0.1 for v in variables)


def test_optimizers_have_rounds_of_their_own(layout):
    with opened(2) as strategy:
        variables, first = make(strategy, BUILDS["sgd"])
        with strategy.scope():
            second = ms.optimizers.Adam(0.01)
        train(strategy, variables[:2], first, range(1))
        train(strategy, variables[2:], second, range(2))  # its round ends
        assert strategy.nodes_differ
        train(strategy, variables[:2], first, range(1))
        assert not strategy.nodes_differ


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_weights_of_fewer_bits(layout, dtype):
    with opened(2, 1.0, 0.0) as strategy:
        variables, optimizer = make(strategy, lambda o: o.SGD(1.0), dtype)
        before = state_of(variables)

        def step():
            gradients = [np.full(v.shape, strategy.rank / strategy.size, v.dtype) for v in variables]
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

        for _ in range(2):
            strategy.run(step)
        change = 2 * sum(range(strategy.size)) / strategy.size
        for variable, start in zip(variables, before, strict=True):
            np.testing.assert_allclose(variable.numpy(), start - np.float32(change), atol=8 * np.finfo(dtype).eps)


def test_values_of_the_program_are_reduced_over_all_nodes(layout):
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS["sgd"])
        train(strategy, variables, optimizer, range(1))
        assert strategy.reduce("SUM", np.float64(strategy.rank), axis=None) == sum(range(strategy.size))


def test_what_cannot_be_combined(layout):
    make = ms.MultiWorkerMirroredStrategy
    with pytest.raises(ValueError, match="local_steps: expected local_steps without replicas"):
        make(local_steps=2, replicas=4)
    with pytest.raises(ValueError, match="local_steps: expected local_steps without sharded_slots=True"):
        make(local_steps=2, sharded_slots=True)
    with pytest.raises(ValueError, match="local_steps: expected"):
        make(local_steps=0)
    with pytest.raises(TypeError, match="local_steps: expected"):
        make(local_steps="often")


def test_ranks_must_agree(layout):
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    last = rank == size - 1 or (size == 4 and rank == 2)  # the last node's in both layouts
    with pytest.raises(ms.errors.CollectiveMismatchError, match="local_steps"):
        ms.MultiWorkerMirroredStrategy(local_steps=2 if last else 3)


def test_an_outer_step_of_one_node_only_is_an_error(layout):
    with opened(10) as strategy:
        variables, optimizer = make(strategy, BUILDS["sgd"])
        train(strategy, variables, optimizer, range(2))
        with pytest.raises(ms.errors.CollectiveMismatchError, match="outer_step"):
            if of_node(strategy, layout):
                strategy.outer_step()
            else:
                strategy.barrier()


@pytest.mark.ranks(1, 2)
def test_on_one_node_there_are_no_outer_steps():
    """One node has nobody to average with: numbers are those of a strategy without local steps."""
    found = []
    for more in ({}, {"local_steps": 1}):
        with ms.MultiWorkerMirroredStrategy(**more) as strategy:
            variables, optimizer = make(strategy, BUILDS["adam"])
            train(strategy, variables, optimizer, range(2))
            assert not strategy.nodes_differ
            found.append(state_of(variables))
    assert_same(*found)


class Counted:
    """A communicator between nodes that counts the bytes of what it sends piece by piece."""

    def __init__(self, comm):
        self.comm, self.sent, self.reduced = comm, 0, 0

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Isend(self, buffer, *where):
        self.sent += buffer[0].nbytes
        return self.comm.Isend(buffer, *where)

    def Allreduce(self, *buffers):
        self.reduced += 1
        return self.comm.Allreduce(*buffers)


def test_bytes_between_nodes_fall_by_the_number_of_steps(layout):
    """An outer step sends as much as a synchronous step whose slots are divided: sums to a piece's node, and its weights back."""
    sizes, steps, every = (70_001, 15, 1, 66_177), 8, 4
    sent = []
    for more in ({"sharded_slots": True}, {"local_steps": every}):
        with ms.MultiWorkerMirroredStrategy(**more) as strategy:
            group = strategy.extended.process_group
            variables, optimizer = make(strategy, lambda o: o.Adam(0.01), sizes=sizes)
            counted = group.inter = None if group.inter is None else Counted(group.inter)
            train(strategy, variables, optimizer, range(steps))
            sent.append(counted and counted.sent)
            if counted is not None and "local_steps" in more:
                assert counted.reduced == 1 + steps // every - 1  # nodes compare their weights as a round begins
    if sent[0] is not None:
        assert sent[0] > 0
        assert abs(sent[1] * every / sent[0] - 1) < 0.05  # pieces are not cut at the same elements


def test_ranks_that_are_lost_in_an_outer_step_are_told_as_such_again(layout, monkeypatch):
    """The refusal of an error that left messages under way would hide the loss from `ms.survive`."""
    monkeypatch.setattr(world, "_lost", False)

    def lose(*_):
        raise RanksLostError("rank 7 is lost")

    with opened(1) as strategy:
        variables, optimizer = make(strategy, BUILDS["sgd"])
        with monkeypatch.context() as patch:
            patch.setattr(OuterSteps, "_step", lose)
            with pytest.raises(RanksLostError):
                train(strategy, variables, optimizer, range(1))
        assert strategy.extended.process_group.monitor.refusal is None
