"""torch's rules as in plain torch: whole tensors, steps of each parameter, state and settings that come later, hooks."""

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")


from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.torch_versions import rules  # noqa: E402

nn, optim = torch.nn, torch.optim
ROWS = 12


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(3, 8), nn.ModuleList([nn.Linear(8, 4, bias=False) for _ in range(2)])
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, head=0):
        return self.heads[head](self.body(x).tanh())


class PerTensor(optim.Optimizer):
    """A rule of a program's own, with numbers among its state and in its groups."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["taken"] = state.get("taken", 0) + 1
                    state["mean"] = state.get("mean", torch.zeros(())) + p.grad.mean()
                    p.add_(
                        p.grad / (p.grad.norm() + 1) + state["mean"],
                        alpha=-group["lr"] / group["calls"] / state["taken"],
                    )


class Fails(PerTensor):
    def step(self, closure=None):
        return 1 / 0


def matrices(kind, module, **settings):
    for parameter in module.parameters():
        parameter.requires_grad_(parameter.ndim > 1)
    return kind([p for p in module.parameters() if p.requires_grad], **settings)


RULES = {
    "Adafactor": lambda m: optim.Adafactor(m.parameters(), lr=0.1),
    "Muon": lambda m: matrices(optim.Muon, m, lr=0.1),
    "Adafactor groups": lambda m: optim.Adafactor(
        [{"params": m.body.parameters(), "weight_decay": 0.1}, {"params": m.heads.parameters(), "lr": 0.05}], lr=0.1
    ),
    "Muon groups": lambda m: optim.Muon(
        [{"params": [m.body.weight]}, {"params": m.heads.parameters(), "lr": 0.05, "weight_decay": 0.0}], lr=0.1
    ),
    "own": lambda m: PerTensor(m.parameters()),
    "SGD": lambda m: optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
    "Adam": lambda m: optim.Adam(m.parameters(), lr=0.1, amsgrad=True),
    "AdamW": lambda m: optim.AdamW([{"params": m.body.parameters()}, {"params": m.heads.parameters(), "lr": 0.05}], lr=0.1),
    "Adagrad": lambda m: optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.1, lr_decay=0.1),
    "NAdam": lambda m: optim.NAdam(m.parameters(), lr=0.1),
    "RAdam": lambda m: optim.RAdam(m.parameters(), lr=0.1),
    "Adamax": lambda m: optim.Adamax(m.parameters(), lr=0.1),
    "RMSprop": lambda m: optim.RMSprop(m.parameters(), lr=0.1, momentum=0.5, centered=True),
    "Adadelta": lambda m: optim.Adadelta(m.parameters(), lr=0.5),
    "ASGD": lambda m: optim.ASGD(m.parameters(), lr=0.1, t0=2),
    "Rprop": lambda m: optim.Rprop(m.parameters(), lr=0.1),
}  # fmt: skip
x = np.random.default_rng(0).normal(size=(ROWS, 3))
y = np.random.default_rng(1).normal(size=(ROWS, 4))


def make(name):
    torch.manual_seed(0)
    module = Heads().double()
    return module, RULES[name](module)


def put(strategy, name):
    module, optimizer = make(name)
    with strategy.scope():
        return ms.torch.distribute(module, optimizer)


def take(module, optimizer, rows, head=0):
    optimizer.zero_grad()
    (module(torch.from_numpy(x[rows]), head) - torch.from_numpy(y[rows])).square().mean().backward()
    optimizer.step()


def own_rows(strategy):
    return np.array_split(np.arange(ROWS), strategy.size)[strategy.rank]


def check(module, reference, limit=1e-9):
    for (name, mine), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        difference = (mine - theirs).abs().max().item()
        assert difference < limit, (name, difference)


def check_states(mine, theirs):
    taken = {
        index: state for index, state in theirs["state"].items() if state.get("step", 1)
    }  # Adagrad has some before
    assert mine["state"].keys() == taken.keys()
    for index, state in taken.items():
        for key, value in state.items():
            if value is not None:
                found = torch.as_tensor(mine["state"][index][key]).double()
                assert torch.allclose(found, torch.as_tensor(value).double(), rtol=1e-6, atol=1e-9), (index, key)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", rules(RULES))
def test_parameters_count_their_own_steps(name):
    """Heads take turns, and one parameter never has a gradient: each one's state is of the steps in which it had one."""
    reference, plain = make(name)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = put(strategy, name)
        for number in range(9):
            head = (number // 2) % 2
            take(reference, plain, slice(None), head)
            take(module, optimizer, own_rows(strategy), head)
        check(module, reference)
        check_states(optimizer.state_dict(), plain.state_dict())


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", rules(RULES))
@pytest.mark.parametrize("when", ["before", "after", "after steps"])
def test_state_is_loaded_in_every_order(name, when):
    reference, plain = make(name)
    for number in range(3):
        take(reference, plain, slice(None), number % 2)
    weights, state = copy.deepcopy((reference.state_dict(), plain.state_dict()))
    for number in range(3):
        take(reference, plain, slice(None), number % 2)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = make(name)
        if when == "before":
            module.load_state_dict(weights)
            optimizer.load_state_dict(state)
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, optimizer)
        if when == "after steps":
            for _ in range(2):
                take(module, optimizer, own_rows(strategy), 1)
        if when != "before":
            module.load_state_dict(weights)
            optimizer.load_state_dict(state)
        for number in range(3):
            take(module, optimizer, own_rows(strategy), number % 2)
        check(module, reference)
        check_states(optimizer.state_dict(), plain.state_dict())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", rules(RULES))
def test_a_file_has_the_steps_of_each_parameter(name, tmp_path_factory):
    reference, plain = make(name)
    for number in range(6):
        take(reference, plain, slice(None), number % 2)
    path = None
    for part in range(2):
        with ms.MultiWorkerMirroredStrategy() as strategy:
            path = path or strategy.broadcast_object(str(tmp_path_factory.mktemp("files") / "state.h5"))
            module, optimizer = put(strategy, name)
            if part:
                strategy.restore(path)
            for number in range(3):
                take(module, optimizer, own_rows(strategy), (3 * part + number) % 2)
            if part:
                check(module, reference)
            else:
                strategy.save(path)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "AdamW"])
def test_a_schedule_of_momentum_and_betas_is_followed(name):
    def run(module, optimizer, rows):
        rate = [0.1] * len(optimizer.param_groups)
        schedule = optim.lr_scheduler.OneCycleLR(optimizer, rate, 8, base_momentum=0.6, max_momentum=0.9)
        for _ in range(8):
            take(module, optimizer, rows)
            schedule.step()

    reference, plain = make(name)
    run(reference, plain, slice(None))
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = put(strategy, name)
        run(module, optimizer, own_rows(strategy))
        check(module, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("name", "change"),
    [("Adagrad", {"lr_decay": 0.5}), ("SGD", {"nesterov": True, "dampening": 0}), ("Adam", {"weight_decay": 0.1}),
     ("RMSprop", {"alpha": 0.5, "momentum": 0.2}), ("AdamW", {"maximize": True}), ("Adam", {"eps": 0.1})],
)  # fmt: skip
def test_settings_that_change_later_are_read_in_each_step(name, change):
    reference, plain = make(name)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = put(strategy, name)
        for number in range(4):
            if number == 2:
                optimizer.param_groups[-1].update(change)
                plain.param_groups[-1].update(change)
            take(reference, plain, slice(None))
            take(module, optimizer, own_rows(strategy))
        check(module, reference)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "change"),
    [(optim.SGD, {"momentum": 0.9}), (optim.RMSprop, {"centered": True}), (optim.Adam, {"amsgrad": True}),
     (optim.RMSprop, {"momentum": 0.1})],
)  # fmt: skip
def test_settings_that_need_state_later_are_an_error_that_names_them(kind, change):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module = Heads().double()
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, kind(module.parameters(), lr=0.1))
        take(module, optimizer, own_rows(strategy))
        before = copy.deepcopy(module.state_dict())
        optimizer.param_groups[0].update(change)
        with pytest.raises(
            RuntimeError, match=f"{kind.__name__}.step: {next(iter(change))}: .*before ms.torch.distribute"
        ):
            take(module, optimizer, own_rows(strategy))
        assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.ranks(2)
def test_hooks_of_the_step_are_called_as_in_plain_torch():
    def calls_of(wrap):
        seen = []
        module = Heads().double()
        optimizer = optim.SGD(module.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre, before distribute"))
        everywhere = register_optimizer_step_post_hook(lambda *_: seen.append("post, of all optimizers"))
        module, optimizer = wrap(module, optimizer)
        optimizer.register_step_post_hook(lambda opt, args, kwargs: seen.append(type(opt).__name__))
        take(module, optimizer, slice(None))
        everywhere.remove()
        return seen

    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        assert calls_of(ms.torch.distribute) == calls_of(lambda *both: both)


@pytest.mark.ranks(2)
def test_cleared_state_starts_again():
    reference, plain = make("Adam")
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = put(strategy, "Adam")
        for number in range(5):
            if number == 3:
                plain.state.clear()
                optimizer.state.clear()
            take(reference, plain, slice(None))
            take(module, optimizer, own_rows(strategy))
        check(module, reference)
        with pytest.raises(RuntimeError, match="state_dict"):
            optimizer.state[module.body.weight]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["Adam", "NAdam", "SGD", "Adafactor"])
def test_default_dtypes_and_devices_of_the_program_do_not_matter(name):
    reference, plain = make(name)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = make(name)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with strategy.scope():
                module, optimizer = ms.torch.distribute(module, optimizer)
            for _ in range(3):
                take(module, optimizer, own_rows(strategy))
        finally:
            torch.set_default_dtype(torch.float32)
        for _ in range(3):
            take(reference, plain, slice(None))
        check(module, reference, 1e-6)


@pytest.mark.ranks(2)
def test_what_cannot_run_whole_is_an_error_at_distribute():
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        module = Heads().double()
        with pytest.raises(TypeError, match=r"takes gradients of zeros, got .*Fails \(ZeroDivisionError.*Take another"):
            ms.torch.distribute(module, Fails(module.parameters()))


@pytest.mark.ranks(2)
def test_a_layer_that_was_replaced_is_an_error_that_names_its_parameter():
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = put(strategy, "SGD")
        own = module.heads[0]
        module.heads[0] = nn.Linear(8, 4, bias=False).double()
        with pytest.raises(RuntimeError, match=r"heads.0.weight.*replaced.*rank"):
            take(module, optimizer, own_rows(strategy))
        module.heads[0] = own
        take(module, optimizer, own_rows(strategy))
