"""The digits job with parameter servers: at least 96 % of the test digits right, on any ranks and by any transport."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from tests.harness import digits_jobs
from tests.harness.parameter_server_strategies import serve_on_rank_0
from tests.harness.transports import TRANSPORTS

WORDS = ("--strategy", "parameter_server", "--dtype", "float32", "--epochs", "8", "--learning-rate", "2e-3")


def train(folder: Path, servers: int, transport: str) -> None:
    """Train, and look at the last three tests: while a worker tests, others train, so that one may meet a bad moment."""
    from mpi4py import MPI

    batch = ("--global-batch-size", "32")  # of one worker
    summary = digits_jobs.run(folder, *WORDS, *batch, "--num-ps", str(servers), "--transport", transport)
    assert summary["ranks"] == MPI.COMM_WORLD.size
    assert summary["replicas"] == 1
    if MPI.COMM_WORLD.rank == 0:
        epochs = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert len(epochs) == 8
        assert epochs[0]["loss"] > 2 * epochs[-1]["loss"]
        assert statistics.median(epoch["val_accuracy"] for epoch in epochs[-3:]) >= 0.96
    MPI.COMM_WORLD.Barrier()


@pytest.mark.ranks(3)
def test_as_chosen(mpi_tmp_path: Path) -> None:
    train(mpi_tmp_path / "job", 1, "")


@pytest.mark.ranks(3)
def test_the_roles_of_tf_config(mpi_tmp_path: Path, monkeypatch) -> None:
    """Rank 0 serves, and knows nothing of the training: the first worker writes of it."""
    from mpi4py import MPI

    from mpistrat.examples import digits

    serve_on_rank_0(monkeypatch)
    options = digits.parse([*digits_jobs.COMMON, *WORDS, "--epochs", "1", "--output", str(mpi_tmp_path)])
    strategy = digits.make_strategy(options)
    assert (strategy.workers, strategy.servers) == ((1, 2), (0,))
    digits.train(strategy, options)
    strategy.close()
    (line,) = (mpi_tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["val_accuracy"] > 0.3  # 0.1 by chance
    MPI.COMM_WORLD.Barrier()


@pytest.mark.ranks(3)
def test_the_number_of_servers_by_the_environment(monkeypatch) -> None:
    from mpistrat.examples import digits

    serve_on_rank_0(monkeypatch)
    monkeypatch.setenv("MPISTRAT_NUM_PS", "2")  # which precedes TF_CONFIG, and gives way to the option
    for words, servers in ([], (1, 2)), (["--num-ps", "1"], (2,)):
        strategy = digits.make_strategy(digits.parse([*WORDS, *words]))
        assert strategy.servers == servers
        strategy.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_server(mpi_tmp_path: Path, transport: str) -> None:
    train(mpi_tmp_path / "job", 1, transport)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_servers(mpi_tmp_path: Path, transport: str) -> None:
    train(mpi_tmp_path / "job", 2, transport)


# One-sided calls over TCP are emulated, slow, and not chosen.
@pytest.mark.hosts(2, ranks_per_host=2, timeout=150)
@pytest.mark.parametrize(("transport", "servers"), [("", 1), ("", 2), ("messages", 2), ("one_sided", 1)])
def test_over_two_hosts(mpi_tmp_path: Path, transport: str, servers: int) -> None:
    """TCP between the hosts; the servers are on the second one, which they share with a worker or fill."""
    train(mpi_tmp_path / "job", servers, transport)


@pytest.mark.hosts(2, ranks_per_host=1)
def test_one_worker_far_from_its_server(mpi_tmp_path: Path) -> None:
    train(mpi_tmp_path / "job", 1, "")
