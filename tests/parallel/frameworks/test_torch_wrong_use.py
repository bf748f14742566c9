"""What wrong use of PyTorch modules under strategies gets: an error on every rank, with the name and the remedy."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from tests.harness.torch_training import loss_of, mlp, put, rows  # noqa: E402


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
def test_gradients_that_are_handed_over_are_refused():
    refused = pytest.raises(ms.errors.LayoutError, match="got one with sharded_gradients=True")
    with ms.MultiWorkerMirroredStrategy(sharded_gradients=True) as strategy, strategy.scope(), refused:
        ms.torch.distribute(mlp())


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_distributed_is_refused():
    module = mlp()
    with pytest.raises(ms.errors.ContextError, match="scope"):
        ms.torch.distribute(module)
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        with pytest.raises(ValueError, match="1 that are not"):
            ms.torch.distribute(module, torch.optim.SGD([*module.parameters(), torch.nn.Parameter(torch.ones(1))]))
        with pytest.raises(ValueError, match="mean"):
            ms.torch.distribute(module, loss="max")
        with pytest.raises(ValueError, match="max_norm"):
            ms.torch.distribute(module, max_norm=1.0)
        ms.torch.distribute(module)
        with pytest.raises(RuntimeError, match="distributed already"):
            ms.torch.distribute(module)


@pytest.mark.ranks(1, 2)
def test_a_module_on_another_device_is_named():
    from torch._subclasses.fake_tensor import FakeTensorMode  # what says that it is on a GPU, without one

    from mpistrat.torch.distribute_model import check_tensors

    module = torch.nn.Module()
    with FakeTensorMode():
        module.weight = torch.nn.Parameter(torch.empty(3, device="cuda"))
    named = pytest.raises(ValueError, match="module: weight: .*on cuda:0, where the strategy's variables lie on cpu")
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope(), named:
        ms.torch.distribute(module)
    with pytest.raises(ValueError, match=r'0\.weight: .*on cpu, where .* lie on cuda\. Use module\.to\("cuda"\)'):
        check_tensors(mlp(), "cuda")


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


@pytest.mark.ranks(2, 3)
def test_a_rank_without_any_gradient_is_told_on_all():
    with put(name="SGD") as (strategy, module, optimizer):
        if strategy.rank != 1:
            loss_of(module, *rows()).backward()
        with pytest.raises(ms.errors.CollectiveMismatchError, match="no gradient"):
            optimizer.step()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor"])
@pytest.mark.parametrize(
    "edit",
    [
        lambda groups: groups[0]["params"].pop(),
        lambda groups: groups[1]["params"].extend(groups[0]["params"]),
        lambda groups: groups[0].update(params=groups[0]["params"][:1]),
        lambda groups: groups[0]["params"].reverse(),
        lambda groups: groups.pop(),
        lambda groups: groups.reverse(),
    ],
)
def test_other_groups_than_those_that_were_distributed_are_refused(name, edit):
    module = mlp()
    groups = [{"params": list(module[0].parameters())}, {"params": list(module[2].parameters()), "lr": 0.1}]
    optimizer = getattr(torch.optim, name)(groups, lr=0.2)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        for changed in (False, True):
            loss_of(module, *rows()).backward()
            if changed:
                edit(optimizer.param_groups)
                with pytest.raises(RuntimeError, match=r"groups of parameters that were distributed.*add_param_group"):
                    optimizer.step()
            else:
                optimizer.step()


@pytest.mark.ranks(1)
def test_a_thawed_parameter_is_no_part_of_gradients():
    module = mlp()
    module[0].weight.requires_grad = False
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module)
        module[0].weight.requires_grad = True
        loss_of(module, *rows()).backward()
        with pytest.raises(RuntimeError, match=r"0\.weight: expected a parameter that was trainable"):
            ms.torch.gradients(module)


@pytest.mark.ranks(1, 2)
def test_memory_that_torch_has_moved_is_named():
    with put() as (_, module, optimizer):
        module.share_memory()  # moves the tensors themselves: a step would update what nobody sees
        loss_of(module, *rows()).backward()
        with pytest.raises(RuntimeError, match=r"0\.weight: expected the memory of its variable"):
            optimizer.step()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("way", ["remains", "copied", "own"])
def test_a_tensor_that_functional_call_leaves_in_a_layer_is_named(way):
    layer, rng = torch.nn.Linear(4, 4), torch.Generator().manual_seed(0)
    plain = torch.nn.Sequential(layer, torch.nn.Tanh(), layer)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            module, optimizer = ms.torch.distribute(plain, torch.optim.SGD(plain.parameters(), 0.1))
        parameters = dict(module.named_parameters())
        if way != "own":  # torch restores the layer twice, the second time with what it put there
            parameters = {name: value.detach() for name, value in parameters.items()}
        called = copy.deepcopy(module) if way == "copied" else module
        x = torch.randn(6, 4, generator=rng)
        torch.func.functional_call(called, parameters, (x,))
        assert (type(module[0].weight) is torch.Tensor) == (way == "remains")
        if way == "remains":
            with pytest.raises(RuntimeError, match=r"0\.weight: expected the parameter .*deepcopy"):
                optimizer.step()
        else:
            module(x).sum().backward()
            before = module[0].weight.detach().clone()
            optimizer.step()
            assert not torch.equal(module[0].weight, before)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("build", "what"),
    [
        (lambda: torch.nn.Sequential(torch.nn.LazyLinear(3)), "0.weight.*lazy"),
        (lambda: torch.nn.Sequential(torch.nn.LazyBatchNorm1d(affine=False)), "0.running_mean.*lazy"),
        (lambda: torch.nn.Linear(2, 2, device="meta"), "weight.*meta"),
        (lambda: torch.nn.Linear(2, 2, dtype=torch.complex64), "weight.*view_as_real"),
        (
            lambda: torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), False)]),
            "0.*float8",
        ),
    ],
)
def test_tensors_that_no_step_can_update_are_named(build, what):
    module = build()
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        with pytest.raises(ValueError, match=what):
            ms.torch.distribute(module)
        with pytest.raises(ValueError, match="inference_mode"), torch.inference_mode():
            ms.torch.distribute(mlp())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad", "RMSprop"])
@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_optimizers_that_were_not_distributed_do_not_step(name, how):
    with put() as (_, module, _):
        if how.get("fused") and name == "RMSprop":
            return
        stranger = getattr(torch.optim, name)(module.parameters(), lr=0.1, **how)
        loss_of(module, *rows()).backward()
        before = [parameter.detach().clone() for parameter in module.parameters()]
        with pytest.raises(RuntimeError, match="that it returned"):
            stranger.step()
        assert all(map(torch.equal, before, module.parameters()))


@pytest.mark.ranks(2, 3)
def test_a_rank_with_fewer_batches_is_told_on_all():
    x, y = map(torch.from_numpy, rows())
    with put(name="SGD") as (strategy, module, optimizer):
        of_all = torch.utils.data.TensorDataset(x, y)
        mine = torch.utils.data.Subset(of_all, range(20 if strategy.rank == 1 else 30))
        with pytest.raises(ms.errors.CollectiveMismatchError, match="fewer passes on some"):
            for a, b in torch.utils.data.DataLoader(mine, batch_size=5):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(module(a), b).backward()
                optimizer.step()
            module.load_state_dict(module.state_dict())


@pytest.mark.ranks(2)
def test_other_groups_on_one_rank_are_told_on_all():
    module = mlp()
    first, *others = module.parameters()
    groups = [[first], others]
    with ms.MultiWorkerMirroredStrategy() as strategy:
        if strategy.rank == 1:
            groups = [[first, *others[:1]], others[1:]]
        optimizer = torch.optim.SGD([{"params": group, "lr": 0.1} for group in groups])
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        assert "array(" not in repr(optimizer.mpistrat_rule)
        loss_of(module, *rows()).backward()
        with pytest.raises(ms.errors.CollectiveMismatchError, match="parameters"):
            optimizer.step()
