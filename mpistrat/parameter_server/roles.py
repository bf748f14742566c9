"""Roles of ranks, worker or parameter server, agreed by all ranks with the settings of the strategy."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from ..base import log
from ..base.errors import ClusterError, explain
from ..base.options import CommunicationOptions
from ..cluster import Topology
from ..cluster.resolvers import ClusterResolver, MPIClusterResolver, TFConfigClusterResolver
from ..cluster.spec import validate
from ..cluster.tasks import own_task, ranks_by_task
from ..comm.monitor import exit_report
from ..comm.process_group import ProcessGroup
from .layout import PLACEMENTS

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["RoleAssignment", "Roles", "Settings", "is_server"]

_NAME = "ParameterServerStrategy"


@final
@dataclass(frozen=True)
class Roles:
    """The ranks of each role.

    Attributes:
        workers: the chief if there is one, then the workers, in the order of their tasks.
        servers: the parameter servers, in the order of their tasks.
    """

    workers: tuple[int, ...]
    servers: tuple[int, ...]

    @classmethod
    def of_counts(cls, size: int, num_ps: int) -> Roles:
        """Return the roles if the last ranks are the servers.

        Raises:
            ClusterError: no worker or no server is left.

        Example:
            >>> Roles.of_counts(4, 1)
            Roles(workers=(0, 1, 2), servers=(3,))
        """
        if type(num_ps) is not int or not 1 <= num_ps < size:
            expected = f"at least 1 and less than the {size} ranks, for there must be a worker"
            remedy = "Start more ranks: workers and servers are counted together"
            raise ClusterError(explain(_NAME, "num_ps", expected=expected, got=num_ps, remedy=remedy))
        return cls(tuple(range(size - num_ps)), tuple(range(size - num_ps, size)))

    def describe(self, hosts: Sequence[str]) -> str:
        """Return the roles on each host, as text.

        Args:
            hosts: the host of each rank.

        Example:
            >>> print(Roles.of_counts(3, 1).describe(["a", "a", "b"]))
            a: worker 0 (rank 0), worker 1 (rank 1)
            b: ps 0 (rank 2)
        """
        tasks = [(rank, f"worker {i} (rank {rank})") for i, rank in enumerate(self.workers)]
        tasks += [(rank, f"ps {i} (rank {rank})") for i, rank in enumerate(self.servers)]
        there = {host: [text for rank, text in tasks if hosts[rank] == host] for host in dict.fromkeys(hosts)}
        return "\n".join(f"{host}: {', '.join(texts)}" for host, texts in there.items())

    def in_sync_with(self, rank: int, workers_in_sync: int) -> tuple[int, ...]:
        """Return the ranks that step together with one, including itself.

        Raises:
            ClusterError: `workers_in_sync` does not divide the workers.

        Example:
            >>> Roles.of_counts(5, 1).in_sync_with(2, workers_in_sync=2)
            (2, 3)
        """
        if len(self.workers) % workers_in_sync:
            expected = f"a divisor of the number of workers, {len(self.workers)}"
            raise ClusterError(explain(_NAME, "workers_in_sync", expected=expected, got=workers_in_sync))
        if rank in self.servers:
            return (rank,)
        first = self.workers.index(rank) // workers_in_sync * workers_in_sync
        return self.workers[first : first + workers_in_sync]

    @classmethod
    def gather(cls, group: ProcessGroup, resolver: ClusterResolver) -> Roles:
        """Return the roles from every rank's resolver. Collective.

        Raises:
            ClusterError: on every rank: a rank has no task or two have the same, clusters differ, or no worker or server is
                left.
        """
        with group.collective(_NAME, "roles"):
            texts = group.all_gather_text(own_task(resolver))
        tasks = ranks_by_task(_NAME, texts, resolver, ("chief", "master", "worker", "ps"))
        if not tasks:
            expected, remedy = "a task for every rank", "Pass each rank its task_type and task_id, or pass num_ps"
            raise ClusterError(explain(_NAME, "cluster_resolver", expected=expected, got="none", remedy=remedy))
        workers = tuple(rank for (job, _), rank in tasks.items() if job != "ps")
        servers = tuple(rank for (job, _), rank in tasks.items() if job == "ps")
        if not workers or not servers:
            got = f"{len(workers)} and {len(servers)}"
            remedy = "Pass num_ps, or MPIClusterResolver(jobs={'worker': 3, 'ps': 1})"
            raise ClusterError(
                explain(_NAME, "cluster_resolver", expected="workers and servers", got=got, remedy=remedy)
            )
        return cls(workers, servers)


def elsewhere(resolver: ClusterResolver, host: str) -> str:
    """Return the host that a resolver names for this rank's task, if it is another one; else "".

    Numeric addresses, "localhost", and names that differ only in their domains are ignored.

    Example:
        >>> spec = ms.ClusterSpec({"worker": ["a.site:1"], "ps": ["b:1"]})
        >>> resolver = ms.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=0)
        >>> elsewhere(resolver, "a"), elsewhere(resolver, "c")
        ('', 'a.site')
    """
    spec = resolver.cluster_spec()
    if not spec or resolver.task_type not in spec.jobs or resolver.task_id not in spec.task_indices(resolver.task_type):
        return ""
    named = spec.task_address(resolver.task_type, resolver.task_id).rpartition("//")[2].rpartition(":")[0]
    short = named.partition(".")[0]
    if not short or short == "localhost" or not any(c.isalpha() for c in short) or ":" in named:
        return ""
    return "" if short == host.partition(".")[0] else named


def is_server(resolver: ClusterResolver) -> bool:
    """Return whether this rank is a parameter server, from its resolver.

    Raises:
        ClusterError: the cluster's roles are not legal.
    """
    spec = resolver.cluster_spec()
    validate(spec, resolver.task_type if spec else None, resolver.task_id)
    return resolver.task_type == "ps"


def register_role(group: ProcessGroup, workers: Sequence[int], servers: Sequence[int]) -> None:
    """Register this rank's role for the report of a kill."""
    rank, topology = group.topology.rank, group.topology
    kind, tasks = ("ps", servers) if rank in servers else ("worker", workers)
    role = f"{kind} {tasks.index(rank)}" if rank in tasks else "no role"
    exit_report.register_rank(f"rank {rank} of {topology.size} ({role}) on {topology.hostname}")


@final
@dataclass(frozen=True)
class Settings:
    """The arguments of ParameterServerStrategy that are equal on all ranks; see there."""

    variable_partitioner: Callable[..., Sequence[int]] | None
    num_ps: int | None
    max_staleness: int | None
    backup_workers: int
    placement: str
    transport: str
    workers_in_sync: int
    back_off: float
    check_numerics: bool
    communication_options: CommunicationOptions | None
    replicas: int | None = None

    def compared(self) -> tuple[Any, ...]:
        """Return the settings that ranks compare; the resolver and other parts of the strategy check the rest."""
        return (
            self.max_staleness,
            self.backup_workers,
            self.placement,
            self.transport,
            self.workers_in_sync,
            self.back_off,
            self.check_numerics,
            self.replicas,
        )

    def check(self) -> None:
        """Raise ValueError for an illegal setting."""
        self._check_number("max_staleness", 0, optional=True)
        self._check_number("backup_workers", 0)
        self._check_number("workers_in_sync", 1)
        self._check_number("replicas", 1, optional=True)
        if self.replicas is not None and self.replicas % self.workers_in_sync:
            expected = f"a multiple of workers_in_sync, {self.workers_in_sync}"
            raise ValueError(explain(_NAME, "replicas", expected=expected, got=self.replicas))
        if self.backup_workers and self.max_staleness != 0:
            expected, got = "max_staleness=0 with backup workers", repr(self.max_staleness)
            raise ValueError(explain(_NAME, "max_staleness", expected=expected, got=got))
        if self.workers_in_sync > 1 and self.max_staleness == 0:
            expected = "1 with max_staleness=0, where all workers step together"
            raise ValueError(explain(_NAME, "workers_in_sync", expected=expected, got=self.workers_in_sync))
        if self.placement not in PLACEMENTS:
            expected = f"one of {', '.join(PLACEMENTS)}"
            raise ValueError(explain(_NAME, "placement", expected=expected, got=repr(self.placement)))

    def devices(self, given: Sequence[str] | str | None) -> Sequence[str] | str | None:
        """Return a worker's devices: the given ones, or its part of the replicas; `check` finds errors."""
        replicas, workers = self.replicas, self.workers_in_sync
        if type(replicas) is not int or type(workers) is not int or not 0 < workers <= replicas:
            return given
        return [f"cpu:{index}" for index in range(replicas // workers)]

    def _check_number(self, name: str, least: int, optional: bool = False) -> None:
        value = getattr(self, name)
        if not (value is None and optional) and (type(value) is not int or value < least):
            expected = f"an integer of at least {least}{' or None' * optional}"
            raise ValueError(explain(_NAME, name, expected=expected, got=repr(value)))


@final
class RoleAssignment:
    """The roles of all ranks, by number or by a resolver.

    Args:
        settings: of the strategy.
        resolver: the roles worker, chief and ps; default TF_CONFIG, if it is set.
    """

    def __init__(self, settings: Settings, resolver: ClusterResolver | None) -> None:
        self._settings, self._resolver = settings, resolver
        self._problem: ClusterError | None = None  # raised by `check`, on all ranks
        try:
            if resolver is None and settings.num_ps is None:
                self._resolver = _from_environment()
            self._serves = self._resolver is not None and is_server(self._resolver)
        except ClusterError as error:
            self._problem, self._serves = error, False
        self._count = 1 if settings.num_ps is None else settings.num_ps

    def serves(self, comm: MPI.Intracomm) -> bool:
        """Return whether this rank will be a server, as far as known before the ranks communicate."""
        if self._resolver is not None:
            return self._serves
        return type(self._count) is int and comm.rank >= comm.size - self._count

    def check(self, topology: Topology) -> None:
        """Raise this rank's errors about the settings, its task and the number of ranks."""
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
            ClusterError: on every rank: the roles contradict each other, or there is no worker or no server.
            CollectiveMismatchError: on every rank: their settings differ.
            ValueError: on every rank: there are not more workers than backup workers.
        """
        with group.collective(_NAME, detail=self._settings.compared()):
            pass
        size, backup = group.topology.size, self._settings.backup_workers
        roles = Roles.of_counts(size, self._count) if self._resolver is None else Roles.gather(group, self._resolver)
        if not backup < len(roles.workers):
            expected = f"less than the {len(roles.workers)} workers"
            raise ValueError(explain(_NAME, "backup_workers", expected=expected, got=backup))
        return roles

    def report(self, group: ProcessGroup, roles: Roles) -> ClusterResolver:
        """Log the roles by host, warn if hosts differ from the resolver's, and return the resolver. Collective."""
        resolver = self._resolver
        if resolver is None:
            jobs = {"worker": list(roles.workers), "ps": list(roles.servers)}
            resolver = MPIClusterResolver(group.topology.comm, jobs)
        host = group.topology.hostname
        with group.collective(_NAME, "placement"):
            hosts = [text.split("\n") for text in group.all_gather_text(f"{host}\n{elsewhere(resolver, host)}")]
        placement = roles.describe([host for host, _ in hosts])
        if group.topology.rank == 0:
            log.once(logging.INFO, f"{_NAME}:\n{placement}")
        wrong = [f"rank {rank} is on {host}, not on {asked}" for rank, (host, asked) in enumerate(hosts) if asked]
        if wrong:
            remedy = "check the launcher's host list (mpiexec --hosts, mpirun --host) against the cluster's addresses"
            log.once(logging.WARNING, f"{_NAME}: other hosts than asked: {'; '.join(wrong)}: {remedy}\n{placement}")
        return resolver


def _from_environment() -> ClusterResolver | None:
    """Return the resolver of TF_CONFIG, if it is set.

    Raises:
        ClusterError: it has no ps task.
    """
    if not os.environ.get("TF_CONFIG", "").strip():
        return None
    resolver = TFConfigClusterResolver()
    spec = resolver.cluster_spec()
    if "ps" not in spec.jobs:
        expected, got = "ps tasks", f"only {', '.join(spec.jobs)}" if spec else "none"
        remedy = "Add them, pass num_ps, or unset TF_CONFIG: MPI knows the ranks without"
        raise ClusterError(explain(_NAME, 'TF_CONFIG: "cluster"', expected=expected, got=got, remedy=remedy))
    return resolver
