"""`hvd.DistributedOptimizer` and what belongs to it, next to one process with all ranks' rows."""

import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat.horovod.torch as hvd  # noqa: E402
from tests.harness.horovod_ranks import initialized  # noqa: E402


@pytest.fixture(autouse=True)
def started():
    with initialized():
        yield


def network(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)).double()


def rows(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def loss_of(model, x):
    return (model(x) ** 2).mean()


def reference(steps=3, passes=1, op="Average", ranks=None):
    """Return the parameters after steps with the mean over ranks of the sums over passes of gradients."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    ranks = range(hvd.size()) if ranks is None else ranks
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            for rank in ranks:
                (loss_of(model, rows(step * passes + number, rank)) / (len(ranks) if op == "Average" else 1)).backward()
        optimizer.step()
    return list(model.parameters())


def trained(steps=3, passes=1, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        optimizer, model.named_parameters(), backward_passes_per_step=passes, **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            loss_of(model, rows(step * passes + number, hvd.rank())).backward()
        optimizer.step()
    return list(model.parameters())


def check(found, wanted, **close):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.ranks(1, 2, 4)
def test_the_steps_are_those_of_one_process():
    check(trained(), reference())


def with_a_frozen_layer(model):
    model[0].requires_grad_(False)
    return torch.optim.Adam(model.parameters(), lr=0.1)


def thaw(model, optimizer):
    model[0].requires_grad_(True)


def of_the_last_layer(model):
    return torch.optim.Adam(model[2].parameters(), lr=0.1)


def add_a_group(model, optimizer):
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})


def whole(name, **options):
    return lambda model: getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    ("make", "change", "closure"),
    [
        (with_a_frozen_layer, thaw, False),
        (of_the_last_layer, add_a_group, False),
        (whole("Adam"), None, True),
        (whole("LBFGS", max_iter=3), None, True),
    ],
)
def test_what_changes_while_training_and_closures(make, change, closure, named):
    found = []
    for ranks in ([hvd.rank()], range(hvd.size())):
        model = network()
        optimizer = make(model)
        if not found:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters() if named else None)
        for step in range(4):
            if step == 2 and change is not None:
                change(model, optimizer)

            def computed():
                optimizer.zero_grad()  # noqa: B023
                losses = [loss_of(model, rows(step, rank)) for rank in ranks]  # noqa: B023
                loss = sum(losses) / len(losses)
                loss.backward()
                return loss

            if closure:
                optimizer.step(computed)
            else:
                computed()
                optimizer.step()
        found.append(list(model.parameters()))
    check(*found)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"groups": 2}, {"gradient_predivide_factor": 4.0}, {"groups": 100}])
def test_options_that_change_no_number(options):
    check(trained(**options), reference())


@pytest.mark.ranks(2)
def test_groups_of_parameters_passes_and_sums():
    check(trained(passes=3), reference(passes=3))
    check(trained(op=hvd.Sum), reference(op="Sum"))
    check(trained(compression=hvd.Compression.fp16), reference(), rtol=0, atol=2e-3)
    with pytest.warns(DeprecationWarning, match="num_groups is the older name of groups"):
        check(trained(num_groups=2), reference())


@pytest.mark.ranks(2)
def test_a_process_set_and_ranks_outside_of_it():
    only = hvd.add_process_set([1])
    found = trained(process_set=only)
    check(found, reference(ranks=[1]) if hvd.rank() == 1 else trained_alone())


def trained_alone():
    return reference(ranks=[hvd.rank()])


@pytest.mark.ranks(2)
def test_a_layer_that_some_ranks_do_not_use():
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])
    for layer in layers:
        torch.nn.init.ones_(layer.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=1.0), layers.named_parameters())
    optimizer.zero_grad()
    layers[hvd.rank()](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    for layer in layers:
        assert layer.weight.tolist() == [[0.5, 0.5], [0.5, 0.5]]


@pytest.mark.ranks(2)
def test_gradients_are_clipped_between_synchronize_and_step():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    (model(torch.ones(1, 1)) * (hvd.rank() + 1)).sum().backward()
    with pytest.raises(AssertionError, match=r"expected step\(\) or synchronize\(\) before it, got pending gradients"):
        optimizer.zero_grad()
    optimizer.synchronize()
    assert model.weight.grad.item() == 1.5
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    with warnings.catch_warnings(), optimizer.skip_synchronize():
        warnings.simplefilter("error")
        optimizer.step()
    assert model.weight.item() == pytest.approx(-0.5, abs=1e-5)
    (model(torch.ones(1, 1))).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="without optimizer.skip_synchronize"):
        optimizer.step()


@pytest.mark.ranks(2)
def test_too_many_passes_are_an_error():
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(AssertionError, match="expected at most 1 backward passes before step"):
        model(torch.ones(1, 1)).sum().backward()
    optimizer.step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients(as_dense):
    table = torch.nn.Embedding(4, 1, sparse=True)
    torch.nn.init.zeros_(table.weight)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=as_dense
    )
    for parameter in table.parameters():
        parameter.grad = None
    table(torch.tensor([hvd.rank(), 3])).sum().backward()
    optimizer.step()
    assert table.weight.flatten().tolist() == [-0.5, -0.5, 0, -1]


@pytest.mark.ranks(2)
def test_adasum_combines_the_changes_of_the_ranks():
    """Each rank changes another weight: orthogonal changes are added. A weight that all change alike is averaged."""
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("w", weight)], op=hvd.Adasum)
    optimizer.zero_grad()
    weight[hvd.rank()].backward()
    optimizer.step()
    assert weight.tolist() == [-1, -1, 0]
    optimizer.zero_grad()
    weight[2].backward()
    optimizer.step()
    assert weight.tolist() == [-1, -1, -1]
    with pytest.raises(AssertionError, match="op: expected another than Adasum"):
        optimizer.skip_synchronize()


@pytest.mark.ranks(2)
def test_parameters_and_the_state_of_optimizers_come_from_the_root():
    model = network(hvd.rank())
    hvd.broadcast_parameters(model.state_dict(), root_rank=1)
    check(model.parameters(), network(1).parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 * (1 + hvd.rank()))
    if hvd.rank() == 1:
        loss_of(model, rows(0, 0)).backward()
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    state = optimizer.state_dict()
    assert state["param_groups"][0]["lr"] == 0.2
    first = state["state"][0]
    assert float(first["step"]) == 1 and first["exp_avg"].abs().sum() > 0
    same = hvd.allgather_object([each.tolist() for each in (first["exp_avg"], first["exp_avg_sq"])])
    assert same[0] == same[1]
    with pytest.raises(ValueError, match="optimizer: expected any but LBFGS"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(model.parameters()), 0)
    with pytest.raises(ValueError, match="params: expected a state_dict, named parameters or tensors"):
        hvd.broadcast_parameters([(1, 2)], 0)


@pytest.mark.ranks(2, 3)
def test_objects():
    mine = {"rank": hvd.rank(), "size": "x" * 1000 * hvd.rank()}
    assert [each["rank"] for each in hvd.allgather_object(mine)] == list(range(hvd.size()))
    assert hvd.broadcast_object(mine if hvd.rank() == 1 else None, root_rank=1)["rank"] == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["train", "eval"])
def test_statistics_of_all_ranks(kind):
    torch.manual_seed(0)
    x, weights = torch.randn(2, 6, 3, 5, dtype=torch.float64), torch.randn(2, 6, 3, 5, dtype=torch.float64)
    mine, whole = hvd.SyncBatchNorm(3).double(), torch.nn.BatchNorm1d(3).double()
    getattr(mine, kind)(), getattr(whole, kind)()
    part, everything = x[hvd.rank()].clone().requires_grad_(), x.flatten(0, 1).clone().requires_grad_()
    own, wanted = mine(part), whole(everything)
    torch.testing.assert_close(own, wanted.unflatten(0, (2, 6))[hvd.rank()])
    (own * weights[hvd.rank()]).sum().backward()
    (wanted * weights.flatten(0, 1)).sum().backward()
    torch.testing.assert_close(part.grad, everything.grad.unflatten(0, (2, 6))[hvd.rank()])
    torch.testing.assert_close(hvd.allreduce(mine.weight.grad, op=hvd.Sum), whole.weight.grad)
    torch.testing.assert_close(mine.running_var, whole.running_var)


@pytest.mark.ranks(1, 2)
def test_wrong_options():
    model = torch.nn.Linear(1, 2)

    def make(named=None, **options):
        named = model.named_parameters() if named is None else named
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), named, **options)

    pairs = list(model.named_parameters())
    for call, text in (
        (lambda: make(backward_passes_per_step=0), "backward_passes_per_step: expected >= 1, got 0"),
        (lambda: make(gradient_predivide_factor=2.0, op=hvd.Sum), "expected 1 where op is not Average, got 2.0"),
        (lambda: make(pairs[:1]), r"expected all parameters of the optimizer, got none for those of shapes \[\(2,\)\]"),
        (lambda: make([("a", p) for _, p in pairs]), "expected each name once, got more of a"),
        (lambda: make(model.parameters()), "expected pairs of name and parameter"),
        (lambda: make(groups=0), "groups: expected a positive number, or lists of parameters, got 0"),
        (
            lambda: make(groups=[[pairs[0][1]], [pairs[0][1]]]),
            "expected each parameter in one group, got 'weight' in two",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    hvd.shutdown()
    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        make()
