"""ParameterServerStrategy on all ranks, for tests: opened and closed, described by TF_CONFIG, and beside one worker alone."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import mpistrat as ms


@contextlib.contextmanager
def made(**settings: Any) -> Iterator[Any]:
    """A strategy over all ranks, in scope; closed unless the test fails: its ranks would wait for each other."""
    strategy = ms.ParameterServerStrategy(**settings)
    with strategy.scope():
        yield strategy
    strategy.close()


def serve_on_rank_0(monkeypatch: Any) -> None:
    """Let TF_CONFIG say that rank 0 is a server, rank 1 the chief and the others workers."""
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    hosts = [f"{MPI.Get_processor_name()}:{port}" for port in range(1, size + 1)]
    cluster = {"ps": hosts[:1], "chief": hosts[1:2], **({"worker": hosts[2:]} if size > 2 else {})}
    job, index = [("ps", 0), ("chief", 0), *(("worker", i) for i in range(size - 2))][rank]
    monkeypatch.delenv("MPISTRAT_NUM_PS", raising=False)
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": job, "index": index}}))


def settle(strategy: Any, *variables: Any) -> None:
    """Wait until what the workers have written to the variables is applied. Collective."""
    if not strategy.is_server:
        for variable in variables:
            variable.numpy()
    strategy.comm.Barrier()


def alone(program: Callable[[Any], Any], devices: int = 1) -> Any:
    """What the program of one worker gives without servers, on this rank alone."""
    from mpi4py import MPI

    with ms.MirroredStrategy([f"cpu:{i}" for i in range(devices)], comm=MPI.COMM_SELF) as strategy, strategy.scope():
        return program(strategy)
