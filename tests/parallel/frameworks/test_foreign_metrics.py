"""Metrics of torchmetrics and Keras over ranks with unequal numbers of rows, and with none: the numbers of one process."""

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.interruptions import Interrupt, Stop

pytestmark = pytest.mark.ranks(1, 2, 3)
ROWS, BATCH = 50, 7


def rows():
    rng = np.random.default_rng(0)
    return rng.random(ROWS).astype(np.float32), (rng.random(ROWS) > 0.4).astype(np.int64)


def shares(strategy):
    """Rows of this rank: unequal numbers, and all on the last rank."""
    cuts = np.linspace(0, 1, strategy.size + 1) ** 2 * ROWS
    yield slice(*cuts.astype(int)[strategy.rank : strategy.rank + 2])
    yield slice(0, ROWS if strategy.rank == strategy.size - 1 else 0)


def batches(share):
    p, y = (array[share] for array in rows())
    for start in range(0, len(p), BATCH):
        yield p[start : start + BATCH], y[start : start + BATCH]


# torchmetrics


def collection():
    import torchmetrics
    from torchmetrics import classification as c
    from torchmetrics import regression as r

    return torchmetrics.MetricCollection(
        {
            "accuracy": c.BinaryAccuracy(),
            "f1": c.BinaryF1Score(),  # a group with accuracy: both have one state
            "confusion": c.BinaryConfusionMatrix(),
            "auroc": c.BinaryAUROC(),  # lists that are concatenated
            "auroc by thresholds": c.BinaryAUROC(thresholds=20),
            "squares": r.MeanSquaredError(),
            "pearson": r.PearsonCorrCoef(),  # states without a reduction: it combines them itself
            "spearman": r.SpearmanCorrCoef(),
            "r2": r.R2Score(),
            "variance": r.ExplainedVariance(),
            "sum and maximum": r.MeanAbsoluteError() + r.MeanSquaredError(),
            "classes": torchmetrics.wrappers.MinMaxMetric(c.BinaryAccuracy()),
        }
    )


def largest(reduction):
    import torch
    import torchmetrics

    class Largest(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("value", torch.tensor(-np.inf), dist_reduce_fx=reduction)
            self.add_state("seen", [], dist_reduce_fx=None)

        def update(self, p, y):
            self.value = torch.maximum(self.value, p.max())
            self.seen.append((p * (y + 1)).sum())

        def compute(self):
            return self.value + sum(self.seen)

    return Largest()


def last():
    import torch
    import torchmetrics

    class Last(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, p, y):
            self.value = p.mean()

        def compute(self):
            return self.value

    return Last()


def update(metric, share):
    import torch

    for p, y in batches(share):
        metric.update(torch.from_numpy(p), torch.from_numpy(y).float())


def close(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=3e-5, atol=1e-6, err_msg=name)


def test_torchmetrics_combine_by_what_they_declare():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchmetrics")
    alone = collection()
    update(alone, slice(None))
    expected = {name: value.numpy() for name, value in alone.compute().items()}
    p, y = rows()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        for share in shares(strategy):
            with strategy.scope():
                mine, ours = collection(), ms.train.Mean("rows")
            update(mine, share)
            for part, _ in batches(share):
                ours.update_state(part)
            for _ in range(2):  # the rank's own states stay
                close(ms.train.results([mine, ours], strategy), {**expected, "rows": p.mean()})
            if len(p[share]):
                assert mine["accuracy"].compute() == pytest.approx(((p > 0.5) == y)[share].mean())
            for reduction in ("max", lambda values: torch.max(values)):
                metric = largest(reduction)
                update(metric, share)
                found = ms.train.results([metric], strategy)
                assert found == {"Largest": pytest.approx(p.max() + (p * (y + 1)).sum(), rel=1e-6)}
        metric = last()
        update(metric, share)  # only the last rank has rows: the others do not count in a mean
        assert ms.train.results([metric], strategy) == {"Last": pytest.approx(p[-(ROWS % BATCH) :].mean())}
        mine.reset()
        with strategy.scope():
            assert ms.train.results([largest("max")]) == {"Largest": -np.inf}


def test_a_result_that_is_no_array_and_others_that_are_refused():
    torch = pytest.importorskip("torch")
    pytest.importorskip("torchmetrics")
    from torchmetrics.classification import BinaryAccuracy, BinaryROC

    curve = BinaryROC()
    for p, y in batches(slice(None)):
        curve.update(torch.from_numpy(p), torch.from_numpy(y))
    with pytest.raises(ms.errors.ContextError, match="expected a strategy, got the default one.*pass strategy"):
        ms.train.results([BinaryAccuracy()])
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with pytest.raises(
            TypeError, match=r"BinaryROC: compute: expected a number, an array or a dict of them, got tuple"
        ):
            ms.train.results([curve], strategy)
        with pytest.raises(ValueError, match="two of name 'BinaryAccuracy'"):
            ms.train.results([BinaryAccuracy(), BinaryAccuracy()], strategy)
        with pytest.raises(
            TypeError, match="Trainer: metrics: expected metrics of ms.train, torchmetrics or Keras, got str"
        ):
            ms.train.Trainer(strategy, None, metrics=["accuracy"])
    devices = ["cpu:0", "cpu:1"]
    with (
        ms.MultiWorkerMirroredStrategy(devices=devices) as strategy,
        pytest.raises(ms.errors.ContextError, match="2 replicas that update one object"),
    ):
        ms.train.results([BinaryAccuracy()], strategy)


# Trainer and Estimator


def trainer(strategy, metrics, **settings):
    """Updates metrics of either library with the rows of a replica, if there are any."""

    def step(p, y):
        for metric in metrics if len(p) else ():
            if hasattr(metric, "update_state"):
                metric.update_state(y[:, None], p[:, None])  # Keras takes an array with one axis for one row
            else:
                import torch

                metric.update(torch.from_numpy(p), torch.from_numpy(y).float())

    return ms.train.Trainer(strategy, step, step, metrics=metrics, **settings)


def dataset():
    return ms.data.from_arrays(rows()).shuffle(seed=1).batch(9)  # the last batch has 5 rows


@pytest.mark.parametrize("library", ["torchmetrics", "keras"])
def test_a_run_resumes_within_an_epoch_on_fewer_ranks(library, mpi_tmp_path):
    pytest.importorskip(library)
    from mpi4py import MPI

    def metrics():
        if library == "keras":
            import keras

            f1, auc = keras.metrics.F1Score(threshold=0.5, name="f1"), keras.metrics.AUC(name="auc")
            return [f1, auc, keras.metrics.BinaryAccuracy(name="accuracy")]
        return [collection()]

    with ms.MultiWorkerMirroredStrategy() as strategy:
        expected = trainer(strategy, metrics()).fit(strategy.distribute_dataset(dataset()), epochs=2)
        checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, every_steps=2)
        broken = trainer(strategy, metrics(), checkpoints=checkpoints, callbacks=[Stop(9)])
        with pytest.raises(Interrupt):
            broken.fit(strategy.distribute_dataset(dataset()), epochs=2)
        checkpoints.wait()
    first = MPI.COMM_WORLD.Split(int(MPI.COMM_WORLD.rank > 0), 0)
    if MPI.COMM_WORLD.rank == 0:
        with ms.MultiWorkerMirroredStrategy(comm=first) as strategy:
            checkpoints = ms.train.Checkpoints(strategy, mpi_tmp_path, every_steps=2)
            again = trainer(strategy, metrics(), checkpoints=checkpoints)
            found = again.fit(strategy.distribute_dataset(dataset()), epochs=2)
            assert again.loop.step == 12
            close(found, expected)
    first.Free()
    MPI.COMM_WORLD.Barrier()


@pytest.mark.parametrize("library", ["torchmetrics", "keras"])
def test_an_estimator_evaluates_them(library, mpi_tmp_path):
    pytest.importorskip(library)
    metric = {}

    def model_fn(features, labels, mode):
        ms.Variable(0.0, name="w")
        if library == "keras":
            import keras

            metric["one"] = keras.metrics.MeanSquaredError(name="mean_squared_error")
        else:
            from torchmetrics import MetricCollection
            from torchmetrics.regression import MeanSquaredError

            metric["one"] = MetricCollection({"mean_squared_error": MeanSquaredError()})
        made = trainer(ms.get_strategy(), [metric["one"]])
        return ms.estimator.EstimatorSpec(mode, made._steps["fit"], made._steps["fit"], metrics=[metric["one"]])

    with ms.MultiWorkerMirroredStrategy() as strategy:
        config = ms.estimator.RunConfig(mpi_tmp_path, train_distribute=strategy)
        estimator = ms.estimator.Estimator(model_fn, config=config)
        results, _ = ms.estimator.train_and_evaluate(
            estimator,
            ms.estimator.TrainSpec(dataset, max_steps=6),
            ms.estimator.EvalSpec(dataset, steps=None, throttle_secs=0),
        )
    p, y = rows()
    assert results == {"mean_squared_error": pytest.approx(np.square(p - y).mean(), rel=1e-6), "global_step": 6}


# Keras


def test_keras_metrics_combine_by_the_aggregation_of_their_variables():
    keras = pytest.importorskip("keras")
    k = keras.metrics
    makers = [
        k.AUC, k.BinaryAccuracy, k.Precision, k.Recall, k.MeanSquaredError, k.RootMeanSquaredError, k.R2Score,
        lambda: k.F1Score(threshold=0.5), lambda: k.BinaryIoU(target_class_ids=[0, 1]),
        lambda: k.MeanIoU(num_classes=2, sparse_y_pred=True),
        lambda: k.SensitivityAtSpecificity(0.5), lambda: k.MeanMetricWrapper(lambda y, p: p * y, name="product"),
    ]  # fmt: skip

    def updated(share):
        metrics = [make() for make in makers]
        for p, y in batches(share):
            for metric in metrics:
                labels = np.round(p) if isinstance(metric, k.MeanIoU) and not isinstance(metric, k.BinaryIoU) else p
                metric.update_state(y[:, None], labels[:, None])
        return metrics

    keras.utils.clear_session()
    expected = {one.name: np.array(keras.ops.convert_to_numpy(one.result())) for one in updated(slice(None))}
    with ms.MultiWorkerMirroredStrategy() as strategy:
        for share in shares(strategy):
            keras.utils.clear_session()
            mine = updated(share)
            for _ in range(2):
                close(ms.train.results(mine, strategy), expected)


def test_keras_variables_that_are_no_sums():
    keras = pytest.importorskip("keras")

    class Custom(keras.metrics.Metric):
        def __init__(self, start, aggregation):
            super().__init__(name="custom")
            self.start = start
            self.value = self.add_variable((), "zeros", aggregation=aggregation, name="value")

        def update_state(self, value):
            self.value.assign(value)

        def result(self):
            return self.value

        def reset_state(self):
            self.value.assign(self.start)

    with ms.MultiWorkerMirroredStrategy() as strategy:
        many = strategy.size > 1

        def result(start, aggregation, value):
            metric = Custom(start, aggregation)
            if value is not None:
                metric.update_state(value)
            return ms.train.results([metric], strategy)["custom"]

        last = strategy.rank == strategy.size - 1
        assert result(0.0, "mean", 3.0 + strategy.rank) == 3 + (strategy.size - 1) / 2
        assert result(0.0, "mean", 5.0 if last else None) == 5
        assert result(0.0, "only_first_replica", 3.0 + strategy.rank) == 3
        assert result(0.0, "none", 4.0) == 4
        with pytest.raises(
            ValueError, match="ms.train.results: custom: value: expected sums that start at 0, got -inf"
        ):
            result(-np.inf, "sum", 3.0)
        if many:
            with pytest.raises(
                ValueError, match="custom: value: expected an aggregation, got 'none', and values that differ"
            ):
                result(0.0, "none", 3.0 + strategy.rank)


def test_servers_have_no_rows():
    keras = pytest.importorskip("keras")
    from mpi4py import MPI

    if MPI.COMM_WORLD.size == 1:
        return
    with ms.ParameterServerStrategy(num_ps=1) as strategy:
        metric = keras.metrics.MeanSquaredError()
        found = trainer(strategy, [metric]).evaluate(strategy.distribute_dataset(dataset()))
    p, y = rows()
    assert found == {metric.name: pytest.approx(np.square(p - y).mean(), rel=1e-6)}
