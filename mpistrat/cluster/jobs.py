"""How ranks are divided into jobs: by counts, by lists of ranks, or by the program of an MPMD launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..errors import ClusterError, explain

__all__ = ["split_apps", "split_counts", "split_lists"]


def split_counts(function: str, jobs: Mapping[str, int], size: int) -> dict[str, list[int]]:
    """Return the ranks of each job when jobs take successive ranks.

    Raises:
        ClusterError: the counts are not counts, or do not add up to `size`.

    Example:
        >>> split_counts("f", {"worker": 3, "ps": 1}, 4)
        {'worker': [0, 1, 2], 'ps': [3]}
    """
    given: object = jobs
    if not isinstance(given, Mapping) or not all(type(count) is int and count >= 0 for count in given.values()):
        raise ClusterError(explain(function, "jobs", expected="a number of tasks for each job", got=f"{jobs!r:.120}"))
    if sum(jobs.values()) != size:
        remedy = "Start as many processes as the jobs have tasks, or change jobs"
        expected, got = f"{size} tasks, one for each rank", f"{sum(jobs.values())} in {jobs!r:.120}"
        raise ClusterError(explain(function, "jobs", expected=expected, got=got, remedy=remedy))
    result, start = {}, 0
    for job, count in jobs.items():
        result[job] = list(range(start, start + count))
        start += count
    return result


def split_lists(function: str, jobs: Mapping[str, Sequence[int]], size: int) -> dict[str, list[int]]:
    """Return the ranks of each job after checking that each of `size` ranks is in one job once.

    Raises:
        ClusterError: a rank is missing, named twice or out of range.
    """
    named = [rank for ranks in jobs.values() for rank in ranks]
    if not all(type(rank) is int for rank in named) or sorted(named) != list(range(size)):
        expected = f"each rank from 0 to {size - 1} once"
        raise ClusterError(explain(function, "jobs", expected=expected, got=f"{dict(jobs)!r:.120}"))
    return {job: list(ranks) for job, ranks in jobs.items()}


def split_apps(function: str, jobs: Sequence[str], apps: Sequence[int]) -> dict[str, list[int]]:
    """Return the ranks of each job when job k is the k-th program of the launch.

    Args:
        function: the caller to name in errors.
        jobs: a job for each program; the same job may come several times.
        apps: for each rank the number of its program, -1 where MPI does not know.

    Raises:
        ClusterError: MPI knows no program numbers, or there are more or fewer programs than jobs.
    """
    if not all(isinstance(job, str) for job in jobs):
        raise ClusterError(explain(function, "jobs", expected="names of jobs", got=f"{jobs!r:.120}"))
    if sorted(set(apps)) != list(range(len(jobs))):
        found = "no program numbers (MPI_APPNUM)" if -1 in apps else f"{len(set(apps))}"
        remedy = "Start them as mpiexec -n 4 python a.py : -n 2 python b.py, or give counts: {'worker': 4, 'ps': 2}"
        expected = f"{len(jobs)} programs, one for each of {', '.join(jobs)}"
        raise ClusterError(explain(function, "jobs", expected=expected, got=found, remedy=remedy))
    result: dict[str, list[int]] = {job: [] for job in jobs}
    for rank, app in enumerate(apps):
        result[jobs[app]].append(rank)
    return result
