"""Parameters that only some ranks use in a step, next to DDP with find_unused_parameters."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.torch_training import difference, make, put  # noqa: E402

STEPS = 6
RULES = ["momentum", "AdamW", "NAdam", "Adafactor"]


class Heads(nn.Module):
    """A trunk and heads, each of which runs in some passes only; the last one never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Linear(4, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(4))

    def forward(self, x, head):
        return self.heads[head](self.trunk(x).tanh())


def heads():
    return Heads().double()


def head_of(step, rank):
    """Step 0: all ranks head 0. Step 1: rank 0 head 0, others head 1. Then heads that differ by rank, or none does."""
    return [0, min(rank, 1), 2, rank % 3, (rank + 1) % 3, 1][step]


def rows(step, rank):
    return torch.from_numpy(np.random.default_rng([step, rank]).normal(size=(3, 4)))


def train(module, optimizer, rank, twice=False):
    for step in range(STEPS):
        optimizer.zero_grad()
        module(rows(step, rank), head_of(step, rank)).square().mean().backward()
        if twice:
            module(rows(step + STEPS, rank), (rank + step) % 2).square().mean().backward()
        optimizer.step()


def rule(name, module):
    if name == "Adafactor":
        return torch.optim.Adafactor(module.parameters(), lr=0.1)
    return make(name, module)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", RULES)
def test_ddp_with_find_unused_parameters_is_equalled(name):
    dist.init_process_group("gloo")
    try:
        reference = DistributedDataParallel(heads(), find_unused_parameters=True)
        train(reference, rule(name, reference), dist.get_rank())
    finally:
        dist.destroy_process_group()
    module = heads()
    optimizer = rule(name, module)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer, find_unused_parameters=True)
        train(module, optimizer, strategy.rank)
        assert difference(module.parameters(), reference.parameters()) < 1e-12
        before = heads().heads[3].weight
        assert torch.equal(module.heads[3].weight, before)  # which no rank has used: no decay of weights either


@pytest.mark.ranks(2)
def test_accumulated_gradients_of_other_parameters_equal_one_process():
    reference = heads()
    expected = make("momentum", reference)
    for step in range(STEPS):
        expected.zero_grad()
        for rank in range(2):
            loss = reference(rows(step, rank), head_of(step, rank)).square().mean()
            (loss + reference(rows(step + STEPS, rank), (rank + step) % 2).square().mean()).div(2).backward()
        expected.step()
    with put(heads, "momentum", find_unused_parameters=True) as (strategy, module, optimizer):
        train(module, optimizer, strategy.rank, twice=True)
        assert difference(module.parameters(), reference.parameters()) < 1e-12


@pytest.mark.ranks(2)
def test_replicas_of_one_rank_may_use_others():
    reference = heads()
    expected = make("momentum", reference)
    for step in range(STEPS):
        expected.zero_grad()
        for replica in range(4):
            reference(rows(step, replica), replica % 3).square().mean().div(4).backward()
        expected.step()
    module = heads()
    optimizer = make("momentum", module)
    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer, find_unused_parameters=True)

        def step_of(step):
            replica = ms.get_replica_context().replica_id_in_sync_group
            optimizer.zero_grad()
            module(rows(step, replica), replica % 3).square().mean().backward()
            optimizer.step()

        for step in range(STEPS):
            strategy.run(step_of, args=(step,))
        assert difference(module.parameters(), reference.parameters()) < 1e-12


@pytest.mark.ranks(2)
def test_what_cannot_find_unused_parameters_is_named():
    for strategy in (ms.MultiWorkerMirroredStrategy(), ms.ParameterServerStrategy(num_ps=1)):
        with strategy, strategy.scope():
            module = heads()
            named = pytest.raises(ValueError, match=r"find_unused_parameters: .*parameter servers|no optimizer")
            optimizer = make("SGD", module) if isinstance(strategy, ms.ParameterServerStrategy) else None
            with named:
                ms.torch.distribute(module, optimizer, find_unused_parameters=True)
    with (
        pytest.raises(ValueError, match="Leave overlap out"),
        put(heads, "SGD", overlap=True, find_unused_parameters=True),
    ):
        pass
