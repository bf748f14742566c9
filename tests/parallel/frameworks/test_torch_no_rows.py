"""Modules that fail with zero rows, where a replica has no row of a batch: the numbers of one process of plain torch."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from tests.harness.torch_training import difference, make  # noqa: E402

nn, functional = torch.nn, torch.nn.functional
ROWS, BATCH, EPOCHS = 13, 4, 3  # the last batch has one row: no other rank has any


class Flat(nn.Module):
    """Fails with zero rows: the size of -1 is ambiguous."""

    def forward(self, x):
        return x.view(x.size(0), -1)


def conv(norm=None):
    torch.manual_seed(0)
    norms = [norm(4)] if norm else []
    return nn.Sequential(nn.Conv2d(1, 4, 3), *norms, nn.Tanh(), Flat(), nn.Linear(64, 3)).double()


class Parts(nn.Module):
    """Methods that the program calls one after the other, and a loss inside."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(36, 5), nn.Linear(5, 3)

    def encode(self, x):
        return self.first(x.view(x.size(0), -1)).tanh()

    def loss(self, hidden, y):
        hidden = hidden.reshape(hidden.size(0), -1)
        return functional.cross_entropy(self.last(hidden), y)

    def forward(self, x):
        return self.last(self.encode(x))


def parts():
    torch.manual_seed(0)
    return Parts().double()


class Recurrent(nn.Module):
    """Time first: rows are the second dimension."""

    def __init__(self):
        super().__init__()
        self.cell, self.last = nn.GRU(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        hidden = self.cell(x)[1][0]
        return {"logits": [self.last(hidden.view(hidden.size(0), -1))]}


def recurrent():
    torch.manual_seed(0)
    return Recurrent().double()


def usual(module, x, y):
    return functional.cross_entropy(module(x), y)


def in_two_passes(module, x, y):
    return module.loss(module.encode(x), y)


def time_first(module, x, y):
    return functional.cross_entropy(module(x[:, 0].transpose(0, 1))["logits"][0], y)


CASES = {
    "flat": (conv, usual, {}),
    "sync": (lambda: conv(nn.BatchNorm2d), usual, {"sync_batch_norm": True}),
    "methods": (parts, in_two_passes, {}),
    "module": (parts, usual, {}),
    "time first": (recurrent, time_first, {}),
}


def dataset():
    rng = np.random.default_rng(0)
    return ms.data.from_arrays((rng.normal(size=(ROWS, 1, 6, 6)), rng.integers(0, 3, ROWS))).batch(BATCH)


def step(module, optimizer, loss, x, y):
    optimizer.zero_grad()
    loss(module, torch.from_numpy(x), torch.from_numpy(y)).backward()
    optimizer.step()


def train(strategy, module, optimizer, loss):
    data = strategy.distribute_dataset(dataset())
    for _ in range(EPOCHS):
        for x, y in data:
            with strategy.batch(x):
                step(module, optimizer, loss, x, y)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("case", CASES)
def test_one_process_is_equalled(case):
    build, loss, options = CASES[case]
    reference = build()
    expected = make("momentum", reference)
    for _ in range(EPOCHS):
        for x, y in dataset():
            step(reference, expected, loss, np.array(x), np.array(y))
    module = build()
    optimizer = make("momentum", module)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer, **options)
        train(strategy, module, optimizer, loss)
        module.eval()
        state = module.state_dict()
        for name, tensor in reference.state_dict().items():
            assert difference([state[name]], [tensor]) < 1e-12, name


@pytest.mark.ranks(2)
def test_running_statistics_do_not_count_rows_that_are_not_there():
    module = conv(nn.BatchNorm2d)
    optimizer = make("momentum", module)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        norm = module[1]
        for x, y in strategy.distribute_dataset(dataset()):
            before = norm.running_mean.clone()
            step(module, optimizer, usual, x, y)
            assert torch.equal(norm.running_mean, before) == (len(x) == 0)
        assert bool(torch.isfinite(norm.running_mean).all())


@pytest.mark.ranks(2)
def test_evaluation_gets_outputs_of_zero_rows():
    module = conv()
    optimizer = make("momentum", module)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        module.eval()
        for x, _ in strategy.distribute_dataset(dataset()):
            with torch.no_grad():
                assert module(torch.from_numpy(x)).shape == (len(x), 3)


@pytest.mark.ranks(2)
def test_an_error_of_the_module_stays():
    module = conv()
    optimizer = make("momentum", module)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        for x, _ in strategy.distribute_dataset(dataset()):
            with strategy.batch(x):
                if len(x):  # the input is empty, but the part of the batch is not
                    with pytest.raises(RuntimeError, match="ambiguous"):
                        module(torch.zeros(0, 1, 6, 6, dtype=torch.float64))
                else:
                    with pytest.raises(RuntimeError, match="channels"):
                        module(torch.zeros(0, 2, 6, 6, dtype=torch.float64))
