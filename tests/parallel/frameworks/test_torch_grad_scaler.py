"""GradScaler: all ranks skip a step together, and their weights and scales are those of one process of plain torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from tests.harness.torch_training import difference, mlp, put  # noqa: E402

STEPS = 8
RULES = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.1),
}


def rows(step, rank):
    return torch.from_numpy(np.random.default_rng([step, rank]).normal(size=(4, 10)))


def loss_of(module, step, ranks):
    """The mean over the ranks; in step 2 that of the last rank has no finite gradients."""
    parts = [module(rows(step, rank)).square().mean() * (np.inf if (step, rank) == (2, 1) else 1) for rank in ranks]
    return sum(parts) / len(parts)


def train(module, optimizer, ranks, unscale=False):
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=3)
    scales = []
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(loss_of(module, step, ranks)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.ranks(2)
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_one_process_is_equalled(name, unscale):
    reference, module = mlp(), mlp()
    expected = train(reference, RULES[name](reference.parameters()), range(2))
    assert expected[1:4] == [16, 8, 8]
    assert max(expected[3:]) == 16
    optimizer = RULES[name](module.parameters())
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        assert train(module, optimizer, [strategy.rank], unscale) == expected
        assert difference(module.parameters(), reference.parameters()) < 1e-12


@pytest.mark.ranks(2)
def test_replicas_that_share_a_scaler_are_refused():
    module = mlp()
    optimizer = RULES["SGD"](module.parameters())
    scaler = torch.amp.GradScaler("cpu")
    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)

        def step():
            scaler.scale(module(rows(0, 0)).square().mean()).backward()
            if ms.get_replica_context().replica_id_in_sync_group % 2 == 0:
                with pytest.raises(RuntimeError, match=r"GradScaler: .*a rank for each replica"):
                    scaler.unscale_(optimizer)

        strategy.run(step)


@pytest.mark.ranks(2)
def test_a_scaler_on_one_rank_is_named():
    with put(mlp, "SGD") as (strategy, module, optimizer):
        scaler = torch.amp.GradScaler("cpu", enabled=strategy.rank == 0)
        scaler.scale(loss_of(module, 0, [strategy.rank])).backward()
        with pytest.raises(ms.errors.CollectiveMismatchError, match=r"rank 0: GradScaler\.unscale_"):
            scaler.step(optimizer)
