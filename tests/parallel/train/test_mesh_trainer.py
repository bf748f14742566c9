"""Trainer, Checkpoints, Monitor and metrics under a MeshStrategy, with layers that the ranks of a replica divide."""

import html
import json
import re

import numpy as np
import pytest

import mpistrat as ms
from tests.harness import meshes
from tests.harness.interruptions import Interrupt, Stop

EPOCHS = 2  # of six steps each


def outputs(weights, x):
    return np.maximum(x @ weights["w1"] + weights["b1"], 0) @ weights["w2"] + weights["b2"]


class Run:
    """A trainer of the network, with metrics over rows."""

    def __init__(self, strategy, **settings):
        self.network = network = meshes.Network(strategy)
        with strategy.scope():
            self.loss, self.rows = ms.train.Mean("loss"), ms.train.Sum("rows")

        def predict_step(x, y):
            w1, b1, w2, b2 = (v.array for v in network.variables.values())
            mesh = ms.get_replica_context().mesh
            return mesh.all_reduce("SUM", np.maximum(x @ w1 + b1, 0) @ w2, mesh_axis="model") + b2

        def test_step(x, y):
            self.loss.update_state(((predict_step(x, y) - y) ** 2).sum(axis=1))
            self.rows.update_state(np.ones(len(x)))

        def train_step(x, y):
            test_step(x, y)
            network.step(x, y)

        optimizer, metrics = network.optimizer, [self.loss, self.rows]
        self.trainer = ms.train.Trainer(
            strategy, train_step, test_step, predict_step, optimizer=optimizer, metrics=metrics, **settings
        )

    def check(self):
        """The weights, what it evaluates and what it predicts are those of NumPy."""
        _, weights = meshes.expected()
        for name, variable in self.network.variables.items():
            np.testing.assert_allclose(variable.gathered(), weights[name], rtol=1e-9, atol=1e-12)
        strategy, (x, y) = self.network.strategy, meshes.data()
        some = ms.data.from_arrays((x, y)).batch(7)  # the last batch has three rows
        found = self.trainer.evaluate(strategy.distribute_dataset(some))
        assert found["rows"] == len(x)
        wanted = outputs(weights, x)
        np.testing.assert_allclose(found["loss"], ((wanted - y) ** 2).sum(axis=1).mean(), rtol=1e-9)
        np.testing.assert_allclose(self.trainer.predict(strategy.distribute_dataset(some)), wanted, rtol=1e-9)


def dataset():
    return ms.data.from_arrays(meshes.data()).batch(meshes.BATCH)


@pytest.mark.ranks(1, 4)
def test_a_run_that_was_stopped_goes_on_in_any_mesh(mpi_tmp_path):
    """Interrupted within epochs; results of epochs are those of a run that nobody stopped."""
    from mpi4py import MPI

    every = meshes.meshes(MPI.COMM_WORLD.size)
    with ms.MeshStrategy(axes=every[0]) as strategy:
        run = Run(strategy)
        wanted = run.trainer.fit(strategy.distribute_dataset(dataset()), EPOCHS)
        run.check()
        assert wanted["rows"] == [len(meshes.data()[0])] * EPOCHS
    folder = mpi_tmp_path / "checkpoints"
    for stop, axes in zip((3, 9), (every * 2)[:2], strict=True):
        with ms.MeshStrategy(axes=axes) as strategy:
            run = Run(
                strategy, callbacks=[Stop(stop)], checkpoints=ms.train.Checkpoints(strategy, folder, every_steps=2)
            )
            with pytest.raises(Interrupt):
                run.trainer.fit(strategy.distribute_dataset(dataset()), EPOCHS)
    with ms.MeshStrategy(axes=every[-1]) as strategy:
        run = Run(strategy, checkpoints=ms.train.Checkpoints(strategy, folder))
        history = run.trainer.fit(strategy.distribute_dataset(dataset()), EPOCHS)
        run.check()
        assert history["rows"] == wanted["rows"]
        np.testing.assert_allclose(history["loss"], wanted["loss"], rtol=1e-9)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("axes", [{"data": 2, "model": 2}, {"model": 4}])
def test_callbacks_and_the_monitor(mpi_tmp_path, axes):
    """All ranks decide alike; one writes, and knows of all; rows are counted once, however many ranks a replica has."""

    class Stops(ms.train.Callback):
        def on_epoch_end(self, loop, logs):
            loop.stop_training |= loop.epoch == 2 and loop.strategy.rank == 3

    folder = mpi_tmp_path / "run"
    with ms.MeshStrategy(axes=axes) as strategy:
        watch = ms.monitor(folder, tensorboard=False, progress=False)
        plateau = ms.train.ReduceLROnPlateau("loss", patience=0, factor=0.5, min_delta=1e9)
        run = Run(strategy, callbacks=[Stops(), plateau, watch])
        history = run.trainer.fit(
            strategy.distribute_dataset(dataset()), 5, validation_data=strategy.distribute_dataset(dataset())
        )
        rate = float(run.network.optimizer.learning_rate)
        assert strategy.all_gather_object((history, rate)) == [(history, rate)] * 4
        assert history["rows"] == history["val_rows"] == [len(meshes.data()[0])] * len(history["loss"])
        assert rate < 0.01
        strategy.barrier()
        found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["val_loss"] for line in found] == history["val_loss"]
        page = (folder / "run.html").read_text()
        replicas = axes.get("data", 1)
        assert f'<th scope="row">replicas</th><td>{replicas}</td>' in page
        assert html.escape(repr(strategy)) in page
        shares = page.partition("Shares of time by rank</caption>")[2].partition("</table>")[0]
        assert re.findall(r'<th scope="row">(\d+)<', shares) == ["0", "1", "2", "3"]


@pytest.mark.ranks(4)
def test_values_of_replicas_are_counted_once():
    with ms.MeshStrategy(axes={"data": 2, "model": 2}) as strategy:
        value = strategy.run(lambda: float(ms.get_replica_context().replica_id_in_sync_group + 1))
        assert strategy.reduce("SUM", value, axis=None) == 3
        assert strategy.reduce("MEAN", value, axis=None) == 1.5
        assert strategy.gather(np.array([value]), axis=0).tolist() == [1, 2]
        assert strategy.local_results(value) == (value,)
