"""Ranks that are killed: optimizers that run whole on each rank, and DataLoaders whose position differs by rank."""

import subprocess

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

from mpistrat.base.programs import program  # noqa: E402
from tests.harness.torch_versions import rules  # noqa: E402
from tests.launch.launcher import job_environment  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]

RULES = """
import os, signal, sys
import numpy as np
import torch
import mpistrat as ms

rule, kill = sys.argv[1:]
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7, bias=False), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=False))
optimizer = {
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=4, history_size=5, line_search_fn="strong_wolfe"),
    "Muon": lambda p: torch.optim.Muon([{"params": p[:1], "weight_decay": 0.2}, {"params": p[1:], "lr": 0.01}], lr=0.02),
    "Adafactor": lambda p: torch.optim.Adafactor([{"params": p[:1], "weight_decay": 0.2}, {"params": p[1:]}], lr=0.02),
}[rule](list(model.parameters()))
strategy = ms.MultiWorkerMirroredStrategy()
with strategy.scope():
    model, optimizer = ms.torch.distribute(model, optimizer)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
checkpoints = ms.train.Checkpoints(
    strategy, f"checkpoints-{kill}", objects={"scheduler": scheduler}, every_steps=4, snapshot_seconds=0.001
)
notes = checkpoints.restore_latest() or {"step": 0}
generation = int(os.environ["MPISTRAT_GENERATION"])
if strategy.rank == 0:
    print("from", generation, notes["step"], flush=True)
for step in range(notes["step"] + 1, 21):
    rng = np.random.default_rng(100 * step + strategy.rank)
    x, y = (torch.from_numpy(rng.normal(size=(4, n)).astype(np.float32)) for n in (5, 3))
    calls = []

    def closure():
        calls.append(step)
        if kill == "kill" and (generation, step) in ((0, 8), (1, 15)) and len(calls) == (3 if rule == "LBFGS" else 1):
            if strategy.rank == generation:
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    scheduler.step()
    checkpoints.step(step)
checkpoints.wait()
strategy.save(f"end-{kill}.h5")
strategy.close()
"""

LOADERS = """
import collections, os, signal, sys
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, Subset
from torchdata.stateful_dataloader import StatefulDataLoader
import mpistrat as ms

ROWS, EPOCHS = 48, 3
kind, kill = sys.argv[1:]


class Seen:
    def __init__(self):
        self.rows = []

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        return row, torch.randn(5, generator=torch.Generator().manual_seed(row))


def main(ranks, rank, size, model, optimizer):
    if kind == "distribute":  # shuffled by each rank, read by worker processes
        loader = StatefulDataLoader(Subset(Rows(), range(rank, ROWS, size)), 3, shuffle=True, num_workers=2)
    else:
        loader = StatefulDataLoader(Rows(), 3, sampler=DistributedSampler(Rows(), size, rank, shuffle=True, seed=1))
    seen = Seen()
    own = {"loader": loader, "seen": seen}
    checkpoints = ms.train.Checkpoints(ranks, f"checkpoints-{kill}", objects_by_rank=own, snapshot_seconds=0.001)
    notes = checkpoints.restore_latest() or {"step": 0, "epoch": 0}
    step, generation = notes["step"], int(os.environ["MPISTRAT_GENERATION"])
    if rank == 0:
        print("from", generation, step, flush=True)
    for epoch in range(notes["epoch"], EPOCHS):
        if kind != "distribute":
            loader.sampler.set_epoch(epoch)
        for rows, x in loader:
            step += 1
            optimizer.zero_grad()
            model(x).square().mean().backward()
            if kill == "kill" and (generation, step) in ((0, 6), (1, 17)) and rank == generation:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            seen.rows += [[epoch, row] for row in rows.tolist()]
            checkpoints.step(step, {"epoch": epoch})
    checkpoints.wait()
    counts = collections.Counter(tuple(row) for rows in ranks.all_gather_object(seen.rows) for row in rows)
    assert counts == {(epoch, row): 1 for epoch in range(EPOCHS) for row in range(ROWS)}, counts
    ranks.save(f"end-{kill}.h5")
    if rank == 0:
        print("each row once an epoch", flush=True)


torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if kind == "distribute":
    strategy = ms.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer = ms.torch.distribute(model, optimizer)
    torch.manual_seed(7 + strategy.rank)
    main(strategy, strategy.rank, strategy.size, model, optimizer)
    strategy.close()
else:
    dist.init_process_group("mpi")
    model = torch.nn.parallel.DistributedDataParallel(model)
    main(ms.torch.TrainingState(model, optimizer), dist.get_rank(), dist.get_world_size(), model, optimizer)
    dist.destroy_process_group()
"""


def run(mpi, folder, source, kind):
    """Run a program undisturbed, and with two kills; return what both printed, and the digests of their files."""
    import h5py

    (folder / "train.py").write_text(source)
    printed, digests = {}, {}
    for kill in ("none", "kill"):
        command = program("mpistrat", "run", "-n", "2", "--restarts", "5", python=mpi.python)
        environment = job_environment("none", folder, {"PATH": "/usr/bin:/bin"})
        words = [*command, "train.py", kind, kill]
        done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        printed[kill] = done.stdout.splitlines()
        with h5py.File(folder / f"end-{kill}.h5") as file:
            digests[kill] = file.attrs["digest"]
    return printed, digests


def starts(lines):
    """Return generation and first step of each start."""
    return [list(map(int, line.split()[1:])) for line in lines if line.startswith("from")]


@pytest.mark.parametrize("rule", rules(["LBFGS", "Muon", "Adafactor"]))
def test_rules_on_whole_tensors_leave_the_bits_of_an_undisturbed_run(mpi, tmp_path, rule):
    printed, digests = run(mpi, tmp_path, RULES, rule)
    assert starts(printed["none"]) == [[0, 0]]
    generations, steps = zip(*starts(printed["kill"]), strict=True)
    assert generations == (0, 1, 2) and 4 <= steps[1] <= 7 < steps[2] <= 14
    assert digests["kill"] == digests["none"], "of all arrays"


@pytest.mark.parametrize("kind", ["distribute", "training_state"])
def test_a_stateful_data_loader_gives_each_row_once(mpi, tmp_path, kind):
    pytest.importorskip("torchdata", reason="torchdata is not installed: make test-frameworks")
    printed, digests = run(mpi, tmp_path, LOADERS, kind)
    assert starts(printed["none"]) == [[0, 0]]
    generations, steps = zip(*starts(printed["kill"]), strict=True)
    assert generations == (0, 1, 2) and 0 < steps[1] <= 5 and steps[1] < steps[2] <= 16
    assert all(lines[-1] == "each row once an epoch" for lines in printed.values())
    assert digests["kill"] == digests["none"], "of all arrays"
