"""SageMakerClusterResolver: the cluster as the variables of a SageMaker training job describe it."""

from __future__ import annotations

import json
import os
from typing import final

from ...base.errors import ClusterError, explain
from ..spec import ClusterSpec, validate
from .resolver import ClusterResolver, check_task, task_url_of_several

__all__ = ["SageMakerClusterResolver"]


@final
class SageMakerClusterResolver(ClusterResolver):
    """The hosts of a SageMaker training job, all of them workers, in the order of their names.

    SM_HOSTS is the JSON list of the hosts, SM_CURRENT_HOST this one; both are read once, here. If SM_HOSTS is empty, or does
    not have this host, the spec is empty and `master()` is "". For one rank on each host: more need
    `MPIClusterResolver`.

    Args:
        port: of every address.
        task_type, task_id, rpc_layer, environment: override what the variables say.

    Raises:
        ClusterError: a variable is missing, SM_HOSTS is no JSON list of names or has one twice, or the task is none of the
            cluster's.

    Source: tf.distribute's resolver of that name, and the variables in https://github.com/aws/sagemaker-training-toolkit.

    Example:
        >>> import os
        >>> os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"] = '["algo-1", "algo-2"]', "algo-2"
        >>> resolver = SageMakerClusterResolver()
        >>> resolver.cluster_spec(), resolver.task_id
        (ClusterSpec({'worker': ['algo-1:2223', 'algo-2:2223']}), 1)
        >>> del os.environ["SM_HOSTS"], os.environ["SM_CURRENT_HOST"]
    """

    def __init__(
        self,
        port: int = 2223,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        check_task("SageMakerClusterResolver", task_type, task_id)
        hosts, current = _hosts(), _variable("SM_CURRENT_HOST")
        inside = current in hosts
        self.task_type = ("worker" if inside else None) if task_type is None else task_type
        self.task_id = (hosts.index(current) if inside else None) if task_id is None else task_id
        self.rpc_layer, self.environment = rpc_layer or "", environment or ""
        cluster = {"worker": [f"{host}:{port}" for host in hosts]} if inside else {}
        self._cluster_spec = validate(cluster, self.task_type if cluster else None, self.task_id)

    def cluster_spec(self) -> ClusterSpec:
        """Return the hosts of the job, empty where this host is none of them."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default of this one; "" if the cluster has at most one."""
        return task_url_of_several(self, task_type, task_id, rpc_layer)


def _error(name: str, expected: str, got: str) -> ClusterError:
    remedy = "SageMaker's training toolkit sets it; elsewhere MPIClusterResolver needs no variable"
    return ClusterError(explain("SageMakerClusterResolver", name, expected=expected, got=got, remedy=remedy))


def _variable(name: str) -> str:
    text = os.environ.get(name)
    if text is None:
        raise _error(name, "a SageMaker training job, with this variable set", "none")
    return text


def _hosts() -> list[str]:
    """Return the names of the hosts, sorted."""
    text = _variable("SM_HOSTS")
    if not text:
        return []
    try:
        hosts = json.loads(text)
    except (ValueError, RecursionError):
        hosts = None
    if not isinstance(hosts, list) or not all(isinstance(host, str) and host for host in hosts):
        raise _error("SM_HOSTS", 'a JSON list of names, such as ["algo-1", "algo-2"]', f"{text!r:.80}")
    if len(set(hosts)) < len(hosts):
        raise _error("SM_HOSTS", "each host once", f"{text!r:.80}")
    return sorted(hosts)
