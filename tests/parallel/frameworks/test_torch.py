"""PyTorch under strategies: the numbers of one process of plain torch, whatever the ranks."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from tests.harness.torch_training import (  # noqa: E402
    CASES,
    EPOCHS,
    conv_net,
    dataset,
    difference,
    distributed,
    loss_of,
    make,
    mlp,
    plain,
    put,
    rows,
    step_of,
)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", CASES)
def test_every_rule_equals_one_process(name):
    reference = mlp()
    expected = make(name, reference, groups=True)
    plain(reference, expected)
    with put(name=name, groups=True) as (strategy, module, optimizer):
        distributed(strategy, module, optimizer)
        assert difference(module.parameters(), reference.parameters()) < 1e-9
        ours, theirs = optimizer.state_dict()["state"], expected.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        for index, state in theirs.items():
            for key, value in state.items():
                if value is not None:
                    assert torch.allclose(ours[index][key].double(), value.double(), rtol=1e-6, atol=1e-12), key


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("made", ["before", "after"])
def test_schedulers_are_followed_in_every_group(made):
    reference = mlp()
    expected = make("Adam", reference, groups=True)
    plain(reference, expected, scheduler=torch.optim.lr_scheduler.OneCycleLR(expected, [0.01, 0.02], 60))
    module = mlp()
    optimizer = make("Adam", module, groups=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.01, 0.02], 60) if made == "before" else None
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        scheduler = scheduler or torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.01, 0.02], 60)
        distributed(strategy, module, optimizer, scheduler=scheduler)
        assert difference(module.parameters(), reference.parameters()) < 1e-9


@pytest.mark.ranks(1, 2, 3)
def test_clipping_is_by_the_norm_over_all_replicas_and_groups():
    reference = mlp()
    plain(reference, make("SGD", reference, groups=True), max_norm=0.05)
    with put(name="SGD", groups=True, max_norm=0.05) as (strategy, module, optimizer):
        distributed(strategy, module, optimizer)
        # torch divides by the norm + 1e-6
        assert difference(module.parameters(), reference.parameters()) < 1e-4


@pytest.mark.ranks(1, 2, 3)
def test_batch_norm_of_all_replicas_equals_one_process():
    reference = conv_net()
    plain(reference, make("SGD", reference), kind="images")
    reference.eval()
    with put(conv_net, "SGD", sync_batch_norm=True) as (strategy, module, optimizer):
        distributed(strategy, module, optimizer, kind="images")
        module.eval()
        assert difference(module.parameters(), reference.parameters()) < 1e-9
        assert difference(module.buffers(), reference.buffers()) < 1e-9


@pytest.mark.ranks(1, 2)
def test_running_statistics_become_means_over_the_replicas():
    with put(conv_net, "SGD") as (strategy, module, _):
        module(torch.full((4, 1, 6, 6), float(strategy.rank), dtype=torch.float64))
        mine = module[1].running_mean.numpy().copy()
        module.eval()
        expected = strategy.reduce(ms.ReduceOp.MEAN, mine)
        assert np.allclose(module[1].running_mean.numpy(), expected, rtol=1e-12)


@pytest.mark.ranks(1, 2, 3)
def test_gradients_are_accumulated_until_zero_grad():
    reference = mlp()
    expected = make("SGD", reference)
    x, y = rows()
    for part in (slice(0, 12), slice(12, 24)):
        loss_of(reference, x[part], y[part]).backward()
    expected.step()
    with put(name="SGD") as (strategy, module, optimizer):
        for (a, b), _ in zip(
            strategy.distribute_dataset(ms.data.from_arrays((x, y)).batch(12)), range(2), strict=False
        ):
            loss_of(module, a, b).backward()
        optimizer.step()
        assert difference(module.parameters(), reference.parameters()) < 1e-12


@pytest.mark.ranks(2, 3)
def test_accumulation_over_batches_of_other_sizes_is_weighted_by_rows():
    x, y = rows()
    reference = mlp()
    expected = make("SGD", reference)
    for part in (slice(0, 12), slice(12, 16)):  # the second is shared out unevenly, or not to all
        loss_of(reference, x[part], y[part]).backward()
    expected.step()
    with put(name="SGD") as (strategy, module, optimizer):
        for a, b in strategy.distribute_dataset(ms.data.from_arrays((x[:16], y[:16])).batch(12)):
            loss_of(module, a, b).backward()
        optimizer.step()
        assert difference(module.parameters(), reference.parameters()) < 1e-12


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_ways_of_forgetting_gradients(set_to_none):
    x, y = rows()
    with put(name="SGD") as (_, module, optimizer):
        loss_of(module, x, y).backward()
        first = ms.torch.local_gradient(module[0].weight).clone()
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(module, x, y).backward()
        assert torch.equal(ms.torch.local_gradient(module[0].weight), first)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor"])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_steps_without_any_gradient_change_nothing_as_in_torch(name, options):
    x, y = rows()
    reference = mlp()
    module, theirs = copy.deepcopy(reference), getattr(torch.optim, name)(reference.parameters(), lr=0.1)
    optimizer = getattr(torch.optim, name)(module.parameters(), lr=0.1)
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        ms.torch.distribute(module, optimizer, **options)
    for each, rule in ((reference, theirs), (module, optimizer)):
        for _ in range(3):
            rule.step()
            loss_of(each, x, y).backward()
            rule.step()
            rule.zero_grad()
    assert difference(module.parameters(), reference.parameters()) < 1e-12
    strategy.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
@pytest.mark.parametrize("delete", [lambda rule: rule.state.clear(), lambda rule: setattr(rule, "state", {})])
def test_state_is_deleted_as_in_torch(name, delete):
    x, y = rows()
    reference = mlp()
    theirs = getattr(torch.optim, name)(reference.parameters(), lr=0.1)
    module = copy.deepcopy(reference)
    optimizer = getattr(torch.optim, name)(module.parameters(), lr=0.1)
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        ms.torch.distribute(module, optimizer)
    for each, rule in ((reference, theirs), (module, optimizer)):
        for step in range(4):
            if step == 2:
                delete(rule) if rule is optimizer else rule.state.clear()
            rule.zero_grad()
            loss_of(each, x, y).backward()
            rule.step()
    assert difference(module.parameters(), reference.parameters()) < 1e-12
    with pytest.raises(RuntimeError, match="load_state_dict"):
        optimizer.state = {module[0].weight: {}}
    strategy.close()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("by_hand", [False, True])
def test_sparse_gradients_are_summed_as_dense_ones(by_hand):
    def build(sparse):
        torch.manual_seed(0)
        return torch.nn.EmbeddingBag(20, 4, mode="sum", sparse=sparse).double()

    words = np.random.default_rng(0).integers(0, 20, (12, 3))
    reference = build(sparse=False)
    expected = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        expected.zero_grad()
        reference(torch.from_numpy(words)).square().sum(1).mean().backward()
        expected.step()
    module = build(sparse=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        data = strategy.distribute_dataset(ms.data.from_arrays(words).batch(12))
        for _ in range(3):
            for batch in data:
                optimizer.zero_grad()
                loss = module(torch.from_numpy(batch)).square().sum(1).mean()
                if by_hand:
                    (module.weight.grad,) = torch.autograd.grad(loss, [module.weight])
                else:
                    loss.backward()
                optimizer.step()
        assert difference(module.parameters(), reference.parameters()) < 1e-12


@pytest.mark.ranks(1, 2)
def test_state_goes_to_plain_torch_and_back():
    with put(name="AdamW", groups=True) as (strategy, module, optimizer):
        distributed(strategy, module, optimizer, epochs=2)
        weights, state = module.state_dict(), optimizer.state_dict()
        other = mlp()
        other.load_state_dict({name: value.clone() for name, value in weights.items()})
        continued = make("AdamW", other, groups=True)
        continued.load_state_dict(copy.deepcopy(state))
        plain(other, continued, epochs=2)
        distributed(strategy, module, optimizer, epochs=2)
        assert difference(module.parameters(), other.parameters()) < 1e-9
        fresh, theirs = other.state_dict(), continued.state_dict()
    with put(name="AdamW", groups=True) as (strategy, module, optimizer):
        module.load_state_dict(fresh)
        optimizer.load_state_dict(theirs)
        plain(other, continued, epochs=1)
        distributed(strategy, module, optimizer, epochs=1)
        assert difference(module.parameters(), other.parameters()) < 1e-9


@pytest.mark.ranks(1, 2)
def test_an_optimizer_that_has_stepped_is_taken_over():
    reference = mlp()
    expected = make("Adam", reference)
    plain(reference, expected, epochs=2)
    module = mlp()
    optimizer = make("Adam", module)
    plain(module, optimizer, epochs=1)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        data = strategy.distribute_dataset(dataset())
        data = iter(data)
        data.restore({"epoch": 1, "next": 0})
        for x, y in data:
            optimizer.zero_grad()
            loss_of(module, x, y).backward()
            optimizer.step()
        assert difference(module.parameters(), reference.parameters()) < 1e-9


class Shared(torch.nn.Module):
    """An embedding whose table is the output layer's weight too, a layer that is never used, and one that is frozen."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = torch.nn.Embedding(7, 5), torch.nn.Linear(5, 7, bias=False)
        self.out.weight = self.table.weight
        self.unused, self.frozen = torch.nn.Linear(2, 2), torch.nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, words):
        return self.out(self.frozen(self.table(words)))


@pytest.mark.ranks(1, 2, 3)
def test_tied_unused_and_frozen_parameters():
    words = np.random.default_rng(0).integers(0, 7, 12)
    after = (words + 1) % 7
    reference, module = Shared(), Shared()
    expected, optimizer = make("Adam", reference), make("Adam", module)
    for _ in range(5):
        expected.zero_grad()
        loss_of(reference, words, after).backward()
        expected.step()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        data = strategy.distribute_dataset(ms.data.from_arrays((words, after)).batch(12))
        for _ in range(5):
            for a, b in data:
                optimizer.zero_grad()
                loss_of(module, a, b).backward()
                optimizer.step()
        assert module.out.weight is module.table.weight
        assert difference(module.parameters(), reference.parameters()) < 1e-9


@pytest.mark.ranks(1, 2)
def test_passes_in_bfloat16_over_float32_weights():
    def train(module, optimizer, batches):
        for x, y in batches:
            with torch.autocast("cpu", torch.bfloat16):
                loss = torch.nn.functional.cross_entropy(
                    module(torch.from_numpy(x).float()).float(), torch.from_numpy(y)
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    reference = mlp().float()
    train(reference, make("SGD", reference), [rows()] * 4)
    with put(lambda: mlp().float(), "SGD") as (_, module, optimizer):
        train(module, optimizer, [rows()] * 4)  # the same rows on each replica: the mean is each one's gradient
        assert module[0].weight.dtype is torch.float32
        assert difference(module.parameters(), reference.parameters()) < 1e-6


@pytest.mark.ranks(1, 2)
def test_bfloat16_weights():
    with put(lambda: mlp().bfloat16(), "SGD") as (_, module, optimizer):
        x, y = rows()
        before = module[0].weight.detach().float()
        loss = torch.nn.functional.cross_entropy(module(torch.from_numpy(x).bfloat16()).float(), torch.from_numpy(y))
        loss.backward()
        gradient = ms.torch.local_gradient(module[0].weight).float()
        optimizer.step()
        assert module[0].weight.dtype is torch.bfloat16
        assert torch.equal(module[0].weight.float(), (before - 0.1 * gradient).bfloat16().float())


@pytest.mark.ranks(1, 2)
def test_a_closure_is_called_once():
    with put(name="SGD") as (_, module, optimizer):
        calls = []

        def closure():
            optimizer.zero_grad()
            loss = loss_of(module, *rows())
            loss.backward()
            calls.append(loss)
            return loss

        before = module[0].weight.detach().clone()
        assert optimizer.step(closure) is calls[0]
        assert len(calls) == 1
        assert not torch.equal(module[0].weight, before)


@pytest.mark.ranks(1, 2)
def test_a_strategys_file_has_weights_statistics_and_state(mpi_tmp_path):
    path = mpi_tmp_path / "run.h5"
    with put(conv_net, "Adam") as (strategy, module, optimizer):
        distributed(strategy, module, optimizer, "images", epochs=2)
        strategy.save(path)
        distributed(strategy, module, optimizer, "images", epochs=1)
        module.eval()
        first = [t.detach().clone() for t in (*module.parameters(), *module.buffers())]
    with put(conv_net, "Adam") as (strategy, module, optimizer):
        strategy.restore(path)
        distributed(strategy, module, optimizer, "images", epochs=1)
        module.eval()
        again = [*module.parameters(), *module.buffers()]
        assert difference(again, first) < (1e-12 if strategy.size == 1 else 1)  # statistics are saved as their means


@pytest.mark.ranks(1, 2)
def test_a_copy_is_a_plain_module_of_its_own():
    with put() as (strategy, module, optimizer):
        average = copy.deepcopy(module)
        before = [p.detach().clone() for p in module.parameters()]
        assert type(average) is torch.nn.Sequential
        distributed(strategy, module, optimizer, epochs=1)
        assert difference(average.parameters(), before) == 0
        assert difference(module.parameters(), before) > 0
        loss_of(average, *rows()).backward()
        assert type(average[0].weight.grad) is torch.Tensor


@pytest.mark.ranks(1, 2)
def test_a_copy_with_batch_norm_of_all_replicas_is_of_the_same_strategy():
    with put(conv_net, "SGD", sync_batch_norm=True) as (strategy, module, optimizer):
        distributed(strategy, module, optimizer, "images", epochs=1)
        average = copy.deepcopy(module)
        own = torch.full((2, 1, 6, 6), float(strategy.rank + 1), dtype=torch.float64)
        everyones = torch.cat([torch.full_like(own, rank + 1) for rank in range(strategy.size)])
        assert torch.allclose(average(own), module(own))
        plain = torch.nn.BatchNorm2d(4).double()  # in training a copy's statistics are those of all replicas, too
        layer = average[1]
        found, reference = layer(average[0](own)), plain(average[0](everyones))
        rows = slice(2 * strategy.rank, 2 * strategy.rank + 2)
        with torch.no_grad():
            scale, shift = layer.weight.view(1, -1, 1, 1), layer.bias.view(1, -1, 1, 1)
            assert torch.allclose(found, reference[rows] * scale + shift)
        average.eval()
        if strategy.rank == 0:
            average(own)  # alone
        assert average[1].running_mean.data_ptr() != module[1].running_mean.data_ptr()


@pytest.mark.ranks(2)
def test_batches_of_another_origin_have_equal_weights_where_the_program_says_so():
    x, y = rows()
    with put(name="SGD") as (strategy, module, _):
        for _ in strategy.distribute_dataset(ms.data.from_arrays((x[:5], y[:5])).batch(5)):
            with pytest.raises(
                ms.errors.BatchError, match=r"Input shapes: \(52, .*3 of 5 rows|Input shapes: \(52, .*2 of 5 rows"
            ):
                loss_of(module, x, y)
            with strategy.batch(None):
                loss_of(module, x, y).backward()
        reference = mlp()
        loss_of(reference, x, y).backward()
        assert torch.equal(ms.torch.local_gradient(module[0].weight), reference[0].weight.grad)


@pytest.mark.ranks(2, 3)
def test_rank_0s_numbers_are_everybodys_and_masks_differ():
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    torch.manual_seed(comm.rank)
    module = torch.nn.Linear(3, 2)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module)
        assert len(set(comm.allgather(module.weight.detach().numpy().tobytes()))) == 1
        first = [comm.allgather(torch.rand(8).numpy().tobytes()) for _ in range(2)]
        assert len(set(first[0])) == comm.size
    torch.manual_seed(comm.rank)
    module = torch.nn.Linear(3, 2)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module)
        assert [comm.allgather(torch.rand(8).numpy().tobytes()) for _ in range(2)] == first


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("loss", ["sum", "mean"])
def test_an_optimizer_of_ours_takes_a_modules_gradients(loss):
    reference = mlp()
    plain(reference, torch.optim.SGD(reference.parameters(), lr=0.1))
    module = mlp()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, loss=loss)
            optimizer = ms.optimizers.SGD(0.1)

        def step(x, y):
            module.zero_grad()
            losses = torch.nn.functional.cross_entropy(
                module(torch.from_numpy(x)), torch.from_numpy(y), reduction="none"
            )
            (losses.mean() if loss == "mean" else losses.sum() / ms.context.global_batch_size()).backward()
            optimizer.apply_gradients(ms.torch.gradients(module))

        data = strategy.distribute_dataset(dataset())
        for _ in range(EPOCHS):
            for batch in data:
                strategy.run(step, args=batch)
        assert difference(module.parameters(), reference.parameters()) < 1e-9


@pytest.mark.ranks(1, 2)
def test_several_local_replicas_have_gradients_of_their_own():
    reference = mlp()
    plain(reference, make("Adam", reference))
    module = mlp()
    optimizer = make("Adam", module)
    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)

        data = strategy.distribute_dataset(dataset())
        for _ in range(EPOCHS):
            for batch in data:
                strategy.run(step_of(module, optimizer), args=batch)
        assert difference(module.parameters(), reference.parameters()) < 1e-9
        with pytest.raises(ms.errors.ContextError, match="strategy.run"):
            optimizer.step()


@pytest.mark.ranks(2, 3)
def test_parameter_servers_that_wait_equal_one_process():
    x, y = rows()
    x, y = x[:48], y[:48]
    reference = mlp()
    expected = make("momentum", reference)
    batches = iter(ms.data.from_arrays((x, y)).shuffle(seed=1).batch(12))
    for epoch in range(4):
        if epoch:
            batches.restore({"epoch": epoch, "next": 0})
        for a, b in batches:
            expected.zero_grad()
            loss_of(reference, np.array(a), np.array(b)).backward()
            expected.step()
    module = mlp()
    optimizer = make("momentum", module)
    strategy = ms.ParameterServerStrategy(num_ps=1, max_staleness=0)
    with strategy.scope():
        ms.torch.distribute(module, optimizer)

    data = strategy.distribute_dataset(ms.data.from_arrays((x, y)).shuffle(seed=1).batch(12 // strategy.num_workers))
    for _ in range(4):
        for batch in data:
            strategy.run(step_of(module, optimizer), args=batch)
    names = [name for name, _ in module.named_parameters()]
    state = module.state_dict()
    for name, theirs in zip(names, reference.parameters(), strict=True):
        assert difference([state[name]], [theirs]) < 1e-9
    strategy.close()
