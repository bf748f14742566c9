"""Who is worker and server in the parameter servers' benchmark, and what this package does there."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from parameter_server_peers import Case

import mpistrat as ms
from mpistrat.base.text import counted

PAUSE = 2e-3  # seconds between two looks of a rank that waits


class Quiet:
    """Ranks that meet without keeping a processor busy: others are being measured on it."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm

    def gather(self, *values: float) -> np.ndarray:
        """Return every rank's values, a row each. Collective."""
        mine, out = np.array(values, np.float64), np.empty((self._comm.size, len(values)))
        request = self._comm.Iallgather(mine, out)
        while not request.Test():
            time.sleep(PAUSE)
        return out

    def meet(self) -> None:
        """Wait for all. Collective."""
        self.gather(0.0)


@dataclass(frozen=True)
class Layout:
    """Who is worker and server, and what this rank is.

    Attributes:
        workers, servers: ranks of the world.
        worker: this rank's number among the workers, None if it is none.
        world: all ranks.
        comm: the workers and then the servers; None on other ranks.
        together: the workers; None on other ranks.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]
    worker: int | None
    world: Quiet
    comm: Any
    together: Quiet | None

    def __str__(self) -> str:
        return f"{len(self.servers)} ps, {counted(len(self.workers), 'worker')}"


def layouts(world: Any, counts: Iterable[tuple[int, int]]) -> Iterator[Layout]:
    """Those layouts of so many servers and workers that the ranks allow; each is freed after its use. Collective."""
    from mpi4py import MPI

    leader, leaders = np.array([world.rank], np.int32), np.empty(world.size, np.int32)
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    node.Bcast(leader)
    node.Free()
    world.Allgather(leader, leaders)
    near = [rank for rank in range(world.size) if leaders[rank] == leaders[-1]]
    far = [rank for rank in range(world.size) if rank not in near]
    for servers, workers in counts:
        pool = far or near[:-servers]
        if len(pool) < workers or len(near) < servers:
            continue
        roles = tuple(pool[:workers]), tuple(near[-servers:])
        members = [*roles[0], *roles[1]]
        place = members.index(world.rank) if world.rank in members else None
        comm = world.Split(MPI.UNDEFINED if place is None else 0, place or 0)
        worker = None if place is None or place >= workers else place
        together = world.Split(MPI.UNDEFINED if worker is None else 0, worker or 0)
        inside, alone = (None if place is None else comm), (None if worker is None else Quiet(together))
        yield Layout(*roles, worker, Quiet(world), inside, alone)
        for used in (comm, together):
            if used != MPI.COMM_NULL:
                used.Free()


class Model:
    """A strategy of ours with the variables of a case. Collective over the ranks of a layout.

    The optimizer is made by all ranks of the world, because worker and server name it by the number that were made before.

    Attributes:
        strategy, variables: what they are called.
        step: on a worker, a whole step.
        push: on a worker, a step that reads nothing.
    """

    def __init__(self, layout: Layout, case: Case, transport: str, sgd: Any) -> None:
        self._sgd = sgd
        servers = len(layout.servers)
        strategy = ms.ParameterServerStrategy(num_ps=servers, transport=transport, comm=layout.comm)
        self.strategy = strategy
        with strategy.scope():
            self.variables = [
                ms.Variable(np.zeros(shape, np.float32), name=f"v{i}") for i, shape in enumerate(case.shapes(servers))
            ]
        if layout.worker is not None:
            step, push = (self._sparse if case.rows else self._dense)(case, layout.worker)
            self.step, self.push = lambda: strategy.run(step), lambda: strategy.run(push)

    def _dense(self, case: Case, worker: int) -> tuple[Callable[[], None], Callable[[], None]]:
        for v in self.variables:
            v.grad[...] = 1

        def push() -> None:
            self._sgd.apply_gradients([(v.grad, v) for v in self.variables])

        def step() -> None:
            self.pull()
            push()

        return step, push

    def _sparse(self, case: Case, worker: int) -> tuple[Callable[[], None], Callable[[], None]]:
        (table,), batches = self.variables, itertools.cycle(case.numbers(worker))
        ones = np.ones((case.rows, *case.shape[1:]), np.float32)

        def push() -> None:
            self._sgd.apply_gradients([(ms.IndexedSlices(ones, next(batches)), table)])

        def step() -> None:
            rows = next(batches)
            table.sparse_read(rows)
            self._sgd.apply_gradients([(ms.IndexedSlices(ones, rows), table)])

        return step, push

    def pull(self) -> None:
        """Read all variables."""
        for v in self.variables:
            v.array  # noqa: B018

    def flush(self) -> None:
        """Wait until all that this worker pushed is applied."""
        for v in self.variables:
            v.sparse_read([0])  # a read is behind all pushes of its worker

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:  # an exception ends the job, and tells what it was
            self.strategy.close()
