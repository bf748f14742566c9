"""The digits job, stopped again and again, ends as the one that nobody disturbs."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.strategy import preemption
from tests.harness import digits_jobs


def until_done(folder: Path, monkeypatch, tell, words: tuple[str, ...]) -> int:
    """Run the job until it is done; return how often it was stopped. `tell(number of the run, number of the call)`."""
    calls = 0
    kind = ms.ParameterServerStrategy if "parameter_server" in words else ms.Strategy
    should_stop = ms.Strategy.should_stop

    def counted(strategy) -> bool:
        nonlocal calls
        calls += 1
        tell(runs, calls)
        return should_stop(strategy)

    monkeypatch.setattr(kind, "should_stop", counted)
    for runs in range(20):
        calls = 0
        try:
            digits_jobs.run(folder, *words)
        except SystemExit as end:
            assert end.code == ms.RESTART_EXIT_CODE
            assert list((folder / "checkpoints").glob("step-*.h5"))
        else:
            monkeypatch.undo()
            assert not (folder / "checkpoints").exists()
            return runs
        finally:
            preemption.release_signals()
    raise AssertionError("stopped for ever")


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def as_undisturbed(parts: Path, whole: Path) -> None:
    found, expected = digits_jobs.weights(parts), digits_jobs.weights(whole)
    assert sorted(found) == sorted(expected)
    assert [name for name in found if found[name].tobytes() != expected[name].tobytes()] == []
    for line, other in zip(metrics(parts), metrics(whole), strict=True):
        keys = ("epoch", "step", "loss", "accuracy", "val_loss", "val_accuracy")
        assert [line[key] for key in keys] == pytest.approx([other[key] for key in keys], rel=1e-12)


def kill(at: tuple[int, ...]):
    """Tell a rank, by turns, at the call so numbered of each run; at none after these."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    def tell(run: int, call: int) -> None:
        if run < len(at) and call == at[run] and comm.rank == (run + 1) % comm.size:
            os.kill(os.getpid(), signal.SIGUSR1)

    return tell


@pytest.mark.ranks(1, 3, timeout=150)
@pytest.mark.parametrize(
    ("strategy", "at"), [("mirrored", (6,)), ("multi_worker_mirrored", (3, 10, 3, 10)), ("central_storage", (6,))]
)
def test_the_bits_of_an_undisturbed_run(mpi_tmp_path, monkeypatch, strategy: str, at: tuple[int, ...]) -> None:
    """Stopped in the middle, twice in one epoch, at its very end and in the last steps of all."""
    from mpi4py import MPI

    words = ("--strategy", strategy)
    digits_jobs.run(mpi_tmp_path / "whole", *words)
    assert until_done(mpi_tmp_path / "parts", monkeypatch, kill(at), words) == len(at)
    if MPI.COMM_WORLD.rank == 0:
        as_undisturbed(mpi_tmp_path / "parts", mpi_tmp_path / "whole")
    MPI.COMM_WORLD.Barrier()


@pytest.mark.ranks(2, timeout=150)
@pytest.mark.parametrize("devices", ["cpu:0,cpu:1"])
def test_with_several_devices(mpi_tmp_path, monkeypatch, devices: str) -> None:
    from mpi4py import MPI

    words = ("--strategy", "mirrored", "--devices", devices)
    digits_jobs.run(mpi_tmp_path / "whole", *words)
    assert until_done(mpi_tmp_path / "parts", monkeypatch, kill((5, 9)), words) == 2
    if MPI.COMM_WORLD.rank == 0:
        as_undisturbed(mpi_tmp_path / "parts", mpi_tmp_path / "whole")
    MPI.COMM_WORLD.Barrier()


@pytest.mark.hosts(2, ranks_per_host=2, timeout=150)
def test_over_two_hosts(mpi_tmp_path, monkeypatch) -> None:
    from mpi4py import MPI

    words = ("--strategy", "multi_worker_mirrored", "--epochs", "1")
    digits_jobs.run(mpi_tmp_path / "whole", *words)
    assert until_done(mpi_tmp_path / "parts", monkeypatch, kill((2, 5)), words) == 2
    if MPI.COMM_WORLD.rank == 0:
        as_undisturbed(mpi_tmp_path / "parts", mpi_tmp_path / "whole")
    MPI.COMM_WORLD.Barrier()


@pytest.mark.ranks(3, timeout=150)
def test_told_at_any_moment(mpi_tmp_path, monkeypatch) -> None:
    """Before the first step, during evaluation, in the last step, while it saves; one rank, or all of them."""
    from mpi4py import MPI

    comm, words = MPI.COMM_WORLD, ("--strategy", "multi_worker_mirrored")
    digits_jobs.run(mpi_tmp_path / "whole", *words)
    chance = np.random.default_rng(5)
    timers: list[threading.Timer] = []

    def tell(run: int, call: int) -> None:
        if call == 1:
            delay, everybody = chance.uniform(0, 0.1), chance.integers(2)
            victim = chance.integers(comm.size)
            if run < 4 and (everybody or comm.rank == victim):
                timers.append(threading.Timer(delay, os.kill, (os.getpid(), signal.SIGUSR1)))
                timers[-1].start()

    release = preemption.release_signals

    def at_the_end() -> None:  # the next run is another job, which hears nothing of what was told this one
        while timers:
            timers.pop().join()
        time.sleep(0.01)
        release()

    monkeypatch.setattr(preemption, "release_signals", at_the_end)
    until_done(mpi_tmp_path / "parts", monkeypatch, tell, words)
    if comm.rank == 0:
        as_undisturbed(mpi_tmp_path / "parts", mpi_tmp_path / "whole")
    comm.Barrier()


@pytest.mark.ranks(4, timeout=150)
def test_on_another_number_of_ranks(mpi_tmp_path, monkeypatch) -> None:
    """Begun on four ranks, ended on one: the weights of one rank, up to rounding."""
    from mpi4py import MPI

    comm, told = MPI.COMM_WORLD, mpi_tmp_path / "job"
    words = ("--strategy", "multi_worker_mirrored")
    with pytest.raises(SystemExit):
        stop_once(told, monkeypatch, words)
    preemption.release_signals()
    if comm.rank == 0:
        digits_jobs.run_alone(told)
        digits_jobs.run_alone(mpi_tmp_path / "alone")
        found, expected = (digits_jobs.weights(mpi_tmp_path / name) for name in ("job", "alone"))
        assert digits_jobs.difference(found, expected) < 1e-9
    comm.Barrier()


def stop_once(folder: Path, monkeypatch, words: tuple[str, ...]) -> None:
    tell, calls = kill((7,)), iter(range(1, 1000))
    should_stop = ms.Strategy.should_stop
    with monkeypatch.context() as patch:
        patch.setattr(ms.Strategy, "should_stop", lambda strategy: (tell(0, next(calls)), should_stop(strategy))[1])
        digits_jobs.run(folder, *words)


@pytest.mark.ranks(2, timeout=150)
def test_settings_must_be_those_it_began_with(mpi_tmp_path, monkeypatch) -> None:
    with pytest.raises(SystemExit):
        stop_once(mpi_tmp_path / "job", monkeypatch, ("--strategy", "mirrored"))
    preemption.release_signals()
    with pytest.raises(ValueError, match="'seed': 0.*'seed': 1.*remove the folder"):
        digits_jobs.run(mpi_tmp_path / "job", "--strategy", "mirrored", "--seed", "1")


@pytest.mark.ranks(3, 4, timeout=150)
def test_parameter_servers(mpi_tmp_path, monkeypatch) -> None:
    """Every row of the data is read once an epoch, and the result is as good."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    words = ("--strategy", "parameter_server", "--global-batch-size", "32", "--epochs", "4", "--learning-rate", "2e-3")
    stopped = until_done(mpi_tmp_path / "job", monkeypatch, kill((5, 3)), words)
    assert stopped >= 1  # in the rest of a pass nobody may be left who hears it
    if comm.rank == 0:
        lines = metrics(mpi_tmp_path / "job")
        assert [line["epoch"] for line in lines] == [0, 1, 2, 3]
        assert lines[0]["loss"] > 2 * lines[-1]["loss"]
        assert max(line["val_accuracy"] for line in lines[-2:]) >= 0.93
    comm.Barrier()
