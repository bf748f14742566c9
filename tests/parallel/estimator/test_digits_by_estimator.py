"""Real digits by fit and by an Estimator, under every strategy: the same epochs, the same early stop, the same history."""

import json

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.estimator import Estimator, EstimatorSpec, EvalSpec, RunConfig, TrainSpec, train_and_evaluate
from mpistrat.examples import digits_data
from mpistrat.examples.digits_model import Digits
from tests.harness.strategies import STRATEGIES, layout_for, made

TRAINING, BATCH, MOST = 600, 100, 12  # rows; rows; epochs


def rows(first, last):
    pixels, labels = digits_data.load()
    return ms.data.from_arrays(((pixels[first:last] / 16), labels[first:last].astype(np.int64)))


def training():
    return rows(0, TRAINING).shuffle(seed=3).batch(BATCH)


def held_out():
    return rows(TRAINING, TRAINING + 310).batch(BATCH)


def model():
    """The steps, optimizer and metrics of a network, made in the current scope."""
    network = Digits(0, np.float64)
    optimizer = ms.optimizers.Adam(3e-3)
    loss = ms.train.SparseCategoricalCrossentropy("loss", from_logits=True)
    accuracy = ms.train.SparseCategoricalAccuracy("accuracy")

    def note(labels, scores):
        loss.update_state(labels, scores)
        accuracy.update_state(labels, scores)

    def train_step(images, labels):
        note(labels, network.scores_and_gradients(images, labels))
        optimizer.apply_gradients([(v.grad, v) for v in network.variables])

    def test_step(images, labels):
        note(labels, network.forward(images)[-1])

    return train_step, test_step, optimizer, [loss, accuracy]


def model_fn(features, labels, mode):
    assert features.shape[1:] == (64,) and np.dtype(labels.dtype) == np.int64
    train_step, test_step, optimizer, metrics = model()
    return EstimatorSpec(mode, train_step, test_step, optimizer=optimizer, metrics=metrics)


def by_fit(strategy):
    with strategy.scope():
        train_step, test_step, optimizer, metrics = model()
    stop = ms.train.EarlyStopping("val_loss", min_delta=0.05)
    trainer = ms.train.Trainer(strategy, train_step, test_step, optimizer=optimizer, metrics=metrics, callbacks=[stop])
    return trainer.fit(
        strategy.distribute_dataset(training()), MOST, validation_data=strategy.distribute_dataset(held_out())
    )


@pytest.mark.ranks(1, 2, 3, timeout=150)
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy(name, mpi_tmp_path):
    from mpi4py import MPI

    devices = layout_for(name, MPI.COMM_WORLD.size)
    if devices is None:
        pytest.skip("the strategy takes one rank")
    with made(name, devices) as strategy:
        history = by_fit(strategy)
        epochs = len(history["loss"])
        assert 2 < epochs < MOST and history["val_accuracy"][-1] > 0.9
        assert len(set(strategy.all_gather_object(json.dumps(history)))) == 1
    with made(name, devices) as strategy:
        config = RunConfig(mpi_tmp_path, save_checkpoints_steps=TRAINING // BATCH, train_distribute=strategy)
        stop = ms.train.EarlyStopping("loss", min_delta=0.05)
        results, _ = train_and_evaluate(
            Estimator(model_fn, config=config),
            TrainSpec(lambda: training().repeat(), max_steps=MOST * TRAINING // BATCH),
            EvalSpec(held_out, steps=None, hooks=[stop], throttle_secs=0),
        )
        assert results["global_step"] == epochs * (TRAINING // BATCH)
        found = {
            file: [json.loads(line) for line in (mpi_tmp_path / file).read_text().splitlines()]
            for file in ("train.jsonl", "eval/results.jsonl")
        }
        for key in ("loss", "accuracy"):
            assert [line[key] for line in found["train.jsonl"]] == history[key]
            assert [line[key] for line in found["eval/results.jsonl"]] == history[f"val_{key}"]


@pytest.mark.ranks(2, 3, timeout=150)
def test_servers_without_staleness_learn_the_same(mpi_tmp_path):
    with ms.ParameterServerStrategy(num_ps=1, max_staleness=0) as strategy:
        history = by_fit(strategy)
        assert len(set(strategy.all_gather_object(json.dumps(history)))) == 1
        assert 2 < len(history["loss"]) <= MOST and history["val_accuracy"][-1] > 0.8
