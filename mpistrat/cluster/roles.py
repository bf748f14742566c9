"""The rules of the roles chief (or master), worker, ps and evaluator: who leads, and who has which number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ClusterError, explain
from .cluster_spec import ClusterSpec

__all__ = ["ROLES", "collective_leader", "id_in_cluster", "is_chief", "validate", "worker_count"]

ROLES = ("chief", "master", "worker", "ps", "evaluator")
_CHIEFS = ("chief", "master")  # the same role: "master" is TensorFlow 1's word

Cluster = ClusterSpec | Mapping[str, Any]


def validate(cluster_spec: Cluster, task_type: str | None = None, task_id: int | None = None) -> ClusterSpec:
    """Check the roles of a cluster, and one task of it; return the spec.

    The roles are chief, worker, ps and evaluator, with at most one chief and one evaluator. A chief may be called master,
    as in TensorFlow 1. An evaluator may be absent from the spec: it is a cluster of its own.

    Raises:
        ClusterError: naming the job and task that break a rule.
    """
    spec = ClusterSpec(cluster_spec)
    for job in spec.jobs:
        if job not in ROLES:
            raise ClusterError(
                explain("cluster_spec", "job", expected=f"one of {', '.join(ROLES)}", got=f"{job!r:.80}")
            )
    for job, number in (("chief", _count(spec, *_CHIEFS)), ("evaluator", _count(spec, "evaluator"))):
        if number > 1:
            got = f"{number} in {spec!r:.200}"
            raise ClusterError(explain("cluster_spec", job, expected=f"at most one {job}", got=got))
    if task_type is not None:
        _validate_task(spec, task_type, task_id)
    return spec


def _validate_task(spec: ClusterSpec, task_type: str, task_id: int | None) -> None:
    if task_type not in ROLES:
        raise ClusterError(explain("task", "type", expected=f"one of {', '.join(ROLES)}", got=f"{task_type!r:.80}"))
    if task_type not in spec.jobs:
        if task_type == "evaluator":
            return
        got = f"{task_type!r}, a job that the cluster lacks"
        raise ClusterError(explain("task", "type", expected=f"one of {', '.join(spec.jobs)}", got=got))
    indices = spec.task_indices(task_type)
    if task_id is not None and task_id not in indices:
        expected = f"one of the {len(indices)} tasks of {task_type!r} ({_span(indices)})"
        raise ClusterError(explain("task", "index", expected=expected, got=task_id))


def _span(indices: list[int]) -> str:
    if not indices:
        return "it has none"
    return f"{indices[0]} to {indices[-1]}" if len(indices) > 1 else str(indices[0])


def is_chief(cluster_spec: Cluster, task_type: str, task_id: int) -> bool:
    """Return whether a task leads: the chief, worker 0 where there is no chief, and an evaluator.

    Raises:
        ClusterError: as `validate`.
    """
    spec = validate(cluster_spec, task_type, task_id)
    return task_type in (*_CHIEFS, "evaluator") or (task_type == "worker" and not _chief(spec) and task_id == 0)


def collective_leader(cluster_spec: Cluster, task_type: str, task_id: int) -> str:
    """Return the name of the task that leads collectives; "" for an evaluator or an empty cluster.

    Example:
        >>> collective_leader({"worker": ["a:1", "b:1"]}, "worker", 1)
        '/job:worker/replica:0/task:0'
    """
    spec = ClusterSpec(cluster_spec)
    if not spec:
        return ""
    validate(spec, task_type, task_id)
    if task_type == "evaluator":
        return ""
    return f"/job:{_chief(spec) or 'worker'}/replica:0/task:0"


def worker_count(cluster_spec: Cluster, task_type: str) -> int:
    """Return how many tasks train with a task: chief and workers, or the evaluators.

    Raises:
        ClusterError: as `validate`, and for a parameter server.
    """
    spec = validate(cluster_spec, task_type)
    if task_type == "ps":
        raise ClusterError(explain("worker_count", "task_type", expected="chief, worker or evaluator", got="'ps'"))
    if task_type == "evaluator":
        return max(1, _count(spec, "evaluator"))
    return _count(spec, *_CHIEFS, "worker")


def id_in_cluster(cluster_spec: Cluster, task_type: str, task_id: int) -> int:
    """Return a task's number among those that train with it: the chief is 0, the workers follow.

    Raises:
        ClusterError: as `validate`, and for a parameter server.

    Example:
        >>> id_in_cluster({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker", 1)
        2
    """
    spec = validate(cluster_spec, task_type, task_id)
    if task_type == "ps":
        raise ClusterError(explain("id_in_cluster", "task_type", expected="chief, worker or evaluator", got="'ps'"))
    if task_type in _CHIEFS:
        return 0
    if task_type == "evaluator":
        return task_id
    return _count(spec, *_CHIEFS) + spec.task_indices("worker").index(task_id)


def _count(spec: ClusterSpec, *jobs: str) -> int:
    return sum(spec.num_tasks(job) for job in jobs if job in spec.jobs)


def _chief(spec: ClusterSpec) -> str:
    """Return by what name the cluster has a chief; "" if it has none."""
    return next((job for job in _CHIEFS if job in spec.jobs), "")
