"""Cluster resolvers: their base class, one for a cluster that the program specifies, and a union of resolvers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

from ...base.devices import count_gpus
from ...base.errors import ClusterError, explain
from ..spec import ClusterSpec

__all__ = [
    "ClusterResolver",
    "SimpleClusterResolver",
    "UnionClusterResolver",
    "UnionResolver",
    "check_task",
    "master_url",
    "task_url",
]


class ClusterResolver(ABC):
    """A source of the tasks of a cluster, and of this process's task. Abstract.

    Attributes:
        task_type: role of this process, or None; may be set.
        task_id: index of this process in its job, or None; may be set.
        rpc_layer: protocol that `master` puts before an address ("grpc://host:port"), or ""; may be set.
        environment: the environment of the cluster ("" outside Google).
    """

    task_type: str | None = None
    task_id: int | None = None
    rpc_layer: str = ""
    environment: str = ""

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the cluster."""

    @abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default of this process; "" if there is nothing to connect to."""

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the number of accelerators of this process by type, {} without any.

        Both arguments are TensorFlow's and have no effect, because a rank sees only its own devices.
        """
        gpus = count_gpus()
        return {"GPU": gpus} if gpus else {}


def master_url(address: str, rpc_layer: str) -> str:
    """Return an address with the protocol before it, if both are set."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address


def task_url(resolver: ClusterResolver, task_type: str | None, task_id: int | None, rpc_layer: str | None) -> str:
    """Return the address of a task, by default of the resolver's own task; "" if it has none."""
    task_type = resolver.task_type if task_type is None else task_type
    task_id = resolver.task_id if task_id is None else task_id
    if task_type is None or task_id is None:
        return ""
    address = resolver.cluster_spec().task_address(task_type, task_id)
    return master_url(address, resolver.rpc_layer if rpc_layer is None else rpc_layer)


def task_url_of_several(
    resolver: ClusterResolver, task_type: str | None, task_id: int | None, rpc_layer: str | None
) -> str:
    """Return `task_url`; "" if the cluster has at most one task, with nothing to connect to."""
    spec = resolver.cluster_spec()
    several = sum(spec.num_tasks(job) for job in spec.jobs) > 1
    return task_url(resolver, task_type, task_id, rpc_layer) if several else ""


def check_task(function: str, task_type: object, task_id: object) -> None:
    """Raise unless a task's role and index have the right types, or are None.

    Raises:
        ClusterError: with the argument's name.
    """
    if task_type is not None and not isinstance(task_type, str):
        raise ClusterError(explain(function, "task_type", expected="a role", got=f"{task_type!r:.80}"))
    if task_id is not None and (not isinstance(task_id, int) or isinstance(task_id, bool) or task_id < 0):
        raise ClusterError(explain(function, "task_id", expected="an index from 0", got=f"{task_id!r:.80}"))


@final
class SimpleClusterResolver(ClusterResolver):
    """A cluster that the program specifies.

    Args:
        cluster_spec: the ClusterSpec.
        master: the result of `master()` for no particular task.
        task_type, task_id: this process's task.
        environment: returned unchanged.
        num_accelerators: returned unchanged; default: those that this process sees.
        rpc_layer: protocol before addresses.

    Raises:
        ClusterError: an argument has the wrong type.

    Example:
        >>> spec = ClusterSpec({"worker": ["a:1", "b:1"]})
        >>> resolver = SimpleClusterResolver(spec, task_type="worker", task_id=0)
        >>> resolver.master("worker", 1, rpc_layer="grpc")
        'grpc://b:1'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        given: object = cluster_spec
        if not isinstance(given, ClusterSpec):
            got = f"a {type(given).__name__}"
            remedy = "Wrap it: ClusterSpec(...)"
            raise ClusterError(
                explain("SimpleClusterResolver", "cluster_spec", expected="a ClusterSpec", got=got, remedy=remedy)
            )
        check_task("SimpleClusterResolver", task_type, task_id)
        self._cluster_spec, self._master, self._num_accelerators = cluster_spec, master, num_accelerators
        self.task_type, self.task_id = task_type, task_id
        self.environment, self.rpc_layer = environment, rpc_layer or ""

    def cluster_spec(self) -> ClusterSpec:
        """Return the given ClusterSpec."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of the task if both type and index are given, else the given master."""
        if task_type is not None and task_id is not None:
            return task_url(self, task_type, task_id, rpc_layer)
        return master_url(self._master, self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the given accelerators, else those that this process sees."""
        if self._num_accelerators is not None:
            return dict(self._num_accelerators)
        return super().num_accelerators(task_type, task_id)


@final
class UnionResolver(ClusterResolver):
    """The tasks of several resolvers together.

    If several resolvers list a job, its tasks are the first one's, then the next one's. If one of them has a sparse job, tasks
    keep their indices, and no later resolver may overwrite a task. Everything else (task, master, environment, accelerators,
    rpc_layer) is the first resolver's, unless given here.

    Args:
        resolvers: one or more resolvers.
        task_type, task_id, rpc_layer: override the first resolver's.

    Raises:
        ClusterError: no resolver, or an object that is not one.

    Example:
        >>> from mpistrat.cluster.resolvers.resolver import SimpleClusterResolver
        >>> a = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}))
        >>> b = SimpleClusterResolver(ClusterSpec({"worker": ["b:1"], "ps": ["c:1"]}))
        >>> UnionResolver(a, b).cluster_spec()
        ClusterSpec({'ps': ['c:1'], 'worker': ['a:1', 'b:1']})
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise ClusterError(explain("UnionResolver", "resolvers", expected="at least one resolver", got="none"))
        given: tuple[object, ...] = resolvers
        for resolver in given:
            if not isinstance(resolver, ClusterResolver):
                got = f"a {type(resolver).__name__}"
                raise ClusterError(explain("UnionResolver", "resolvers", expected="ClusterResolvers", got=got))
        check_task("UnionResolver", task_type, task_id)
        first = resolvers[0]
        self._resolvers = resolvers
        # Compare with None, because 0 is a valid task.
        self.task_type = first.task_type if task_type is None else task_type
        self.task_id = first.task_id if task_id is None else task_id
        self.rpc_layer = first.rpc_layer if rpc_layer is None else rpc_layer
        self.environment = first.environment

    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of all resolvers.

        Raises:
            ClusterError: two resolvers give the same task of a sparse job.
        """
        specs = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        names = dict.fromkeys(job for spec in specs for job in spec)
        return ClusterSpec({job: _merge(job, [spec[job] for spec in specs if job in spec]) for job in names})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return a task's address if its type and index are given, else the first resolver's master."""
        if task_type is not None and task_id is not None:
            return task_url(self, task_type, task_id, rpc_layer)
        return self._resolvers[0].master(rpc_layer=self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the first resolver's accelerators."""
        return self._resolvers[0].num_accelerators(task_type, task_id)


UnionClusterResolver = UnionResolver


def _merge(job: str, parts: list[Any]) -> Any:
    """Return the tasks of one job: concatenated lists, or dicts (and lists converted to dicts) merged by index."""
    if not any(isinstance(part, dict) and part for part in parts):
        return [address for part in parts for address in part]
    merged: dict[int, str] = {}
    for part in parts:
        for index, address in part.items() if isinstance(part, dict) else enumerate(part):
            if index in merged:
                got = f"task {index} at {merged[index]!r} and at {address!r}"
                raise ClusterError(explain("UnionResolver", f"job {job!r}", expected="each task once", got=got))
            merged[index] = address
    return merged
