"""Optimizers of PyTorch compute the same bits on all ranks, or raise: unequal threads, random numbers, unequal settings."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from tests.harness.process_groups import set_layout  # noqa: E402
from tests.harness.torch_versions import rules  # noqa: E402

optim = torch.optim


class Dots(optim.Optimizer):
    """A rule whose bits depend on the number of threads."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            g = p.grad.flatten()
            p.add_(p.grad, alpha=-self.param_groups[0]["lr"] * (1 + float(g @ g)))


class Noisy(optim.Optimizer):
    """A rule that draws random numbers between two calls of its closure."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure):
        closure()
        for p in self.param_groups[0]["params"]:
            p.add_(torch.randn_like(p), alpha=0.1)
        loss = closure()
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad + torch.rand_like(p), alpha=-self.param_groups[0]["lr"])
        return loss


RULES = {
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.5, max_iter=3, history_size=2),
    "strong_wolfe": lambda p: optim.LBFGS(p, max_iter=3, history_size=2, line_search_fn="strong_wolfe"),
    "own": Dots,
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.1),
    "Muon": lambda p: optim.Muon(p, lr=0.1),
    "AdamW": lambda p: optim.AdamW(p, lr=0.1),
    "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
}


def weights_of_all(module):
    """The weights of all ranks, one row each."""
    from mpi4py import MPI

    own = np.concatenate([p.detach().numpy().reshape(-1) for p in module.parameters()])
    return np.stack(MPI.COMM_WORLD.allgather(own))


def trained(rule, threads, limit, steps):
    """The weights of all ranks after some steps, of ranks with these numbers of threads."""
    torch.manual_seed(0)
    module = torch.nn.Linear(600, 500, bias=False)
    x, y = torch.randn(4, 600), torch.randn(4, 500)
    before = torch.get_num_threads()
    try:
        with ms.MultiWorkerMirroredStrategy() as strategy:
            torch.set_num_threads(threads[strategy.rank])
            optimizer = RULES[rule](module.parameters())
            with strategy.scope():
                module, optimizer = ms.torch.distribute(module, optimizer, max_norm=limit)
            rows = slice(2 * strategy.rank, 2 * strategy.rank + 2)

            def closure():
                optimizer.zero_grad()
                loss = (module(x[rows]) - y[rows]).square().mean()
                loss.backward()
                return loss

            for _ in range(steps):
                optimizer.step(closure)
                assert torch.get_num_threads() == threads[strategy.rank]
            return weights_of_all(module)
    finally:
        torch.set_num_threads(before)


def test_dot_products_depend_on_threads():
    """Else the next test would see nothing."""
    torch.manual_seed(0)
    a, found = torch.randn(300_000), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(float(a @ a))
    assert found[0] != found[1]


@pytest.mark.ranks(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("limit", [None, 0.01])
@pytest.mark.parametrize("rule", rules(RULES))
def test_unequal_numbers_of_threads(monkeypatch, rule, limit):
    """The weights are the same on all ranks, of two nodes, and those of ranks with one thread each."""
    set_layout("nodes", monkeypatch)
    expected, found = (trained(rule, threads, limit, 2) for threads in ([1, 1], [2, 1]))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.ranks(2)
def test_random_numbers_of_rules_and_of_closures(monkeypatch):
    """The rule draws the same on all ranks, of two nodes; each rank's closures draw what they would without it."""
    from mpi4py import MPI

    set_layout("nodes", monkeypatch)
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2).double()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        optimizer = Noisy(module.parameters())
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, optimizer)
        alone, drawn = torch.Generator(), []
        alone.set_state(torch.get_rng_state())

        def closure():
            drawn.append(torch.rand(3, dtype=torch.float64))
            optimizer.zero_grad()
            loss = (module(drawn[-1]) - 1).square().mean()
            loss.backward()
            return loss

        seen = []
        for _ in range(3):
            optimizer.step(closure)
            seen.append(weights_of_all(module))
        np.testing.assert_array_equal([a for a, _ in seen], [b for _, b in seen])
        assert len(np.unique(seen)) == 3 * seen[0][0].size  # other noise in each step, and for each number
        for mine in [*drawn, torch.rand(3, dtype=torch.float64)]:
            assert torch.equal(mine, torch.rand(3, dtype=torch.float64, generator=alone))
        everyones = MPI.COMM_WORLD.allgather([each.tolist() for each in drawn])
        assert everyones[0] != everyones[1]


KINDS = [
    name
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and name not in ("Optimizer", "SparseAdam")
]
BASE = {  # of which a change of each other argument is legal, and changes numbers
    "SGD": {"momentum": 0.5},
    "RMSprop": {"momentum": 0.5},
    "Muon": {"weight_decay": 0.1},
    "LBFGS": {"max_iter": 3, "history_size": 3},
}
CHANGED = {
    "line_search_fn": "strong_wolfe",
    "adjust_lr_fn": "match_rms_adamw",
    "max_eval": 1,
    "dampening": 0.5,
    "weight_decay": 0.3,
    "momentum": 0.25,
    "initial_accumulator_value": 0.5,
    "etas": (0.4, 1.3),
    "d": 2.0,
}
ON_BLOCKS = ("foreach", "fused", "capturable", "differentiable")  # a step on blocks is the same with each of them


def arguments():
    for name in KINDS:
        for argument in list(inspect.signature(getattr(optim, name)).parameters.values())[1:]:
            yield name, argument.name, argument.default


def another(name, value):
    """Another legal value of an argument."""
    if name in CHANGED:
        return CHANGED[name]
    if value is None or isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(0.5 if each is None else 0.75 * each for each in value)
    return value + 1 if isinstance(value, int) else 0.5 * value


def after_steps(name, settings):
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2, bias=False).double()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        optimizer = getattr(optim, name)(module.parameters(), **settings)
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, optimizer)

        def closure():
            optimizer.zero_grad()
            loss = (module(torch.ones(1, 3, dtype=torch.float64)) - strategy.rank - 1).square().mean()
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        return weights_of_all(module)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "argument", "default"), list(arguments()))
def test_a_setting_that_differs_raises_or_changes_no_number(name, argument, default):
    """Of all optimizers of PyTorch, all arguments."""
    from mpi4py import MPI

    settings = BASE.get(name, {})
    changed = settings | {argument: another(argument, settings.get(argument, default))}
    getattr(optim, name)([torch.zeros(2, 3)], **changed)  # legal
    own = changed if MPI.COMM_WORLD.rank == 1 else settings
    if argument in ON_BLOCKS and name != "Adafactor":
        expected, found = after_steps(name, settings), after_steps(name, own)
        np.testing.assert_array_equal(found, expected)
        return
    with pytest.raises(ms.errors.CollectiveMismatchError, match="rank 0.*rank 1"):
        after_steps(name, own)
