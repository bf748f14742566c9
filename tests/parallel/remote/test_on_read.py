"""ON_READ variables and metrics that scheduled functions write: the chief reads what all workers have, or gets an error."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import ContextError
from tests.harness.coordinators import coordinated

pytestmark = pytest.mark.ranks(3, 4)
ON_READ, SUM = ms.VariableSynchronization.ON_READ, ms.VariableAggregation.SUM


def made(name, aggregation=SUM, value=0.0):
    return ms.Variable(np.full(2, value), name=name, synchronization=ON_READ, aggregation=aggregation)


def test_metrics_are_those_of_all_workers_and_begin_again():
    strategy = ms.ParameterServerStrategy()
    with strategy.scope():
        metrics = [ms.train.Mean("mean"), ms.train.Sum("sum")]

    def step(values):
        strategy.run(lambda: [metric.update_state(values) for metric in metrics])

    with coordinated(strategy) as c:
        if c.is_chief:
            for epoch in range(2):
                values = [[float(i + epoch), 4.0] for i in range(12)]
                for pair in values:
                    c.schedule(step, (pair,))
                c.join()
                assert ms.train.results(metrics) == {"mean": np.mean(values), "sum": np.sum(values)}
                assert metrics[0].result() == np.mean(values)
                for metric in metrics:
                    metric.reset_state()
            assert metrics[1].result() == 0
            c.schedule(step, ([7.0],))
            assert metrics[1].result() == 7  # after what was scheduled
            c.schedule(metrics[0].result)
            with pytest.raises(ContextError, match="scheduled function"):
                c.join()


def test_a_sum_is_read_and_written_over_all_workers(mpi_tmp_path):
    path = mpi_tmp_path / "sum.h5"
    strategy = ms.ParameterServerStrategy()
    with strategy.scope():
        total = made("total")

    def add():
        strategy.run(lambda: total.assign_add([1.0, 2.0]))

    with coordinated(strategy) as c:
        if c.is_chief:
            for _ in range(10):
                c.schedule(add)
            c.join()
            assert total.numpy().tolist() == total.read_value().tolist() == np.asarray(total).tolist() == [10, 20]
            assert strategy.reduce("SUM", total).tolist() == [10, 20]
            for copies in (lambda: total.values, lambda: strategy.local_results(total)):
                with pytest.raises(
                    ContextError, match="Variable.values: total: expected a read of all workers' copies"
                ):
                    copies()
            strategy.save(path)
            total.assign([5.0, 5.0])
            assert total.numpy().tolist() == [5, 5]
            c.schedule(add).get()
            assert total.numpy().tolist() == [6, 7]
            strategy.restore(path)
            assert total.numpy().tolist() == [10, 20]


def test_what_no_sum_is_cannot_be_read_by_the_chief_and_is_written_to_all_copies():
    strategy = ms.ParameterServerStrategy()
    with strategy.scope():
        mean = made("mean", ms.VariableAggregation.MEAN, 1.0)
    with coordinated(strategy) as c:
        if c.is_chief:
            mean.assign([3.0, 4.0])
            mean.assign_add([1.0, 1.0])
            found = [c.schedule(lambda: mean.numpy().tolist(), worker=index) for index in range(c.num_workers)]
            assert c.fetch(found) == [[4, 5]] * c.num_workers
            for read in (mean.numpy, lambda: strategy.reduce("MEAN", mean)):
                with pytest.raises(ContextError, match=r"mean: expected aggregation SUM .* got MEAN"):
                    read()


def test_gathered_is_called_by_the_chief_while_functions_run():
    strategy = ms.ParameterServerStrategy()
    with strategy.scope():
        served, total, mean = (
            ms.Variable(np.zeros(2), name="served"),
            made("total"),
            made("mean", ms.VariableAggregation.MEAN),
        )
        own = ms.Variable(np.zeros(2), name="own", per_worker_variable=True)

    def write():
        served.assign_add([1.0, 2.0])
        strategy.run(lambda: total.assign_add([1.0, 2.0]))

    with coordinated(strategy) as c:
        if c.is_chief:
            for _ in range(10):
                c.schedule(write)
            assert total.gathered()[0] in range(11) and served.gathered()[0] in range(11)
            c.join()
            assert served.gathered().tolist() == total.gathered().tolist() == [10, 20]
            own.assign([3.0, 4.0])
            assert own.gathered().tolist() == [3, 4]
            with pytest.raises(ContextError, match=r"mean: expected aggregation SUM .* got MEAN"):
                mean.gathered()
            for variable in (served, total, mean, own):
                with pytest.raises(ContextError, match="gathered: not in a scheduled function"):
                    c.schedule(variable.gathered).get()
