"""MPIClusterResolver: the cluster of MPI's ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ...base.errors import ClusterError, explain
from ..rendezvous import wait_for_ranks
from ..spec import ClusterSpec, validate
from ..topology import check_comm, running_mpi
from .resolver import ClusterResolver, task_url

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MPIClusterResolver", "split_apps", "split_counts", "split_lists"]


@final
class MPIClusterResolver(ClusterResolver):
    """The ranks of a communicator as tasks, each at the processor name of its node. Collective over `comm`.

    Args:
        comm: an intracommunicator; default COMM_WORLD.
        jobs: counts of successive ranks (`{"worker": 4, "ps": 2}`); or the ranks of each job
            (`{"worker": [0, 2], "ps": [1, 3]}`); or a job for each program of an MPMD launch (`["worker", "ps"]` for
            `mpiexec -n 4 … : -n 2 …`). Default: all ranks are workers. Equal on every rank.

    Raises:
        ClusterError: on every rank, if `jobs` does not fit the ranks, differs between them, or breaks a rule of roles.
        LayoutError: `comm` is not an intracommunicator.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        jobs: Mapping[str, int] | Mapping[str, Sequence[int]] | Sequence[str] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        mpi = running_mpi("MPIClusterResolver")
        comm = check_comm(mpi, comm, "MPIClusterResolver")
        wait_for_ranks(comm, "MPIClusterResolver")
        names, apps, digests = _exchange(mpi, comm, jobs)
        if len(set(digests)) > 1:
            other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
            got = f"another on rank {other} than on rank 0 (here {jobs!r:.120})"
            raise ClusterError(explain("MPIClusterResolver", "jobs", expected="one value on all ranks", got=got))
        self._ranks = _split(jobs, comm.size, apps)
        self._cluster_spec = validate({job: [names[rank] for rank in ranks] for job, ranks in self._ranks.items()})
        self.task_type = next(job for job, ranks in self._ranks.items() if comm.rank in ranks)
        self.task_id = self._ranks[self.task_type].index(comm.rank)
        self.rpc_layer = rpc_layer or ""

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs, with the processor name of each task as its address."""
        return self._cluster_spec

    def ranks(self, job_name: str) -> tuple[int, ...]:
        """Return the ranks of a job in the order of its tasks, () for an unknown job."""
        return tuple(self._ranks.get(job_name, ()))

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default of this one."""
        return task_url(self, task_type, task_id, rpc_layer)


def _split(jobs: Any, size: int, apps: list[int]) -> dict[str, list[int]]:
    """Return the ranks of each job, from any form of `jobs`."""
    name = "MPIClusterResolver"
    if jobs is None:
        return {"worker": list(range(size))}
    if isinstance(jobs, Mapping):
        lists = [isinstance(value, (list, tuple, range)) for value in jobs.values()]
        return split_lists(name, jobs, size) if lists and all(lists) else split_counts(name, jobs, size)
    if isinstance(jobs, Sequence) and not isinstance(jobs, str):
        return split_apps(name, jobs, apps)
    expected = "counts or ranks by job, or a list of jobs"
    raise ClusterError(explain(name, "jobs", expected=expected, got=f"{jobs!r:.120}"))


def _exchange(mpi: Any, comm: Any, jobs: object) -> tuple[list[str], list[int], list[int]]:
    """Return each rank's processor name, program number and digest of `jobs`. Collective over `comm`."""
    row = np.zeros(1, np.dtype([("name", f"S{mpi.MAX_PROCESSOR_NAME}"), ("app", np.int64), ("jobs", np.uint64)]))
    app = mpi.COMM_WORLD.Get_attr(mpi.APPNUM)
    digest = hashlib.blake2b(repr(jobs).encode(errors="replace"), digest_size=8).digest()
    row["name"], row["app"] = mpi.Get_processor_name().encode(), -1 if app is None else app
    row["jobs"] = int.from_bytes(digest, "little")
    table = np.zeros(comm.size, row.dtype)
    own = comm.Dup()
    own.Allgather(row.view(np.uint8), table.view(np.uint8))
    own.Free()
    return [name.decode() for name in table["name"]], table["app"].tolist(), table["jobs"].tolist()


def split_counts(function: str, jobs: Mapping[str, int], size: int) -> dict[str, list[int]]:
    """Return the ranks of each job if jobs take successive ranks.

    Raises:
        ClusterError: the counts are invalid, or do not add up to `size`.

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
    """Return the ranks of each job; raise unless each of `size` ranks is in exactly one job.

    Raises:
        ClusterError: a rank is missing, named twice or out of range.
    """
    named = [rank for ranks in jobs.values() for rank in ranks]
    if not all(type(rank) is int for rank in named) or sorted(named) != list(range(size)):
        expected = f"each rank from 0 to {size - 1} once"
        raise ClusterError(explain(function, "jobs", expected=expected, got=f"{dict(jobs)!r:.120}"))
    return {job: list(ranks) for job, ranks in jobs.items()}


def split_apps(function: str, jobs: Sequence[str], apps: Sequence[int]) -> dict[str, list[int]]:
    """Return the ranks of each job if job k, which may repeat, is the k-th program of the launch.

    `apps` are the programs of the ranks, -1 if MPI does not know them.

    Raises:
        ClusterError: MPI has no program numbers, or their count differs from the jobs'.
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
