"""Layers with statistics and buffers under PyTorch: BatchNorm over all replicas, buffers that programs assign, their means."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402

nn = torch.nn
x = np.random.default_rng(0).normal(size=(11, 3, 2, 2))


def rows_of(strategy, array=x):
    return torch.from_numpy(np.array_split(array, strategy.size)[strategy.rank])


def net(momentum=0.1):
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4, momentum=momentum)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return nn.Sequential(nn.Conv2d(3, 4, 2), norm, nn.Flatten()).double()


def put(strategy, module, **options):
    with strategy.scope():
        return ms.torch.distribute(module, **options)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("offset", [0.0, 1e4, 1e8])
def test_batch_norm_keeps_the_digits_of_large_means(offset, momentum):
    layer = nn.BatchNorm2d(3, momentum=momentum).double()
    reference = copy.deepcopy(layer)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module = put(strategy, nn.Sequential(layer), sync_batch_norm=True)
        found = strategy.gather(module(rows_of(strategy, x + offset)).detach().numpy(), axis=0)
        whole = reference(torch.from_numpy(x + offset)).detach().numpy()
        exact = (x - x.mean((0, 2, 3), keepdims=True)) / np.sqrt(x.var((0, 2, 3), keepdims=True) + layer.eps)
        limit = 10 * max(np.abs(whole - exact).max(), 1e-14) + 4 * np.finfo(float).eps * offset
        assert np.abs(found - exact).max() < limit
        module.eval()
        for mine, theirs in zip(module.buffers(), reference.buffers(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-7)


@pytest.mark.ranks(1, 2, 3)
def test_derivatives_of_every_order_are_those_of_the_whole_batch():
    """On unequal parts, a penalty of gradients: through sums over replicas that are differentiated twice."""

    def penalty(module, rows):
        rows = rows.detach().requires_grad_()
        out = module(rows)
        slope = torch.autograd.grad(out.square().sum(1).mean(), rows, create_graph=True)[0] * len(rows)
        return slope.square().sum((1, 2, 3)).mean() + out.mean()

    reference = net()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    penalty(reference, torch.from_numpy(x)).backward()
    plain.step()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module = net()
        module, optimizer = put(
            strategy, module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), sync_batch_norm=True
        )
        for rows in strategy.distribute_dataset(ms.data.from_arrays(x).batch(11)):
            rows = torch.from_numpy(rows).requires_grad_()
            out = module(rows)
            slope = torch.autograd.grad(out.square().sum(1).mean(), rows, create_graph=True)[0] * len(rows)
            (slope.square().sum((1, 2, 3)).mean() + out.mean()).backward()
        optimizer.step()
        for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-8, atol=1e-10), (mine - theirs).abs().max()


@pytest.mark.ranks(1, 2)
def test_too_few_values_are_an_error_that_names_the_layer_as_in_torch():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module = nn.Sequential(nn.Flatten(), nn.Sequential(nn.BatchNorm1d(4)))
        module = put(strategy, module, sync_batch_norm=True)
        rows = torch.ones(int(strategy.rank == 0), 4)
        with pytest.raises(ValueError, match=r"SyncBatchNorm '1.0': expected more than 1 value per channel"):
            module(rows)
        with pytest.raises(ValueError, match=r"SyncBatchNorm '1.0'.*shape \(4,\)"):
            module[1][0](torch.ones(4))


class Assigns(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, rows):
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * rows.detach().mean(0)
            self.count = self.count + 1
        return self.linear(rows - self.mean)


@pytest.mark.ranks(1, 2, 3)
def test_buffers_that_forward_assigns_are_averaged_and_saved(mpi_tmp_path):
    path = mpi_tmp_path / "state.h5"
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module = put(strategy, Assigns())
        for _ in range(2):
            module(torch.full((4, 2), float(strategy.rank)))
        expected = 0.75 * np.arange(strategy.size).mean()
        module.eval()
        assert module.mean.tolist() == [expected] * 2 and module.count == 2
        strategy.save(path)
        module.mean = torch.zeros(2)
        strategy.restore(path)
        assert module.mean.tolist() == [expected] * 2
        assert module.state_dict()["mean"].tolist() == [expected] * 2
        with pytest.raises(RuntimeError, match=r"Assigns: buffer mean: .*\(2,\).*got torch.float32\(3,\)"):
            module.mean = torch.zeros(3)
        with torch.no_grad():
            module.train()
            module.half = None  # an attribute of another name is of no concern
            vars(module)["_buffers"]["mean"] = torch.full(
                (2,), float(strategy.rank)
            )  # as torch's own functions write it
        module.eval()
        assert module.mean.tolist() == [np.arange(strategy.size).mean()] * 2


@pytest.mark.ranks(1, 2, 3)
def test_buffers_that_are_equal_keep_their_bits():
    class Constants(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("mask", torch.full((3, 3), torch.finfo(torch.float32).min).triu(1))
            self.register_buffer("infinite", torch.tensor([float("inf"), float("nan"), 0.1]))
            self.register_buffer("table", torch.rand(1000, generator=torch.Generator().manual_seed(0)))
            self.register_buffer("own", torch.zeros(1))

    with ms.MultiWorkerMirroredStrategy() as strategy:
        module = put(strategy, Constants())
        before = copy.deepcopy(dict(module.named_buffers()))
        for number in range(3):
            module.own.fill_(strategy.rank + number)
            module.eval()
            module.train()
            assert module.own == number + (strategy.size - 1) / 2
        for name in ("mask", "infinite", "table"):
            assert module.get_buffer(name).numpy().tobytes() == before[name].numpy().tobytes(), name


@pytest.mark.ranks(2)
def test_a_closed_strategy_of_torch_is_freed():
    import gc
    import weakref

    def trial():
        strategy = ms.MultiWorkerMirroredStrategy()
        module = net()
        module, optimizer = put(strategy, module, optimizer=torch.optim.Adam(module.parameters()), sync_batch_norm=True)
        for rows in strategy.distribute_dataset(ms.data.from_arrays(x).batch(11)):
            module(torch.from_numpy(rows)).square().mean().backward()
            optimizer.step()
        strategy.close()
        return weakref.ref(strategy)

    alive = [trial() for _ in range(3)]
    gc.collect()
    assert [reference() for reference in alive] == [None] * 3
