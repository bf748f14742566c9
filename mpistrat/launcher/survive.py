"""Continuing in place with the remaining ranks when some are lost: under Open MPI with ULFM; see `cluster/world.py`.

The old strategy is not repaired. The program's function is called again and creates strategy, variables and datasets for fewer
ranks. `Checkpoints` finds the state in the nodes' memory, as after a restart.
"""

from __future__ import annotations

import gc
import os
import secrets
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, final

import numpy as np

from ..base.environment import Environment
from ..base.errors import ClusterError, LayoutError, explain
from ..base.log import logger
from ..base.text import counted, named
from ..cluster import world
from ..cluster.topology import running_mpi
from ..comm import job_files
from ..comm.monitor import abort
from ..comm.process_group import abandon

__all__ = ["Job", "survive"]

T = TypeVar("T")
_own_keys = set[str]()  # of jobs without a supervisor


@final
class Job(NamedTuple):
    """The ranks that `survive` calls a function on.

    Attributes:
        comm: their communicator, the default of strategies.
        generation: number of restarts and losses so far.
        lost: the numbers in COMM_WORLD of the ranks that were lost since the last restart.
    """

    comm: Any
    generation: int
    lost: tuple[int, ...]


def survive(train: Callable[[Job], T]) -> T:
    """Call a function, again with the remaining ranks when some die, and return its result. Collective over COMM_WORLD.

    Each call creates its strategy, variables and datasets, and resumes where `Checkpoints` restores to. The function must not
    store them elsewhere. Strategies use the remaining ranks by default. Unless the program was started for it (`mpistrat run
    --survive`, Open MPI), the function is called once, and a rank that dies ends the job. An exception of the function ends the
    job as usual. RanksLostError must propagate through it.

    Args:
        train: called with a `Job`; its return value must not depend on the number of calls.

    Raises:
        ClusterError: MPI was started for it, but with collectives that miss failures.
        LayoutError: in a call of `survive`.

    Example:
        >>> def train(job):
        ...     with ms.OneDeviceStrategy() as strategy, strategy.scope():
        ...         return ms.Variable(2.0).numpy() + job.generation
        >>> float(ms.survive(train))
        2.0
    """
    mpi = running_mpi("survive")
    if world.survives():
        raise LayoutError(explain("survive", "", expected="one call at a time", got="one in another"))
    if not world.loses_ranks():
        return train(Job(world.world(mpi), Environment.read().generation, ()))
    unsafe = world.unsafe_collectives()
    if unsafe:
        expected, got = (
            f"OMPI_MCA_coll=^{','.join(world.UNSAFE)}",
            f"collectives by {', '.join(unsafe)}, which miss deaths",
        )
        remedy = "mpistrat run --survive sets it"
        raise ClusterError(explain("survive", "environment", expected=expected, got=got, remedy=remedy))
    return _Survival(world.track(world.world(mpi))).run(train)


@final
class _Survival:
    """The state of one call of `survive`."""

    def __init__(self, comm: Any) -> None:
        self._comm, self._lost = comm, tuple[int, ...]()
        environment, self._noticed = Environment.read(), 0.0
        self._generation = environment.generation
        self._job = "" if environment.job in _own_keys else environment.job  # a supervisor's, if there is one
        if self._job:
            self._generation = job_files.least_generation(self._job, self._generation)
        key = np.frombuffer(secrets.token_bytes(8), np.uint8).copy()
        comm.Bcast(key)
        if not environment.job:
            _own_keys.add(key.tobytes().hex())
            os.environ["MPISTRAT_JOB"] = key.tobytes().hex()
        abort.leave_without_mpi(lambda: world.agree(True))

    def run(self, train: Callable[[Job], T]) -> T:
        while True:
            result, problem = self._attempt(train)
            if problem:
                self._leave_groups()
            if world.agree(not problem):
                world.untrack()
                assert result
                return result[0]
            if not problem:
                self._leave_groups()
            self._go_on(problem)

    def _attempt(self, train: Callable[[Job], T]) -> tuple[list[T], str]:
        """Return the function's result in a list, or the text of the error that indicates lost ranks."""
        try:
            self._enter()
            return [train(Job(self._comm, self._generation, self._lost))], ""
        except Exception as error:
            # An error that passed through C++, as in the backward pass of DistributedDataParallel, has no cause.
            if not (world.is_loss(error) or world.met_loss()):
                raise
            self._noticed = time.monotonic()
            problem = "".join(traceback.format_exception(error))
            logger.debug("ranks were lost:\n%s", problem)
            return [], problem

    def _enter(self) -> None:
        """Agree on the generation. Collective."""
        self._generation = world.highest(self._generation)
        os.environ["MPISTRAT_GENERATION"] = str(self._generation)
        if self._job and self._comm.rank == 0:
            job_files.state(self._job)[job_files.GENERATION] = self._generation
        if self._noticed and self._comm.rank == 0:
            ranks, seconds = counted(self._comm.size, "rank"), time.monotonic() - self._noticed
            logger.warning("%s lost: %s continue, after %.2f s", named("rank", self._lost), ranks, seconds)

    def _leave_groups(self) -> None:
        """Leave everything that needs the lost ranks; ranks that wait for this one leave too."""
        world.revoke()
        abandon()
        abort.renumber()

    def _go_on(self, problem: str) -> None:
        """Create a world of the living ranks. Collective over them."""
        if not self._noticed:
            self._noticed = time.monotonic()
        size = world.world(running_mpi("survive")).size  # a coordinator may have left out lost workers
        self._comm, self._lost = world.shrink()
        if self._comm.size == size:
            why = f"an error that was no loss of ranks:\n{problem}" if problem else "an error of another rank"
            raise RuntimeError(f"rank {self._comm.rank}: survive: {why}")
        self._generation += 1
        gc.collect()  # memory of the old strategy, in cycles
