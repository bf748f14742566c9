"""The mean over all tokens, of which replicas and backward passes have different numbers: the numbers of one process."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from tests.harness.torch_training import difference, make, mlp, put  # noqa: E402

STEPS, PASSES = 4, 2


def tokens(step, number, rank):
    """Rows and labels, some of which are ignored; in the first step one rank has none."""
    rng = np.random.default_rng([step, number, rank])
    x, y = rng.normal(size=(8, 10)), rng.integers(0, 3, 8)
    y[rng.random(8) < 0.2 * rank + 0.1 * number] = -1
    if step == 0 and rank == 1:
        y[:] = -1
    return torch.from_numpy(x), torch.from_numpy(y)


def loss_of(module, x, y):
    return torch.nn.functional.cross_entropy(module(x), y, ignore_index=-1, reduction="sum")


def rule(name, module):
    return torch.optim.Adafactor(module.parameters(), lr=0.1) if name == "Adafactor" else make(name, module)


def plain(name, max_norm=None, replicas=2):
    module = mlp()
    optimizer = rule(name, module)
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = [tokens(step, number, rank) for number in range(PASSES) for rank in range(replicas)]
        x, y = (torch.cat(each) for each in zip(*parts, strict=True))
        (loss_of(module, x, y) / (y != -1).sum()).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
    return module


def accumulate(module, optimizer, step, rank):
    for number in range(PASSES):
        x, y = tokens(step, number, rank)
        ms.torch.counted_loss(loss_of(module, x, y), (y != -1).sum(), optimizer).backward()
    optimizer.step()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("name", "clear"), [("momentum", "optimizer"), ("AdamW", "none"), ("Adafactor", "zeros")])
def test_one_process_is_equalled(name, clear):
    from mpi4py import MPI

    reference = plain(name, replicas=MPI.COMM_WORLD.size)
    module = mlp()
    optimizer = rule(name, module)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer, loss="sum")
        for step in range(STEPS):
            accumulate(module, optimizer, step, strategy.rank)
            if clear == "none":
                for parameter in module.parameters():
                    parameter.grad = None
            else:
                optimizer.zero_grad(set_to_none=clear == "optimizer")
        assert difference(module.parameters(), reference.parameters()) < 1e-12


@pytest.mark.ranks(2)
def test_the_norm_is_that_of_the_mean():
    reference = plain("momentum", max_norm=0.05)
    with put(mlp, "momentum", max_norm=0.05, loss="sum") as (strategy, module, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad()
            accumulate(module, optimizer, step, strategy.rank)
        assert difference(module.parameters(), reference.parameters()) < 1e-4  # torch divides by norm + 1e-6


@pytest.mark.ranks(2)
def test_replicas_of_one_rank_count_their_own():
    reference = plain("momentum", replicas=4)
    module = mlp()
    optimizer = make("momentum", module)
    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer, loss="sum")

        def step_of(step):
            optimizer.zero_grad()
            accumulate(module, optimizer, step, ms.get_replica_context().replica_id_in_sync_group)

        for step in range(STEPS):
            strategy.run(step_of, args=(step,))
        assert difference(module.parameters(), reference.parameters()) < 1e-12


@pytest.mark.ranks(2)
def test_a_step_without_counts_sums_again():
    with put(mlp, "SGD", loss="sum") as (strategy, module, optimizer):
        reference = mlp()
        expected = make("SGD", reference)
        accumulate(module, optimizer, 1, strategy.rank)
        reference.load_state_dict(module.state_dict())
        optimizer.zero_grad()
        loss_of(module, *tokens(2, 0, strategy.rank)).backward()
        optimizer.step()
        for rank in range(2):
            loss_of(reference, *tokens(2, 0, rank)).backward()
        expected.step()
        assert difference(module.parameters(), reference.parameters()) < 1e-12


@pytest.mark.ranks(2)
def test_wrong_counts_are_named():
    with put(mlp, "SGD", loss="sum") as (strategy, module, optimizer):
        x, y = tokens(1, 0, strategy.rank)
        with pytest.raises(TypeError, match="has returned"):
            ms.torch.counted_loss(loss_of(module, x, y), 3, torch.optim.SGD(mlp().parameters()))
        with pytest.raises(ValueError, match="0 or more"):
            ms.torch.counted_loss(loss_of(module, x, y), -1, optimizer)
        with pytest.raises(TypeError, match="integer"):
            ms.torch.counted_loss(loss_of(module, x, y), 1.5, optimizer)
        ms.torch.counted_loss(loss_of(module, x, y), 0, optimizer).backward()
        with pytest.raises(ValueError, match="0 in all"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="zero_grad"):
            ms.torch.counted_loss(loss_of(module, x, y), 2, optimizer).backward()
    with put(mlp, "SGD") as (strategy, module, optimizer), pytest.raises(ValueError, match='loss="sum"'):
        ms.torch.counted_loss(loss_of(module, x, y), 3, optimizer)
    with put(mlp, "SGD", loss="sum") as (strategy, module, optimizer):
        loss = loss_of(module, x, y)
        (ms.torch.counted_loss(loss, 3, optimizer) if strategy.rank else loss).backward()
        with pytest.raises(ms.errors.CollectiveMismatchError, match="counted_loss"):
            optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["local_steps=LocalSteps", "parameter servers"])
def test_a_strategy_whose_steps_do_not_sum_all_gradients_is_named(what, monkeypatch):
    monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")  # each rank is a node
    servers = what == "parameter servers"
    with ms.ParameterServerStrategy() if servers else ms.MultiWorkerMirroredStrategy(local_steps=3) as strategy:
        module = mlp()
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, torch.optim.SGD(module.parameters(), 0.1), loss="sum")
        with pytest.raises(ValueError, match=f"got one with {what}"):
            ms.torch.counted_loss(torch.zeros(()), 1, optimizer)
