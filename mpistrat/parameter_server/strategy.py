"""ParameterServerStrategy: workers that train without waiting for each other, and servers that store the variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

from ..base import log
from ..base.errors import ContextError, explain
from ..base.options import CommunicationOptions, RunOptions
from ..base.text import counted
from ..base.types import Quality
from ..base.waiting import CEILING
from ..cluster.forks import is_child, refusal
from ..cluster.resolvers import ClusterResolver
from ..cluster.topology import Topology, check_comm, running_mpi
from ..comm.process_group import ProcessGroup
from ..cross_device.ops import CrossDeviceOps
from ..data.feed.plan import Workers
from ..remote.cluster import Cluster, share_settings
from ..strategy.assemble import PARAMETER_SERVER, assemble
from ..strategy.input import Division
from ..strategy.loss import summed_replicas, sums_workers
from ..strategy.preemption import StopAtPasses, StopRequest
from ..strategy.strategy import Strategy
from .connections import ParameterServers
from .report import ParameterServerStats
from .roles import RoleAssignment, Roles, Settings
from .store import ServerStore
from .worker.access import WorkerAccess

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["ParameterServerStrategy"]

_NAME = "ParameterServerStrategy"


@final
class ParameterServerStrategy(Strategy):
    """Asynchronous training: servers store the variables, workers read them and push updates (TF: ParameterServerStrategy).

    Every rank runs the same program. Creating the strategy and variables, `save`, `restore` and `close` are collective over all
    ranks. Otherwise a worker waits for no other worker: `run`, `reduce` and `gather` are over its own replicas, and
    `apply_gradients` sums over them and pushes once. The server applies a push once, by the optimizer that the same program
    created there.

    On a server, iterating a distributed dataset serves the workers until all have left the pass, and yields nothing. A worker
    leaves a pass when its loop ends, also by `break` or an exception. Servers answer reads and writes between passes as well.

    A file has each variable between two updates, including all earlier pushes. Save when all ranks have left a pass for a file
    of one moment.

    `dataset.batch(n)` is the batch of one push: batches go to the workers round-robin, each row once in an epoch.

    Args:
        cluster_resolver: the roles worker, chief and ps; default TF_CONFIG, if it is set and num_ps is not given.
        variable_partitioner: cuts large variables into shards on several servers, see `ms.partitioners`.
        num_ps: without a resolver: the last `num_ps` ranks are servers; default 1.
        max_staleness: a worker starts a step only when its finished steps exceed the slowest worker's by at most this number;
            None for no bound. With 0 the servers sum a step's pushes in worker order and apply them once: synchronous training.
        backup_workers: with max_staleness=0: a step is complete without this many workers' pushes, which are dropped.
        placement: the server of the next variable: "round_robin", or "bytes" for the one with the fewest bytes.
        transport: "shared_window", "one_sided" or "messages" for all; default chosen for each worker and server.
        workers_in_sync: groups of this many successive workers step together, synchronously, and push once; 1 for none. The
            replicas of a group are in sync, and divide a batch.
        back_off: the longest sleep, in seconds, of an idle server. 1 ms costs up to 6 % of a core, and a push waits about as
            long for it; shorter sleeps cost more.
        check_numerics: refuse to push a gradient with a NaN or infinity.
        communication_options, cross_device_ops: the reductions over the worker's own replicas; the first's `wire` encodes pushes.
        comm: communicator, duplicated here; default COMM_WORLD.
        devices: this rank's, as for MirroredStrategy; servers use none.
        replicas: instead of devices: the number of replicas in sync on CPUs, the same on each worker of `workers_in_sync`.
            Their sums are in the order of replicas.

    Raises:
        ClusterError: on every rank: there is no worker or no server, or the roles contradict each other.
        ValueError: on every rank: another placement, transport or staleness.
        LayoutError: there is one rank only.

    Example:
        >>> strategy = ms.ParameterServerStrategy(num_ps=1)  # doctest: +SKIP

    Source: Li et al., https://www.usenix.org/conference/osdi14/technical-sessions/presentation/li_mu.

    Attributes:
        workers, servers: their ranks.
        is_server: whether this rank is a server.
        worker_index: this worker's number, None on a server.
        cluster_resolver: as given, or an equivalent of `num_ps`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        num_ps: int | None = None,
        max_staleness: int | None = None,
        backup_workers: int = 0,
        placement: str = "round_robin",
        transport: str = "",
        workers_in_sync: int = 1,
        back_off: float = CEILING,
        check_numerics: bool = False,
        communication_options: CommunicationOptions | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        comm: MPI.Intracomm | None = None,
        devices: Sequence[str] | str | None = None,
        replicas: int | None = None,
    ) -> None:
        settings = Settings(
            variable_partitioner,
            num_ps,
            max_staleness,
            backup_workers,
            placement,
            transport,
            workers_in_sync,
            back_off,
            check_numerics,
            communication_options,
            replicas,
        )
        assignment = RoleAssignment(settings, cluster_resolver)
        ranks = check_comm(running_mpi(_NAME), comm, _NAME)
        joined = share_settings(ranks, dict(vars(settings)))
        roles = Roles((), ())

        def make_sync_group(group: ProcessGroup) -> ProcessGroup:
            nonlocal roles
            roles = assignment.agree(group)
            return group.subgroup(roles.in_sync_with(group.topology.rank, workers_in_sync), _NAME)

        def check(topology: Topology) -> None:
            if replicas is not None and devices is not None:
                got = f"devices={devices!r} and replicas={replicas!r}"
                raise ValueError(explain(_NAME, "replicas", expected="devices or replicas", got=got))
            assignment.check(topology)

        extended = assemble(
            self,
            PARAMETER_SERVER,
            comm,
            "cpu:0" if assignment.serves(ranks) else settings.devices(devices),
            cross_device_ops,
            communication_options,
            check=check,
            make_sync_group=make_sync_group,
            ordered_replicas=replicas,
        )
        group, variables = extended.process_group, extended.placement
        self.cluster_resolver = assignment.report(group, roles)
        self._settings = settings
        self.workers, self.servers = roles.workers, roles.servers
        rank = group.topology.rank
        self.is_server = rank in roles.servers
        self.worker_index = None if self.is_server else roles.workers.index(rank)
        self._parameter_servers = ParameterServers(
            group, roles.workers, roles.servers, transport=transport, back_off=back_off
        )
        self._store = ServerStore(self, self._parameter_servers, variables.group, settings)
        self._access = self._store.access
        variables.store = variables.optimizers = self._store
        variables.make, variables.partitioner = self._store.make, variable_partitioner
        variables.first_worker, variables.is_worker = roles.workers[0], not self.is_server
        variables.lacking |= dict.fromkeys([Quality.COMMON_STEPS, Quality.OWN_VARIABLES], "parameter servers")
        extended.num_input_pipelines = len(roles.workers) // workers_in_sync
        super().__init__(extended)
        if sums_workers(self) and not self.backup_workers:
            extended.batches.of_workers = summed_replicas(self)
        self._stop_request = StopRequest(group, spread=True)
        self._stop_agreement = StopAtPasses(
            group,
            self._stop_agreement,
            lambda: bool(joined) or self._extended.coordination.leads or self._access.in_pass,
        )
        if joined:
            Cluster(self, joined)

    # roles

    @property
    def max_staleness(self) -> int | None:
        """The bound on staleness, as given."""
        return self._settings.max_staleness

    @property
    def backup_workers(self) -> int:
        """The number of backup workers, as given."""
        return self._settings.backup_workers

    @property
    def workers_in_sync(self) -> int:
        """The number of workers in a group, as given."""
        return self._settings.workers_in_sync

    @property
    def num_workers(self) -> int:
        """The number of workers, including the chief."""
        return len(self.workers)

    @property
    def num_ps(self) -> int:
        """The number of servers."""
        return len(self.servers)

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas that step together: those of this worker, or of its group of `workers_in_sync`.

        A server returns the number of the first worker or group, so `batch(b * strategy.num_replicas_in_sync)` is the same on
        all ranks if workers have equally many devices.
        """
        if self.is_server:
            return sum(self._replicas_of_workers()[: self.workers_in_sync])
        return super().num_replicas_in_sync

    # steps, on workers

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call a step once on each replica of this worker, and return the results.

        With `max_staleness` it waits for the slowest worker. See `Strategy.run`.

        Raises:
            ContextError: on a server.
        """
        access: Any = self._access
        if type(access) is not WorkerAccess:
            access = self._worker("run")
        self._extended.coordination.announce("step")
        access.begin_step()
        try:
            return super().run(fn, args, kwargs, options)
        finally:
            access.end_step()

    def _worker(self, function: str) -> WorkerAccess:
        access = self._access
        if isinstance(access, WorkerAccess):
            return access
        remedy = "Guard the call with `if not strategy.is_server:`, or iterate a distributed dataset (empty on servers)"
        got = f"a call on rank {self.rank}, a parameter server"
        raise ContextError(explain(f"{_NAME}.{function}", "", expected="a worker", got=got, remedy=remedy))

    # serving, on servers

    def serve(self, passes: int | None = 1) -> None:
        """Serve the workers until all have left one pass, or for good. For servers.

        A worker leaves a pass when its loop over a distributed dataset ends, or by `leave`, and for good when it closes the
        strategy or ends its program. Iterating a distributed dataset calls this.

        Args:
            passes: the number of passes to wait for; None for all.

        Raises:
            ContextError: on a worker.
            PeerExitError: a worker left the program in the middle of a pass.
        """
        self._extended.require_open(f"{_NAME}.serve")
        if is_child():
            raise refusal(f"{_NAME}.serve")
        server = self._parameter_servers.server
        if server is None:
            got = f"a call on rank {self.rank}, a worker"
            raise ContextError(explain(f"{_NAME}.serve", "", expected="a parameter server", got=got))
        server.wait(passes)

    def flush(self) -> None:
        """Wait until all pushes and writes of this worker are applied. For workers.

        Reading a variable waits for this worker's pushes to the same server. With `max_staleness` 0 a step is applied when all
        workers have taken it.

        Raises:
            ContextError: on a server.
        """
        self._extended.require_open(f"{_NAME}.flush")
        self._worker("flush").flush()

    def leave(self) -> None:
        """Leave a pass without a loop over a distributed dataset, which leaves it itself. For workers.

        Call it in a program that steps without a dataset, to let servers return from `serve`.

        Raises:
            ContextError: on a server.

        Example:
            >>> if strategy.is_server:  # doctest: +SKIP
            ...     strategy.serve()
            ... else:
            ...     for _ in range(100):
            ...         strategy.run(step)
            ...     strategy.leave()
        """
        self._extended.require_open(f"{_NAME}.leave")
        access = self._worker("leave")
        access.begin_pass()
        access.end_pass()

    # input

    def _division(self) -> Division:
        """Return this rank's part in reading: batches go to workers, or groups, round-robin; a server serves a pass."""
        if self._extended.coordination.scheduled:  # a coordinator's function: its dataset is for this worker only
            alone = Workers([self._extended.sync_topology.num_replicas], 0)
            return Division.alone(alone, alone, self._extended.placement.group, self)
        size, index = self.workers_in_sync, self.worker_index or 0
        counts = self._replicas_of_workers()
        groups = [sum(counts[first : first + size]) for first in range(0, len(counts), size)]
        dealt = Workers(groups, index // size)
        if self.is_server:
            return Division.serving(dealt, self)
        first = index // size * size
        within = Workers(counts[first : first + size], index - first)
        return Division.alone(dealt, within, self._extended.placement.group, self)

    def _replicas_of_workers(self) -> list[int]:
        replicas = self._extended.process_group.topology.replicas_per_rank
        return [replicas[rank] for rank in self.workers]

    def begin_pass(self) -> None:
        """Start to read a dataset; on a server, serve until all workers have left the pass."""
        if isinstance(self._access, WorkerAccess):
            self._access.begin_pass()
        else:
            self.serve()

    def end_pass(self) -> None:
        """Leave the pass."""
        if isinstance(self._access, WorkerAccess) and not self._extended.closed:
            self._access.end_pass()

    def resume_pass(self) -> None:
        """Start a pass that `suspend_pass` ends, independently of open datasets. For workers."""
        self._worker("resume_pass").resume_pass()

    def suspend_pass(self) -> None:
        """Leave the pass with open datasets, which continue in the next one. For workers."""
        self._worker("suspend_pass").suspend_pass()

    def describe(self) -> list[tuple[str, str]]:
        """Return roles and transports, as names and texts."""
        roles = f"workers {', '.join(map(str, self.workers))}; servers {', '.join(map(str, self.servers))}"
        return [("roles by rank", roles), *(("transport", t) for t in self._parameter_servers.describe().splitlines())]

    # the death of workers

    @property
    def outlives_workers(self) -> bool:
        """True if its variables can be used after the death of a worker. For coordinators."""
        return self._parameter_servers.outlive_workers

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Continue after the death of workers with the group's new numbers of the others. Collective; for coordinators."""
        self._parameter_servers.renumber(numbers)
        self._extended.placement.first_worker = self._parameter_servers.workers[0]
        self.workers = tuple(rank for rank in self._parameter_servers.workers if rank >= 0)
        self.servers = self._parameter_servers.servers
        self.worker_index = None if self.is_server else self.workers.index(self.rank)
        self._extended.renumber(len(self.workers))

    # statistics

    def traffic(self) -> tuple[int, int]:
        """Return the bytes that this worker has pulled and pushed so far; (0, 0) on a server."""
        every = [transport.stats for transport in self._parameter_servers.transports]
        pulled = sum(nbytes for stats in every for _, nbytes in stats.pulls.values())
        return pulled, sum(nbytes for stats in every for _, nbytes in stats.pushes.values())

    def stats(self) -> ParameterServerStats:
        """Return the statistics of all workers and servers so far: a table, when printed. Collective over all ranks.

        Example:
            >>> print(strategy.stats())  # doctest: +SKIP
        """
        self._extended.require_open(f"{_NAME}.stats")
        self._extended.coordination.announce("stats")
        self._access.flush()
        return self._parameter_servers.stats(self._store.dropped)

    # files

    def _begin_file(self, function: str, path: str | os.PathLike[str], *more: Any) -> None:
        """Wait until everything is applied, and all optimizers are known on every rank. Collective.

        Raises:
            ContextError: saving next to a coordinator's program.
        """
        super()._begin_file(function, path)
        apart = function in ("begin_save", "prepare_save", "take_snapshot", "newest_snapshot", "restore_snapshot")
        if apart and self._extended.coordination.leads:
            expected, got = "a program that every rank runs", "a coordinator's program"
            raise ContextError(explain(f"{_NAME}.{function}", "", expected=expected, got=got, remedy="Use save"))
        self._extended.coordination.announce(function, os.fspath(path), *more)
        self._access.flush()
        self._store.agree(function, path)

    # lifetime

    def close(self) -> None:
        """Leave for good, when all pushes are applied; then as `Strategy.close`. Collective the first time."""
        if is_child():
            return
        if not self._extended.closed:
            self._extended.coordination.announce("close")
        if isinstance(self._access, WorkerAccess) and not self._extended.closed:
            self._access.leave_for_good()
        super().close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Warn if a worker's program dropped a strategy without closing it: its servers still run."""
        access = getattr(self, "_access", None)
        if isinstance(access, WorkerAccess) and not access.left and not is_finalizing() and not is_child():
            log.logger.warning(
                "rank %d dropped a %s without close(): until the program ends, its servers keep its variables, and a server in"
                " serve() waits for this rank. Call close() on every rank, or create the strategy in a `with` statement",
                self.rank,
                _NAME,
            )

    def __repr__(self) -> str:
        nodes = self._extended.topology.num_nodes
        state = "closed" if self._extended.closed else f"{self.num_workers} workers, {self.num_ps} servers"
        return f"<{_NAME} {state}, {counted(nodes, 'node')}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise RuntimeError(explain(_NAME, "", expected="a new strategy", got="copy.deepcopy", remedy="Create one"))
