"""The weight of a batch in PyTorch: loops of any order equal one process of plain torch, or raise an error with the remedy."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402

ROWS, BATCH = 11, 4  # 4, 4 and 3 rows: on two ranks the last part is unequal, on three all are
nn, functional = torch.nn, torch.nn.functional


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(3, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.kept = None
        self.pairs = [[self.encoder.weight, [self.decoder.bias]]]  # not where torch looks for parameters

    def encode(self, x):
        return self.encoder(x).tanh()

    def tied(self, x):
        return functional.linear(functional.linear(x, self.encoder.weight), self.encoder.weight.T)

    def loss(self, x):
        out = self(x) + self.pairs[0][1][0]  # a call of itself, and a bare parameter after it
        return (out - x).square().mean() + (self.scale * x).mean()

    def of_hidden(self, hidden):
        return hidden @ self.pairs[0][0]

    def forward(self, x):
        hidden = self.encode(x)
        self.kept = hidden.square().mean()
        return self.scale * self.decoder(hidden)


def net():
    torch.manual_seed(0)
    made = Net().double()
    made.pairs = [[made.encoder.weight, [made.decoder.bias]]]
    return made


def data(rows=ROWS, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, 3))


def loss_of(out, x):
    return (out - x).square().mean()


# Each takes the tensor of a batch, the module and the optimizer; rows that belong together are in one tensor.
def usual(x, net, optimizer):
    loss_of(net(x), x).backward()


def module_zero_grad(x, net, optimizer):
    loss = loss_of(net(x), x)
    net.zero_grad()
    loss.backward()


def gradients_by_hand(x, net, optimizer):
    found = torch.autograd.grad(loss_of(net(x), x), list(net.parameters()))
    for parameter, gradient in zip(net.parameters(), found, strict=True):
        parameter.grad = gradient


def two_losses(x, net, optimizer):
    out = net(x)
    loss_of(out, x).backward(retain_graph=True)
    out.abs().mean().backward()


def losses_of_two_passes_in_one_graph(x, net, optimizer):
    (loss_of(net(x), x) + net(2 * x).abs().mean()).backward()


def a_pass_without_gradients_between(x, net, optimizer):
    out = net(x)
    with torch.no_grad():
        target = net(x) + 1
    loss_of(out, target).backward()


def a_look_after_backward(x, net, optimizer):
    loss_of(net(x), x).backward()
    net(x).mean().item()


def methods(x, net, optimizer):
    loss_of(net.decoder(net.encode(x)), x).backward()


def a_method_and_a_call(x, net, optimizer):
    net.encode(x).square().mean().backward()
    loss_of(net(x), x).backward()


def a_method_with_bare_weights(x, net, optimizer):
    loss_of(net.tied(x), x).backward()


def a_loss_that_the_module_keeps(x, net, optimizer):
    out = net(x)
    (loss_of(out, x) + net.kept).backward()


def a_penalty_of_the_weights(x, net, optimizer):
    (loss_of(net(x), x) + 0.1 * sum(p.square().sum() for p in net.parameters())).backward()


def a_gradient_penalty(x, net, optimizer):
    x = x.detach().requires_grad_()
    slope = torch.autograd.grad(net(x).sum(), x, create_graph=True)[0]
    (slope.square().sum(1).sqrt() - 1).square().mean().backward()


def a_penalty_of_the_gradients_of_each_row(x, net, optimizer):
    losses = (net(x) - x).square().mean(1)
    weights = [net.encoder.weight, net.decoder.weight]
    slopes = [torch.autograd.grad(each, weights, create_graph=True) for each in losses]
    penalties = [sum(slope.square().sum() for slope in each) for each in slopes]
    (losses + torch.stack(penalties) if penalties else losses).mean().backward(create_graph=True)


def in_place_on_the_output(x, net, optimizer):
    out = net(x)
    out -= x
    out.square().mean().backward()


def a_hook_on_a_layer(x, net, optimizer):
    seen = []
    handle = net.encoder.register_forward_hook(lambda _, args, out: seen.append(out))
    net(x)
    handle.remove()
    seen[0].square().mean().backward()


def functional_call(x, net, optimizer):
    parameters = dict(net.named_parameters())
    loss_of(torch.func.functional_call(net, parameters, (x,)), x).backward()


def a_checkpoint(x, net, optimizer):
    loss_of(torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False), x).backward()


def a_reentrant_checkpoint_of_layers(x, net, optimizer):
    x = x.detach().requires_grad_()
    hidden = torch.utils.checkpoint.checkpoint(net.encode, x, use_reentrant=True)
    loss_of(net.decoder(hidden), x).backward()


def a_list_of_views(x, net, optimizer):
    parts = [net(row[None]) for row in x]  # each view is part of the batch's memory
    if parts:
        loss_of(torch.cat(parts), x).backward()
    else:
        loss_of(net(x), x).backward()


def time_first(x, net, optimizer):
    loss_of(net(x.T[:, :, None].expand(3, len(x), 3)), x.T[:, :, None]).backward()


def a_method_that_calls_the_module(x, net, optimizer):
    net.loss(x).backward()


def forward_itself(x, net, optimizer):
    loss_of(net.forward(x), x).backward()


def a_method_of_what_another_pass_computed(x, net, optimizer):
    loss_of(net.of_hidden(functional.gelu(net.encode(x))), x).backward()


def under_vmap(x, net, optimizer):
    if len(x):
        loss_of(torch.func.vmap(net)(x), x).backward()
    else:
        usual(x, net, optimizer)


def weights_clamped_in_forward(x, net, optimizer):
    hook = net.encoder.register_forward_pre_hook(lambda layer, _: _clamp(layer))
    usual(x, net, optimizer)
    hook.remove()


def _clamp(layer):
    with torch.no_grad():
        layer.weight.clamp_(-0.3, 0.3)


LOOPS = [
    a_method_that_calls_the_module, forward_itself, a_method_of_what_another_pass_computed, under_vmap, usual,
    module_zero_grad, gradients_by_hand, two_losses, losses_of_two_passes_in_one_graph, a_pass_without_gradients_between,
    a_look_after_backward, methods, a_method_and_a_call, a_method_with_bare_weights, a_loss_that_the_module_keeps,
    a_penalty_of_the_weights, a_gradient_penalty, a_penalty_of_the_gradients_of_each_row, in_place_on_the_output,
    a_hook_on_a_layer, functional_call, a_checkpoint, a_reentrant_checkpoint_of_layers, a_list_of_views, time_first,
]  # fmt: skip


def take(loop, x, module, optimizer):
    optimizer.zero_grad()
    loop(x, module, optimizer)
    optimizer.step()


def alone(loop, batches, epochs=2, **sgd):
    module = net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5, **sgd)
    for _ in range(epochs):
        for rows in batches:
            take(loop, torch.from_numpy(rows), module, optimizer)
    return module


def batches_of(x, size=BATCH):
    return [x[low : low + size] for low in range(0, len(x), size)]


def put(strategy, make=net):
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    with strategy.scope():
        return ms.torch.distribute(module, optimizer)


def check(module, reference):
    for (name, mine), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12), (name, (mine - theirs).abs().max().item())


# Their inputs are copies: outside of strategy.run, 2 rows may be of 4 or of 3.
ONLY_IN_RUN = [losses_of_two_passes_in_one_graph, a_reentrant_checkpoint_of_layers]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("where", ["in run", "outside"])
def test_a_loop_equals_one_process(loop, where):
    if where == "outside" and loop in ONLY_IN_RUN:
        pytest.skip("its inputs are copies of the batch")
    equals_one_process(loop, where)


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("loop", [usual, two_losses, time_first], ids=lambda loop: loop.__name__)
def test_a_loop_equals_one_process_on_a_rank_without_rows(loop):
    equals_one_process(loop, "outside")


def equals_one_process(loop, where):
    x = data()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = put(strategy)
        rows = strategy.distribute_dataset(ms.data.from_arrays(x).batch(BATCH))
        for _ in range(2):
            for batch in rows:
                if where == "outside":
                    take(loop, torch.from_numpy(batch), module, optimizer)
                else:
                    strategy.run(lambda a: take(loop, torch.from_numpy(a), module, optimizer), args=(batch,))
        check(module, alone(loop, batches_of(x)))


def drawn_ahead(data, take):
    batches = iter(data)
    batch = next(batches, None)
    while batch is not None:
        now, batch = torch.from_numpy(batch), next(batches, None)
        take(now)


def in_a_list(data, take):
    for batch in [torch.from_numpy(batch) for batch in data]:
        take(batch)


def views_in_a_list(data, take):
    for batch in [batch[:, ::-1][:, ::-1] for batch in data]:
        take(torch.from_numpy(batch.copy()) if not batch.size else torch.as_tensor(batch))


def copies_by_rows(data, take):
    for batch in data:
        take(torch.tensor(batch))


def in_run_converted_before(data, take):
    for batch in data:
        ms_strategy().run(take, args=(torch.from_numpy(batch),))


def in_run_by_a_closure(data, take):
    for batch in data:
        tensor = torch.from_numpy(batch)
        ms_strategy().run(lambda tensor=tensor: take(tensor))


def named_batches(data, take):
    for batch in data:
        with ms_strategy().batch(batch):
            take(torch.tensor(batch))


def named_by_a_view(data, take):
    for batch in data:
        tensor = torch.from_numpy(batch)
        with ms_strategy().batch(tensor[:, 1:]):
            take(tensor.clone())


def after_a_break(data, take):
    for _ in data:
        break
    for batch in data:
        take(torch.from_numpy(batch))


_strategy = []


def ms_strategy():
    return _strategy[-1]


DRAWN = [
    drawn_ahead, in_a_list, views_in_a_list, copies_by_rows, in_run_converted_before, in_run_by_a_closure, named_batches,
    named_by_a_view, after_a_break,
]  # fmt: skip


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("draw", DRAWN, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("loop", [usual, module_zero_grad, two_losses, methods], ids=lambda loop: loop.__name__)
def test_a_batch_weighs_the_same_whenever_it_was_drawn(draw, loop):
    x = data(9)  # batches of 5 and 4 rows: 3 + 2 and 2 + 2, or 2 + 2 + 1 and 2 + 1 + 1
    with ms.MultiWorkerMirroredStrategy() as strategy:
        _strategy.append(strategy)
        module, optimizer = put(strategy)
        rows = strategy.distribute_dataset(ms.data.from_arrays(x).batch(5))
        if draw is copies_by_rows:
            x = x[:5]  # else 2 rows are of batches of different weights: see below
            rows = strategy.distribute_dataset(ms.data.from_arrays(x).batch(5))
        draw(rows, lambda tensor: take(loop, tensor, module, optimizer))
        check(module, alone(loop, batches_of(x, 5), epochs=1))


@pytest.mark.ranks(2)
def test_rows_of_batches_of_other_weights_are_an_error_that_names_them():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = put(strategy)
        drawn = list(strategy.distribute_dataset(ms.data.from_arrays(data(9)).batch(5)))  # 3 + 2 rows, then 2 + 2
        flat = torch.tensor(drawn[0]).repeat(5, 1)  # a copy with a number of rows that no batch has
        with pytest.raises(
            ms.errors.BatchError, match=rf"Net.forward.*\({len(flat)}, 3\).*2 of 4 rows.*strategy.batch\(x\)"
        ):
            module(flat)
        two = torch.zeros(2, 3, dtype=torch.float64)
        if strategy.rank:
            with pytest.raises(ms.errors.BatchError, match=r"2 of 4 rows, 2 of 5 rows\); rank 1"):
                module(two)
        module.eval()
        out = module(flat)  # most passes of evaluation have no backward pass: it is there that they are refused
        with pytest.raises(ms.errors.BatchError, match="Net.forward"):
            out.sum().backward()
        with torch.no_grad():
            module.train()(flat)
        with strategy.batch(None):
            usual(flat, module, optimizer)
        optimizer.step()


@pytest.mark.ranks(2, 3)
def test_two_datasets_in_a_loop():
    x, y = data(10), data(7, seed=1)

    def take_both(a, b, module, optimizer):
        optimizer.zero_grad()
        loss_of(module(a), a).backward()
        (2 * loss_of(module(b), b)).backward()
        optimizer.step()

    reference = net()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.5)
    for a, b in zip(batches_of(x, 5), batches_of(y, 4), strict=True):
        take_both(torch.from_numpy(a), torch.from_numpy(b), reference, plain)
    for in_run in (False, True):
        with ms.MultiWorkerMirroredStrategy() as strategy:
            module, optimizer = put(strategy)
            pairs = zip(
                strategy.distribute_dataset(ms.data.from_arrays(x).batch(5)),
                strategy.distribute_dataset(ms.data.from_arrays(y).batch(4)),
                strict=True,
            )

            def step(a, b, module=module, optimizer=optimizer):
                take_both(torch.from_numpy(a), torch.from_numpy(b), module, optimizer)

            for a, b in pairs:
                strategy.run(step, args=(a, b)) if in_run else step(a, b)
            check(module, reference)


@pytest.mark.ranks(2, 3)
def test_two_modules_under_one_optimizer_and_one_inside_another():
    class Around(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.scale, self.inner = nn.Parameter(torch.full((3,), 1.5, dtype=torch.float64)), inner

        def forward(self, x):
            return self.scale * self.inner(x)

    def train(batches, wrap):
        pair = nn.ModuleList([net(), Around(net())])
        optimizer = torch.optim.SGD(pair.parameters(), lr=0.1)
        pair, optimizer = wrap(pair, optimizer)
        for rows in batches:
            optimizer.zero_grad()
            x = torch.from_numpy(rows)
            loss_of(
                pair[1](functional.softplus(pair[0](x))), x
            ).backward()  # what comes between has no memory of a batch
            optimizer.step()
        return pair

    x = data(9)
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        wrapped = train(strategy.distribute_dataset(ms.data.from_arrays(x).batch(5)), ms.torch.distribute)
        check(wrapped, train(batches_of(x, 5), lambda *both: both))


@pytest.mark.ranks(2)
def test_recurrent_layers_and_parameters_in_lists():
    class Lists(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.weights = nn.ParameterList(
                [nn.Parameter(torch.full((4, 3), 0.2)), nn.Parameter(torch.full((3, 3), 0.3))]
            )
            self.again = [*self.weights]  # a plain list of the same

        def forward(self, x):
            out, _ = self.lstm(x[:, None])
            return out[:, 0] @ self.again[0] @ self.weights[1]

    def make():
        torch.manual_seed(0)
        return Lists().double()

    x = data(5)
    reference = make()
    reference.again = [*reference.weights]
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    take(usual, torch.from_numpy(x), reference, plain)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module = make()
        module.again = [*module.weights]
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, torch.optim.SGD(module.parameters(), lr=0.1))
        for batch in strategy.distribute_dataset(ms.data.from_arrays(x).batch(5)):
            take(usual, torch.from_numpy(batch), module, optimizer)
        check(module, reference)
        assert all(type(p) is nn.Parameter for p in module.parameters())
        assert module.again[0] is module.weights[0]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    "loop", [usual, methods, a_method_and_a_call, a_penalty_of_the_weights], ids=lambda loop: loop.__name__
)
def test_several_replicas_of_a_rank_have_modules_of_their_own(loop):
    with ms.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        module, optimizer = put(strategy)

        def step(rows):
            if loop in (methods, a_method_and_a_call):
                optimizer.zero_grad()
                x = torch.from_numpy(rows)
                loss_of(module(x) if loop is methods else module.encode(x) @ x.new_ones(5, 3), x).backward()
                optimizer.step()
            else:
                take(loop, torch.from_numpy(rows), module, optimizer)

        for _ in range(2):
            for batch in strategy.distribute_dataset(ms.data.from_arrays(data()).batch(BATCH)):
                strategy.run(step, args=(batch,))

        def plain(x, net, optimizer):
            if loop in (methods, a_method_and_a_call):
                loss_of(net(x) if loop is methods else net.encode(x) @ x.new_ones(5, 3), x).backward()
            else:
                loop(x, net, optimizer)

        check(module, alone(plain, batches_of(data())))
        with strategy.batch(None), pytest.raises(RuntimeError, match="the layers of replica 1"):
            strategy.run(lambda: module.decoder(torch.ones(2, 5, dtype=torch.float64)))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("loop", [usual, methods, a_method_with_bare_weights], ids=lambda loop: loop.__name__)
def test_servers_are_read_before_methods_and_layers(loop):
    with ms.ParameterServerStrategy(num_ps=1, max_staleness=0) as strategy:
        module, optimizer = put(strategy)
        x = data(16)
        for batch in strategy.distribute_dataset(ms.data.from_arrays(x).batch(16 // (strategy.size - 1))):
            strategy.run(lambda a: take(loop, torch.from_numpy(a), module, optimizer), args=(batch,))
        for _ in range(2):
            for batch in strategy.distribute_dataset(ms.data.from_arrays(x).batch(16 // (strategy.size - 1))):
                strategy.run(lambda a: take(loop, torch.from_numpy(a), module, optimizer), args=(batch,))
            strategy.barrier()
        if not strategy.is_server:
            module(torch.from_numpy(x))
            check(module, alone(loop, [x], epochs=3))


@pytest.mark.ranks(2, 3)
def test_a_pass_goes_on_with_what_a_pass_of_another_batch_computed():
    """The graph of the first batch is kept; a pass of the second comes between; layers go on with the first."""

    def train(batches, wrap):
        module = net()
        module, optimizer = wrap(module, torch.optim.SGD(module.parameters(), lr=0.1))
        first, second = map(torch.from_numpy, batches)
        hidden = functional.softplus(module.encoder(first))
        loss_of(module(second), second).backward()
        loss_of(functional.softplus(module.decoder(hidden)) * 1.0, first).backward()
        again = functional.softplus(
            module.decoder(functional.softplus(module.encoder(functional.softplus(module(first)))))
        )
        loss_of(again, first).backward()
        optimizer.step()
        return module

    x = data(8)  # batches of 5 and 3 rows
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        rows = list(strategy.distribute_dataset(ms.data.from_arrays(x).batch(5)))
        check(train(rows, ms.torch.distribute), train(batches_of(x, 5), lambda *both: both))


@pytest.mark.ranks(2)
def test_gradients_that_are_made_zero_are_zeros_and_frozen_ones_still_step():
    def train(wrap, rows, optimizer_of=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.1)):
        module = net()
        module, optimizer = wrap(module, optimizer_of(module.parameters()))
        for number in range(6):
            optimizer.zero_grad(set_to_none=False)
            (module.encode(rows) if number % 2 else module(rows)).square().mean().backward()
            module.decoder.weight.requires_grad_(number < 3)
            optimizer.step()
        return module

    rows = torch.from_numpy(data(8))
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        mine = rows[4 * strategy.rank : 4 * strategy.rank + 4]
        check(train(ms.torch.distribute, mine), train(lambda *both: both, rows))


@pytest.mark.ranks(2)
def test_copies_and_slices_of_a_module_are_plain():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, _ = put(strategy, lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)).double())
        list(strategy.distribute_dataset(ms.data.from_arrays(data(5)).batch(5)))
        twin = copy.deepcopy(module)
        assert type(twin) is nn.Sequential and type(module[:-1]) is nn.Sequential
        twin(torch.ones(17, 3, dtype=torch.float64)).sum().backward()  # rows of no batch: of no concern
        assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in twin.modules())
        with pytest.raises(ms.errors.BatchError):
            module[:-1](torch.ones(17, 3, dtype=torch.float64))


@pytest.mark.ranks(2)
def test_a_pass_that_fails_leaves_the_module_as_it_was():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = put(strategy)
        for batch in strategy.distribute_dataset(ms.data.from_arrays(data(5)).batch(5)):
            x = torch.from_numpy(batch)
            for call in (
                lambda x=x: module(x[:, :2]),
                lambda x=x: module.decoder(x),
                lambda x=x: module.encode(x[:, :2]),
            ):
                with pytest.raises(RuntimeError, match="shapes"):
                    call()
                assert all(type(p) is nn.Parameter for p in module.parameters())
            take(usual, x, module, optimizer)
        check(module, alone(usual, [data(5)], epochs=1))
