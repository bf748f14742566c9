"""UnionResolver: several resolvers as one."""

from __future__ import annotations

from typing import Any, final

from ..errors import ClusterError, explain
from .cluster_resolver import ClusterResolver, check_task, task_url
from .cluster_spec import ClusterSpec

__all__ = ["UnionClusterResolver", "UnionResolver"]


@final
class UnionResolver(ClusterResolver):
    """The tasks of several resolvers together.

    A job that several resolvers list is the first one's tasks followed by the next one's. Where one of them gives a
    sparse job, tasks keep their indices, and no later resolver may overwrite a task. Everything else (task, master,
    environment, accelerators, rpc_layer) is the first resolver's, unless given here.

    Args:
        resolvers: one or more resolvers.
        task_type, task_id, rpc_layer: override the first resolver's.

    Raises:
        ClusterError: no resolver, or something else than one.

    Example:
        >>> from mpistrat.cluster.simple import SimpleClusterResolver
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
        # Compared with None: task 0 is a task.
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
    """Return the tasks of one job: lists one after the other, or dicts (and lists taken for dicts) by index."""
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
