"""The tasks of each job of a cluster, and their addresses; the rules of the roles chief (or master), worker, ps and evaluator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

from ..base.errors import ClusterError, explain

__all__ = ["ClusterSpec", "ROLES", "validate", "worker_count"]

# A sparse job may name any task; a larger index is a mistake, for which job_tasks() would fill the memory.
_MAX_INDEX = 1 << 20


@final
class ClusterSpec:
    """The tasks of a cluster, by job: a list of addresses, or a sparse dict from task index to address.

    Equal to another ClusterSpec of the same tasks; true if it has a job. Like `tf.train.ClusterSpec`, except that every error is
    a ClusterError (a ValueError), and that it uses no protocol buffers.

    Args:
        cluster: a mapping from job names to lists or to sparse dicts of addresses, a ClusterSpec, or a cluster_def: the result
            of `as_cluster_def`, or TensorFlow's protocol buffer of these fields.

    Raises:
        ClusterError: `cluster` has another form.

    Example:
        >>> spec = ClusterSpec({
        ...     "worker": {1: "worker1.example.com:2222"},
        ...     "ps": ["ps0.example.com:2222"],
        ... })
        >>> spec.jobs, spec.num_tasks("worker"), spec.task_indices("worker")
        (['worker', 'ps'], 1, [1])
        >>> spec.task_address("ps", 0)
        'ps0.example.com:2222'
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, cluster: Mapping[str, Any] | ClusterSpec | Any) -> None:
        given: object = cluster._jobs if isinstance(cluster, ClusterSpec) else _of_cluster_def(cluster)
        if not isinstance(given, Mapping):
            expected = "a dict from job names to lists of addresses"
            raise ClusterError(explain("ClusterSpec", "cluster", expected=expected, got=f"a {type(given).__name__}"))
        self._jobs: dict[str, dict[int, str]] = {}
        for job, tasks in given.items():
            if not isinstance(job, str) or not job:
                raise ClusterError(explain("ClusterSpec", "cluster", expected="names of jobs", got=f"{job!r:.80}"))
            self._jobs[job] = _tasks(job, tasks)

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        if isinstance(other, Mapping):
            return self._jobs == other or self.as_dict() == other
        return NotImplemented

    def __repr__(self) -> str:
        tasks = self.as_dict()
        return "ClusterSpec({" + ", ".join(f"{job!r}: {tasks[job]!r}" for job in sorted(tasks)) + "})"

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, Any]:
        """Return the addresses of each job: a list, or a dict by task index if these are not 0, 1, 2, …; {} without a task."""
        return {
            job: self.job_tasks(job) if tasks and max(tasks) + 1 == len(tasks) else dict(sorted(tasks.items()))
            for job, tasks in self._jobs.items()
        }

    def as_cluster_def(self) -> dict[str, list[dict[str, Any]]]:
        """Return the fields of TensorFlow's ClusterDef as plain dicts and lists, jobs sorted by name.

        Example:
            >>> ClusterSpec({"ps": ["a:1"]}).as_cluster_def()
            {'job': [{'name': 'ps', 'tasks': {0: 'a:1'}}]}
        """
        return {"job": [{"name": job, "tasks": dict(sorted(self._jobs[job].items()))} for job in sorted(self._jobs)]}

    def num_tasks(self, job_name: str) -> int:
        """Return the number of tasks of a job. Raises ClusterError if there is no such job."""
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the sorted task indices of a job. Raises ClusterError if there is no such job."""
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of a task. Raises ClusterError if there is no such job or task."""
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ClusterError(f"No task with index {task_index!r:.80} in job {job_name!r}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of a job by task index, None if a sparse job lacks the task.

        Raises:
            ClusterError: there is no such job.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, name: str) -> dict[int, str]:
        if name not in self._jobs:
            raise ClusterError(
                f"No such job in cluster: {name!r:.80}; it has {', '.join(sorted(self._jobs)) or 'none'}"
            )
        return self._jobs[name]


def _of_cluster_def(given: Any) -> Any:
    """Return job → tasks of a ClusterDef, a dict or an object with its fields; anything else unchanged."""
    if isinstance(given, Mapping):
        jobs = given["job"] if list(given) == ["job"] else None
        if isinstance(jobs, list) and all(isinstance(job, Mapping) for job in jobs):
            return {job.get("name"): job.get("tasks") for job in jobs}
        return given
    try:
        return {job.name: dict(job.tasks) for job in given.job}
    except (AttributeError, TypeError, ValueError):
        return given


def _tasks(job: str, tasks: object) -> dict[int, str]:
    where = f"job {job!r:.80}"
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(tasks, (list, tuple)):
        pairs = enumerate(tasks)
    elif isinstance(tasks, Mapping):
        pairs = tasks.items()
    else:
        expected = "a list of addresses or a dict from task indices to addresses"
        raise ClusterError(explain("ClusterSpec", where, expected=expected, got=f"a {type(tasks).__name__}"))
    result = {}
    for index, address in pairs:
        number = _index(where, index)
        if number in result:
            raise ClusterError(explain("ClusterSpec", where, expected="each task once", got=f"task {number} twice"))
        if not isinstance(address, str) or not address:
            got = f"{address!r:.80} for task {number}"
            raise ClusterError(explain("ClusterSpec", where, expected="addresses, such as 'host:2222'", got=got))
        result[number] = address
    return result


def _index(where: str, index: object) -> int:
    """Return a task index; accepts digits, because JSON has no integer keys."""
    if isinstance(index, str) and index.isascii() and index.isdigit() and len(index) < 10:
        index = int(index)
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < _MAX_INDEX:
        got = f"a {type(index).__name__}" if isinstance(index, int) else f"{index!r:.80}"
        if isinstance(index, int) and not isinstance(index, bool) and abs(index) < 1 << 64:
            got = str(index)
        expected = f"task indices from 0 to {_MAX_INDEX - 1}"
        raise ClusterError(explain("ClusterSpec", where, expected=expected, got=got))
    return index


ROLES = ("chief", "master", "worker", "ps", "evaluator")
_CHIEFS = ("chief", "master")  # the same role; "master" is TensorFlow 1's name

Cluster = ClusterSpec | Mapping[str, Any]


def validate(cluster_spec: Cluster, task_type: str | None = None, task_id: int | None = None) -> ClusterSpec:
    """Check the roles of a cluster, and one of its tasks; return the spec.

    The roles are chief, worker, ps and evaluator, with at most one chief and one evaluator. A chief may be called master, as in
    TensorFlow 1. An evaluator may be absent from the spec, because it is a separate cluster.

    Raises:
        ClusterError: with the job and task that break a rule.
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


def worker_count(cluster_spec: Cluster, task_type: str) -> int:
    """Return the number of tasks that train with a task: chief and workers, or the evaluators.

    Raises:
        ClusterError: as `validate`, and for a parameter server.
    """
    spec = validate(cluster_spec, task_type)
    if task_type == "ps":
        raise ClusterError(explain("worker_count", "task_type", expected="chief, worker or evaluator", got="'ps'"))
    if task_type == "evaluator":
        return max(1, _count(spec, "evaluator"))
    return _count(spec, *_CHIEFS, "worker")


def _count(spec: ClusterSpec, *jobs: str) -> int:
    return sum(spec.num_tasks(job) for job in jobs if job in spec.jobs)
