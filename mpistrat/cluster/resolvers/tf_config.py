"""TFConfigClusterResolver: the cluster in the environment variable TF_CONFIG."""

from __future__ import annotations

import json
import logging
import os
from typing import Any, final

from ...base import log
from ...base.errors import ClusterError, explain
from ..spec import ClusterSpec, validate
from .resolver import ClusterResolver, check_task, task_url_of_several

__all__ = ["TFConfigClusterResolver", "warn_unused"]


@final
class TFConfigClusterResolver(ClusterResolver):
    """The cluster in TF_CONFIG, read and checked once, in the constructor.

    TF_CONFIG is JSON: `{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}, "rpc_layer":
    "grpc", "environment": "cloud"}`; each part may be missing. If it is unset or empty, the spec is empty and `master()` is "".

    Args:
        task_type, task_id, rpc_layer, environment: override TF_CONFIG.

    Raises:
        ClusterError: TF_CONFIG is not JSON or not an object, has an unknown role, two chiefs or evaluators, one address twice, or
            a task that is not in the cluster.
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        config = _read()
        task = _part(config, "task", dict, {})
        self.rpc_layer = _part(config, "rpc_layer", str, "") if rpc_layer is None else rpc_layer
        self.environment = _part(config, "environment", str, "") if environment is None else environment
        self.task_type = task.get("type") if task_type is None else task_type
        self.task_id = _index(task.get("index")) if task_id is None else task_id
        check_task("TF_CONFIG", self.task_type, self.task_id)
        self._cluster_spec = _spec(_part(config, "cluster", dict, {}), self.task_type, self.task_id)

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster of TF_CONFIG, empty if it has none."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default of this one; "" if the cluster has at most one."""
        return task_url_of_several(self, task_type, task_id, rpc_layer)


def warn_unused(strategy: str, ranks: int) -> None:
    """Warn that TF_CONFIG has no cluster, if TensorFlow would train in each process alone and this package on all ranks.

    Args:
        strategy: its name.
        ranks: the number of ranks that train together.
    """
    if ranks > 1 and os.environ.get("TF_CONFIG", "").strip():
        effect = f"the {ranks} ranks of MPI train together, where TensorFlow would train in each process alone"
        remedy = 'Add "cluster" to TF_CONFIG, or unset it'
        log.once(logging.WARNING, f"{strategy}: TF_CONFIG has no cluster: {effect}. {remedy}")


def _error(argument: str, expected: str, got: str) -> ClusterError:
    remedy = 'Its form: {"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
    return ClusterError(explain("TF_CONFIG", argument, expected=expected, got=got, remedy=remedy))


def _read() -> dict[str, Any]:
    text = os.environ.get("TF_CONFIG", "")
    if not text.strip():
        return {}
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a plain ValueError
        raise _error("", "JSON", f"{text!r:.80} ({error!s:.80})") from None
    if not isinstance(config, dict):
        raise _error("", "a JSON object", f"{text!r:.80}")
    return config


def _part(config: dict[str, Any], name: str, kind: type, default: Any) -> Any:
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise _error(name, "an object" if kind is dict else "a string", f"a {type(value).__name__}")
    return value


def _index(index: Any) -> Any:
    """Return a task index; TensorFlow accepts "0" for 0."""
    if isinstance(index, str) and index.isascii() and index.isdigit() and len(index) < 10:
        return int(index)
    if isinstance(index, int) and abs(index) >= 1 << 31:
        raise _error("task index", "a number that fits a task", "one of more than 31 bits")
    return index


def _spec(cluster: dict[str, Any], task_type: str | None, task_id: int | None) -> ClusterSpec:
    try:
        spec = validate(cluster, task_type if cluster else None, task_id)
    except ClusterError as error:
        raise ClusterError(f"TF_CONFIG: {error}") from None
    seen: dict[str, str] = {}
    for job in spec.jobs:
        for index in spec.task_indices(job):
            address, task = spec.task_address(job, index), f"{job} {index}"
            if address in seen:
                raise _error(
                    "cluster", "an address of its own for each task", f"{address!r:.80} for {seen[address]} and {task}"
                )
            seen[address] = task
    return spec
