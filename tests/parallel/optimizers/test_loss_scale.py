"""The LossScaleOptimizer: what it makes of the factor, of steps that overflow on one rank, and of a file."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from tests.harness.process_groups import set_layout

pytestmark = pytest.mark.ranks(2, 4)
SIZE = 70001  # more than a block


def made(**said):
    w = ms.Variable(np.ones(SIZE), dtype="float16", name="w")
    return w, ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(1.0), **said)


def step(strategy, optimizer, w, gradient):
    def train():
        w.grad[...] = gradient
        return optimizer.apply_gradients([(w.grad, w)])

    return int(np.max(strategy.local_results(strategy.run(train))[0]))


def test_gradients_too_small_for_16_bits_arrive():
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        w = ms.Variable(np.zeros(SIZE), dtype="float16")
        optimizer = ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(1024.0), initial_scale=2.0**15)
        tiny = 2.0**-30 / strategy.num_replicas_in_sync  # float16 has nothing below 2^-24
        for _ in range(4):
            step(strategy, optimizer, w, np.float16(optimizer.scale_loss(tiny)))
        assert (np.float32(w.numpy()) == -4 * 2.0**-20).all()
        assert (optimizer.iterations, optimizer.step_counter, float(optimizer.dynamic_scale)) == (4, 4, 2.0**15)


def test_one_ranks_infinity_leaves_the_step_out_everywhere():
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        w, optimizer = made(initial_scale=8.0, dynamic_growth_steps=2)
        last = strategy.rank == strategy.num_replicas_in_sync - 1
        scales = []
        for bad in (True, False, False, False, True, False):
            gradient = np.full(SIZE, optimizer.scale_loss(0.0))
            if bad and last:
                gradient[-1] = np.inf
            step(strategy, optimizer, w, gradient.astype(np.float16))
            scales.append(float(optimizer.dynamic_scale))
        assert scales == [4, 4, 8, 8, 4, 4]  # Keras's: halved at once, doubled after two finite steps
        assert (optimizer.iterations, optimizer.step_counter) == (4, 1)
        assert (w.numpy() == 1).all()


def test_a_nan_that_stays_is_told_once(caplog):
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        w, optimizer = made(initial_scale=8.0)
        for count, told in ((49, 0), (1, 1), (60, 1)):
            for _ in range(count):
                step(strategy, optimizer, w, np.full(SIZE, np.nan, np.float16))
            lines = [record.getMessage() for record in caplog.records if "LossScaleOptimizer" in record.getMessage()]
            assert len(lines) == (told if strategy.rank == 0 else 0)
            assert all(
                f"50 steps in a row were left out, for sums that are not finite: the factor is {2.0**-47:g}" in line
                for line in lines
            )
        assert optimizer.iterations == 0


def test_an_infinity_of_one_local_replica_counts_once():
    with ms.MultiWorkerMirroredStrategy(replicas=8) as strategy, strategy.scope():
        w = ms.Variable(np.ones(3))
        optimizer = ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(0.5), initial_scale=8.0)

        def train(bad):
            number = ms.get_replica_context().replica_id_in_sync_group
            gradient = np.full(3, np.inf if bad and number == 5 else optimizer.scale_loss(1 / 8))
            return optimizer.apply_gradients([(gradient, w)])

        for bad in (True, False):
            strategy.run(train, args=(bad,))
        assert (float(optimizer.dynamic_scale), optimizer.iterations, optimizer.step_counter) == (4.0, 1, 1)
        assert w.numpy().tolist() == [0.5] * 3


def test_settings_act_on_the_sums_of_losses_that_are_not_scaled():
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        number = strategy.num_replicas_in_sync
        w = ms.Variable(np.ones(4), name="w")
        optimizer = ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(0.5, global_clipnorm=1.0), initial_scale=64.0)
        step(strategy, optimizer, w, np.full(4, 64 * 10.0 / number))  # a norm of 20, clipped to 1: 0.5 each
        assert np.allclose(w.numpy(), 1 - 0.5 * 0.5, rtol=1e-12)


def test_a_file_has_the_factor_and_the_count(tmp_path):
    path = MPI.COMM_WORLD.bcast(str(tmp_path / "state.h5"))
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        w, optimizer = made(initial_scale=8.0, dynamic_growth_steps=3)
        for gradient in (np.inf, 1.0, 1.0):
            step(strategy, optimizer, w, np.full(SIZE, gradient, np.float16))
        strategy.save(path)
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        w, optimizer = made(initial_scale=8.0, dynamic_growth_steps=3)
        strategy.restore(path)
        assert (float(optimizer.dynamic_scale), optimizer.step_counter, optimizer.iterations) == (4.0, 2, 2)
        step(strategy, optimizer, w, np.ones(SIZE, np.float16))
        assert (float(optimizer.dynamic_scale), optimizer.step_counter) == (8.0, 0)


def test_wrong_use_is_told():
    inner = ms.optimizers.SGD(0.1, loss_scale_factor=2.0)
    with pytest.raises(ValueError, match=r"inner_optimizer: expected an optimizer without loss_scale_factor, got 2\.0"):
        ms.optimizers.LossScaleOptimizer(inner)
    with pytest.raises(TypeError, match=r"expected an optimizer of ms\.optimizers, got float"):
        ms.optimizers.LossScaleOptimizer(0.5)
    with pytest.raises(ValueError, match="loss_scale_factor: expected a finite number > 0, got 0"):
        ms.optimizers.SGD(0.1, loss_scale_factor=0)
    outside = ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(0.1))
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        w = ms.Variable(np.ones(3))
        with pytest.raises(ValueError, match="expected an optimizer that was made in the strategy's scope"):
            step(strategy, outside, w, np.ones(3))


def test_ranks_with_other_factors_are_told():
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        w = ms.Variable(np.ones(3))
        optimizer = ms.optimizers.SGD(0.1, loss_scale_factor=2.0 + strategy.rank)
        with pytest.raises(ms.errors.CollectiveMismatchError, match=r"loss_scale_factor=3\.0"):
            step(strategy, optimizer, w, np.ones(3))


def test_a_factor_stays_one_from_which_training_can_go_on():
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        w = ms.Variable(np.ones(3), dtype="float64")
        optimizer = ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(0.5), dynamic_growth_steps=1)
        for factor, gradient in ((2.0**127, 0.0), (2.0**-126, np.inf)):
            optimizer.dynamic_scale.assign(factor)
            step(strategy, optimizer, w, np.full(3, gradient))
            assert (
                float(optimizer.dynamic_scale) == factor
            )  # neither doubled to infinity nor, in many steps, halved to 0


@pytest.mark.parametrize("aggregate", [True, False])
def test_gradients_that_were_summed_before(aggregate):
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        w = ms.Variable(np.zeros(3))
        optimizer = ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(1.0), initial_scale=8.0)

        def train(value):
            pairs = [(np.full(3, optimizer.scale_loss(value)), w)]
            return optimizer.apply_gradients(pairs, experimental_aggregate_gradients=aggregate)

        for value in (1.0, np.inf, 0.5):
            strategy.run(train, args=(value,))
        assert w.numpy().tolist() == [-1.5 * (strategy.num_replicas_in_sync if aggregate else 1)] * 3
        assert (float(optimizer.dynamic_scale), optimizer.iterations) == (4.0, 2)


@pytest.mark.parametrize("layout", ["private", "nodes"])
def test_a_step_that_is_left_out_begins_no_round_of_local_steps(layout, monkeypatch):
    set_layout(layout, monkeypatch)
    how = ms.LocalSteps(2, outer_learning_rate=1.0, outer_momentum=0.0)
    with ms.MultiWorkerMirroredStrategy(local_steps=how) as strategy, strategy.scope():
        w = ms.Variable(np.zeros(5))
        optimizer = ms.optimizers.LossScaleOptimizer(ms.optimizers.SGD(1.0), initial_scale=8.0)
        other = ms.optimizers.SGD(1.0)
        share, last = 1 / strategy.num_replicas_in_sync, strategy.rank == strategy.size - 1

        def train(value):
            gradient = np.full(5, optimizer.scale_loss(share) * (value if last else 1.0))
            optimizer.apply_gradients([(gradient, w)])

        strategy.run(train, args=(np.inf,))
        assert not strategy.nodes_differ
        w.assign(np.zeros(5))  # refused while nodes differ
        strategy.run(lambda: other.apply_gradients([(np.zeros(5), w)]))  # in a round of its own
        strategy.outer_step()
        for value in (1.0, np.inf, 1.0):  # two updates are a round
            assert not strategy.nodes_differ or value != 1.0 or optimizer.iterations == 1
            strategy.run(train, args=(value,))
        assert not strategy.nodes_differ
        np.testing.assert_allclose(w.numpy(), -2.0)
        assert float(optimizer.dynamic_scale) == 2.0
