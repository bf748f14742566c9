"""Scheduled training steps under a ParameterServerStrategy: they find the worker's own variables and optimizers."""

import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ContextError, LayoutError
from tests.harness.coordinators import coordinated

pytestmark = pytest.mark.ranks(3, 4)
GRADIENT = np.array([1, 2, 4], np.float32)


def make(strategy):
    with strategy.scope():
        return ms.Variable(np.zeros(3, np.float32), name="v"), ms.optimizers.SGD(0.5)


def test_steps_are_applied_once_each():
    strategy = ms.ParameterServerStrategy()
    v, optimizer = make(strategy)
    with coordinated(strategy) as c:
        if c.is_chief:

            def step(scale):
                strategy.run(lambda: optimizer.apply_gradients([(GRADIENT * scale, v)]))
                return v, strategy.worker_index

            results = [c.schedule(step, (2.0,)) for _ in range(40)]
            c.join()
            assert v.numpy().tolist() == [-40, -80, -160]
            values = [value[2] for value, _ in c.fetch(results)]
            assert all(-160 <= value <= -4 for value in values)
            assert {worker for _, worker in c.fetch(results)} <= set(range(1, strategy.num_workers))
            v.assign([1, 2, 3])
            assert c.schedule(lambda: v.numpy().tolist()).get() == [1, 2, 3]


def test_variables_in_arguments_and_parts_of_a_sharded_variable():
    two = ms.partitioners.FixedShardsPartitioner(2)
    strategy = ms.ParameterServerStrategy(variable_partitioner=two)
    with strategy.scope():
        table = ms.Variable(np.arange(8.0).reshape(4, 2), name="table")
    with coordinated(strategy) as c:
        if c.is_chief:
            assert len(table.variables) == 2
            c.schedule(lambda t, part: (t.assign_add(np.ones((4, 2))), part.assign_add(np.ones((2, 2)))),
                       (table, table.variables[0])).get()  # fmt: skip
            assert table.numpy().tolist() == [[2, 3], [4, 5], [5, 6], [7, 8]]
            assert c.schedule(lambda: {"whole": table}).get()["whole"].tolist() == table.numpy().tolist()
            other = ms.Variable([1.0])
            with pytest.raises(TypeError, match="not created in the scope"):
                c.schedule(lambda: other)


def test_each_worker_trains_on_a_dataset_of_its_own():
    strategy = ms.ParameterServerStrategy()
    v, optimizer = make(strategy)

    def make_dataset():
        return ms.data.from_arrays(np.ones((4, 3), np.float32)).repeat().batch(2)

    def step(iterator):
        batch = next(iterator)
        strategy.run(lambda: optimizer.apply_gradients([(batch.sum(axis=0), v)]))

    with coordinated(strategy) as c:
        if c.is_chief:
            iterator = iter(c.create_per_worker_dataset(make_dataset))
            for _ in range(10):
                c.schedule(step, (iterator,))
            c.join()
            assert v.numpy().tolist() == [-10, -10, -10]


def test_what_all_ranks_do_together_is_refused_in_a_function():
    strategy = ms.ParameterServerStrategy()
    v, optimizer = make(strategy)

    def step():
        strategy.run(lambda: optimizer.apply_gradients([(GRADIENT, v)]))

    with coordinated(strategy) as c:
        if c.is_chief:
            for wrong in (lambda: ms.Variable(1.0), lambda: strategy.save("nowhere.h5")):
                c.schedule(wrong)
                with pytest.raises(ContextError, match="scheduled function"):
                    c.join()
            c.schedule(step)
            c.join()
            assert v.numpy().tolist() == [-0.5, -1, -2]


MAKERS = {
    "MultiWorkerMirroredStrategy": ms.MultiWorkerMirroredStrategy,
    "ParameterServerStrategy": ms.ParameterServerStrategy,
    "split_evaluator": ms.estimator.split_evaluator,
}


@pytest.mark.parametrize("function", MAKERS)
def test_what_all_ranks_make_is_refused_where_others_serve(function):
    """At once, and without leaving anything behind: the next strategy of all ranks is made."""
    from mpi4py import MPI

    make_it = MAKERS[function]
    with coordinated(ms.ParameterServerStrategy()) as c:
        between = ms.MultiWorkerMirroredStrategy()  # all ranks make it: none serves yet
        between.close()
        if c.is_chief:
            assert c.schedule(lambda: 1).get() == 1
            began = time.monotonic()
            with pytest.raises(ContextError, match=rf"{function}: .* in the coordinator's service"):
                make_it()
            c.schedule(make_it)
            with pytest.raises(ContextError, match=rf"{function}: .* in the coordinator's service"):
                c.join()
            assert time.monotonic() - began < 10
            ms.MirroredStrategy(comm=MPI.COMM_SELF).close()
    after = ms.MultiWorkerMirroredStrategy()
    assert after.reduce("SUM", 1.0) == after.size
    after.close()


def test_the_chief_needs_a_worker_beside_it():
    from mpi4py import MPI

    strategy = ms.ParameterServerStrategy(num_ps=MPI.COMM_WORLD.size - 1)
    with pytest.raises(LayoutError, match="at least one other worker"):
        ms.coordinator.ClusterCoordinator(strategy)
    strategy.close()


def test_a_worker_scales_losses_by_a_factor_of_its_own():
    strategy = ms.ParameterServerStrategy()
    with strategy.scope():
        v = ms.Variable(np.zeros(3, np.float32), name="v")
        optimizer = ms.optimizers.LossScaleOptimizer(
            ms.optimizers.SGD(1.0), initial_scale=8.0, dynamic_growth_steps=100
        )
    with coordinated(strategy) as c:
        if c.is_chief:

            def step(value):
                def train():
                    return optimizer.apply_gradients([(np.full(3, optimizer.scale_loss(value)), v)])

                strategy.run(train)

            for value in (1.0, np.inf, 1.0, np.inf, 0.5):
                c.schedule(step, (value,))
            c.join()
            assert v.numpy().tolist() == [-2.5] * 3
            scales = [float(scale) for scale in optimizer.dynamic_scale.read_all()]
            assert np.prod([8.0 / scale for scale in scales]) == 4.0  # two steps were skipped
