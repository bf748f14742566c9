"""What a server does with the pushes of workers that do not wait for each other."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import MpistratError
from mpistrat.parameter_server.operations import Operation
from mpistrat.parameter_server.server.local_updates import LocalUpdates
from mpistrat.parameter_server.server.server import VariableServer
from mpistrat.parameter_server.server.updates import Updates
from tests.harness.server_harness import ServerHarness, Weights


def served(workers, variables, *optimizers):
    """A harness, and what applies each optimizer; its number is its key."""
    harness = ServerHarness(workers, variables)
    updaters = [LocalUpdates(optimizer) for optimizer in optimizers]
    harness.start(Updates(harness.server, updaters.__getitem__, variables.__getitem__))
    return harness, updaters


def test_a_gradient_is_applied_at_once_and_a_commit_counts_the_step():
    harness, (sgd,) = served(1, [Weights([10.0, 20.0])], ms.optimizers.SGD(0.5))
    harness.push(0, [2, 4])
    assert harness.array().tolist() == [9, 18]
    assert (sgd.iterations, harness.server.version(0)) == (0, 2)  # the first version is the start
    harness.commit(0)
    assert sgd.iterations == 1
    harness.step(0, [2, 4])
    assert harness.array().tolist() == [8, 16]
    assert (sgd.iterations, harness.acknowledged(0)) == (2, True)


def test_rows_of_a_gradient():
    harness, _ = served(1, [Weights(np.ones((4, 2)))], ms.optimizers.SGD(1.0))
    harness.step(0, [[1, 2], [3, 4]], rows=[1, 3])
    assert harness.array().tolist() == [[1, 1], [0, -1], [1, 1], [-2, -3]]


def test_optimizers_are_told_apart():
    variables = [Weights([0.0]), Weights([0.0])]
    harness, (slow, fast) = served(1, variables, ms.optimizers.SGD(1.0), ms.optimizers.SGD(10.0))
    harness.push(0, [1], 0, key=0)
    harness.push(0, [1], 1, key=1)
    harness.commit(0, key=1)
    assert (harness.array(0).tolist(), harness.array(1).tolist()) == ([-1], [-10])
    assert (slow.iterations, fast.iterations) == (0, 1)


class Recorder:
    """An updater that notes the numbers of steps."""

    def __init__(self):
        self.iterations, self.asked, self.steps = 0, 0, []

    def count_step(self):
        self.iterations += 1

    def dense(self, variable, weights, gradients, step, old=None):
        self.steps.append((variable.name, step))

    def rows(self, variable, weights, rows, values, step):
        self.steps.append((variable.name, step))


def test_a_workers_step_has_one_number_whatever_others_do():
    variables, recorder = [Weights([0.0], "a"), Weights([0.0], "b")], Recorder()

    def find(key):
        recorder.asked += 1
        return recorder

    harness = ServerHarness(2, variables)
    harness.start(Updates(harness.server, find, variables.__getitem__))
    harness.push(0, [1], 0)  # worker 0 begins step 1
    harness.push(1, [1], 0)  # so does worker 1
    harness.commit(1)
    harness.push(1, [1], 0)  # worker 1 begins step 2
    harness.push(0, [1], 1)  # still step 1
    harness.commit(0)
    harness.push(0, [1], 0)  # step 3
    harness.push(1, [1], 1)  # still step 2
    assert recorder.steps == [("a", 1), ("a", 1), ("a", 2), ("b", 1), ("a", 3), ("b", 2)]
    assert (recorder.iterations, recorder.asked) == (2, 4)


def test_a_workers_step_has_one_rate_whatever_others_do():
    schedule = ms.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 10.0])  # 10 from the second step on
    harness, _ = served(2, [Weights([0.0]), Weights([0.0])], ms.optimizers.SGD(schedule))
    harness.push(0, [1], 0)
    harness.commit(1)
    harness.step(0, [1], variable=1)
    assert (harness.array(0).tolist(), harness.array(1).tolist()) == ([-1], [-1])
    harness.step(0, [1])
    assert harness.array(0).tolist() == [-11]


def test_what_this_program_has_yet_to_come_to_is_kept_in_order(monkeypatch):
    """Worker 0 is in the next pass, with an optimizer that is not here yet; worker 1 is still in this one."""
    variables, ready = [Weights([0.0])], []
    harness, sgd = ServerHarness(2, variables), LocalUpdates(ms.optimizers.SGD(1.0))

    def find(key):
        if key not in ready:
            raise MpistratError("none like it")
        return sgd

    updates = Updates(harness.server, find, variables.__getitem__)
    harness.start(updates)
    expected = {0: False, 1: True}
    monkeypatch.setattr(VariableServer, "expects", lambda self, worker: expected[worker])
    ready.append(1)
    harness.step(0, [1], key=2)
    harness.push(0, [100], operation=Operation.ASSIGN)
    harness.step(1, [10], key=1)
    assert (harness.array().tolist(), sgd.iterations) == ([-10], 1)
    assert (harness.acknowledged(0), harness.acknowledged(1), updates.retry()) == (False, True, False)
    with pytest.raises(MpistratError, match="none like it"):
        harness.step(1, [10], key=2)
    ready.append(2)
    assert updates.retry()
    assert (harness.array().tolist(), sgd.iterations, harness.acknowledged(0)) == ([100], 2, True)
    harness.step(0, [1], key=2)
    assert (harness.array().tolist(), harness.acknowledged(0), updates.retry()) == ([99], True, False)


def test_a_commit_alone_counts_a_step():
    harness, (adam,) = served(1, [Weights([0.0])], ms.optimizers.Adam(0.1))
    harness.commit(0)
    harness.commit(0)
    assert adam.iterations == 2


@pytest.mark.parametrize("make", [ms.optimizers.Adam, lambda rate: ms.optimizers.SGD(rate, 0.9, nesterov=True)])
def test_one_worker_trains_as_a_program_does_alone(make):
    random, names = np.random.default_rng(0), ("a", "b")
    starts = [random.normal(size=(5, 3)).astype(np.float32), random.normal(size=70001).astype(np.float32)]
    schedule = ms.optimizers.schedules.ExponentialDecay(0.1, decay_steps=3, decay_rate=0.5)
    serial = [ms.Variable(start, name=name) for start, name in zip(starts, names, strict=True)]
    optimizer = make(schedule)
    harness, _ = served(1, [Weights(start, name) for start, name in zip(starts, names, strict=True)], make(schedule))
    for _ in range(5):
        gradients = [random.normal(size=start.shape).astype(np.float32) for start in starts]
        optimizer.apply_gradients(list(zip(gradients, serial, strict=True)))
        harness.push(0, gradients[0], 0)
        harness.step(0, gradients[1], variable=1)
    for index, variable in enumerate(serial):
        assert harness.array(index).tobytes() == variable.numpy().tobytes()


def test_writes_and_scatters_are_applied_and_count_no_step():
    harness, (sgd,) = served(2, [Weights(np.zeros((3, 2)))], ms.optimizers.SGD(1.0))
    harness.push(0, np.full((3, 2), 5), operation=Operation.ASSIGN)
    harness.push(1, np.full((3, 2), 2), operation=Operation.ASSIGN_SUB)
    harness.push(0, [[1, 1], [10, 10]], rows=[2, 2], operation=Operation.SCATTER_ADD)
    assert harness.array().tolist() == [[3, 3], [3, 3], [14, 14]]
    assert sgd.iterations == 0


def test_a_constraint_holds_after_every_gradient_before_anybody_reads():
    seen = []

    def clip(w):
        seen.append(w.flags.writeable)
        return np.clip(w, -1, 1)

    harness, _ = served(1, [Weights([0.0, 0.5], constraint=clip)], ms.optimizers.SGD(1.0))
    harness.push(0, [5, -5])
    assert harness.array().tolist() == [-1, 1]
    assert harness.server.version(0) == 2  # one write: no reader saw -5
    harness.push(0, [9], rows=[1])
    assert harness.array().tolist() == [-1, -1]
    harness.push(0, [7, 7], operation=Operation.ASSIGN)
    assert harness.array().tolist() == [7, 7]  # as `assign` does elsewhere
    assert seen == [False, False]


def test_staleness_is_counted_for_gradients():
    harness, _ = served(2, [Weights([0.0])], ms.optimizers.SGD(1.0))
    harness.push(0, [1], version=1)
    harness.push(1, [1], version=1)  # one push behind
    harness.push(1, [1], operation=Operation.ASSIGN)
    assert harness.server.stats.staleness[0][0] == {0: 1}
    assert harness.server.stats.staleness[1][0] == {1: 1}
