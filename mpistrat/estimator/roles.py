"""Which ranks train and which one evaluates, and the communicator of each."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from ..base.environment import Environment
from ..base.errors import ClusterError, explain
from ..cluster.rendezvous import wait_for_ranks
from ..cluster.resolvers.tf_config import TFConfigClusterResolver
from ..cluster.start import import_mpi
from ..cluster.world import world as world_of

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["EvaluatorSplit", "split_evaluator"]


class EvaluatorSplit(NamedTuple):
    """The job, divided by roles.

    Attributes:
        comm: of the ranks with this one's role.
        is_evaluator: whether this rank evaluates.
        has_evaluator: whether a rank of this job does.
        world: all of them.
    """

    comm: MPI.Intracomm
    is_evaluator: bool
    has_evaluator: bool
    world: MPI.Intracomm


def split_evaluator(comm: MPI.Intracomm | None = None) -> EvaluatorSplit:
    """Return the communicators of those that train and of the evaluator. Collective over `comm`.

    A rank evaluates when its task in TF_CONFIG is evaluator, as in several programs under one mpiexec; or when it is the last one
    and `mpistrat run --evaluator` (MPISTRAT_EVALUATOR=1) has started it. `train_and_evaluate` calls it; a program with a loop of
    its own makes its strategy over the result's `comm`, and lets the evaluator follow `ms.train.checkpoints_iterator`.

    Args:
        comm: default COMM_WORLD.

    Raises:
        ClusterError: on every rank: there are several evaluators, or nobody trains.
        CollectiveMismatchError: on every rank: some make a strategy instead.
        CollectiveTimeoutError: a rank did not come within MPISTRAT_ABORT_AFTER seconds.
        ContextError: a rank serves a coordinator, and cannot come.

    Example:
        >>> split = ms.estimator.split_evaluator()
        >>> split.comm.size, split.is_evaluator
        (1, False)
    """
    world: MPI.Intracomm = world_of(import_mpi()) if comm is None else comm
    wait_for_ranks(world, "split_evaluator")
    task = TFConfigClusterResolver().task_type if os.environ.get("TF_CONFIG") else None
    last = Environment.read().evaluator and world.size > 1 and world.rank == world.size - 1
    evaluates = world.allgather(bool(last) if task is None else task == "evaluator")
    found = [rank for rank, is_evaluator in enumerate(evaluates) if is_evaluator]
    if len(found) > 1:
        expected, got = "one evaluator at most", f"ranks {', '.join(map(str, found))}"
        raise ClusterError(explain("split_evaluator", "comm", expected=expected, got=got, rank=world.rank))
    mine = evaluates[world.rank]
    part: Any = world.Split(int(mine), world.rank)
    return EvaluatorSplit(part, mine, bool(found), world)


def evaluator_elsewhere() -> bool:
    """Return whether TF_CONFIG's cluster has an evaluator, perhaps in another job."""
    return "evaluator" in TFConfigClusterResolver().cluster_spec().jobs
