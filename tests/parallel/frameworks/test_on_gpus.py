"""Parameters on a GPU. Without one, benchmarks/gpu/check.py does the same on a stand-in: see test_gpu_check.py."""

import sys
from importlib import import_module

import numpy as np
import pytest

import mpistrat as ms

pytestmark = pytest.mark.ranks(1, 2)


def rows(strategy):
    """Eight rows in all, and those of this rank."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 10)), rng.integers(0, 3, 8)
    mine = slice(strategy.rank * 8 // strategy.size, (strategy.rank + 1) * 8 // strategy.size)
    return (x, y), (x[mine], y[mine])


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["momentum", "AdamW", "Adagrad"])
def test_a_module_of_torch_equals_one_process(rule):
    torch = pytest.importorskip("torch")
    import copy

    from tests.harness.torch_training import make, mlp

    device = "cuda"
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy:
        module = mlp().to(device)
        alone = copy.deepcopy(module)
        optimizer, reference = make(rule, module), make(rule, alone)
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, optimizer)
        for model, chosen, (x, y) in zip((alone, module), (reference, optimizer), rows(strategy), strict=True):
            x, y = torch.as_tensor(x, device=device), torch.as_tensor(y, device=device)
            for _ in range(5):
                chosen.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                chosen.step()
        assert all(p.device.type == device for p in module.parameters())
        for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
            assert float((mine - theirs).abs().max().detach()) < 1e-12


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["adam", "clipped", "optax"])
def test_a_tree_of_jax_equals_one_process(rule):
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    from tests.harness.jax_training import RULES, arrays, dict_tree

    ours, theirs = RULES.get(rule, (lambda: None, lambda: optax.adamw(1e-2)))
    tree, step = dict_tree()
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0"]) as strategy:
        whole, mine = rows(strategy)
        alone, transformation = tree, theirs()
        state = transformation.init(alone)
        for _ in range(5):
            _, gradients = step(alone, *whole)
            updates, state = transformation.update(gradients, state, alone)
            alone = optax.apply_updates(alone, updates)
        with strategy.scope():
            optimizer = ours()
            if optimizer is None:
                params, optimizer = ms.jax.distribute(tree, theirs())
            else:
                params = ms.jax.distribute(tree)
        for _ in range(5):
            _, gradients = step(params, *mine)
            params = ms.jax.apply(optimizer, gradients, params)
        for got, expected in zip(arrays(params), arrays(alone), strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12)
        assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(params))


def test_several_gpus_on_a_rank_are_refused_for_jax(monkeypatch):
    pytest.importorskip("jax")
    from tests.harness.jax_training import dict_tree
    from tests.models import honest_cupy

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("FAKE_GPUS", "2")
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        monkeypatch.setitem(sys.modules, name, sys)  # after the test they are as before
    honest_cupy.install()
    monkeypatch.setattr(import_module("mpistrat.jax.distribute"), "backend", lambda: "gpu")
    refused = pytest.raises(ms.errors.DeviceError, match=r"one GPU in each rank.*got 2")
    with ms.MultiWorkerMirroredStrategy(devices=["gpu:0", "gpu:1"]) as strategy, strategy.scope(), refused:
        ms.jax.distribute(dict_tree()[0])
