"""Optimizers that call a closure themselves, as LBFGS does: next to plain torch on the whole batch; files; what is refused."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from tests.harness.torch_versions import rules  # noqa: E402

optim = torch.optim
ROWS = 24
x = np.random.default_rng(0).normal(size=(ROWS, 6))
y = np.random.default_rng(1).normal(size=(ROWS, 2))


class SharpnessAware(optim.Optimizer):
    """SGD by the gradients at a point a little uphill: a rule of a program's own that calls the closure twice."""

    def __init__(self, params, lr=0.1, rho=0.05):
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss, moved = closure(), []
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["taken"] = state.get("taken", 0) + 1
                moved.append((p, p.clone(), group["lr"] / state["taken"]))
                if p.grad is not None:
                    p.add_(p.grad, alpha=group["rho"])
        closure()
        for p, before, rate in moved:
            p.copy_(before)
            if p.grad is not None:
                p.add_(p.grad, alpha=-rate)
        return loss


class InTurns(optim.Optimizer):
    """Has another optimizer."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.inner = optim.SGD(self.param_groups, lr=0.1)

    def step(self, closure=None):
        self.inner.step()


RULES = {
    "fixed step": lambda p: optim.LBFGS(p, lr=0.5, max_iter=4),
    "strong_wolfe": lambda p: optim.LBFGS(p, max_iter=5, line_search_fn="strong_wolfe"),
    "short history": lambda p: optim.LBFGS(p, lr=0.5, max_iter=4, history_size=3),
    "own": lambda p: SharpnessAware([{"params": p[:2], "lr": 0.2}, {"params": p[2:]}]),
}


def net(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)]
    return torch.nn.Sequential(*layers).to(dtype)


def make(name):
    module = net()
    return module, RULES[name](list(module.parameters()))


def put(strategy, name, **options):
    module, optimizer = make(name)
    with strategy.scope():
        return ms.torch.distribute(module, optimizer, **options)


def loss_of(module, a, b):
    return (module(torch.from_numpy(a)) - torch.from_numpy(b)).square().mean()


def take(module, optimizer, parts, steps=4, as_number=False):
    """Take steps with the mean of the losses of parts of equal size; return what each step returned."""

    def closure():
        optimizer.zero_grad()
        losses = [loss_of(module, x[rows], y[rows]) / len(parts) for rows in parts]
        for loss in losses:
            loss.backward()
        total = sum(loss.detach() for loss in losses)
        return float(total) if as_number else total

    return [float(optimizer.step(closure)) for _ in range(steps)]


def parts_of(number):
    return np.array_split(np.arange(ROWS), number)


def own(strategy):
    return [parts_of(strategy.size)[strategy.rank]]


def same_bits(module, reference):
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def near(module, reference, limit=1e-9):
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert (mine - theirs).abs().max() < limit


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", rules(RULES))
def test_steps_have_the_bits_of_plain_torch_on_the_sum_of_the_same_parts(name):
    """Numbers of parts are powers of two, so that dividing before the sum or after it gives the same bits."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        reference, plain = make(name)
        expected = take(reference, plain, parts_of(strategy.size))
        module, optimizer = put(strategy, name)
        assert take(module, optimizer, own(strategy)) == expected
        same_bits(module, reference)
        mine, theirs = optimizer.state_dict()["state"], plain.state_dict()["state"]
        assert mine.keys() == theirs.keys()
        for key in theirs[0].keys() - {"al"}:  # which torch computes anew in each iteration
            found, wanted = (np.array([np.asarray(v) for v in np.atleast_1d(s[0][key])]) for s in (mine, theirs))
            np.testing.assert_array_equal(found, wanted, key)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", rules(RULES))
@pytest.mark.parametrize("in_run", [False, True])
def test_unequal_and_empty_parts_of_batches_are_weighted(name, in_run):
    """25 rows in batches of 8: the last has one row, so that all ranks but one have none."""
    a, b = (np.concatenate([each, each[:1]]) for each in (x, y))
    dataset = ms.data.from_arrays((a, b)).batch(8)

    def step_of(module, optimizer):
        def step(a, b):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(module, a, b)
                loss.backward()
                return loss

            return float(optimizer.step(closure).detach())

        return step

    reference, plain = make(name)
    losses = [step_of(reference, plain)(*map(np.array, batch)) for batch in dataset]
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = put(strategy, name)
        step, found = step_of(module, optimizer), []
        for batch in strategy.distribute_dataset(dataset):
            found.append(strategy.run(step, args=batch) if in_run else step(*batch))
        near(module, reference)
        np.testing.assert_allclose(found, losses, rtol=1e-9)


@pytest.mark.ranks(2)
def test_a_loss_may_be_a_number_and_batches_have_several_weights():
    """A number has the weight of the passes of the step; a loss of batches of several weights is an error."""
    data = ms.data.from_arrays((x[:5], y[:5])).batch(3)  # parts of 2 and 1 rows, then of 1 and 1
    reference, plain = make("fixed step")
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = put(strategy, "fixed step")

        def step(module, optimizer, a, b):
            def closure():
                optimizer.zero_grad()
                loss = loss_of(module, a, b)
                loss.backward()
                return loss.item()

            return optimizer.step(closure)

        batches = list(strategy.distribute_dataset(data))
        assert step(module, optimizer, *batches[0]) == pytest.approx(step(reference, plain, x[:3], y[:3]), rel=1e-12)
        near(module, reference)

        def closure():
            optimizer.zero_grad()
            loss = sum(loss_of(module, *batch) for batch in batches)
            loss.backward()
            return loss

        with pytest.raises(ms.errors.BatchError, match=r"closure: loss.*batches of 2 different weights"):
            optimizer.step(closure)
        near(module, reference)


@pytest.mark.ranks(2)
def test_sums_and_counts_are_summed():
    """A loss that is a part of the whole, and one of which each rank has counted the terms."""
    rows = [np.arange(7), np.arange(7, ROWS)]
    reference, plain = make("strong_wolfe")
    expected = take(reference, plain, [np.arange(ROWS)])
    for counted in (False, True):
        with ms.MultiWorkerMirroredStrategy() as strategy:
            module, optimizer = put(strategy, "strong_wolfe", loss="sum")
            own = rows[strategy.rank]

            def closure(module=module, optimizer=optimizer, own=own, counted=counted):
                optimizer.zero_grad()
                loss = (module(torch.from_numpy(x[own])) - torch.from_numpy(y[own])).square().sum()
                loss = ms.torch.counted_loss(loss, 2 * len(own), optimizer) if counted else loss / (2 * ROWS)
                loss.backward()
                return loss

            found = [float(optimizer.step(closure)) for _ in range(4)]
            np.testing.assert_allclose(found, expected, rtol=1e-9)
            near(module, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", rules(RULES))
@pytest.mark.parametrize("how", ["file", "state_dict", "plain state_dict", "before"])
def test_a_run_that_is_restored_goes_on_with_the_same_bits(name, how, tmp_path_factory):
    halves = parts_of(2)
    reference, plain = make(name)
    take(reference, plain, halves, 2)
    theirs = copy.deepcopy((reference.state_dict(), plain.state_dict()))
    take(reference, plain, halves, 2)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        path = strategy.broadcast_object(str(tmp_path_factory.mktemp("files") / "state.h5"))
        module, optimizer = put(strategy, name)
        take(module, optimizer, own(strategy), 2)
        strategy.save(path)
        states = module.state_dict(), optimizer.state_dict()
    states = theirs if how in ("plain state_dict", "before") else states
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = make(name)
        if how == "before":
            module.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, optimizer)
        if how == "file":
            strategy.restore(path)
        elif how != "before":
            module.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
        take(module, optimizer, own(strategy), 2)
        same_bits(module, reference)


@pytest.mark.ranks(1, 2)
def test_schedulers_hooks_and_a_cleared_state_work_as_in_plain_torch():
    def train(module, optimizer, parts):
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
        schedule = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for number in range(4):
            if number == 2:
                optimizer.state.clear()
            take(module, optimizer, parts, 1)
            schedule.step()
        return calls

    with ms.MultiWorkerMirroredStrategy() as strategy:
        reference, plain = make("fixed step")
        expected = train(reference, plain, parts_of(strategy.size))
        module, optimizer = put(strategy, "fixed step")
        assert train(module, optimizer, own(strategy)) == expected
        same_bits(module, reference)


@pytest.mark.ranks(2)
def test_an_error_in_a_closure_leaves_weights_and_state_as_they_were():
    reference, plain = make("strong_wolfe")
    take(reference, plain, parts_of(2), 2)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = put(strategy, "strong_wolfe")
        take(module, optimizer, own(strategy), 1)
        before, calls = copy.deepcopy(module.state_dict()), []

        def closure():
            calls.append(1)
            if len(calls) == 3:
                raise ZeroDivisionError
            optimizer.zero_grad()
            loss = loss_of(module, x[own(strategy)[0]], y[own(strategy)[0]])
            loss.backward()
            return loss

        with pytest.raises(ZeroDivisionError):
            optimizer.step(closure)
        assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
        take(module, optimizer, own(strategy), 1)
        same_bits(module, reference)


@pytest.mark.ranks(2)
def test_ranks_that_compute_other_numbers_are_an_error():
    class ByRank(SharpnessAware):
        @torch.no_grad()
        def step(self, closure):
            loss = super().step(closure)
            self.param_groups[0]["params"][0].add_(self.rank)
            return loss

    with ms.MultiWorkerMirroredStrategy() as strategy:
        module = net()
        optimizer = ByRank(module.parameters())
        optimizer.rank = strategy.rank
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, optimizer)
        with pytest.raises(ms.errors.CollectiveMismatchError, match=r"0\.weight"):
            take(module, optimizer, own(strategy), 1)


@pytest.mark.ranks(2)
def test_a_history_that_grows_later_is_refused():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = put(strategy, "short history")
        optimizer.param_groups[0]["history_size"] = 5
        with pytest.raises(RuntimeError, match="history_size: expected at most 3, as when it was distributed"):
            take(module, optimizer, own(strategy), 3)


@pytest.mark.ranks(1, 2)
def test_what_cannot_work_is_refused():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        _, optimizer = put(strategy, "strong_wolfe")
        with pytest.raises(TypeError, match=r"LBFGS\.step: closure: .*got None"):
            optimizer.step()
        with strategy.scope():
            module = net(torch.bfloat16)
            with pytest.raises(
                ValueError, match=r"LBFGS: expected parameters of float32 or float64.*some of torch\.bfloat16"
            ):
                ms.torch.distribute(module, optim.LBFGS(module.parameters()))
        with strategy.scope():
            module = net()
            with pytest.raises(TypeError, match="got one with another in its inner"):
                ms.torch.distribute(module, InTurns(module.parameters()))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rule", rules(["LBFGS", "Muon", "Adafactor"]))
@pytest.mark.parametrize("world", ["servers", "parts"])
def test_rules_on_whole_tensors_are_refused_where_parameters_are_not_whole(rule, world):
    module = torch.nn.Sequential(torch.nn.Linear(6, 8, bias=False)).double()
    optimizer = getattr(optim, rule)(module.parameters())
    make, options, got = {
        "servers": (lambda: ms.ParameterServerStrategy(num_ps=1), {}, "parameters that servers keep"),
        "parts": (
            lambda: ms.MeshStrategy(axes={"data": 1, "model": 2}),
            {"layouts": {"0.weight": ["model", None]}},
            r"parts of 0\.weight",
        ),
    }[world]
    refused = pytest.raises(ValueError, match=rf"whole on each node, for torch\.optim.*{rule}, got .*{got}.*Take SGD")
    with make() as strategy, strategy.scope(), refused:
        ms.torch.distribute(module, optimizer, **options)


@pytest.mark.ranks(1)
def test_several_replicas_of_a_rank_are_refused():
    with ms.MirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        module, optimizer = put(strategy, "strong_wolfe")
        with pytest.raises(RuntimeError, match="expected one replica on each rank, got 2, which share the optimizer"):
            strategy.run(lambda: take(module, optimizer, [np.arange(ROWS)], 1))


class Two(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.extra = net(), torch.nn.Linear(6, 2).double()

    def forward(self, a, with_extra):
        return self.body(a) + self.extra(a) if with_extra else self.body(a)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("limit", [None, 0.2])
def test_parameters_used_on_one_rank_and_max_norm(limit):
    def train(module, optimizer, ranks):
        def closure():
            optimizer.zero_grad()
            losses = []
            for rank in ranks:
                a, b = (torch.from_numpy(each[parts_of(2)[rank]]) for each in (x, y))
                losses.append((module(a, rank == 0) - b).square().mean() / len(ranks))
                losses[-1].backward()
            if limit is not None and len(ranks) == 2:
                norm = torch.cat([p.grad.flatten() for p in module.parameters()]).norm()
                for p in module.parameters():
                    p.grad.mul_(min(1.0, limit / float(norm)))
            return sum(loss.detach() for loss in losses)

        return [float(optimizer.step(closure)) for _ in range(3)]

    def new():
        torch.manual_seed(0)
        module = Two()
        return module, optim.LBFGS(module.parameters(), lr=0.5, max_iter=4)

    reference, plain = new()
    expected = train(reference, plain, [0, 1])
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = new()
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, optimizer, max_norm=limit, find_unused_parameters=True)
        np.testing.assert_allclose(train(module, optimizer, [strategy.rank]), expected, rtol=1e-9)
        near(module, reference, 1e-7)  # clipped gradients make numbers of up to 150


@pytest.mark.ranks(2)
def test_two_optimizers_of_which_one_calls_a_closure():
    def train(module, optimizers, parts):
        for _ in range(3):
            take(module, optimizers[0], parts, 1)
            optimizers[1].zero_grad()
            for rows in parts:
                (loss_of(module, x[rows], y[rows]) / len(parts)).backward()
            optimizers[1].step()

    def new():
        module = net()
        return module, [optim.LBFGS(module[0].parameters(), max_iter=3), optim.SGD(module[2].parameters(), lr=0.1)]

    reference, plain = new()
    train(reference, plain, parts_of(2))
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizers = new()
        with strategy.scope():
            module, optimizers = ms.torch.distribute(module, optimizers)
        train(module, optimizers, own(strategy))
        near(module, reference)


@pytest.mark.ranks(2)
def test_the_state_of_a_frozen_first_parameter_is_saved():
    """torch keeps LBFGS's state with the first parameter, which may be frozen."""

    def new():
        module, optimizer = make("strong_wolfe")
        module[0].weight.requires_grad_(False)
        return module, optimizer

    reference, plain = new()
    take(reference, plain, parts_of(2), 4)
    states = ()
    for _ in range(2):
        with ms.MultiWorkerMirroredStrategy() as strategy:
            module, optimizer = new()
            with strategy.scope():
                module, optimizer = ms.torch.distribute(module, optimizer)
            for one, state in zip((module, optimizer), states, strict=False):
                one.load_state_dict(state)
            take(module, optimizer, own(strategy), 2)
            states = module.state_dict(), optimizer.state_dict()
            if states[1]["state"][0]["func_evals"] == plain.state_dict()["state"][0]["func_evals"]:
                same_bits(module, reference)
    assert states[1]["state"][0]["func_evals"] == plain.state_dict()["state"][0]["func_evals"]
