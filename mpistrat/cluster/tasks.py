"""Tasks of ranks, from the resolvers of all ranks, compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from ..base.errors import ClusterError, explain
from ..base.text import named
from .resolvers.resolver import ClusterResolver
from .spec import ROLES, ClusterSpec, validate

__all__ = ["Task", "own_task", "ranks_by_task"]

Task = tuple[str, int]


def own_task(resolver: ClusterResolver | None) -> str:
    """Return the message with this rank's task and cluster for the other ranks; "" if it knows neither.

    Raises:
        ClusterError: the cluster or the task breaks a rule of `roles`, or the task is incomplete.
    """
    if resolver is None:
        return ""
    spec = resolver.cluster_spec()
    validate(spec, resolver.task_type if spec else None, resolver.task_id)
    job, index = resolver.task_type, resolver.task_id
    if (job is None) != (index is None):
        expected = "both task_type and task_id, or neither"
        raise ClusterError(explain("cluster_resolver", "task", expected=expected, got=f"{job!r:.80} and {index!r:.80}"))
    digest = hashlib.blake2b(repr(spec).encode(errors="replace"), digest_size=8).hexdigest()
    return f"{digest if spec else '-'} {job} {index}" if job is not None or spec else ""


def ranks_by_task(
    function: str, texts: Sequence[str], resolver: ClusterResolver | None, jobs: Sequence[str]
) -> Mapping[Task, int]:
    """Return the rank of each task, the chief first, then by role and number; {} if no rank knows its task.

    Equal on every rank, errors included. `texts` are those of `own_task` on each rank, `jobs` the allowed roles.

    Raises:
        ClusterError: the clusters differ, only some ranks know their task, a rank has another role, two ranks have one task, or a
            task of these roles has no rank.
    """

    def refuse(expected: str, got: str, remedy: str) -> ClusterError:
        return ClusterError(explain(function, "cluster_resolver", expected=expected, got=got, remedy=remedy))

    words = [text.split() for text in texts]
    digests = [rank_words[0] if rank_words else "" for rank_words in words]
    others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if others:
        here = "" if resolver is None else f" (here {resolver.cluster_spec()!r:.200})"
        remedy = "Describe the whole cluster on every rank: only the task differs"
        raise refuse("one cluster on all ranks", f"another on {named('rank', others, 8)} than on rank 0{here}", remedy)
    silent = [rank for rank, rank_words in enumerate(words) if not rank_words or rank_words[1] == "None"]
    if len(silent) == len(texts):
        return {}
    if silent:
        raise refuse(
            "a task for every rank", f"none for {named('rank', silent, 8)}", "Give each rank its task_type and task_id"
        )
    tasks: dict[Task, int] = {}
    for rank, (_, job, index) in enumerate(words):
        task = (job, int(index))
        if job not in jobs:
            remedy = "Evaluators are a separate job: leave their ranks out of comm" if job == "evaluator" else ""
            raise refuse(f"{', '.join(jobs)} for rank {rank}", f"{job} {index}", remedy)
        if task in tasks:
            got = f"{job} {index} for ranks {tasks[task]} and {rank}"
            raise refuse("each task once", got, "Give each rank a different task index in its job script")
        tasks[task] = rank
    spec = ClusterSpec({}) if resolver is None else resolver.cluster_spec()
    for job in [job for job in jobs if job in spec.jobs]:
        for number in spec.task_indices(job):
            if (job, number) not in tasks:
                raise refuse("a rank for each task", f"none for {job} {number}", "Start one rank for each task")
    return {task: tasks[task] for task in sorted(tasks, key=lambda task: (ROLES.index(task[0]), task[1]))}
