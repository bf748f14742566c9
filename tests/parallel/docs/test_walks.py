"""The walks of docs/walks.md are those that the code takes: each operation is recorded on one node and on two."""

from __future__ import annotations

from importlib.util import find_spec

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.cli.main import main
from tests.harness.process_groups import set_layout
from tests.harness.walks import Recorder, walks

WALKS = walks()
LARGE = 1 << 20


def gradient(path) -> Recorder:
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            weights = ms.Variable(np.zeros(1000, np.float32), name="weights")
            optimizer = ms.optimizers.SGD(0.1)
        recorder = Recorder()

        def step(recorded):
            weights.grad[:] = 1
            if not recorded:
                return optimizer.apply_gradients([(weights.grad, weights)])
            with recorder:
                return optimizer.apply_gradients([(weights.grad, weights)])

        for recorded in (False, True):
            strategy.run(step, args=(recorded,))
    return recorder


def batch(path) -> Recorder:
    with ms.MultiWorkerMirroredStrategy() as strategy:
        if strategy.rank == 0:
            with h5py.File(path / "rows.h5", "w") as file:
                file["x"] = np.zeros((4096, 16), np.float32)
        strategy.barrier()
        dataset = ms.data.HDF5Dataset(path / "rows.h5").shuffle(4096, seed=1).batch(64)
        batches = iter(strategy.distribute_dataset(dataset))
        with Recorder() as recorder:
            for _ in range(5):
                next(batches)
    return recorder


def reduction(path) -> Recorder:
    with ms.MultiWorkerMirroredStrategy() as strategy, Recorder() as recorder:
        strategy.reduce("SUM", np.zeros(LARGE), axis=None)
    return recorder


def repeated_reduction(path) -> Recorder:
    with ms.MultiWorkerMirroredStrategy() as strategy:
        strategy.reduce("SUM", np.zeros(10), axis=None)
        with Recorder() as recorder:
            strategy.reduce("SUM", np.zeros(10), axis=None)
    return recorder


def variable(path) -> Recorder:
    with ms.MultiWorkerMirroredStrategy() as strategy, strategy.scope(), Recorder() as recorder:
        ms.Variable(np.zeros(10), name="weights")
    return recorder


def checkpoint(path) -> Recorder:
    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            ms.Variable(np.zeros(10), name="weights")
        with Recorder() as recorder:
            strategy.save(path / "weights.h5")
    return recorder


def torch_step(path) -> Recorder:
    import torch

    with ms.MultiWorkerMirroredStrategy() as strategy:
        with strategy.scope():
            model = torch.nn.Linear(100, 10)
            model, optimizer = ms.torch.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
        recorder = Recorder()

        def step(recorded):
            optimizer.zero_grad()
            model(torch.ones(4, 100)).sum().backward()
            if not recorded:
                return optimizer.step()
            with recorder:
                return optimizer.step()

        for recorded in (False, True):
            strategy.run(step, args=(recorded,))
    return recorder


def torch_collective(path) -> Recorder:
    import torch
    import torch.distributed as dist

    dist.init_process_group("mpistrat")
    try:
        dist.all_reduce(torch.ones(100))
        with Recorder() as recorder:
            dist.all_reduce(torch.ones(100))
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return recorder


def push(path) -> Recorder:
    """Of the worker the push alone; of the server all that it does."""
    recorder = Recorder()
    with recorder, ms.ParameterServerStrategy(num_ps=1) as strategy:
        with strategy.scope():
            weights = ms.Variable(np.zeros(1000, np.float32), name="weights")
            optimizer = ms.optimizers.SGD(0.1)

        def step():
            weights.grad[:] = 1
            optimizer.apply_gradients([(weights.grad, weights)])

        if not strategy.is_server:
            strategy.run(step)
    return recorder


PROGRAMS = {
    "A gradient becomes weights": gradient, "A batch": batch, "A push": push, "A reduction": reduction,
    "The same reduction again": repeated_reduction, "A variable": variable, "A checkpoint": checkpoint,
}  # fmt: skip


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["one node", "several nodes"])
@pytest.mark.parametrize("title", PROGRAMS)
def test_an_operation_takes_its_walk(title, where, monkeypatch, mpi_tmp_path):
    if where == "several nodes":
        set_layout("nodes", monkeypatch)
    monkeypatch.setenv("MPISTRAT_TRANSPORT", "messages")
    check(title, where, PROGRAMS[title](mpi_tmp_path))


FRAMEWORKS = {"A step of PyTorch": torch_step, "A collective of torch.distributed": torch_collective}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("where", ["one node", "several nodes"])
@pytest.mark.parametrize("title", FRAMEWORKS)
@pytest.mark.skipif(find_spec("torch") is None, reason="PyTorch is not installed: make test-frameworks")
def test_an_operation_of_frameworks_takes_its_walk(title, where, monkeypatch, mpi_tmp_path):
    if where == "several nodes":
        set_layout("nodes", monkeypatch)
    check(title, where, FRAMEWORKS[title](mpi_tmp_path))


def check(title, where, recorder):
    """Compare the functions that an operation called with its walk."""
    from mpi4py import MPI

    functions, (_, hops) = recorder.functions(), WALKS[title]
    on_server = MPI.COMM_WORLD.rank == 1
    places = ("", where, "rank 0") if MPI.COMM_WORLD.rank == 0 else ("", where)
    if title == "A push":
        mine = [hop for hop in hops if (hop.where == "server") == on_server]
    else:
        mine = [hop for hop in hops if hop.where in places]
    missing = [f"{hop.file} {hop.name}" for hop in mine if (hop.file, hop.name) not in functions]
    assert not missing, f"{title}, {where}: never called: {missing}"
    order = [functions.index((hop.file, hop.name)) for hop in mine]
    assert order == sorted(order), f"{title}, {where}: called in another order: {order}"
    elsewhere = [hop for hop in hops if hop.where in {"one node", "several nodes"} - {where} and title != "A push"]
    wrong = [f"{hop.file} {hop.name}" for hop in elsewhere if (hop.file, hop.name) in functions]
    assert not wrong, f"{title}, {where}: called although the walk says elsewhere: {wrong}"


def test_a_batch_job_takes_its_walk(capsys):
    with Recorder() as recorder:
        assert main(["job", "--nodes", "2", "train.py"]) == 0
    functions = recorder.functions()
    hops = [hop for hop in WALKS["A batch job"][1] if hop.name != "submit"]  # only with --submit
    order = [functions.index((hop.file, hop.name)) for hop in hops]
    assert order == sorted(order), capsys.readouterr()
