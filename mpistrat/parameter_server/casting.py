"""Role assignment: workers and servers, agreed by all ranks when the strategy is created."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, final

from .._util import log
from ..cluster import ClusterResolver, MPIClusterResolver, TFConfigClusterResolver, Topology
from ..cluster.tasks import own_task
from ..comm.process_group import ProcessGroup
from ..errors import ClusterError, explain
from .roles import Roles, elsewhere, is_server
from .settings import Settings

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Casting"]

_NAME = "ParameterServerStrategy"


@final
class Casting:
    """The roles of all ranks, by number or by a resolver.

    Args:
        settings: of the strategy.
        resolver: who is worker, chief or ps; default what TF_CONFIG says, if it is set and names ps tasks.
    """

    def __init__(self, settings: Settings, resolver: ClusterResolver | None) -> None:
        self._settings, self._resolver = settings, resolver
        self._problem: ClusterError | None = None  # raised by `check`, which all ranks hear of
        try:
            if resolver is None and settings.num_ps is None:
                self._resolver = _from_environment()
            self._serves = self._resolver is not None and is_server(self._resolver)
        except ClusterError as error:
            self._problem, self._serves = error, False
        self._count = 1 if settings.num_ps is None else settings.num_ps

    def serves(self, comm: MPI.Intracomm) -> bool:
        """Return whether this rank will be a server, as far as it can be seen before the ranks have talked."""
        if self._resolver is not None:
            return self._serves
        return type(self._count) is int and comm.rank >= comm.size - self._count

    def check(self, topology: Topology) -> None:
        """Raise what this rank finds wrong with the settings, its task and the number of ranks."""
        if self._problem is not None:
            raise self._problem
        if self._resolver is not None and self._settings.num_ps is not None:
            raise ValueError(explain(_NAME, "num_ps", expected="num_ps or cluster_resolver", got="both"))
        if self._resolver is None:
            Roles.of_counts(topology.size, self._count)
        own_task(self._resolver)
        self._settings.check()

    def agree(self, group: ProcessGroup) -> Roles:
        """Return the roles. Collective.

        Raises:
            ClusterError: on every rank, when the roles contradict each other, or there is no worker or no server.
            CollectiveMismatchError: on every rank, when their settings differ.
            ValueError: on every rank, when there are not more workers than backup workers.
        """
        with group.collective(_NAME, detail=self._settings.compared()):
            pass
        size, backup = group.topology.size, self._settings.backup_workers
        roles = Roles.of_counts(size, self._count) if self._resolver is None else Roles.gather(group, self._resolver)
        if not backup < len(roles.workers):
            expected = f"less than the {len(roles.workers)} workers"
            raise ValueError(explain(_NAME, "backup_workers", expected=expected, got=backup))
        return roles

    def tell(self, group: ProcessGroup, roles: Roles) -> ClusterResolver:
        """Log who is where, warn where that is not what the resolver said, and return the resolver. Collective."""
        resolver = self._resolver
        if resolver is None:
            jobs = {"worker": list(roles.workers), "ps": list(roles.servers)}
            resolver = MPIClusterResolver(group.topology.comm, jobs)
        host = group.topology.hostname
        with group.collective(_NAME, "placement"):
            told = [text.split("\n") for text in group.all_gather_text(f"{host}\n{elsewhere(resolver, host)}")]
        placement = roles.describe([host for host, _ in told])
        if group.topology.rank == 0:
            log.once(logging.INFO, f"{_NAME}:\n{placement}")
        wrong = [f"rank {rank} is on {host}, not on {asked}" for rank, (host, asked) in enumerate(told) if asked]
        if wrong:
            remedy = "check the launcher's host list (mpiexec --hosts, mpirun --host) against the cluster's addresses"
            log.once(logging.WARNING, f"{_NAME}: other hosts than asked: {'; '.join(wrong)}: {remedy}\n{placement}")
        return resolver


def _from_environment() -> ClusterResolver | None:
    """The resolver of TF_CONFIG, where that says who is a server."""
    if not os.environ.get("TF_CONFIG"):
        return None
    resolver = TFConfigClusterResolver()
    return resolver if "ps" in resolver.cluster_spec().jobs else None
