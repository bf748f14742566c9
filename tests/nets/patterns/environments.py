"""Where a program runs: under a strategy on all ranks, or in one plain process of the framework."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

import mpistrat as ms

KINDS = ("equal", "unequal", "last", "empty")  # parts of batches: see sizes


def sizes(kind: str, ranks: int) -> tuple[int, int]:
    """Return the rows of a data set and of a batch that give the ranks such parts."""
    batch = 4 * ranks
    if kind == "equal":
        return 3 * batch, batch
    if kind == "unequal":  # in every batch
        return 4 * (3 * ranks + 1), 3 * ranks + 1
    if kind == "last":  # in the last batch
        return 2 * batch + ranks + 1, batch
    return 2 * batch + 1, batch  # all ranks but the first have no row of the last batch


class Environment:
    """One process of the framework alone: the reference. Its methods do nothing."""

    plain = True
    rank, size = 0, 1

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def data(self, dataset: Any) -> Iterable[Any]:
        """Return the dataset's batches as this rank gets them."""
        return dataset

    def run(self, step: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call a step."""
        return step(*args, **(kwargs or {}))

    def batch(self, batch: Any) -> contextlib.AbstractContextManager[Any]:
        """Say which batch the passes inside belong to."""
        return contextlib.nullcontext()

    def mean(self, value: float, rows: int) -> float:
        """Return the mean over the rows of all ranks."""
        return value

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def barrier(self) -> None:
        pass

    def close(self) -> None:
        pass


class Left(Exception):
    """The program goes on without this rank."""


class Distributed(Environment):
    """A strategy over all ranks, or over the first ones; with servers, one on the last rank."""

    plain = False

    def __init__(self, folder: str, servers: bool = False) -> None:
        super().__init__(folder)
        self.servers = servers
        self.open(MPI.COMM_WORLD)

    def open(self, comm: MPI.Intracomm) -> None:
        """Make the strategy. Collective."""
        if self.servers:
            self.strategy: Any = ms.ParameterServerStrategy(num_ps=1, workers_in_sync=comm.size - 1, comm=comm)
        else:
            self.strategy = ms.MultiWorkerMirroredStrategy(comm=comm)
        self.rank, self.size = self.strategy.rank, self.strategy.size

    def resize(self, ranks: int) -> None:
        """Close the strategy and make another one over the first ranks of the world. Collective.

        Raises:
            Left: on the ranks that it has no place for.
        """
        if self.strategy is not None:
            self.strategy.close()
            self.strategy = None
        world = MPI.COMM_WORLD
        inside = world.rank < ranks
        part = world.Split(0 if inside else MPI.UNDEFINED, world.rank)
        if not inside:
            raise Left
        self.open(part)

    def data(self, dataset: Any) -> Iterable[Any]:
        return self.strategy.distribute_dataset(dataset)

    def run(self, step: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return self.strategy.run(step, args=args, kwargs=dict(kwargs or {}))

    def batch(self, batch: Any) -> contextlib.AbstractContextManager[Any]:
        return self.strategy.batch(batch)

    def mean(self, value: float, rows: int) -> float:
        sums = np.array([value * rows if rows else 0.0, rows], np.float64)
        total, count = np.asarray(self.strategy.reduce("SUM", sums))
        return float(total / count)

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.strategy.scope()

    def barrier(self) -> None:
        self.strategy.barrier()

    def close(self) -> None:
        if self.strategy is not None:
            self.strategy.close()
