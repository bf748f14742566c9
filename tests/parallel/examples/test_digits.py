"""The digits job: the same weights on any ranks, under any strategy, with any algorithm; the same bits on one layout."""

from __future__ import annotations

import json

import pytest

from tests.harness import digits_jobs

CASES = [
    ("mirrored", "auto", ""),
    ("mirrored", "reduction_to_one_device", "cpu:0,cpu:1"),
    ("multi_worker_mirrored", "hierarchical", ""),
    ("multi_worker_mirrored", "mpi", "cpu:0,cpu:1"),
    ("central_storage", "auto", ""),
    ("central_storage", "auto", "cpu:0,cpu:1"),
]


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("strategy", "all_reduce", "devices"), CASES)
def test_weights_do_not_depend_on_the_layout(mpi_tmp_path, strategy: str, all_reduce: str, devices: str) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    words = ["--strategy", strategy, "--all-reduce", all_reduce, *(["--devices", devices] if devices else [])]
    summary = digits_jobs.run(mpi_tmp_path / "job", *words)
    assert summary["ranks"] == comm.size
    assert summary["replicas"] == comm.size * (2 if devices else 1)
    if comm.rank == 0:
        digits_jobs.run_alone(mpi_tmp_path / "alone")
        found, expected = (digits_jobs.weights(mpi_tmp_path / name) for name in ("job", "alone"))
        assert digits_jobs.difference(found, expected) < 1e-9
    comm.Barrier()


@pytest.mark.ranks(1, 3)
def test_the_same_layout_gives_the_same_bits(mpi_tmp_path) -> None:
    from mpi4py import MPI

    for name in ("first", "second"):
        digits_jobs.run(mpi_tmp_path / name, "--strategy", "multi_worker_mirrored", "--dtype", "float32")
    if MPI.COMM_WORLD.rank == 0:
        first, second = (digits_jobs.weights(mpi_tmp_path / name) for name in ("first", "second"))
        assert sorted(first) == sorted(second)
        assert all(first[name].tobytes() == second[name].tobytes() for name in first)
    MPI.COMM_WORLD.Barrier()


@pytest.mark.ranks(2)
def test_outputs_and_accuracy(mpi_tmp_path) -> None:
    """As `make demo` runs it: float32, all epochs, at least 97 %, within 0.5 % of one rank alone."""
    from mpi4py import MPI

    from mpistrat.examples import digits

    summary = digits.main(["--output", str(mpi_tmp_path / "out"), "--progress", "none"])
    if MPI.COMM_WORLD.rank == 0:
        out = mpi_tmp_path / "out"
        lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert [line["epoch"] for line in lines] == list(range(summary["epochs"]))
        assert lines[0]["loss"] > 2 * lines[-1]["loss"]
        assert summary["test_accuracy"] == lines[-1]["val_accuracy"] >= 0.97
        assert "val_accuracy" in (out / "run.html").read_text()
        epochs, batch = str(summary["epochs"]), str(digits.parse([]).global_batch_size)
        words = ("--dtype", "float32", "--epochs", epochs, "--global-batch-size", batch)
        alone = digits_jobs.run_alone(mpi_tmp_path / "alone", *words)
        assert abs(alone["test_accuracy"] - summary["test_accuracy"]) <= 0.005
    MPI.COMM_WORLD.Barrier()
