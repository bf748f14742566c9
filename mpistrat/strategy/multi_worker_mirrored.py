"""MultiWorkerMirroredStrategy: synchronous training on any ranks of any nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from ..cluster import ClusterResolver, MPIClusterResolver, TFConfigClusterResolver
from ..cluster.spec import worker_count
from ..cluster.tasks import own_task, ranks_by_task
from ..cross_device.ops import CrossDeviceOps
from ..errors import ClusterError, explain
from ..options import CommunicationOptions
from .assemble import RankOrder, assemble
from .layout import MULTI_WORKER_MIRRORED
from .strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MultiWorkerMirroredStrategy"]


@final
class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on any number of ranks on any nodes (TF: MultiWorkerMirroredStrategy).

    Creation is collective over `comm`. Every device of every rank is a replica. The ranks of a node share one copy of
    the variables; each updates its own slice, and only slices travel between nodes.

    Args:
        cluster_resolver: who the tasks are; default what TF_CONFIG says if it is set, else MPI. It must describe as many
            workers as there are ranks, and no parameter servers. The strategy numbers its ranks as the cluster does, the
            chief first, then the workers; one without tasks leaves them as MPI has them.
        communication_options: bytes_per_pack, timeout_seconds, implementation of every reduction, unless a call says
            otherwise.
        comm: communicator, duplicated here; default COMM_WORLD.
        devices, cross_device_ops: as for MirroredStrategy.

    Raises:
        ClusterError: on every rank, when the resolver's cluster does not fit the ranks, or differs between them, or two
            ranks are the same task.
        DeviceError: on every rank, for a device that is not there.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        comm: MPI.Intracomm | None = None,
        devices: Sequence[str] | str | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
    ) -> None:
        resolver = cluster_resolver

        def tell() -> str:
            nonlocal resolver
            if resolver is None and os.environ.get("TF_CONFIG"):
                resolver = TFConfigClusterResolver()
            return own_task(resolver)

        def arrange(told: Sequence[str]) -> Sequence[int]:
            if resolver is not None:
                _check_cluster(resolver, len(told))
            jobs = ("evaluator",) if len(told) == 1 and "evaluator" in told[0] else ("chief", "master", "worker")
            return tuple(ranks_by_task(MULTI_WORKER_MIRRORED.name, told, resolver, jobs).values())

        order = RankOrder(tell, arrange)
        parts = assemble(MULTI_WORKER_MIRRORED, comm, devices, cross_device_ops, communication_options, order=order)
        super().__init__(parts)
        self.cluster_resolver = resolver or MPIClusterResolver(self.comm)


def _check_cluster(resolver: ClusterResolver, size: int) -> None:
    """Raise ClusterError unless the resolver describes so many workers; an empty cluster says nothing."""
    spec = resolver.cluster_spec()
    if not spec:
        return
    if "ps" in spec.jobs and spec.num_tasks("ps"):
        remedy = "Parameter servers need a parameter-server strategy; leave their ranks out of comm and of the cluster"
        got = f"{spec.num_tasks('ps')} of job 'ps'"
        raise ClusterError(
            explain("MultiWorkerMirroredStrategy", "cluster_resolver", expected="no ps task", got=got, remedy=remedy)
        )
    workers = worker_count(spec, resolver.task_type or "worker")
    if workers != size:
        remedy = "Start one rank for each chief and worker, or pass the communicator of those ranks as comm="
        expected = f"as many chief and worker tasks as ranks ({size})"
        raise ClusterError(
            explain("MultiWorkerMirroredStrategy", "cluster_resolver", expected=expected, got=workers, remedy=remedy)
        )
