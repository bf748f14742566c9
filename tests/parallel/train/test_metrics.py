"""Metrics of all replicas: those of all rows together, under every strategy, on every layout."""

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.strategies import STRATEGIES, layout_for, made

ROWS, BATCH = 50, 12  # the last batch has 2 rows: some replicas none


def rows():
    rng = np.random.default_rng(0)
    return rng.integers(0, 2, ROWS), rng.random(ROWS), rng.random(ROWS)


def metrics():
    return [
        ms.train.AUC(),
        ms.train.Precision(),
        ms.train.MeanSquaredError(),
        ms.train.Mean("weighted"),
        ms.train.Sum("n"),
    ]


def update(these, labels, scores, weights):
    *of_both, weighted, count = these
    for metric in of_both:
        metric.update_state(labels, scores)
    weighted.update_state(scores, sample_weight=weights)
    count.update_state(np.ones(len(labels)))


@pytest.fixture
def expected():
    these = metrics()
    update(these, *rows())
    return ms.train.results(these)


def passed(strategy, these):
    data = strategy.distribute_dataset(ms.data.from_arrays(rows()).shuffle(seed=3).batch(BATCH))
    for batch in data:
        strategy.run(lambda *batch: update(these, *batch), args=batch)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", STRATEGIES)
def test_results_are_those_of_all_rows(name, expected):
    from mpi4py import MPI

    devices = layout_for(name, MPI.COMM_WORLD.size)
    if devices is None:
        pytest.skip("the strategy takes one rank")
    with made(name, devices) as strategy:
        with strategy.scope():
            these = metrics()
        for _ in range(2):
            passed(strategy, these)
            found = ms.train.results(these)
            assert found == pytest.approx(expected, rel=1e-12)
            assert these[0].result() == found["auc"]
            assert len(set(strategy.all_gather_object(repr(found)))) == 1
            for metric in these:
                metric.reset_state()
        with strategy.scope():
            own = ms.train.Sum("own")
        seen = strategy.run(lambda: (own.update_state(2.0), own.result())[1])
        assert strategy.local_results(seen) == (2.0,) * len(strategy.extended.worker_devices)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("settings", [{}, {"max_staleness": 0}])
def test_servers_and_workers_have_the_results_of_all_workers_rows(settings, expected):
    with ms.ParameterServerStrategy(num_ps=1, **settings) as strategy:
        with strategy.scope():
            these = metrics()
        passed(strategy, these)
        assert ms.train.results(these) == pytest.approx(expected, rel=1e-12)


@pytest.mark.ranks(2)
def test_outside_of_steps_a_rank_adds_what_it_has():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            loss = ms.train.Mean("loss")
        loss.update_state(np.full(1 + strategy.rank, 3.0 * strategy.rank))
        assert loss.result() == 2.0  # 0, 3, 3


@pytest.mark.ranks(2)
def test_other_metrics_on_one_rank_are_told_on_all():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            these = [ms.train.Mean("a"), ms.train.AUC(name="b")]
        with pytest.raises(ms.errors.CollectiveMismatchError):
            ms.train.results(these[strategy.rank :])
