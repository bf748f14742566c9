"""SimpleClusterResolver: the cluster as the program gives it."""

from __future__ import annotations

from typing import final

from ..errors import ClusterError, explain
from .cluster_resolver import ClusterResolver, check_task, master_url, task_url
from .cluster_spec import ClusterSpec

__all__ = ["SimpleClusterResolver"]


@final
class SimpleClusterResolver(ClusterResolver):
    """A cluster that the program gives.

    Args:
        cluster_spec: the ClusterSpec.
        master: what `master()` returns for no particular task.
        task_type, task_id: which task this process is.
        environment: returned as it is.
        num_accelerators: returned as it is; default: what this process sees.
        rpc_layer: protocol before addresses.

    Raises:
        ClusterError: an argument has the wrong type.

    Example:
        >>> resolver = SimpleClusterResolver(ClusterSpec({"worker": ["a:1", "b:1"]}), task_type="worker", task_id=0)
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
        """Return the ClusterSpec that was given."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of the task if both type and index are given, else the master given."""
        if task_type is not None and task_id is not None:
            return task_url(self, task_type, task_id, rpc_layer)
        return master_url(self._master, self.rpc_layer if rpc_layer is None else rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the accelerators that were given, else those that this process sees."""
        if self._num_accelerators is not None:
            return dict(self._num_accelerators)
        return super().num_accelerators(task_type, task_id)
