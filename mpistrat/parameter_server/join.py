"""Server: a worker or parameter server without its own program, led by the chief's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

from ..base.errors import explain
from ..cluster import ClusterSpec
from ..cluster.resolvers import ClusterResolver, SimpleClusterResolver, TFConfigClusterResolver
from ..cluster.topology import check_comm, running_mpi
from ..remote.cluster import Cluster, learn_settings, with_joined
from .strategy import ParameterServerStrategy

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Server"]


@final
class Server:
    """A rank without its own program, which serves rank 0's program (TF: tf.distribute.Server).

    `ms.Server(resolver).join()` is the whole program of a parameter server, and, with a ClusterCoordinator, of a worker. Rank
    0, the chief, runs its program as if alone: it creates a ParameterServerStrategy, variables and optimizers, schedules
    functions, saves and closes.

    Args:
        cluster: a resolver that knows this rank's task; or a cluster, with the task in the next two arguments; default
            TF_CONFIG, or else the chief's strategy (`num_ps`).
        job_name, task_index: this rank's task, if `cluster` is not a resolver.
        protocol, config, start: accepted for TF's programs, without effect.
        comm: the communicator of the chief's strategy; default COMM_WORLD.

    Raises:
        TypeError: a cluster without a task.
    """

    def __init__(
        self,
        cluster: ClusterResolver | ClusterSpec | Mapping[str, Any] | None = None,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Any = None,
        start: bool = True,
        *,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        if cluster is not None and not isinstance(cluster, ClusterResolver):
            if job_name is None or task_index is None:
                got = f"job_name={job_name!r}, task_index={task_index!r}"
                raise TypeError(explain("Server", "job_name", expected="the task of this rank", got=got))
            cluster = SimpleClusterResolver(ClusterSpec(cluster), task_type=job_name, task_id=task_index)
        self._resolver, self._comm = cluster, comm

    @property
    def target(self) -> str:
        """The address of this task, "" if there is none: ranks find each other by MPI."""
        resolver = self._resolver or TFConfigClusterResolver()
        return resolver.master(resolver.task_type, resolver.task_id)

    def join(self) -> None:
        """Serve until the chief closes its strategy or ends its program. Collective with the chief's strategy.

        Raises:
            ClusterError: rank 0 has no program either.
            PeerExitError: the chief left without closing.
        """
        comm = check_comm(running_mpi("Server.join"), self._comm, "Server.join")
        settings, joined = learn_settings(comm)
        with with_joined(joined):
            strategy = ParameterServerStrategy(self._resolver, comm=self._comm, **settings)
        loop = Cluster.of(strategy).loop
        if loop is not None and loop.serve():
            strategy.close()
