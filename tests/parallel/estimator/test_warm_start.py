"""Estimators that start with variables of a file, save by the clock, and train next to an evaluator."""

import itertools
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.estimator import EvalSpec, RunConfig, TrainSpec, WarmStartSettings
from tests.harness.linear_trainer import dataset, held_out, model_fn

VALUES = np.array([7.0, 8.0, 9.0])


class Begin(ms.train.Callback):
    """The weights with which training starts."""

    def on_train_begin(self, loop):
        self.weights = {one.name: one.numpy() for one in loop.strategy.extended.variables}


def start(strategy, folder, made=model_fn, **settings):
    estimator = ms.estimator.Estimator(made, folder, RunConfig(train_distribute=strategy), {"rate": 0.0}, **settings)
    begin = Begin()
    estimator.train(held_out, [begin], steps=1)
    return begin.weights


def save(path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            for name, value in (("w", VALUES), ("old", -VALUES), ("two", np.zeros(2)), ("statistic", np.float32(4))):
                ms.Variable(value, name=name)
        strategy.save(path)


@pytest.mark.ranks(1, 2)
def test_variables_of_a_file(mpi_tmp_path):
    folder, file = mpi_tmp_path, mpi_tmp_path / "step-0000000003.h5"
    save(file)

    def more(features, labels, mode, params):
        ms.Variable(0.0, name="statistic", trainable=False)
        return model_fn(features, labels, mode, params)

    cases = [
        (file, VALUES, 0),
        (folder, VALUES, 0),  # the newest file in it
        (WarmStartSettings(file, var_name_to_prev_var_name={"w": "old"}), -VALUES, 0),
        (WarmStartSettings(file, None), np.zeros(3), 0),
        (WarmStartSettings(file, ["stat"]), np.zeros(3), 4),
        (WarmStartSettings(file, ["w$", "stat.*"]), VALUES, 4),
    ]
    with ms.MultiWorkerMirroredStrategy() as strategy:
        assert start(strategy, folder / "cold")["w"].tolist() == [0, 0, 0]
    for number, (warm, w, statistic) in enumerate(cases):
        for _ in range(2):  # the second time there is a checkpoint
            with ms.MultiWorkerMirroredStrategy() as strategy:
                found = start(strategy, folder / str(number), more, warm_start_from=warm)
            assert (found["w"].tolist(), found["statistic"]) == (w.tolist(), statistic), warm
            warm = WarmStartSettings(file, "nothing of this name")
    if ms.cluster_resolver.MPIClusterResolver().cluster_spec().num_tasks("worker") > 1:
        with ms.ParameterServerStrategy(num_ps=1) as strategy:
            assert start(strategy, folder / "servers", warm_start_from=file)["w"].tolist() == VALUES.tolist()


@pytest.mark.ranks(1, 2)
def test_names_that_do_not_fit(mpi_tmp_path):
    file = mpi_tmp_path / "a.h5"
    save(file)
    cases = [
        (WarmStartSettings(file, "v"), r"WarmStartSettings: vars_to_warm_start: expected a name of w, got 'v'"),
        (WarmStartSettings(file, None, {"v": "w"}), r"var_name_to_prev_var_name: expected a name of w, got 'v'"),
        (
            WarmStartSettings(file, None, {"w": "x"}),
            r"a\.h5: expected 'x' with shape \(3,\) and dtype float64, got only old, ",
        ),
        (
            WarmStartSettings(file, None, {"w": "two"}),
            r"expected 'two' with shape \(3,\) and dtype float64, got shape \(2,\)",
        ),
        (
            mpi_tmp_path / "empty",
            "warm_start_from: expected a file, or a folder with a checkpoint, got the folder .*empty",
        ),
    ]
    (mpi_tmp_path / "empty").mkdir(exist_ok=True)
    for number, (warm, words) in enumerate(cases):
        with ms.MultiWorkerMirroredStrategy() as strategy, pytest.raises(ValueError, match=words):
            start(strategy, mpi_tmp_path / str(number), warm_start_from=warm)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("servers", [0, 1])
def test_files_by_the_clock(servers, mpi_tmp_path):
    def made(features, labels, mode, params):
        spec = model_fn(features, labels, mode, params)

        calls = itertools.count()

        def slow(x, y):  # the first step is fast
            time.sleep(0.02 if next(calls) else 0)
            spec.train_step(x, y)

        return ms.estimator.EstimatorSpec(mode, slow, spec.test_step, optimizer=spec.optimizer, metrics=spec.metrics)

    size = ms.cluster_resolver.MPIClusterResolver().cluster_spec().num_tasks("worker")
    if servers >= size:
        return
    make = (lambda: ms.ParameterServerStrategy(num_ps=1)) if servers else ms.MultiWorkerMirroredStrategy
    with make() as strategy:
        config = RunConfig(mpi_tmp_path, keep_checkpoint_max=0, save_checkpoints_secs=1.0, train_distribute=strategy)
        estimator = ms.estimator.Estimator(made, config=config)
        estimator.train(lambda: dataset().repeat(), max_steps=80)
        steps = strategy.broadcast_object(estimator.checkpoints.steps())
    assert (steps[0], steps[-1]) == (1, 80)
    gaps = np.diff(steps)
    assert (gaps <= 50).all()  # a step takes at least 0.02 seconds, of 1
    assert (gaps[1:] <= 10 * gaps[:-1]).all() and gaps.max() > 1


@pytest.mark.ranks(1)
def test_settings_that_contradict_each_other(mpi_tmp_path):
    assert RunConfig().save_checkpoints_steps == 1000
    assert RunConfig(save_checkpoints_secs=5).save_checkpoints_steps is None
    for settings, words in (
        ({"save_checkpoints_secs": 1.0, "save_checkpoints_steps": 5}, "or save_checkpoints_secs, got both"),
        ({"save_checkpoints_secs": 0}, "expected seconds > 0, got 0"),
        ({"save_checkpoints_steps": 0}, "save_checkpoints_steps"),
    ):
        with pytest.raises(ValueError, match=words):
            RunConfig(**settings)
    with ms.OneDeviceStrategy() as strategy:
        estimator = ms.estimator.Estimator(model_fn, mpi_tmp_path, RunConfig(train_distribute=strategy))
        training, best = TrainSpec(held_out, 1), ms.train.EarlyStopping("loss", restore_best_weights=True)
        with pytest.raises(
            ValueError, match="EvalSpec: input_fn: expected a function, as this rank evaluates, got None"
        ):
            ms.estimator.train_and_evaluate(estimator, training, EvalSpec())
        with pytest.raises(ValueError, match="EvalSpec: hooks: .*BestExporter"):
            ms.estimator.train_and_evaluate(estimator, training, EvalSpec(held_out, hooks=[best]))
        with pytest.raises(ValueError, match=r"Estimator\.train: hooks: .*BestExporter"):
            estimator.train(held_out, [best], steps=1)
