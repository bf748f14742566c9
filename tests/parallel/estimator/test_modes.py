"""A model function with a branch for each mode, as in TensorFlow: it is called again, and variables are shared by name."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.estimator import EstimatorSpec, EvalSpec, ModeKeys, RunConfig, TrainSpec
from tests.harness.linear_trainer import dataset, held_out, rows

CALLS = []


def model_fn(features, labels, mode, params):
    CALLS.append(mode)
    w = ms.Variable(np.zeros(features.shape[1:]), name="w")
    ms.Variable(0.0, trainable=False)  # the first without a name
    offset = ms.Variable(np.full((), 0.5), trainable=False)  # the second
    if mode == ModeKeys.PREDICT:
        return EstimatorSpec(
            mode, predict_step=lambda x, y: {"value": x @ w.array, "offset": np.full(len(x), offset.array)}
        )
    loss = ms.train.MeanSquaredError("loss")
    if mode == ModeKeys.EVAL:
        largest = ms.train.Mean("mean prediction")

        def test_step(x, y):
            loss.update_state(y, x @ w.array)
            largest.update_state(x @ w.array)

        return EstimatorSpec(mode, test_step=test_step, metrics=[loss, largest])
    optimizer = ms.optimizers.SGD(params["rate"])

    def train_step(x, y):
        error = x @ w.array - y
        loss.update_state(y, x @ w.array)
        optimizer.apply_gradients([(x.T @ error / ms.global_batch_size(), w)])

    return EstimatorSpec(mode, train_step, optimizer=optimizer, metrics=[loss])


def estimator(folder, strategy, model_fn=model_fn):
    config = RunConfig(model_dir=folder, train_distribute=strategy, save_checkpoints_steps=5)
    return ms.estimator.Estimator(model_fn, config=config, params={"rate": 0.05})


@pytest.fixture(autouse=True)
def calls():
    CALLS.clear()


@pytest.mark.ranks(1, 2, 3)
def test_each_mode_has_the_weights_of_training(mpi_tmp_path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        made = estimator(mpi_tmp_path, strategy)
        made.train(lambda: dataset().repeat(), max_steps=10)
        results = made.evaluate(held_out)
        found = made.predict(held_out)
        made.evaluate(held_out)
        assert CALLS == [ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT]
        weights = made.get_variable_value("w")
        assert np.abs(weights).min() > 0
        np.testing.assert_allclose(found["value"], rows()[0] @ weights, rtol=1e-12)
        np.testing.assert_array_equal(found["offset"], np.full(len(found["offset"]), 0.5))
        assert results["mean prediction"] == pytest.approx((rows()[0] @ weights).mean(), rel=1e-9)
        assert made.get_variable_names() == ["Variable", "Variable_1", "metric/loss", "w"]


@pytest.mark.ranks(1, 2)
def test_a_run_that_resumes_has_the_variables_of_its_evaluations(mpi_tmp_path):
    lines = []
    for end in (10, 20):
        with ms.MultiWorkerMirroredStrategy() as strategy:
            made = estimator(mpi_tmp_path, strategy)
            training = TrainSpec(lambda: dataset().repeat(), max_steps=end)
            results, _ = ms.estimator.train_and_evaluate(
                made, training, EvalSpec(held_out, steps=None, throttle_secs=0)
            )
            lines.append(results)
            assert made.get_variable_names() == ["Variable", "Variable_1", "metric/loss", "metric/mean prediction", "w"]
    assert [line["global_step"] for line in lines] == [10, 20]
    assert lines[1]["loss"] < lines[0]["loss"]
    assert CALLS == [ModeKeys.TRAIN, ModeKeys.EVAL] * 2


@pytest.mark.ranks(1, 2)
def test_training_goes_on_after_an_evaluation_that_has_more_metrics(mpi_tmp_path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        made = estimator(mpi_tmp_path, strategy)
        first = made.train(lambda: dataset().repeat(), steps=10).evaluate(held_out)
        second = made.train(lambda: dataset().repeat(), steps=10).evaluate(held_out)
        assert (first["global_step"], second["global_step"]) == (10, 20)
        assert second["loss"] < first["loss"]
    with ms.MultiWorkerMirroredStrategy() as strategy:
        made = estimator(mpi_tmp_path, strategy)
        made.evaluate(held_out)
        assert made.train(lambda: dataset().repeat(), steps=5).evaluate(held_out)["global_step"] == 25


@pytest.mark.ranks(1)
def test_an_estimator_that_only_evaluates_needs_no_optimizer(mpi_tmp_path):
    with ms.OneDeviceStrategy() as strategy:
        estimator(mpi_tmp_path, strategy).train(lambda: dataset().repeat(), max_steps=5)
    with ms.OneDeviceStrategy() as strategy:
        made = estimator(mpi_tmp_path, strategy)
        results = made.evaluate(held_out)
        assert results["global_step"] == 5
        weights = made.get_variable_value("w")
        assert results["mean prediction"] == pytest.approx((rows()[0] @ weights).mean(), rel=1e-9)


@pytest.mark.ranks(1)
def test_a_variable_of_another_shape_in_another_mode_is_refused(mpi_tmp_path):
    def grows(features, labels, mode, params):
        ms.Variable(np.zeros(2 if mode == ModeKeys.TRAIN else 3), name="w")
        return EstimatorSpec(mode, (lambda x, y: None) if mode == ModeKeys.TRAIN else None)

    with ms.OneDeviceStrategy() as strategy:
        made = estimator(mpi_tmp_path, strategy, grows)
        made.train(lambda: dataset().repeat(), max_steps=5)
        words = r"Estimator: model_fn: variable 'w': expected shape \(2,\), as model_fn gave it in another mode, got shape \(3,\)"
        with pytest.raises(ValueError, match=words):
            made.evaluate(held_out)


@pytest.mark.ranks(1, 2)
def test_a_file_without_the_models_weights_is_refused(mpi_tmp_path):
    def other(features, labels, mode, params):
        ms.Variable(np.zeros(features.shape[1:]), name=params["name"])
        return model_fn(features, labels, mode, params)

    with ms.MultiWorkerMirroredStrategy() as strategy:
        estimator(mpi_tmp_path, strategy).train(lambda: dataset().repeat(), max_steps=5)
    for start in (ModeKeys.EVAL, ModeKeys.PREDICT):
        with ms.MultiWorkerMirroredStrategy() as strategy:
            made = estimator(mpi_tmp_path, strategy, other)
            made.params["name"] = "more"
            with pytest.raises(
                ValueError, match=r"step-0000000005.h5: expected 'more' with shape .*, got only Variable"
            ):
                made.evaluate(held_out) if start == ModeKeys.EVAL else made.predict(held_out)
            with pytest.raises(ValueError, match="expected 'more'"):  # and not trained from its first weights
                made.train(lambda: dataset().repeat(), max_steps=10)
