"""Estimator: a model function trained, evaluated and used by its folder, under every strategy, the same as by Trainer.fit."""

import json

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.estimator import EvalSpec, RunConfig, TrainSpec
from tests.harness.linear_trainer import dataset, held_out, model_fn, rows, trainer
from tests.harness.strategies import STRATEGIES, layout_for, made


def estimator(strategy, folder, **settings):
    settings = {"save_checkpoints_steps": 5, **settings}
    config = RunConfig(model_dir=folder, train_distribute=strategy, **settings)
    return ms.estimator.Estimator(model_fn, config=config, params={"rate": 0.05})


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_history_is_that_of_fit_and_each_rank_stops_with_it(name, mpi_tmp_path):
    from mpi4py import MPI

    devices = layout_for(name, MPI.COMM_WORLD.size)
    if devices is None:
        pytest.skip("the strategy takes one rank")
    with made(name, devices) as strategy:
        by_fit, w = trainer(strategy, 0.05, callbacks=[ms.train.EarlyStopping("val_loss", min_delta=0.05)])
        validation = strategy.distribute_dataset(held_out())
        history = by_fit.fit(strategy.distribute_dataset(dataset()), 50, validation_data=validation)
        epochs, weights = len(history["loss"]), w.numpy()
        assert 1 < epochs < 50
    with made(name, devices) as strategy:
        made_of = estimator(strategy, mpi_tmp_path)
        stop = ms.train.EarlyStopping("loss", min_delta=0.05)
        evaluation = EvalSpec(held_out, steps=None, hooks=[stop], throttle_secs=0)
        results, exports = ms.estimator.train_and_evaluate(
            made_of, TrainSpec(lambda: dataset().repeat(), max_steps=250), evaluation
        )
        assert results == {"loss": history["val_loss"][-1], "global_step": 5 * epochs} and exports == []
        assert made_of.get_variable_names() == ["metric/loss", "w"]
        np.testing.assert_array_equal(made_of.get_variable_value("w"), weights)
        lines = [json.loads(line) for line in (mpi_tmp_path / "train.jsonl").read_text().splitlines()]
        assert [line["loss"] for line in lines] == history["loss"]
        lines = [json.loads(line) for line in (mpi_tmp_path / "eval" / "results.jsonl").read_text().splitlines()]
        assert [line["loss"] for line in lines] == history["val_loss"]
        np.testing.assert_allclose(made_of.predict(held_out), rows()[0] @ weights, rtol=1e-12)


@pytest.mark.ranks(2, 3)
def test_workers_of_servers_train_and_evaluate(mpi_tmp_path):
    def run(steps):
        with ms.ParameterServerStrategy(num_ps=1, max_staleness=0) as strategy:
            made_of = estimator(strategy, mpi_tmp_path / str(steps[0]))
            for end in steps:
                results, _ = ms.estimator.train_and_evaluate(
                    made_of,
                    TrainSpec(lambda: dataset().repeat(), max_steps=end),
                    EvalSpec(held_out, steps=None, throttle_secs=0),
                )
            assert len(set(strategy.all_gather_object(repr(results)))) == 1
            return results

    whole = run([8])
    assert whole["global_step"] == 8 and whole["loss"] < 1.2
    assert run([5, 8]) == whole


@pytest.mark.ranks(1, 2)
def test_a_run_in_parts_has_the_bits_of_a_whole_one(mpi_tmp_path):
    def train(folder, ends):
        for end in ends:
            with ms.MultiWorkerMirroredStrategy() as strategy:
                made_of = estimator(strategy, mpi_tmp_path / folder)
                made_of.train(lambda: dataset().repeat(), max_steps=end)
                assert made_of.evaluate(held_out)["global_step"] == end
                last = made_of.get_variable_value("w")
        return last

    np.testing.assert_array_equal(train("parts", [3, 10, 13]), train("whole", [13]))


@pytest.mark.ranks(1, 2)
def test_steps_count_from_the_checkpoint_and_data_that_end_end_training(mpi_tmp_path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        made_of = estimator(strategy, mpi_tmp_path, keep_checkpoint_max=0)
        made_of.train(dataset, steps=2).train(dataset, steps=2).train(dataset)
        assert made_of.checkpoints.steps() == [2, 4, 9]
        made_of.train(lambda input_context: dataset().repeat(), steps=1)
        assert made_of.checkpoints.steps()[-1] == 10
        results = made_of.evaluate(held_out, checkpoint_path=made_of.checkpoints.path(4), name="old")
        assert results["global_step"] == 4
        strategy.barrier()  # one rank has written it
        assert json.loads((mpi_tmp_path / "eval_old" / "results.jsonl").read_text()) == results
        with pytest.raises(ValueError, match=r"steps: expected steps or max_steps, got both"):
            made_of.train(dataset, steps=1, max_steps=2)
        with pytest.raises(ValueError, match=r"steps: expected a number of batches"):
            made_of.evaluate(lambda: dataset().repeat())
        with pytest.raises(ValueError, match=r"name: expected metric/loss, w, got 'v'"):
            made_of.get_variable_value("v")


@pytest.mark.ranks(1, 2)
def test_exporters_keep_the_last_and_the_best(mpi_tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")

    class Shake(ms.train.Callback):
        """Makes the model worse in the third interval."""

        def on_epoch_end(self, loop, logs):
            if loop.step == 6:
                loop.optimizer.learning_rate = 10.0

    exporters = [
        ms.estimator.FinalExporter("final"), ms.estimator.LatestExporter("latest", exports_to_keep=2),
        ms.estimator.BestExporter("best", exports_to_keep=1),
    ]  # fmt: skip
    with ms.MultiWorkerMirroredStrategy() as strategy:
        made_of = estimator(strategy, mpi_tmp_path, save_checkpoints_steps=3)
        _, exports = ms.estimator.train_and_evaluate(
            made_of,
            TrainSpec(lambda: dataset().repeat(), max_steps=10, hooks=[Shake()]),
            EvalSpec(held_out, steps=None, throttle_secs=0, exporters=exporters),
        )
        found = {path.parent.name: path for path in exports}
        assert set(found) == {"final", "latest"}
        last = safetensors.load_file(found["final"])["w"]
        np.testing.assert_array_equal(last, made_of.get_variable_value("w"))
        folder = mpi_tmp_path / "export"
        strategy.barrier()
        names = {name: sorted(p.name for p in (folder / name).glob("*.safetensors")) for name in ("latest", "best")}
        assert names == {
            "latest": ["step-0000000009.safetensors", "step-0000000010.safetensors"],
            "best": ["step-0000000006.safetensors"],
        }


@pytest.mark.ranks(1)
def test_wrong_use_is_named(mpi_tmp_path):
    with pytest.raises(ValueError, match=r"Estimator: model_dir: expected a folder"):
        ms.estimator.Estimator(model_fn)
    with pytest.raises(TypeError, match=r"model_fn: expected to take features, labels, mode, params, config, got x"):
        ms.estimator.Estimator(lambda x: None, mpi_tmp_path)
    with pytest.raises(ValueError, match=r"save_checkpoints_steps: expected 1 or more, got 0"):
        RunConfig(save_checkpoints_steps=0)
    with ms.OneDeviceStrategy() as strategy:
        made_of = ms.estimator.Estimator(lambda mode: None, mpi_tmp_path, RunConfig(train_distribute=strategy))
        with pytest.raises(TypeError, match=r"model_fn: expected to return an EstimatorSpec, got NoneType"):
            made_of.train(dataset)
        made_of = estimator(strategy, mpi_tmp_path)
        with pytest.raises(ValueError, match=r"expected a checkpoint in it, got no file. Train first"):
            made_of.evaluate(held_out)
        with pytest.raises(TypeError, match=r"input_fn: expected to return a dataset of ms.data, got list"):
            made_of.train(lambda: [1])
