"""What wrong use of PyTorch modules under strategies gets: an error on every rank, with the name and the remedy."""

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

from torch_training import loss_of, make, mlp, put, rows  # noqa: E402

import mpistrat as ms  # noqa: E402


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("convert", ["half", "data"])
def test_a_parameter_that_lost_its_memory_is_named(convert):
    with put() as (_, module, optimizer):
        if convert == "half":
            module[2].half().double()
        else:
            module[2].weight.data = torch.zeros(3, 16, dtype=torch.float64)
        loss_of(module, *rows()).backward()
        with pytest.raises(RuntimeError, match=r"2\.weight: expected the memory of its variable"):
            optimizer.step()


@pytest.mark.ranks(1, 2)
def test_local_gradients_are_not_clipped_or_stepped_by():
    with put() as (_, module, _):
        stranger = torch.optim.Adam(module.parameters())
        loss_of(module, *rows()).backward()
        with pytest.raises(RuntimeError, match="max_norm"):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        with pytest.raises(RuntimeError, match="that it returned"):
            stranger.step()
        assert "not summed" in repr(module[0].weight.grad)


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_distributed_is_refused():
    module = mlp()
    with pytest.raises(ms.errors.ContextError, match="scope"):
        ms.torch.distribute(module)
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        with pytest.raises(TypeError, match="LBFGS"):
            ms.torch.distribute(module, torch.optim.LBFGS(module.parameters()))
        with pytest.raises(ValueError, match="1 that are not"):
            ms.torch.distribute(module, torch.optim.SGD([*module.parameters(), torch.nn.Parameter(torch.ones(1))]))
        with pytest.raises(ValueError, match="mean"):
            ms.torch.distribute(module, loss="max")
        with pytest.raises(ValueError, match="max_norm"):
            ms.torch.distribute(module, max_norm=1.0)
        ms.torch.distribute(module)
        with pytest.raises(RuntimeError, match="second"):
            ms.torch.distribute(module)


@pytest.mark.ranks(2, 3)
def test_another_module_on_one_rank_is_told_on_all():
    from mpi4py import MPI

    module = torch.nn.Linear(3, 4 if MPI.COMM_WORLD.rank == 1 else 2)
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope(), pytest.raises(ms.errors.CollectiveMismatchError, match="weight"):
        ms.torch.distribute(module)
    strategy.close()


@pytest.mark.ranks(2, 3)
def test_a_parameter_without_gradient_on_one_rank_is_told_on_all():
    with put(name="SGD") as (strategy, module, optimizer):
        loss_of(module, *rows()).backward()
        if strategy.rank == 1:
            module[2].bias.grad = None
        with pytest.raises(ms.errors.CollectiveMismatchError, match=r"2\.bias"):
            optimizer.step()


@pytest.mark.ranks(1)
def test_a_frozen_parameter_that_is_trained_later_is_named():
    module = mlp()
    module[0].weight.requires_grad = False
    optimizer = make("SGD", module)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        loss_of(module, *rows()).backward()
        before = module[0].weight.detach().clone()
        optimizer.step()
        assert torch.equal(module[0].weight, before)
        module[0].weight.requires_grad = True
        optimizer.zero_grad()
        loss_of(module, *rows()).backward()
        with pytest.raises(RuntimeError, match=r"0\.weight: expected a parameter that was trainable"):
            optimizer.step()
