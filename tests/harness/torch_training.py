"""Modules of PyTorch, trained in one process of plain torch and under a strategy."""

import contextlib

import numpy as np
import torch

import mpistrat as ms

ROWS, BATCH, EPOCHS = 52, 12, 10  # the last batch has 4 rows: with 3 replicas 2, 1, 1
CASES = {
    "SGD": {"lr": 0.1},
    "momentum": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.2},
    "Adam": {"lr": 1e-2, "weight_decay": 1e-2},
    "AdamW": {"lr": 1e-2, "amsgrad": True},
    "RMSprop": {"lr": 1e-2, "centered": True, "momentum": 0.5},
    "Adagrad": {"lr": 1e-2, "initial_accumulator_value": 0.1, "lr_decay": 0.01},
    "Adadelta": {},
    "Adamax": {"lr": 1e-2},
    "RAdam": {"lr": 1e-2},
    "NAdam": {"lr": 1e-2},
}
KINDS = {"momentum": "SGD", "dampening": "SGD"}


SHAPES = {"vectors": (10,), "images": (1, 6, 6), "sequences": (5, 8)}


def rows(kind="vectors"):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 20, (ROWS, 3)) if kind == "words" else rng.normal(size=(ROWS, *SHAPES[kind]))
    return x, rng.integers(0, 3, ROWS)


def mlp():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(10, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    return torch.nn.Sequential(*layers).double()


def conv_net():
    torch.manual_seed(0)
    n = torch.nn
    layers = [n.Conv2d(1, 4, 3), n.BatchNorm2d(4), n.ReLU(), n.AdaptiveAvgPool2d(1), n.Flatten(), n.Linear(4, 3)]
    return n.Sequential(*layers).double()


def embedding():
    torch.manual_seed(0)
    n = torch.nn
    return n.Sequential(n.Embedding(20, 4, sparse=True), n.Flatten(), n.Linear(12, 3)).double()


class Transformer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = torch.nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.encoder(x).mean(1))


def transformer():
    torch.manual_seed(0)
    return Transformer().double()


# How to build each module, its rows, its optimizer, and the options of `distribute`.
MODULES = {
    "mlp": (mlp, "vectors", "Adam", {}),
    "conv_net": (conv_net, "images", "momentum", {"sync_batch_norm": True}),
    "embedding": (embedding, "words", "SGD", {}),
    "transformer": (transformer, "sequences", "AdamW", {}),
}


def make(name, module, groups=False):
    parameters = list(module.parameters())
    if groups:
        weights, biases = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
        parameters = [{"params": weights}, {"params": biases, "lr": 3e-3}]
    return getattr(torch.optim, KINDS.get(name, name))(parameters, **CASES[name])


def dataset(kind="vectors", batch=BATCH):
    return ms.data.from_arrays(rows(kind)).shuffle(seed=1).batch(batch)


def loss_of(module, x, y):
    return torch.nn.functional.cross_entropy(module(torch.from_numpy(x)), torch.from_numpy(y))


def plain(module, optimizer, kind="vectors", scheduler=None, max_norm=None, epochs=EPOCHS):
    """Train in one process of plain torch."""
    batches = iter(dataset(kind))
    for epoch in range(epochs):
        if epoch:
            batches.restore({"epoch": epoch, "next": 0})
        for x, y in batches:
            optimizer.zero_grad()
            loss_of(module, np.array(x), np.array(y)).backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()


def distributed(strategy, module, optimizer, kind="vectors", scheduler=None, epochs=EPOCHS, first=0):
    """Train in a loop that but for its data is one of plain torch, from an epoch on."""
    data = strategy.distribute_dataset(dataset(kind))
    data.set_epoch(first)
    for _ in range(epochs):
        for x, y in data:
            optimizer.zero_grad()
            loss_of(module, x, y).backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()


def difference(a, b):
    """The largest difference of two lists of tensors, relative to the largest number of each."""
    pairs = zip([t.detach().double() for t in a], [t.detach().double() for t in b], strict=True)
    return max(float((x - y).abs().max() / y.abs().max().clamp(min=1e-30)) for x, y in pairs)


@contextlib.contextmanager
def put(build=mlp, name="Adam", groups=False, **options):
    """A strategy, a module and its optimizer in it."""
    module = build()
    optimizer = make(name, module, groups)
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, optimizer, **options)
        yield strategy, module, optimizer


def step_of(module, optimizer):
    """A step for `strategy.run`."""

    def step(x, y):
        optimizer.zero_grad()
        loss_of(module, x, y).backward()
        optimizer.step()

    return step


def check_equal(strategy, name, batch=BATCH):
    """Train a module under a strategy, and in one process of plain torch; the weights and statistics must be equal.

    Args:
        strategy: the rows of its last batch are not divisible by the replicas.
        name: of the module.
        batch: the rows of a batch of one worker, where these step apart.
    """
    build, kind, rule, options = MODULES[name]
    reference, module = build(), build()
    plain(reference, make(rule, reference), kind)
    optimizer = make(rule, module)
    with strategy.scope():
        ms.torch.distribute(module, optimizer, **options)
    data = strategy.distribute_dataset(dataset(kind, batch))
    for _ in range(EPOCHS):
        for x in data:
            strategy.run(step_of(module, optimizer), args=x)
        strategy.barrier()  # of workers that step apart one may begin to read the next epoch
    module.eval()
    if getattr(strategy, "is_server", False):
        return
    state = module.state_dict()
    for key, expected in reference.state_dict().items():
        assert difference([state[key]], [expected]) < 1e-9, key
