"""Files and snapshots of torch optimizers: param groups and schedulers continue where they were."""

import secrets

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-frameworks")

import mpistrat as ms  # noqa: E402
from mpistrat.comm import job_files  # noqa: E402

schedulers = torch.optim.lr_scheduler
STEPS, STOP = 9, 4


def sequential(optimizer):
    parts = [schedulers.LinearLR(optimizer, 0.25, total_iters=3), schedulers.ExponentialLR(optimizer, 0.8)]
    return schedulers.SequentialLR(optimizer, parts, [3])


SCHEDULERS = {
    "step": lambda o: schedulers.StepLR(o, 2, 0.5),
    "multi step": lambda o: schedulers.MultiStepLR(o, [2, 6, 6], 0.5),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.8),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, 8),
    "restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "one cycle": lambda o: schedulers.OneCycleLR(o, [0.1, 0.2], 12),
    "cyclic": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, mode="exp_range", gamma=0.9),
    "lambda": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "sequential": sequential,
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=1, cooldown=1),
}
RULES = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.01)),
}


def make(rule="SGD"):
    torch.manual_seed(0)
    module = torch.nn.Linear(4, 2).double()
    groups = [{"params": [module.weight]}, {"params": [module.bias], "lr": 0.03, "weight_decay": 0.01}]
    return module, RULES[rule](groups)


def step(module, optimizer, scheduler, number):
    optimizer.zero_grad()
    loss = (module(torch.arange(8.0, dtype=torch.float64).reshape(2, 4) / 8) ** 2).mean()
    loss.backward()
    optimizer.step()
    worse = 1.0 + (number > 1)  # a result that does not become better
    scheduler.step(worse) if isinstance(scheduler, schedulers.ReduceLROnPlateau) else scheduler.step()


def plain(name, rule="SGD"):
    """The weights and rates after all steps in one process of plain torch."""
    module, optimizer = make(rule)
    scheduler = SCHEDULERS[name](optimizer)
    for number in range(STEPS):
        step(module, optimizer, scheduler, number)
    return [p.detach().numpy() for p in module.parameters()], [float(group["lr"]) for group in optimizer.param_groups]


def run(name, folder, first, last, rule="SGD", snapshot=False):
    """Train some steps from the newest file or snapshot on, and save; return the weights and rates."""
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = make(rule)
        with strategy.scope():
            module, optimizer = ms.torch.distribute(module, optimizer)
        scheduler = SCHEDULERS[name](optimizer)
        seconds = 1e-9 if snapshot else None
        checkpoints = ms.train.Checkpoints(strategy, folder, objects={"scheduler": scheduler}, snapshot_seconds=seconds)
        notes = checkpoints.restore_latest() or {"step": 0}
        # Snapshots are not taken after each step: what was done since is done again.
        assert notes == {"step": first} or (snapshot and 0 < notes["step"] < first)
        for number in range(notes["step"], last):
            step(module, optimizer, scheduler, number)
            checkpoints.step(number + 1)
        if not snapshot:
            checkpoints.save(last)
        checkpoints.wait()
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        return [p.detach().numpy().copy() for p in module.parameters()], rates


def assert_continued(name, folder, rule="SGD", snapshot=False, rtol=1e-9):
    whole = run(name, folder / "whole", 0, STEPS, rule, snapshot)
    run(name, folder / "parts", 0, STOP, rule, snapshot)
    parts = run(name, folder / "parts", STOP, STEPS, rule, snapshot)
    expected = plain(name, rule)
    for found, undisturbed, reference in zip(parts[0], whole[0], expected[0], strict=True):
        np.testing.assert_array_equal(found, undisturbed)
        np.testing.assert_allclose(found, reference, rtol=rtol)
    assert parts[1] == whole[1] == pytest.approx(expected[1], rel=1e-12)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_continue(name, mpi_tmp_path):
    assert_continued(name, mpi_tmp_path)


@pytest.mark.ranks(1, 3)
def test_a_rate_that_is_a_tensor_continues(mpi_tmp_path):
    assert_continued("exponential", mpi_tmp_path, "AdamW", rtol=1e-6)  # the rate is float32


@pytest.mark.ranks(1, 2)
def test_snapshots_have_them(mpi_tmp_path, monkeypatch):
    from mpi4py import MPI

    job = MPI.COMM_WORLD.bcast(secrets.token_hex(8))
    monkeypatch.setenv("MPISTRAT_JOB", job)
    try:
        assert_continued("multi step", mpi_tmp_path, snapshot=True)
    finally:
        MPI.COMM_WORLD.Barrier()
        job_files.remove(job)


@pytest.mark.ranks(2, 3)
def test_settings_of_groups_are_taken_on_other_ranks(mpi_tmp_path):
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    alone = world.Split(world.rank == 0, world.rank)
    if world.rank == 0:
        with ms.MultiWorkerMirroredStrategy(comm=alone) as strategy:
            module, optimizer = make()
            with strategy.scope():
                ms.torch.distribute(module, optimizer)
            optimizer.param_groups[0].update(lr=0.5, momentum=0.25, label="weights")
            optimizer.param_groups[1].update(nesterov=True)
            strategy.save(mpi_tmp_path / "x.h5")
    world.Barrier()
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = make()
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        strategy.restore(mpi_tmp_path / "x.h5")
        first, second = optimizer.param_groups
        assert (first["lr"], first["momentum"], first["label"], first["nesterov"]) == (0.5, 0.25, "weights", False)
        assert (second["lr"], second["momentum"], second["weight_decay"], second["nesterov"]) == (0.03, 0.9, 0.01, True)


@pytest.mark.ranks(1, 2)
def test_other_groups_are_an_error_before_anything_changes(mpi_tmp_path):
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = make()
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        strategy.save(mpi_tmp_path / "x.h5")
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module = make()[0]
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)
        with strategy.scope():
            ms.torch.distribute(module, optimizer)
        with torch.no_grad():
            module.weight.fill_(7.0)
        with pytest.raises(ValueError, match="has 2 groups of parameters in it, here 1"):
            strategy.restore(mpi_tmp_path / "x.h5")
        assert (module.weight == 7.0).all() and optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.ranks(1, 2, timeout=60)
@pytest.mark.parametrize(
    ("there", "here"), [("Adam", "SGD"), ("SGD", "Adam"), ("Adafactor", "Adam"), ("AdamW", "Adam")]
)
def test_the_file_of_another_rule_is_refused_before_anything_changes(there, here, mpi_tmp_path):
    """A rule's state means nothing to another one."""

    def made(rule):
        torch.manual_seed(0)
        module = torch.nn.Linear(4, 2)
        with strategy.scope():
            return ms.torch.distribute(module, getattr(torch.optim, rule)(module.parameters(), lr=0.1))

    def step(module, optimizer):
        module(torch.ones(3, 4)).sum().backward()
        optimizer.step()

    with ms.MultiWorkerMirroredStrategy() as strategy:
        step(*made(there))
        strategy.save(mpi_tmp_path / "x.h5")
    with ms.MultiWorkerMirroredStrategy() as strategy:
        module, optimizer = made(here)
        before = module.weight.detach().clone()
        with pytest.raises(ValueError, match=f"is 'torch {there}.*, here 'torch {here}'"):
            strategy.restore(mpi_tmp_path / "x.h5")
        assert torch.equal(module.weight, before)
        step(module, optimizer)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int64, torch.bfloat16, torch.float32, torch.complex64]
)
def test_tensors_in_the_state_of_an_object_come_back(dtype):
    from mpistrat.state.extra import state_of_text, text_of_state

    given = {
        "one": torch.tensor([3]).to(dtype),
        "rows": torch.arange(6).view(2, 3).t().to(dtype),
        "none": torch.zeros(0, 2).to(dtype),
    }
    if dtype.is_complex:
        given["conjugate"] = torch.tensor([1 + 2j]).conj()

    class Loader:
        def state_dict(self):
            return given

    found = state_of_text(text_of_state(Loader(), "loader"))
    for name, tensor in given.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
