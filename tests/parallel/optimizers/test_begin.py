"""Optimizer.begin: sums that start before the step give its bits, and mistakes with it are errors on all ranks.

Nodes are ranks without shared memory, or made up on this machine, as in test_sharded_slots.
"""

import threading
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arena import early
from mpistrat.errors import ContextError
from mpistrat.step import early_start
from mpistrat.step.early_start import EarlyChoice
from tests.harness.process_groups import set_layout
from tests.models.optimizer_states import assert_same, state_of

SIZES = (300_007, 15, 1, 266_177, 130_003)
pytestmark = pytest.mark.ranks(2, 3, 4)


@pytest.fixture(params=["private", "nodes"])
def opened(request, monkeypatch):
    """A function that makes a strategy over nodes; begin always starts sums, however small."""
    set_layout(request.param, monkeypatch)
    monkeypatch.setattr(early_start, "LEAST_BYTES", 1)
    monkeypatch.setattr(EarlyChoice, "note_step", lambda self, group, begun: None)
    return lambda **more: ms.MultiWorkerMirroredStrategy(**more)


def make(strategy, build, dtype="float32"):
    rng = np.random.default_rng(99)
    with strategy.scope():
        variables = [ms.Variable(rng.normal(size=size), name=f"v{i}", dtype=dtype) for i, size in enumerate(SIZES)]
        return variables, build(ms.optimizers)


def fill(strategy, variable, number):
    rng = np.random.default_rng((number, int(variable.name[1:]), strategy.rank))
    variable.grad[...] = rng.normal(size=variable.shape)


def train(strategy, variables, optimizer, early, steps=4):
    """Take steps; `early` are the indices of variables that are begun together, in order."""

    def step(number):
        for variable in variables:
            fill(strategy, variable, number)
        for chosen in early:
            optimizer.begin([variables[i] for i in chosen])
        optimizer.apply_gradients([(v.grad, v) for v in variables])

    for number in range(steps):
        strategy.run(step, args=(number,))


def both_ways(opened, build, early, dtype="float32", **more):
    found = []
    for chosen in (early, ()):
        with opened(**more) as strategy:
            variables, optimizer = make(strategy, build, dtype)
            train(strategy, variables, optimizer, chosen)
            found.append(state_of(variables, optimizer))
    assert_same(*found)


@pytest.fixture
def counted(monkeypatch):
    """The sums that were carried by threads."""
    seen = []
    plain = early.EarlySums._sum

    def sum_(self, job):
        seen.append((threading.current_thread().name, job.pieces))
        plain(self, job)

    monkeypatch.setattr(early.EarlySums, "_sum", sum_)
    return seen


BUILDS = {
    "SGD": lambda o: o.SGD(0.1),
    "Adam, clipped": lambda o: o.Adam(0.01, global_clipnorm=3.0),
    "Adam, each clipped": lambda o: o.Adam(0.01, clipnorm=1.0, check_numerics=True),
    "accumulation": lambda o: o.Adam(0.01, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("build", BUILDS)
def test_bits_are_those_of_a_step_without(opened, counted, build):
    both_ways(opened, BUILDS[build], [[4], [3, 1]])
    from mpi4py import MPI

    had = MPI.COMM_WORLD.allreduce(len(counted))
    assert had and {name for name, _ in counted} <= {"mpistrat-sums"}
    # Two times in each of four steps, on each rank that owns a slice: of 3 ranks in two nodes on one of each.
    assert len(counted) in (0, 8)


@pytest.mark.parametrize("chosen", [[[0, 1, 2, 3, 4]], [[0]], [[2], [1]]])
def test_all_variables_the_first_and_small_ones(opened, chosen):
    both_ways(opened, BUILDS["Adam, clipped"], chosen)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_other_dtypes(opened, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    both_ways(opened, BUILDS["accumulation"], [[4], [0]], dtype)


def test_where_each_node_keeps_all_slots_nothing_starts(opened, counted):
    both_ways(opened, BUILDS["Adam, clipped"], [[4], [3, 1]], sharded_slots=False)
    assert not counted


@pytest.mark.parametrize("wire", ["bfloat16", "int8"])
def test_fewer_bytes_between_nodes(opened, counted, wire):
    """What int8 loses in a step is sent with the next one, so nothing starts early."""
    both_ways(opened, BUILDS["Adam, clipped"], [[4], [3, 1]], communication_options=ms.CommunicationOptions(wire=wire))
    assert len(counted) in ((0, 8) if wire == "bfloat16" else (0,))


def test_gradients_stay(opened):
    with opened() as strategy:
        variables, optimizer = make(strategy, BUILDS["SGD"])
        train(strategy, variables, optimizer, [[4], [3]], steps=1)
        for variable in variables:
            own = variable.grad.copy()
            fill(strategy, variable, 0)
            np.testing.assert_array_equal(own, variable.grad)


def step_of_two(strategy, variables, first, second, chosen, number):
    for variable in variables:
        fill(strategy, variable, number)
    if chosen:
        second.begin([variables[4]])
        first.begin([variables[0]])
    first.apply_gradients([(v.grad, v) for v in variables[:2]])
    second.apply_gradients([(v.grad, v) for v in variables[2:]])


def test_two_optimizers_in_one_arena(opened):
    found = []
    for chosen in (True, False):
        with opened() as strategy:
            variables, first = make(strategy, BUILDS["SGD"])
            with strategy.scope():
                second = ms.optimizers.Momentum(0.1)
            for number in range(3):
                strategy.run(step_of_two, args=(strategy, variables, first, second, chosen, number))
            found.append([v.numpy() for v in variables])
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, expected)


# mistakes


def wrong(opened, act, error, words):
    """Have a step that should fail on all ranks; then a right one must give the numbers of a run without the mistake."""
    from mpi4py import MPI

    with opened() as strategy:
        variables, optimizer = make(strategy, BUILDS["SGD"])
        train(strategy, variables, optimizer, [[4]], steps=1)
        said = ""
        try:
            strategy.run(act, args=(strategy, variables, optimizer))
        except error as got:
            said = str(got)
        told = MPI.COMM_WORLD.allgather(said)
        assert all(words in text for text in told), told
        train(strategy, variables, optimizer, [[4], [0]], steps=2)
        found = [v.numpy() for v in variables]
    with opened() as strategy:
        variables, optimizer = make(strategy, BUILDS["SGD"])
        train(strategy, variables, optimizer, (), steps=1)
        train(strategy, variables, optimizer, (), steps=2)
        for ours, expected in zip(found, variables, strict=True):
            np.testing.assert_array_equal(ours, expected.numpy())


def test_a_variable_twice(opened):
    def act(strategy, variables, optimizer):
        optimizer.begin([variables[4]])
        optimizer.begin([variables[3], variables[4]])

    wrong(opened, act, ValueError, "v4: expected each variable once in a step, got 'v4' twice")


@pytest.mark.parametrize("chosen", [[4], [3, 4], [0]])
def test_what_a_step_began_is_forgotten_when_it_fails(opened, chosen):
    """The next step, whatever it begins, gives what it does without the one that failed."""
    found = []
    for fails in (False, True):
        with opened() as strategy:
            variables, optimizer = make(strategy, BUILDS["SGD"])

            def fail(variables=variables, optimizer=optimizer):
                for variable in variables:
                    variable.grad[...] = 7
                optimizer.begin([variables[4]])
                optimizer.begin([variables[3]])
                raise MemoryError("no room")

            for steps in (1, 2):
                if fails:
                    with pytest.raises(MemoryError, match="no room"):
                        strategy.run(fail)
                train(strategy, variables, optimizer, [chosen], steps)
            found.append([variable.numpy().copy() for variable in variables])
    for ours, expected in zip(*found, strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_a_variable_that_the_step_leaves_out(opened):
    def act(strategy, variables, optimizer):
        optimizer.begin([variables[4]])
        optimizer.apply_gradients([(v.grad, v) for v in variables[:4]])

    wrong(opened, act, ValueError, "v4: expected a gradient for each variable passed to begin, got none")


def test_a_variable_without_gradient(opened):
    def act(strategy, variables, optimizer):
        optimizer.begin([variables[4]])
        optimizer.apply_gradients([(None if v is variables[4] else v.grad, v) for v in variables])

    wrong(opened, act, ValueError, "v4: expected a gradient for each variable passed to begin, got none")


def test_a_gradient_elsewhere(opened):
    def act(strategy, variables, optimizer):
        optimizer.begin([variables[4]])
        optimizer.apply_gradients([(v.grad.copy(), v) for v in variables])

    wrong(opened, act, ValueError, "v4: expected its gradient in v.grad, got one elsewhere")


def test_sums_that_are_sums_already(opened):
    def act(strategy, variables, optimizer):
        optimizer.begin([variables[4]])
        optimizer.apply_gradients([(v.grad, v) for v in variables], experimental_aggregate_gradients=False)

    wrong(opened, act, ValueError, "expected gradients that are summed over the replicas")


@pytest.mark.parametrize("chosen", [[0], [4, 3]])
def test_sums_that_no_step_took_are_not_written_over_those_of_the_next(opened, monkeypatch, chosen):
    """The first ones arrive late; then others are begun."""
    plain, jobs = early.EarlySums._sum, []

    def late(self, job):
        def put(low, high, block):
            time.sleep(0.2)
            job.put(low, high, block)

        jobs.append(job)
        plain(self, job if len(jobs) > 1 else job._replace(put=put))

    def left_out():
        for variable in variables:
            variable.grad[...] = 7
        optimizer.begin([variables[4]])
        optimizer.apply_gradients([(v.grad, v) for v in variables[:4]])

    def whole():
        for variable in variables:
            variable.grad[...] = 1
        optimizer.begin([variables[i] for i in chosen])
        optimizer.apply_gradients([(v.grad, v) for v in variables])

    monkeypatch.setattr(early.EarlySums, "_sum", late)
    with opened() as strategy:
        variables, optimizer = make(strategy, lambda o: o.SGD(1.0))
        before = [v.numpy() for v in variables]
        with pytest.raises(ValueError, match="v4"):
            strategy.run(left_out)
        strategy.run(whole)
        for variable, values in zip(variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), values - np.float32(strategy.size))


def test_a_gradient_that_was_changed_is_told_in_the_first_step(opened):
    with opened() as strategy:
        variables, optimizer = make(strategy, BUILDS["SGD"])

        def step():
            optimizer.begin([variables[4]])
            variables[4].grad[7] += 1
            optimizer.apply_gradients([(v.grad, v) for v in variables])

        with pytest.raises(ValueError, match="v4: expected a final gradient, got one that was changed after begin"):
            strategy.run(step)


def test_outside_of_a_step(opened):
    with opened() as strategy:
        variables, optimizer = make(strategy, BUILDS["SGD"])
        with strategy.scope(), pytest.raises(ContextError, match="begin: expected a call in replica context"):
            optimizer.begin(variables)


# the choice


def test_both_ways_are_tried_and_one_is_kept(opened, counted, monkeypatch, caplog):
    from mpi4py import MPI

    monkeypatch.undo()
    monkeypatch.setattr(early_start, "LEAST_BYTES", 1)
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    carried = []
    plain = early.EarlySums.begin
    monkeypatch.setattr(early.EarlySums, "begin", lambda self, *given: carried.append(1) or plain(self, *given))
    with ms.MultiWorkerMirroredStrategy() as strategy:
        variables, optimizer = make(strategy, BUILDS["SGD"])
        train(strategy, variables, optimizer, [[4]], steps=16)
        assert len(carried) == 8
        train(strategy, variables, optimizer, [[4]], steps=4)
        assert set(MPI.COMM_WORLD.allgather(len(carried))) in ({8}, {12})
