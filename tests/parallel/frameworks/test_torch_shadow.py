"""Modules of PyTorch on several ranks beside one process: each planted fault is named, and no correct program is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import numpy as np  # noqa: E402

import mpistrat as ms  # noqa: E402
from tests.harness.shadow_programs import STEPS, expect_faults, first_difference, recorded  # noqa: E402

nn = torch.nn

# fault: the step, the ranks ("all" or "last"), the operation, and words of the text
FAULTS = {
    "divisor": (1, "all", "gradient of 0.weight", "its own rows"),
    "no reduction": (1, "all", "gradient of 0.weight", ""),
    "skipped": (1, "last", "gradient of 0.weight", "adds zeros"),
    "batch norm": (1, "all", "output of 1 (BatchNorm1d; SyncBatchNorm on one process)", "sync_batch_norm=True"),
    "dropout": (1, "all", "output of 3", "equal random numbers"),
    "order": (1, "all", "input", "read in another order"),
    "stale": (4, "last", "parameter 4.weight at the start of the step", "on these ranks only"),
    "rate": (2, "all", "parameter 0.weight after the update", "learning rate"),
}


class Words(nn.Module):
    """Sequences of words, with the batch on the second axis of inner tensors, and dropout."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(20, 6), nn.GRU(6, 8)
        self.norm, self.drop, self.out = nn.LayerNorm(8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, words):
        inner, _ = self.rnn(self.embed(words).transpose(0, 1))
        return self.out(self.drop(self.norm(inner)).mean(0))


def model_of(seed):
    torch.manual_seed(seed)
    make = [
        lambda: nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)),
        lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(16, 3)),
        Words,
        lambda: nn.Sequential(
            nn.Unflatten(1, (3, 2)),
            nn.TransformerEncoderLayer(2, 2, 16, dropout=0.0, batch_first=True),
            nn.Flatten(),
            nn.Linear(6, 3),
        ),
    ]
    return make[seed % len(make)]()


class Program:
    """A classifier under `ms.torch.distribute`, with or without a fault."""

    def __init__(self, seed, fault=""):
        self.seed, self.fault = seed, fault

    def __call__(self, comm):
        fault, rng = self.fault if comm.size > 1 else "", np.random.default_rng(self.seed)
        words = self.seed % 4 == 2
        x = rng.integers(0, 20, (90, 5)) if words else rng.normal(size=(90, 6)).astype(np.float32)
        data = ms.data.from_arrays((x, rng.integers(0, 3, 90)))
        model = model_of(self.seed)
        kind = [torch.optim.Adam, torch.optim.SGD, torch.optim.AdamW][self.seed % 3]
        optimizer = kind(model.parameters(), lr=1e-2)
        options = {
            "sync_batch_norm": fault != "batch norm",
            "loss": "sum" if fault in ("divisor", "no reduction") else "mean",
        }
        with pytest.MonkeyPatch.context() as patch:
            if fault == "stale":  # with a copy of the parameters on each rank
                patch.setenv("MPISTRAT_SHARED_MEMORY", "0")
            with ms.MultiWorkerMirroredStrategy(comm=comm) as strategy:
                with strategy.scope():
                    model, optimizer = ms.torch.distribute(model, optimizer, **options)
                if fault == "dropout":
                    torch.manual_seed(1)
                batches = iter(
                    strategy.distribute_dataset(data.shuffle(seed=self.seed + (fault == "order")).repeat().batch(20))
                )
                for step in range(STEPS + 1):
                    self.step(strategy, model, optimizer, *map(torch.from_numpy, next(batches)), fault, step)

    def step(self, strategy, model, optimizer, x, y, fault, step):
        last = strategy.rank == strategy.size - 1
        optimizer.zero_grad()
        reduction = "sum" if fault == "no reduction" else "mean"
        nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
        if fault == "skipped" and last:
            for parameter in model.parameters():
                parameter.grad.zero_()
        if fault == "rate" and step == 1:
            optimizer.param_groups[0]["lr"] = 0.0101
        optimizer.step()
        if fault == "stale" and last and step == 2:
            with torch.no_grad():
                model[4].weight.mul_(1.001)


@pytest.mark.ranks(2)
def test_each_fault_is_named_by_its_step_rank_and_tensor(mpi_tmp_path):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    recorded(mpi_tmp_path, Program(0), comm)
    assert first_difference(mpi_tmp_path, Program(0), comm) is None
    expect_faults(mpi_tmp_path, FAULTS, lambda fault: Program(0, fault), comm)


@pytest.mark.ranks(1, 2, 3)
def test_no_correct_program_differs(mpi_tmp_path):
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    for seed in range(4):
        recorded(mpi_tmp_path, Program(seed), comm)
        assert first_difference(mpi_tmp_path, Program(seed), comm) is None, seed


@pytest.mark.ranks(2)
def test_distributed_data_parallel(mpi_tmp_path):
    """A program of torch alone: masks of dropout are replayed, and unreduced gradients named."""
    from mpi4py import MPI

    dist, comm = torch.distributed, MPI.COMM_WORLD

    def train(ranks, wrapped=False):
        torch.manual_seed(0)
        x, y = torch.randn(96, 6), torch.randint(0, 3, (96,))
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
        torch.manual_seed(ranks.rank)
        wrap = nn.parallel.DistributedDataParallel(model) if wrapped else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(STEPS):
            rows = slice(12 * step + 12 // ranks.size * ranks.rank, 12 * step + 12 // ranks.size * (ranks.rank + 1))
            optimizer.zero_grad()
            nn.functional.cross_entropy(wrap(x[rows]), y[rows]).backward()
            optimizer.step()

    recorded(mpi_tmp_path, train, comm)
    ms.torch.use()
    dist.init_process_group("mpi")
    try:
        assert first_difference(mpi_tmp_path, lambda ranks: train(ranks, wrapped=True), comm) is None
        found = first_difference(mpi_tmp_path, train, comm)
        assert found is not None
        assert (found.step, found.operation) == (1, "gradient of 0.weight"), str(found)
        assert "DistributedDataParallel" in str(found)
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(2)
def test_inputs_that_require_gradients(mpi_tmp_path):
    """They are rows as all others, although a model may have computed such tensors."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def train(ranks, seed=0):
        torch.manual_seed(0)
        model, rows = nn.Linear(4, 1), np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
        with ms.MultiWorkerMirroredStrategy(comm=ranks) as strategy:
            with strategy.scope():
                _, optimizer = ms.torch.distribute(model, torch.optim.SGD(model.parameters(), 0.1))

            for batch in np.random.default_rng(seed).permutation(rows).reshape(STEPS, ranks.size, -1, 4):
                optimizer.zero_grad()
                model(torch.tensor(batch[ranks.rank], requires_grad=True)).square().mean().backward()
                optimizer.step()

    recorded(mpi_tmp_path, train, comm)
    assert first_difference(mpi_tmp_path, train, comm) is None
    found = first_difference(mpi_tmp_path, lambda ranks: train(ranks, 1), comm)
    assert found is not None and (found.step, found.operation) == (1, "input"), str(found)


@pytest.mark.ranks(2)
def test_models_of_which_one_reads_the_others_outputs(mpi_tmp_path):
    """Computed rows differ by rounding, so they are no input to look up; a fault is named nevertheless."""
    from mpi4py import MPI

    comm, of_logits = MPI.COMM_WORLD, nn.functional.binary_cross_entropy_with_logits

    def train(ranks, rate=0.1):
        torch.manual_seed(0)
        makes, tells = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Linear(8, 1)
        optimizers = [torch.optim.Adam(model.parameters(), each) for model, each in ((makes, rate), (tells, 0.1))]
        with ms.MultiWorkerMirroredStrategy(comm=ranks) as strategy:
            with strategy.scope():
                for model, optimizer in zip((makes, tells), optimizers, strict=True):
                    ms.torch.distribute(model, optimizer)

            def step(z, real):
                fake = makes(torch.as_tensor(z))
                ones, zeros = torch.ones(len(z), 1), torch.zeros(len(z), 1)
                optimizers[1].zero_grad()
                (of_logits(tells(torch.as_tensor(real)), ones) + of_logits(tells(fake.detach()), zeros)).backward()
                optimizers[1].step()
                optimizers[0].zero_grad()
                of_logits(tells(fake), ones).backward()
                optimizers[0].step()

            rng = np.random.default_rng(0)
            rows = [rng.normal(size=(96, width)).astype(np.float32) for width in (4, 8)]
            for batch in strategy.distribute_dataset(ms.data.from_arrays(tuple(rows)).batch(16)):
                strategy.run(step, args=batch)

    recorded(mpi_tmp_path, train, comm)
    assert first_difference(mpi_tmp_path, train, comm) is None
    found = first_difference(mpi_tmp_path, lambda ranks: train(ranks, 0.11), comm)
    assert found is not None
    assert (found.step, found.operation) == (2, "parameter 0.weight after the update"), str(found)


@pytest.mark.ranks(2)
def test_passes_with_a_weight_have_the_models_parameters(mpi_tmp_path):
    """Unequal parts of a batch: tensors with the weight of the pass stand for parameters."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def train(ranks, factor=1.0):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        rows = np.random.default_rng(0).normal(size=(STEPS * 5, 4)).astype(np.float32)
        with ms.MultiWorkerMirroredStrategy(comm=ranks) as strategy:
            with strategy.scope():
                _, optimizer = ms.torch.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
            for number, batch in enumerate(strategy.distribute_dataset(ms.data.from_arrays(rows).batch(5))):
                optimizer.zero_grad()
                model(torch.from_numpy(batch)).square().mean().backward()
                optimizer.step()
                if number == 2:
                    with torch.no_grad():
                        model[0].bias.mul_(factor if ranks.size == 1 or strategy.rank == 0 else 1.0)

    recorded(mpi_tmp_path, train, comm)
    with ms.shadow.compare(mpi_tmp_path, steps=STEPS) as report:
        train(comm)
    assert not report.left_out
    found = first_difference(mpi_tmp_path, lambda ranks: train(ranks, 1.1), comm)
    assert found is not None
    assert (found.step, found.operation) == (4, "parameter 0.bias at the start of the step"), str(found)
