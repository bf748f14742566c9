"""Local steps: nodes train by themselves, and take outer steps; against a NumPy model of DiLoCo in float64.

Nodes are ranks without shared memory, or made up on this machine: of 3 ranks one of two and one of one.
"""

import secrets

import numpy as np
import pytest
from process_groups import fake_nodes

import mpistrat as ms
from mpistrat.cluster.topology import Topology
from mpistrat.comm import job_files
from mpistrat.strategy.checkpoint import Checkpoint

SIZES = (7001, 15, 1, 3301)
pytestmark = pytest.mark.ranks(2, 3, 4)


def nodes_of(size, layout):
    """The node of each rank."""
    if layout == "private":
        return list(range(size))
    return [rank * 2 // size if size != 3 else rank // 2 for rank in range(size)]


@pytest.fixture(params=("private", "nodes"))
def layout(request, monkeypatch):
    if request.param == "private":
        monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    else:

        def create(comm=None, **more):
            from mpi4py import MPI

            comm = comm or MPI.COMM_WORLD
            return fake_nodes(comm, nodes_of(comm.size, "nodes"))

        monkeypatch.setattr(Topology, "create", create)
    return request.param


def opened(every, rate=0.7, momentum=0.9, **more):
    how = ms.LocalSteps(every, outer_learning_rate=rate, outer_momentum=momentum)
    return ms.MultiWorkerMirroredStrategy(local_steps=how, **more)


def make(strategy, build, dtype="float64", sizes=SIZES, **more):
    rng = np.random.default_rng(99)
    with strategy.scope():
        variables = [
            ms.Variable(rng.normal(size=size), name=f"v{i}", dtype=dtype, **more) for i, size in enumerate(sizes)
        ]
        return variables, build(ms.optimizers)


def gradient_of(weights, number, index, replica, replicas):
    """The gradient of a replica: of its part of a loss that is a mean over all, at the weights of its node."""
    rng = np.random.default_rng((number, index, replica))
    return (np.tanh(weights) + rng.normal(size=weights.shape)) / replicas


def train(strategy, variables, optimizer, steps):
    replicas, replica = strategy.num_replicas_in_sync, strategy.rank

    def step(number):
        gradients = [gradient_of(v.array, number, i, replica, replicas) for i, v in enumerate(variables)]
        optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

    for number in steps:
        strategy.run(step, args=(number,))


class Model:
    """DiLoCo in NumPy: nodes with weights and moments of their own, an anchor, and outer momentum."""

    def __init__(self, nodes, sizes=SIZES):
        rng = np.random.default_rng(99)
        self.anchor = [rng.normal(size=size) for size in sizes]
        self.nodes, self.number = nodes, max(nodes) + 1
        self.weights = [[a.copy() for a in self.anchor] for _ in range(self.number)]
        self.moments = [[(np.zeros(size), np.zeros(size)) for size in sizes] for _ in range(self.number)]
        self.outer = [np.zeros(size) for size in sizes]
        self.steps = 0

    def gradients(self, node, number):
        """The gradient of the mean over the rows of a node: its replicas' parts, not scaled by the others'."""
        replicas, mine = len(self.nodes), [r for r, at in enumerate(self.nodes) if at == node]
        for i, weights in enumerate(self.weights[node]):
            parts = [gradient_of(weights, number, i, replica, replicas) for replica in mine]
            yield i, np.sum(parts, axis=0) * replicas / len(mine)

    def sgd(self, rate, number):
        for node in range(self.number):
            for i, gradient in list(self.gradients(node, number)):
                self.weights[node][i] = self.weights[node][i] - rate * gradient

    def adam(self, rate, number, beta_1=0.9, beta_2=0.999, epsilon=1e-7):
        self.steps += 1
        scale = rate * np.sqrt(1 - beta_2**self.steps) / (1 - beta_1**self.steps)
        for node in range(self.number):
            for i, gradient in list(self.gradients(node, number)):
                m, v = self.moments[node][i]
                m, v = beta_1 * m + (1 - beta_1) * gradient, beta_2 * v + (1 - beta_2) * gradient**2
                self.moments[node][i] = m, v
                self.weights[node][i] = self.weights[node][i] - scale * m / (np.sqrt(v) + epsilon)

    def outer_step(self, rate, momentum):
        share = [self.nodes.count(node) / len(self.nodes) for node in range(self.number)]
        for i, anchor in enumerate(self.anchor):
            delta = anchor - sum(s * weights[i] for s, weights in zip(share, self.weights, strict=True))
            self.outer[i] = momentum * self.outer[i] + delta
            self.anchor[i] = anchor - rate * (delta + momentum * self.outer[i])
            for weights in self.weights:
                weights[i] = self.anchor[i].copy()

    def check(self, strategy, variables, tolerance=1e-12):
        node = self.nodes[strategy.rank]
        for variable, expected in zip(variables, self.weights[node], strict=True):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=tolerance, atol=tolerance)


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


def of_node(strategy, layout):
    return nodes_of(strategy.size, layout)[strategy.rank]


def state_of(variables):
    return [v.numpy() for v in variables]


def assert_same(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


BUILDS = {
    "adam": lambda o: o.Adam(0.01),
    "sgd": lambda o: o.SGD(0.05),
    "accumulates": lambda o: o.Adam(0.01, gradient_accumulation_steps=2, use_ema=True),
}


@pytest.mark.parametrize("writers", ["all", "rank 0"])
@pytest.mark.parametrize("build", BUILDS)
def test_a_run_from_a_file_goes_on_bit_for_bit(layout, build, writers, mpi_tmp_path, monkeypatch):
    """A file has the slots of each node, and the momentum of outer steps; it may be restored before or after the first step."""
    if writers != "all":
        monkeypatch.setattr(Checkpoint, "_writers", lambda self, beside: [0])
    calls = 2 if build == "accumulates" else 1
    ends = []
    path, again = mpi_tmp_path / "saved.h5", mpi_tmp_path / "again.h5"
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS[build])
        train(strategy, variables, optimizer, range(4 * calls))
        strategy.save(path)
        middle = state_of(variables)
        train(strategy, variables, optimizer, range(4 * calls, 7 * calls))
        ends.append(state_of(variables))
        strategy.restore(path)  # from within a round
        assert not strategy.nodes_differ
        assert_same(state_of(variables), middle)
        train(strategy, variables, optimizer, range(4 * calls, 7 * calls))
        ends.append(state_of(variables))
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS[build])
        strategy.restore(path)
        strategy.save(again)  # what waits for the first step is in it
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS[build])
        strategy.restore(again)
        assert optimizer.slots(variables[0]).keys() == set(optimizer.slot_names)
        train(strategy, variables, optimizer, range(4 * calls, 7 * calls))
        ends.append(state_of(variables))
    assert_same(ends[1], ends[0])
    assert_same(ends[2], ends[0])


def test_files_go_to_any_strategy_and_back(layout, mpi_tmp_path):
    local, synchronous = mpi_tmp_path / "local.h5", mpi_tmp_path / "synchronous.h5"
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        train(strategy, variables, optimizer, range(2))
        strategy.save(local)
        weights, slots = state_of(variables), [optimizer.slots(v) for v in variables]
        train(strategy, variables, optimizer, range(2, 4))
    with ms.MultiWorkerMirroredStrategy() as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        strategy.restore(local)
        assert_same(state_of(variables), weights)
        for variable, expected in zip(variables, slots, strict=True):
            found = optimizer.slots(variable)
            assert found.keys() == {"momentum", "velocity"}
            assert_same(found.values(), expected.values())  # the first node's
        train(strategy, variables, optimizer, range(2))
        strategy.save(synchronous)
        weights = state_of(variables)
    with opened(2) as strategy:  # without momentum of outer steps, as at the first one
        variables, optimizer = make(strategy, BUILDS["adam"])
        train(strategy, variables, optimizer, range(2))
        strategy.restore(synchronous)
        train(strategy, variables, optimizer, range(2, 4))
        found = state_of(variables)
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        strategy.restore(synchronous)
        assert_same(state_of(variables), weights)
        train(strategy, variables, optimizer, range(2, 4))
        assert_same(state_of(variables), found)


def test_a_file_goes_to_other_numbers_of_nodes(layout, mpi_tmp_path):
    """More nodes than then take their slots in turn."""
    from mpi4py import MPI

    path = mpi_tmp_path / "saved.h5"
    with opened(2) as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        train(strategy, variables, optimizer, range(2))
        strategy.save(path)
        weights = state_of(variables)
    half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank == 0)
    with ms.MultiWorkerMirroredStrategy(comm=half, local_steps=2) as strategy:
        variables, optimizer = make(strategy, BUILDS["adam"])
        strategy.restore(path)
        assert_same(state_of(variables), weights)
        train(strategy, variables, optimizer, range(2, 4))
        assert not strategy.nodes_differ
        assert np.isfinite(variables[0].numpy()).all()
    half.Free()


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


def test_snapshots_are_taken_after_outer_steps(layout, monkeypatch):
    from mpi4py import MPI

    key = MPI.COMM_WORLD.bcast(secrets.token_hex(8))
    monkeypatch.setenv("MPISTRAT_JOB", key)
    try:
        with opened(2) as strategy:
            variables, optimizer = make(strategy, BUILDS["sgd"])
            train(strategy, variables, optimizer, range(2))
            expected = state_of(variables)
            strategy.take_snapshot(2, {})
            train(strategy, variables, optimizer, range(2, 4))
            end = state_of(variables)
            snapshot = strategy.newest_snapshot()
            assert snapshot is not None
            strategy.restore_snapshot(snapshot)
            assert_same(state_of(variables), expected)
            train(strategy, variables, optimizer, range(2, 4))
            assert_same(state_of(variables), end)
            train(strategy, variables, optimizer, range(1))
            with pytest.raises(ms.errors.ContextError, match="take_snapshot"):
                strategy.take_snapshot(5, {})
            strategy.outer_step()
    finally:
        MPI.COMM_WORLD.Barrier()
        job_files.remove(key)


def test_checkpoints_wait_for_the_next_outer_step(layout, mpi_tmp_path):
    with opened(4) as strategy:
        variables, optimizer = make(strategy, BUILDS["sgd"])
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, every_steps=3, keep=0)
        for number in range(10):
            train(strategy, variables, optimizer, [number])
            checkpoints.step(number + 1)
        checkpoints.wait()
        assert checkpoints.steps() == [4, 8]


def test_the_trainer_ends_with_an_outer_step(layout, mpi_tmp_path):
    with opened(4) as strategy:
        variables, optimizer = make(strategy, BUILDS["sgd"])
        rows = ms.data.from_arrays(np.arange(3 * strategy.size)).batch(strategy.size)

        def step(x):
            gradients = [gradient_of(v.array, int(x[0]), 0, strategy.rank, strategy.size) for v in variables]
            optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))

        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, keep=0)  # after each epoch of three steps
        data = strategy.distribute_dataset(rows)
        ms.train.Trainer(strategy, step, checkpoints=checkpoints).fit(data, epochs=3)
        assert not strategy.nodes_differ
        assert checkpoints.steps() == [4, 8, 9]


def test_what_cannot_be_combined(layout):
    make = ms.MultiWorkerMirroredStrategy
    with pytest.raises(ValueError, match="local_steps: expected no replicas"):
        make(local_steps=2, replicas=4)
    with pytest.raises(ValueError, match="local_steps: expected no sharded_slots"):
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


def test_a_run_that_is_told_to_stop_ends_at_an_outer_step(layout, mpi_tmp_path, monkeypatch):
    """And goes on from there as if nobody had stopped it."""
    ends = []
    for told in (False, True):
        for _ in range(1 + told):
            with opened(4) as strategy:
                variables, optimizer = make(strategy, BUILDS["adam"])
                rows = ms.data.from_arrays(np.arange(3 * strategy.size)).batch(strategy.size)

                def step(x):
                    gradients = [gradient_of(v.array, int(x[0]), 0, strategy.rank, strategy.size) for v in variables]  # noqa: B023
                    optimizer.apply_gradients(list(zip(gradients, variables, strict=True)))  # noqa: B023

                checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path / str(told))
                trainer = ms.train.Trainer(strategy, step, checkpoints=checkpoints)
                with monkeypatch.context() as patched:
                    if told and not checkpoints.steps():
                        patched.setattr(type(strategy), "should_stop", lambda self: trainer.loop.step >= 2)  # noqa: B023
                    trainer.fit(strategy.distribute_dataset(rows), epochs=4)
                ends.append((trainer.loop.step, state_of(variables)))
    whole, stopped, went_on = ends
    assert (whole[0], stopped[0], went_on[0]) == (12, 4, 12)
    assert_same(went_on[1], whole[1])
