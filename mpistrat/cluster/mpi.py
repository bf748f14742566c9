"""MPIClusterResolver: the cluster as MPI knows it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..errors import ClusterError, explain
from .cluster_resolver import ClusterResolver, task_url
from .cluster_spec import ClusterSpec
from .communicator import check_comm, running_mpi
from .jobs import split_apps, split_counts, split_lists
from .rendezvous import meet
from .roles import validate

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MPIClusterResolver"]


@final
class MPIClusterResolver(ClusterResolver):
    """The ranks of a communicator as tasks, each at the processor name of its node. Collective over `comm`.

    Args:
        comm: an intracommunicator; default COMM_WORLD.
        jobs: counts, given to successive ranks (`{"worker": 4, "ps": 2}`); or the ranks of each job
            (`{"worker": [0, 2], "ps": [1, 3]}`); or a job for each program of an MPMD launch (`["worker", "ps"]` for
            `mpiexec -n 4 … : -n 2 …`). Default: all ranks are workers. The same on every rank.

    Raises:
        ClusterError: on every rank, if `jobs` does not fit the ranks, differs between them, or breaks a rule of roles.
        LayoutError: `comm` is no intracommunicator.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        jobs: Mapping[str, int] | Mapping[str, Sequence[int]] | Sequence[str] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        mpi = running_mpi("MPIClusterResolver")
        comm = check_comm(mpi, comm, "MPIClusterResolver")
        meet(comm, "MPIClusterResolver")
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
        """Return the jobs, with the processor name of each task for address."""
        return self._cluster_spec

    def ranks(self, job_name: str) -> tuple[int, ...]:
        """Return the ranks of a job in the order of its tasks, () for a job that is not there."""
        return tuple(self._ranks.get(job_name, ()))

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, by default of this one."""
        return task_url(self, task_type, task_id, rpc_layer)


def _split(jobs: Any, size: int, apps: list[int]) -> dict[str, list[int]]:
    """Return the ranks of each job, in whichever of its forms `jobs` is."""
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
