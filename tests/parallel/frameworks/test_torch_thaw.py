"""Layers that are thawed, and param groups that are added, while a module trains: the numbers of one process of plain torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from tests.harness.torch_training import difference, make, mlp  # noqa: E402

STEPS, RANKS = 7, 2
pytestmark = pytest.mark.ranks(RANKS)


def frozen_mlp():
    module = mlp()
    module[0].requires_grad_(False)
    return module


def rows(step, rank):
    return torch.from_numpy(np.random.default_rng([step, rank]).normal(size=(4, 10)))


def thaw(module, optimizer, step):
    """A bias from step 2 on, its weight from step 4; the bias is frozen again in step 5."""
    module[0].bias.requires_grad = step >= 2 and step != 5
    module[0].weight.requires_grad = step >= 4


def add_groups(module, optimizer, step):
    thaw(module, optimizer, step)
    if step == 2:
        optimizer.add_param_group({"params": [module[0].bias], "lr": 0.02})
    if step == 4:
        optimizer.add_param_group({"params": [module[0].weight], "weight_decay": 0.1})


def build(name, grows):
    module = frozen_mlp()
    parameters = [p for p in module.parameters() if p.requires_grad or grows is thaw]
    if name == "Adafactor":
        return module, torch.optim.Adafactor(parameters, lr=0.1)
    chosen = torch.nn.Module()
    chosen.listed = torch.nn.ParameterList(parameters)
    return module, make(name, chosen)


def take_step(module, optimizer, step, ranks):
    optimizer.zero_grad()
    for rank in ranks:
        (module(rows(step, rank)).square().mean() / len(ranks)).backward()
    optimizer.step()


def plain(name, grows, steps=range(STEPS), replicas=RANKS):
    module, optimizer = build(name, grows)
    for step in steps:
        grows(module, optimizer, step)
        take_step(module, optimizer, step, range(replicas))
    return module, optimizer


def train(strategy, module, optimizer, grows, steps=range(STEPS)):
    for step in steps:
        grows(module, optimizer, step)
        take_step(module, optimizer, step, [strategy.rank])


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("name", "grows"),
    [("momentum", thaw), ("AdamW", thaw), ("NAdam", thaw), ("Adafactor", thaw), ("momentum", add_groups), ("AdamW", add_groups),
     ("ASGD", add_groups)],
)  # fmt: skip
def test_one_process_is_equalled(monkeypatch, name, grows, nodes):
    if nodes == 2:
        monkeypatch.setenv("MPISTRAT_SHARED_MEMORY", "0")
    monkeypatch.setitem(make.__globals__["CASES"], "ASGD", {"lr": 0.1})
    reference, theirs = plain(name, grows)
    module, optimizer = build(name, grows)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        train(strategy, module, optimizer, grows)
        assert difference(module.parameters(), reference.parameters()) < 1e-12
        mine, expected = optimizer.state_dict(), theirs.state_dict()
        assert [group["params"] for group in mine["param_groups"]] == [g["params"] for g in expected["param_groups"]]
        assert mine["state"].keys() == expected["state"].keys()
        for index, state in expected["state"].items():
            known = [key for key in state if torch.is_tensor(state[key])]
            assert difference([mine["state"][index][k] for k in known], [state[k] for k in known]) < 1e-9


@pytest.mark.parametrize("grows", [thaw, add_groups])
def test_a_file_continues_after_a_layer_was_thawed(tmp_path_factory, grows):
    from mpi4py import MPI

    path = MPI.COMM_WORLD.bcast(str(tmp_path_factory.mktemp("thaw") / "state.h5"))
    reference, _ = plain("AdamW", grows)
    for first in (0, 5):
        module, optimizer = build("AdamW", grows)
        with ms.MultiWorkerMirroredStrategy() as strategy:
            with strategy.scope():
                ms.torch.distribute(module, optimizer)
            if first:
                for step in (2, 4) if grows is add_groups else ():
                    grows(module, optimizer, step)
                strategy.restore(path)
            train(strategy, module, optimizer, grows, range(first, STEPS if first else 5))
            if first:
                assert difference(module.parameters(), reference.parameters()) < 1e-12
            else:
                strategy.save(path)


def test_replicas_of_one_rank_thaw_in_their_step():
    reference, _ = plain("AdamW", thaw, replicas=4)
    module, optimizer = build("AdamW", thaw)
    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)

        def step_of(step):
            number = ms.get_replica_context().replica_id_in_sync_group
            for name, parameter in module.named_parameters():
                if name == "0.bias":
                    parameter.requires_grad = step >= 2 and step != 5
                elif name == "0.weight":
                    parameter.requires_grad = step >= 4
            take_step(module, optimizer, step, [number])

        for step in range(STEPS):
            strategy.run(step_of, args=(step,))
        assert difference(module.parameters(), reference.parameters()) < 1e-12


def test_a_gradient_that_is_not_summed_is_not_clipped():
    module, optimizer = build("AdamW", thaw)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        module[0].requires_grad_(True)
        module[2].requires_grad_(False)
        module(rows(0, strategy.rank)).square().mean().backward()
        with pytest.raises(RuntimeError, match="max_norm"):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)


def test_a_layer_that_one_rank_thaws_is_named():
    module, optimizer = build("AdamW", thaw)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        module[0].bias.requires_grad = strategy.rank == 1
        named = pytest.raises(ms.errors.CollectiveMismatchError, match=r"rank 1: Variable.trainable '0\.bias'")
        with named:
            take_step(module, optimizer, 0, [strategy.rank])


def test_groups_that_cannot_be_added_are_named():
    module, _ = build("momentum", add_groups)
    plainly = torch.optim.SGD(list(module[2].parameters()), lr=0.1)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, plainly)
        with pytest.raises(ValueError, match="no optimizer has, got 1 that are not"):
            plainly.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        with pytest.raises(ValueError, match="more than one parameter group"):
            plainly.add_param_group({"params": [module[2].bias]})
        with pytest.raises(RuntimeError, match="momentum_buffer"):
            plainly.add_param_group({"params": [module[0].bias], "momentum": 0.9})
        assert len(plainly.param_groups) == 1
        with pytest.raises(ms.errors.CollectiveMismatchError, match="parameters"):
            if strategy.rank == 1:
                plainly.add_param_group({"params": [module[0].bias]})
            take_step(module, plainly, 0, [strategy.rank])
    module, whole = build("Adafactor", add_groups)
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        ms.torch.distribute(module, whole)
        with pytest.raises(RuntimeError, match=r"Adafactor, which runs on whole tensors.*requires_grad"):
            whole.add_param_group({"params": [module[0].bias]})
