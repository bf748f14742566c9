"""What a server does with the pushes of workers that train in step."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError
from mpistrat.parameter_server.operations import Operation
from mpistrat.parameter_server.server.local_updates import LocalUpdates
from mpistrat.parameter_server.server.updates import SynchronousUpdates
from tests.harness.server_harness import ServerHarness, Weights


def served(workers, variables, *optimizers, backup_workers=0):
    """A harness, and what applies each optimizer; its number is its key."""
    harness = ServerHarness(workers, variables)
    updaters = [LocalUpdates(optimizer) for optimizer in optimizers or (ms.optimizers.SGD(1.0),)]
    handler = SynchronousUpdates(harness.server, updaters.__getitem__, variables.__getitem__, backup_workers)
    harness.start(handler)
    return harness, updaters


def test_a_step_waits_for_every_worker_and_is_applied_once():
    harness, (sgd,) = served(3, [Weights([0.0, 0.0])])
    harness.step(1, [1, 10])
    harness.push(2, [2, 20])
    harness.step(0, [3, 30])
    assert harness.array().tolist() == [0, 0]
    assert [harness.acknowledged(worker) for worker in range(3)] == [False, False, True]  # 2 has not ended its step
    harness.commit(2)
    assert harness.array().tolist() == [-6, -60]
    assert (sgd.iterations, harness.server.version(0)) == (1, 2)  # one for the start, one for the step
    assert all(harness.acknowledged(worker) for worker in range(3))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_sum_is_that_of_synchronous_training_bit_for_bit(order, dtype):
    start = np.linspace(-1, 1, 1000).astype(dtype)
    gradients = [
        [(np.random.default_rng((s, w)).normal(size=1000) * 50**w).astype(dtype) for w in range(3)] for s in range(3)
    ]
    strategy = ms.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with strategy.scope():
        v, optimizer = ms.Variable(start), ms.optimizers.Adam(0.1)
        for of_step in gradients:
            strategy.run(
                lambda of_step=of_step: optimizer.apply_gradients(
                    [(of_step[ms.get_replica_context().replica_id_in_sync_group], v)]
                )
            )
        expected, momentum = v.numpy(), optimizer.slots(v)["momentum"]
    strategy.close()
    weights = Weights(start)
    harness, (adam,) = served(3, [weights], ms.optimizers.Adam(0.1))
    for of_step in gradients:
        for worker in order:
            harness.step(worker, of_step[worker])
    assert harness.array().tobytes() == expected.tobytes()
    assert adam.slots(weights)["momentum"].tobytes() == momentum.tobytes()


def test_rows_are_summed_over_the_workers_before_they_are_applied():
    weights = Weights(np.zeros((5, 2)))
    harness, (momentum,) = served(2, [weights], ms.optimizers.Momentum(1.0, 0.5))
    for _ in range(2):
        harness.step(0, [[1, 2], [3, 4]], rows=[0, 3])
        harness.step(1, [[10, 20], [30, 40]], rows=[3, 4])
    # m = -g, then -g / 2 - g
    gradient = np.array([[1, 2], [0, 0], [0, 0], [13, 24], [30, 40]])
    assert np.array_equal(momentum.slots(weights)["momentum"], -1.5 * gradient)
    assert np.array_equal(harness.array(), -2.5 * gradient)


def test_rows_of_16_bit_are_summed_in_32_bit_and_rounded_once():
    harness, _ = served(3, [Weights(np.zeros(3, np.float16))])
    harness.step(0, [2048], rows=[1])
    harness.step(1, [1], rows=[1])  # 2049 is no float16: it would be 2048
    harness.step(2, [1], rows=[1])
    assert harness.array().tolist() == [0, -2050, 0]


def test_rows_of_one_worker_and_a_dense_gradient_of_another():
    harness, _ = served(2, [Weights(np.zeros((3, 1)))])
    harness.step(1, [[1], [2], [3]])
    harness.step(0, [[10]], rows=[2])
    assert harness.array().tolist() == [[-1], [-2], [-13]]


def test_a_variable_that_not_all_workers_have_a_gradient_of():
    harness, (sgd,) = served(2, [Weights([0.0]), Weights([0.0])])
    harness.push(0, [1], 0)
    harness.step(0, [2], variable=1)
    harness.step(1, [10], variable=1)
    assert (harness.array(0).tolist(), harness.array(1).tolist()) == ([-1], [-12])
    harness.commit(0)
    harness.commit(1)
    assert (sgd.iterations, harness.server.version(1)) == (2, 2)


def test_a_gradient_of_a_step_that_broke_off_is_replaced():
    harness, _ = served(1, [Weights([0.0]), Weights([0.0])])
    harness.push(0, [100], 0)
    assert harness.acknowledged(0)  # so that the worker can leave
    harness.push(0, [1], 0)
    harness.step(0, [2], variable=1)
    assert (harness.array(0).tolist(), harness.array(1).tolist()) == ([-1], [-2])


def test_a_constraint_is_applied_to_the_result_of_the_step():
    harness, _ = served(2, [Weights([0.0], constraint=lambda w: np.maximum(w, -3))])
    harness.step(0, [4])
    harness.step(1, [-2])
    assert harness.array().tolist() == [-2]  # were each applied on its own, 3 would come in between


# what comes after a commit


def test_a_worker_may_be_ahead_and_its_pushes_stay_in_order():
    harness, (sgd,) = served(2, [Weights([0.0])])
    harness.step(0, [1])
    harness.push(0, [100], operation=Operation.ASSIGN)
    harness.step(0, [2])
    harness.step(0, [3])
    harness.push(0, [5], operation=Operation.ASSIGN_ADD)
    assert (harness.array().tolist(), harness.server.applied[0]) == ([0], 0)
    harness.step(1, [10])  # 0 - 11, then 100
    assert (harness.array().tolist(), harness.server.applied[0]) == ([100], 2)
    harness.step(1, [20])  # 100 - 22
    assert (harness.array().tolist(), harness.server.applied[0]) == ([78], 3)
    harness.step(1, [30])  # 78 - 33 + 5
    assert (harness.array().tolist(), sgd.iterations) == ([50], 3)
    assert harness.acknowledged(0)
    assert harness.acknowledged(1)


def test_writes_in_the_middle_of_a_step_act_at_once():
    harness, _ = served(2, [Weights([0.0])])
    harness.push(0, [1])
    harness.push(0, [[7]], rows=[0], operation=Operation.SCATTER_ADD)
    assert (harness.array().tolist(), harness.acknowledged(0)) == ([7], True)
    harness.commit(0)
    harness.push(1, [100], operation=Operation.ASSIGN)
    harness.step(1, [1])
    assert harness.array().tolist() == [98]


# two optimizers


def test_two_optimizers_in_turn():
    harness, updaters = served(2, [Weights([0.0]), Weights([0.0])], ms.optimizers.SGD(1.0), ms.optimizers.SGD(10.0))
    for worker in range(2):
        harness.step(worker, [1], variable=0, key=0)
        harness.step(worker, [1], variable=1, key=1)
    assert (harness.array(0).tolist(), harness.array(1).tolist()) == ([-2], [-20])
    assert [updater.iterations for updater in updaters] == [1, 1]


def test_workers_that_step_with_other_optimizers_would_wait_for_each_other_for_ever():
    harness, _ = served(2, [Weights([0.0])], ms.optimizers.SGD(1.0), ms.optimizers.SGD(1.0))
    harness.step(0, [1], key=0)
    with pytest.raises(CollectiveMismatchError, match="apply_gradients: optimizer: expected the same on all workers"):
        harness.step(1, [1], key=1)


# leaving


def test_nobody_waits_for_who_has_left_the_pass():
    harness, _ = served(3, [Weights([0.0])])
    for worker in range(3):
        harness.step(worker, [1])
    harness.step(0, [1])
    harness.step(1, [1])
    assert harness.array().tolist() == [-3]
    harness.leave(2)
    assert harness.array().tolist() == [-5]
    harness.leave(1)
    harness.step(0, [1])
    assert harness.array().tolist() == [-6]


def test_what_is_pushed_for_the_next_pass_waits_until_all_are_there():
    harness, _ = served(2, [Weights([0.0])])
    harness.leave(1)
    harness.step(1, [100])  # of the second pass
    harness.step(0, [1])
    assert harness.array().tolist() == [-1]
    harness.leave(0)
    assert harness.array().tolist() == [-1]
    harness.step(0, [10])
    assert harness.array().tolist() == [-111]


def test_who_has_left_for_good_is_not_waited_for_in_any_pass():
    harness, _ = served(2, [Weights([0.0])])
    harness.leave(1, for_good=True)
    for _ in range(2):
        harness.step(0, [1])
        harness.leave(0)
    assert harness.array().tolist() == [-2]


# backup workers


def test_a_step_does_without_the_last_worker_whose_gradient_is_dropped():
    harness, (sgd,) = served(3, [Weights([0.0])], backup_workers=1)
    harness.push(2, [100])
    harness.step(0, [1])
    assert harness.array().tolist() == [0]
    harness.step(1, [2])
    assert (harness.array().tolist(), sgd.iterations) == ([-3], 1)
    assert not any(harness.handler.dropped)
    harness.commit(2)
    assert (harness.array().tolist(), sgd.iterations) == ([-3], 1)
    assert (harness.handler.dropped, harness.acknowledged(2)) == ([0, 0, 1], True)
    harness.step(2, [10])  # and now it is in step again
    harness.step(1, [20])
    assert (harness.array().tolist(), sgd.iterations) == ([-33], 2)
    harness.step(0, [1])
    assert harness.handler.dropped == [1, 0, 1]


def test_a_gradient_counts_if_what_it_was_computed_from_is_new_enough():
    harness, _ = served(2, [Weights([0.0]), Weights([0.0])], backup_workers=1)
    harness.push(0, [1], 0)
    harness.step(0, [1], variable=1)
    now = harness.server.version(0)
    harness.push(1, [10], 0, version=now)
    harness.step(1, [10], variable=1, version=now - 1)  # one of two was read before
    assert harness.handler.dropped == [0, 1]
    harness.step(0, [1])
    harness.step(1, [10], version=now + 1)
    assert harness.handler.dropped == [0, 1]
    assert harness.array(0).tolist() == [-12]


def test_a_commit_alone_comes_too_late_as_well():
    harness, (sgd,) = served(2, [Weights([0.0])], backup_workers=1)
    harness.step(0, [1])
    harness.commit(1)
    assert (sgd.iterations, harness.handler.dropped) == (1, [0, 1])
    harness.commit(1)
    assert (sgd.iterations, harness.handler.dropped) == (2, [0, 1])


def test_what_waits_for_the_next_pass_may_come_too_late_while_it_waits():
    harness, (sgd,) = served(3, [Weights([0.0])], backup_workers=1)
    harness.leave(2)
    harness.step(2, [100])
    harness.step(0, [1])  # two are left, one is waited for
    assert (sgd.iterations, harness.handler.dropped) == (1, [0, 0, 1])
    assert harness.acknowledged(2)


@pytest.mark.parametrize("backup_workers", [-1, 2, 3])
def test_somebody_must_be_waited_for(backup_workers):
    with pytest.raises(ValueError, match="SynchronousUpdates: backup_workers: expected 0 <= backup_workers < 2"):
        served(2, [Weights([0.0])], backup_workers=backup_workers)


# any order


@st.composite
def programs(draw):
    """For each worker, pass by pass, the gradients of each step: for each variable None, all of it, or its rows."""
    workers, passes = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    what = st.tuples(*[st.sampled_from(["", "dense", "rows"])] * 2)
    return [[draw(st.lists(what, max_size=3)) for _ in range(passes)] for _ in range(workers)]


SHAPE = (4, 3)


def gradient_of(worker, number, step, variable, what):
    """A gradient as an array of the variable's shape, and the numbers of the rows that are pushed."""
    random = np.random.default_rng((worker, number, step, variable))
    rows = np.sort(random.choice(SHAPE[0], random.integers(1, SHAPE[0]), replace=False)) if what == "rows" else None
    values = (random.normal(size=SHAPE) * 100**worker).astype(np.float32)
    if rows is None:
        return values, None
    whole = np.zeros(SHAPE, np.float32)
    whole[rows] = values[rows]
    return whole, rows


def serial(program):
    """The weights, when each step of a pass takes the sum, in the order of the workers, over those that have that many."""
    weights, steps = [np.zeros(SHAPE, np.float32) for _ in range(2)], 0
    for number in range(len(program[0])):
        for step in range(max(len(passes[number]) for passes in program)):
            for variable in range(2):
                total = np.zeros(SHAPE, np.float32)
                for worker, passes in enumerate(program):
                    if step < len(passes[number]) and (what := passes[number][step][variable]):
                        total += gradient_of(worker, number, step, variable, what)[0]
                weights[variable] -= np.float32(0.5) * total
            steps += 1
    return weights, steps


def actions(harness, worker, passes):
    """Do what a worker does, one thing at each `next`; yields whether it has to wait."""
    for number, steps in enumerate(passes):
        for step, kinds in enumerate(steps):
            present = [variable for variable in range(2) if kinds[variable]]
            for variable in present:
                whole, rows = gradient_of(worker, number, step, variable, kinds[variable])
                values = whole if rows is None else whole[rows]
                joined = variable == present[-1] and (step + worker) % 2 == 0
                harness.push(worker, values, variable, rows=rows, commit=joined)
                yield False
            if not present or (step + worker) % 2:
                harness.commit(worker)
                yield False
        while not harness.acknowledged(worker):
            yield True
        harness.leave(worker)
        yield False


@settings(max_examples=150, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_in_any_order_it_is_a_serial_program(program, random):
    harness, (sgd,) = served(len(program), [Weights(np.zeros(SHAPE, np.float32))] * 2, ms.optimizers.SGD(0.5))
    running = {worker: actions(harness, worker, passes) for worker, passes in enumerate(program)}
    waiting = set()
    while running:
        worker = random.choice(sorted(running))
        try:
            waits = next(running[worker])
        except StopIteration:
            del running[worker]
            waiting.clear()
            continue
        waiting = waiting | {worker} if waits else set()
        assert waiting != set(running), "all wait for each other"
    weights, steps = serial(program)
    assert sgd.iterations == steps
    for variable in range(2):
        assert np.array_equal(harness.array(variable), weights[variable])
    assert not any(w.gradients.get(0) or w.later for w in harness.handler._workers)
