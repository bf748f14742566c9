"""ClusterResolver: what every source of a cluster's description can tell."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ..errors import ClusterError, explain
from .cluster_spec import ClusterSpec
from .devices import count_gpus

__all__ = ["ClusterResolver", "check_task", "master_url", "task_url"]


class ClusterResolver(ABC):
    """Tells the tasks of a cluster, and which of them this process is. Abstract.

    Attributes:
        task_type: role of this process, or None; may be set.
        task_id: index of this process in its job, or None; may be set.
        rpc_layer: protocol that `master` puts before an address ("grpc://host:port"), or ""; may be set.
        environment: where the cluster runs ("" outside Google).
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
        """Return the address of a task, by default of this process; "" with nobody to connect to."""

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the number of accelerators of this process by type, {} without any.

        Both arguments are TensorFlow's; a rank sees its own devices only, so they change nothing.
        """
        gpus = count_gpus()
        return {"GPU": gpus} if gpus else {}


def master_url(address: str, rpc_layer: str) -> str:
    """Return an address with the protocol before it, if both are there."""
    return f"{rpc_layer}://{address}" if rpc_layer and address else address


def task_url(resolver: ClusterResolver, task_type: str | None, task_id: int | None, rpc_layer: str | None) -> str:
    """Return the address of a task, by default of the resolver's own task; "" if it has none."""
    task_type = resolver.task_type if task_type is None else task_type
    task_id = resolver.task_id if task_id is None else task_id
    if task_type is None or task_id is None:
        return ""
    address = resolver.cluster_spec().task_address(task_type, task_id)
    return master_url(address, resolver.rpc_layer if rpc_layer is None else rpc_layer)


def check_task(function: str, task_type: object, task_id: object) -> None:
    """Check the types of a task's role and index, either of which may be None.

    Raises:
        ClusterError: naming the argument.
    """
    if task_type is not None and not isinstance(task_type, str):
        raise ClusterError(explain(function, "task_type", expected="a role", got=f"{task_type!r:.80}"))
    if task_id is not None and (not isinstance(task_id, int) or isinstance(task_id, bool) or task_id < 0):
        raise ClusterError(explain(function, "task_id", expected="an index from 0", got=f"{task_id!r:.80}"))
