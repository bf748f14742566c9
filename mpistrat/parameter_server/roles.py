"""Roles: which ranks are workers and which are parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from ..cluster import ClusterResolver
from ..cluster.spec import validate
from ..cluster.tasks import own_task, ranks_by_task
from ..comm import obituary
from ..comm.process_group import ProcessGroup
from ..errors import ClusterError, explain

__all__ = ["Roles", "is_server"]

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
        """Return the roles when the last ranks are the servers.

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
        """Return who is where, in words.

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
        """Return the ranks that step together with one, itself among them.

        Raises:
            ClusterError: the workers cannot be divided so.

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
        """Return the roles that every rank's resolver tells of its own task. Collective.

        Raises:
            ClusterError: on every rank, when a rank has no task or two have the same, clusters differ, or no worker or
                server is left.
        """
        with group.collective(_NAME, "roles"):
            told = group.all_gather_text(own_task(resolver))
        tasks = ranks_by_task(_NAME, told, resolver, ("chief", "master", "worker", "ps"))
        if not tasks:
            expected, remedy = "a task for every rank", "Give each rank its task_type and task_id, or give num_ps"
            raise ClusterError(explain(_NAME, "cluster_resolver", expected=expected, got="none", remedy=remedy))
        workers = tuple(rank for (job, _), rank in tasks.items() if job != "ps")
        servers = tuple(rank for (job, _), rank in tasks.items() if job == "ps")
        if not workers or not servers:
            got = f"{len(workers)} and {len(servers)}"
            remedy = "Give num_ps, or MPIClusterResolver(jobs={'worker': 3, 'ps': 1})"
            raise ClusterError(
                explain(_NAME, "cluster_resolver", expected="workers and servers", got=got, remedy=remedy)
            )
        return cls(workers, servers)


def elsewhere(resolver: ClusterResolver, host: str) -> str:
    """Return the host that a resolver names for this rank's task, if it names another one; else "".

    Addresses in numbers, "localhost", and names that differ in their domains only, say nothing.

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
    """Return whether this rank is a parameter server, as its resolver tells.

    Raises:
        ClusterError: the cluster's roles are not legal.
    """
    spec = resolver.cluster_spec()
    validate(spec, resolver.task_type if spec else None, resolver.task_id)
    return resolver.task_type == "ps"


def introduce(group: ProcessGroup, workers: Sequence[int], servers: Sequence[int]) -> None:
    """Say what this rank is, for those who speak when it is killed."""
    rank, topology = group.topology.rank, group.topology
    kind, tasks = ("ps", servers) if rank in servers else ("worker", workers)
    role = f"{kind} {tasks.index(rank)}" if rank in tasks else "no role"
    obituary.introduce(f"rank {rank} of {topology.size} ({role}) on {topology.hostname}")
