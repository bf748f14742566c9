"""`ms.train` around the steps of frameworks: their loops' numbers, with callbacks and checkpoints."""

import numpy as np
import pytest

import mpistrat as ms
from tests.harness.interruptions import Interrupt, Stop

pytestmark = pytest.mark.ranks(1, 2)


def torch_run(folder=None, stop=None, epochs=6):
    """The history and weights of a module of torch that is trained with a plateau callback."""
    import torch

    from tests.harness.torch_training import dataset, make, mlp

    with ms.MultiWorkerMirroredStrategy() as strategy:
        module = mlp()
        optimizer = make("AdamW", module)
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, optimizer)
            metrics = [
                ms.train.SparseCategoricalCrossentropy("loss", from_logits=True),
                ms.train.SparseCategoricalAccuracy("accuracy"),
            ]

        def step(x, y):
            optimizer.zero_grad()
            logits = module(torch.from_numpy(x))
            torch.nn.functional.cross_entropy(logits, torch.from_numpy(y)).backward()
            optimizer.step()
            for metric in metrics:
                metric.update_state(y, logits.detach())

        callbacks = [ms.train.ReduceLROnPlateau("loss", patience=1, min_delta=0.05, factor=0.5), Stop(stop)]
        checkpoints = None if folder is None else ms.train.Checkpoints(strategy, folder, every_steps=4)
        trainer = ms.train.Trainer(
            strategy, step, optimizer=optimizer, metrics=metrics, callbacks=callbacks, checkpoints=checkpoints
        )
        history = trainer.fit(strategy.distribute_dataset(dataset()), epochs)
        return history, [parameter.detach().clone().numpy() for parameter in module.parameters()], trainer.loop.rate()


def test_a_trainer_of_a_torch_module_goes_on(mpi_tmp_path):
    pytest.importorskip("torch")
    history, weights, rate = torch_run()
    assert history["loss"][-1] < history["loss"][0]
    assert rate < 1e-2
    for stop in (7, 19):
        with pytest.raises(Interrupt):
            torch_run(mpi_tmp_path, stop)
    again, found, rate_again = torch_run(mpi_tmp_path)
    assert rate_again == rate
    for name in history:
        assert again[name] == pytest.approx(history[name], rel=1e-12)
    for mine, theirs in zip(found, weights, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_trainer_of_a_jax_tree():
    pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    from tests.harness.jax_training import dataset, dict_tree

    tree, gradients = dict_tree()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            state = dict(zip(("params", "optimizer"), ms.jax.distribute(tree, optax.adamw(1e-2)), strict=True))
            loss = ms.train.Mean("loss")

        def step(x, y):
            value, grads = gradients(state["params"], x, y)
            loss.update_state(np.full(len(y), value))
            state["params"] = ms.jax.apply(state["optimizer"], grads, state["params"], of=x)

        trainer = ms.train.Trainer(strategy, step, metrics=[loss])
        history = trainer.fit(strategy.distribute_dataset(dataset()), 8)
        assert history["loss"][-1] < history["loss"][0]
        with pytest.raises(
            ValueError, match="expected a schedule of optax in the transformation, got learning_rate = 0.5"
        ):
            state["optimizer"].learning_rate = 0.5
