"""Cluster: the chief of a strategy and its serving ranks, over one communicator; and how ranks without a program join.

A rank without its own program is in `Server.join()`: it receives the settings of the strategy of rank 0's program, creates the
strategy, and then executes the chief's commands.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..base.agree import as_told, gather_bytes, gather_text, together
from ..base.errors import ClusterError, ContextError, LayoutError, PeerExitError, explain
from ..base.lazy import load_cloudpickle
from ..base.text import named
from ..cluster.rendezvous import add_check, remove_check, wait_for_ranks
from ..cluster.world import leave_out_lost, spans_world
from ..optimizers import Optimizer
from ..optimizers import core as optimizers
from ..strategy.assemble import PARAMETER_SERVER
from ..strategy.extended import Coordination
from .channel import Kind, MpiChannel
from .dispatcher import Dispatcher
from .program import ProgramWorld
from .registry import ObjectRegistry, dumps, loads
from .worker import Commands, WorkerLoop, command_of, get_current_worker_index

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..strategy import Strategy

__all__ = ["Cluster", "check_workers", "learn_settings", "share_settings", "with_joined"]

_REMEDY = "Make collective calls on the chief: the serving ranks then take part"

_CHIEF = 0  # it creates initial values, so it leads
_joined: ContextVar[tuple[int, ...] | None] = ContextVar("mpistrat_joined", default=None)
_clusters: weakref.WeakKeyDictionary[Any, Cluster] = weakref.WeakKeyDictionary()


@final
class Cluster(Coordination):
    """The chief's dispatcher, or another rank's loop, over a separate communicator. Collective over all ranks.

    The strategy announces the chief's collective calls, and the serving ranks get a command to make them too.

    Args:
        strategy: a ParameterServerStrategy.
        joined: ranks without a program of their own, which serve from now on.

    Attributes:
        chief: its rank.
        workers: the ranks that run functions, by index.
        dispatcher: on the chief.
        loop: on all others.
        registry: the objects of tokens on this rank.
        world: of clients' programs.

    Raises:
        MissingDependencyError: cloudpickle is not installed.
    """

    def __init__(self, strategy: Strategy, joined: Sequence[int] = ()) -> None:
        load_cloudpickle()
        group, roles = strategy.extended.process_group, _roles(strategy)
        self.chief, *self.workers = roles[0]
        self.registry = ObjectRegistry(strategy)
        self.dispatcher: Dispatcher | None = None
        self.loop: WorkerLoop | None = None
        self._strategy, self._joined = strategy, tuple(joined)
        led: Any = strategy
        self._flush: Callable[[], None] = led.flush
        with group.collective("ClusterCoordinator"):
            self._comm: Any = group.topology.comm.Dup()
        self.world = ProgramWorld(self._comm)
        channel, rank = MpiChannel(self._comm, group.bear), group.topology.rank
        if rank == self.chief:
            others = [*self.workers, *roles[1]]
            self.dispatcher = Dispatcher(group, channel, self.workers, self._unpack)
            self.dispatcher.listeners.update(self._joined)
            group.contacts.update(others)
            self._others = others
        else:
            index = self.workers.index(rank) if rank in self.workers else -1
            execute = Commands(strategy).execute
            calls = self._alone, execute, self._flush, self._reform
            self.loop = WorkerLoop(group, channel, self.chief, index, self.registry, *calls, self.world)
            group.contacts.add(self.chief)
        if spans_world(group.topology.comm) and led.outlives_workers:
            group.expendable.update(self.workers)
        self._group, self._servers = group, roles[1]
        group.attach(self)
        add_check(self._check_rendezvous)
        _clusters[strategy] = self
        strategy.extended.coordinate(self)

    @classmethod
    def of(cls, strategy: Strategy) -> Cluster:
        """Return the cluster of a strategy. Collective, unless it exists."""
        known = _clusters.get(strategy)
        return cls(strategy) if known is None or known.closed else known

    @property
    def closed(self) -> bool:
        """True once its communicator is freed."""
        return self._comm is None

    # on the chief

    def open(self, coordinator: Any, queue_size: int) -> None:
        """Attach a coordinator to the cluster. On every rank that creates one."""
        self.registry.coordinator = coordinator
        if self.dispatcher is not None:
            self.dispatcher.queue_size = queue_size
            self.dispatcher.listeners.update(self._others)
            self.leads = True
            if not self._joined:  # the same program created the same optimizers everywhere
                self.registry.note_optimizers()

    def release(self) -> None:
        """Detach the coordinator; collective unless ranks have joined."""
        self.leads = False
        self.registry.coordinator = None
        self.registry.resources.clear()
        if not self._joined:
            self.free()

    def end_coordinator(self) -> None:
        """Release the ranks with their own programs. For the chief."""
        if self.dispatcher is not None:
            self.dispatcher.cancel("the coordinator was closed")
            self.leave_out_lost()
            self.dispatcher.end(rank for rank in self._others if rank not in self._joined)
            if not self._joined:
                self.dispatcher.stop()

    def announce(self, name: str, /, *args: Any, **kwargs: Any) -> None:
        """Make the serving ranks take part in a collective call that this rank is about to make.

        Args:
            name: "variable", "optimizer", "close", or a collective method of the strategy; or "step", a call of this rank alone,
                for which ranks without a program need its optimizers.
            args, kwargs: of the call.

        Raises:
            ContextError: in a scheduled function, because only one rank runs it.
        """
        if self.dispatcher is None:
            if name != "step":
                _refuse_in_function(name)
        elif name == "step":
            if self._joined:
                self._announce_optimizers(optimizers.known())
        elif name == "close":
            if self.registry.coordinator is not None:
                self.registry.coordinator.close()
            if self._joined:
                self.leave_out_lost()
                self.dispatcher.end(self._joined)
                self.dispatcher.stop()
        elif self.dispatcher.listeners:
            if name == "restore" and self._joined:  # they restore optimizers' state like this rank
                self._announce_optimizers(optimizers.known())
            self.leave_out_lost()
            self.dispatcher.command(dumps(command_of(name, args, kwargs), self.registry.reduce_command))

    def leave_out_lost(self) -> None:
        """Make all living ranks continue without workers that died, before their next collective call. For the chief.

        Raises:
            PeerExitError: another rank does not serve any more, and cannot take part.
        """
        dispatcher = self.dispatcher
        if dispatcher is None:
            return
        self._group.look_for_losses()
        if not self._group.lost:
            return
        with dispatcher.held_back():
            dispatcher.wait_until_all_serve()
            away = {*range(self._group.topology.size)} - {self.chief} - dispatcher.listeners - self._group.lost
            if away:
                raise PeerExitError(
                    f"ClusterCoordinator: {named('rank', sorted(away))} left the service, and workers died"
                )
            dispatcher.send(dispatcher.listeners, Kind.REFORM)
            dispatcher.drive(lambda: not dispatcher.sending())
            with dispatcher.lock:  # its thread must not compare old numbers with new ones
                self._reform()

    def _reform(self) -> None:
        """Continue with the living ranks: new communicators, new numbers. Collective over them; no function runs."""
        numbers = self._group.reopen(leave_out_lost())
        led: Any = self._strategy
        led.renumber(numbers)
        self.chief = numbers[self.chief]
        self._servers, self._joined = (
            tuple(numbers[rank] for rank in ranks if rank in numbers) for ranks in (self._servers, self._joined)
        )
        self.workers = [numbers[rank] for rank in self.workers if rank in numbers]
        with self._group.collective("ClusterCoordinator"):
            self._comm = self._group.topology.comm.Dup()
        self.world = ProgramWorld(self._comm)
        channel = MpiChannel(self._comm, self._group.bear)
        if self.dispatcher is not None:
            self._others = [*self.workers, *self._servers]
            self.dispatcher.renumber(channel, numbers)
        elif self.loop is not None:
            self.loop.renumber(channel, self.chief, self.world)

    def prepare(self, optimizers: Sequence[Optimizer]) -> None:
        """Apply the chief's earlier writes, and announce a function's optimizers."""
        self._flush()
        self._announce_optimizers(optimizers)

    def _check_rendezvous(self, comm: MPI.Intracomm, function: str) -> None:
        """Raise ContextError if this rank waits for serving ranks, which cannot take part in its collective call."""
        if self.scheduled:
            serving: Sequence[int] = self._servers
        else:
            serving = [] if self.dispatcher is None else self.dispatcher.idle()
        if not serving:
            return
        from mpi4py import MPI

        own, theirs = self._group.topology.comm.Get_group(), comm.Get_group()
        there = [rank for rank in MPI.Group.Translate_ranks(own, serving, theirs) if rank != MPI.UNDEFINED]
        own.Free()
        theirs.Free()
        if there:
            remedy = (
                "In a function one rank acts: use the coordinator's strategy, ms.get_strategy(). A strategy of all ranks "
                "is created by a program that all ranks run; a client starts one by run()"
            )
            expected = "ranks that all run this program"
            got = f"{named('rank', there)} of it in the coordinator's service"
            raise ContextError(explain(function, "comm", expected=expected, got=got, remedy=remedy))

    def _announce_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Make the serving ranks create a function's optimizers, with their current settings."""
        for optimizer in optimizers:
            if self.registry.note_optimizer(optimizer):
                self.announce("optimizer", optimizer)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Enter the context of a function that this rank runs alone, in which calls collective over all ranks raise."""
        monitor, before = self._group.monitor, self._group.monitor.refusal
        monitor.refusal = before or ContextError(f"not in a scheduled function, which one rank runs. {_REMEDY}")
        self.scheduled = True
        try:
            with self._strategy.scope():
                yield
        finally:
            self.scheduled = False
            monitor.refusal = before

    # the end

    def free(self) -> None:
        """Free the communicator. Collective; no message is pending."""
        comm, self._comm = self._comm, None
        self._group.expendable.clear()
        remove_check(self._check_rendezvous)
        if comm is not None:
            self._strategy.extended.coordinate(Coordination())
            self.world.free()
            comm.Free()

    def close(self) -> None:
        """Free the communicator, with the strategy. Collective; called by the group."""
        self.free()

    def leave(self) -> Callable[[], None] | None:
        """Release the others, at the end of the program. Called by the group."""
        remove_check(self._check_rendezvous)
        if self.dispatcher is not None and self._comm is not None:
            self.dispatcher.leave()
        return None

    def abandon(self) -> None:
        """See `comm.process_group.Attachment`."""
        self._group.expendable.clear()
        if self.dispatcher is not None:
            self.dispatcher.abandon()
        remove_check(self._check_rendezvous)
        self._comm = None

    def _unpack(self, data: bytes) -> Any:
        return loads(data, self.registry.resolve)


def _refuse_in_function(name: str) -> None:
    try:
        get_current_worker_index()
    except ContextError:
        return
    raise ContextError(f"{name}: not in a scheduled function, which one rank runs. {_REMEDY}")


def _roles(strategy: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of the workers, the chief first, and of the servers."""
    if not hasattr(strategy, "workers") or not hasattr(strategy, "servers"):
        got = f"a {type(strategy).__name__}"
        raise TypeError(explain("ClusterCoordinator", "strategy", expected="a ParameterServerStrategy", got=got))
    return tuple(strategy.workers), tuple(strategy.servers)


def check_workers(strategy: Strategy) -> None:
    """Raise unless functions can be scheduled with a strategy.

    Raises:
        LayoutError: there is no worker besides the chief.
        ValueError: workers may wait for each other, while functions go to any free worker.
    """
    workers, servers = _roles(strategy)
    if len(workers) < 2:
        remedy = "Start one rank more: the chief only schedules"
        expected = "a chief and at least one other worker"
        got = f"{len(workers)} workers and {len(servers)} servers"
        raise LayoutError(explain("ClusterCoordinator", "strategy", expected=expected, got=got, remedy=remedy))
    for name, free in (("max_staleness", None), ("workers_in_sync", 1)):
        given = getattr(strategy, name, free)
        if given != free:
            remedy = "Workers run scheduled functions, not equal numbers of steps"
            expected = f"a strategy with {name}={free}"
            raise ValueError(explain("ClusterCoordinator", "strategy", expected=expected, got=given, remedy=remedy))


@contextlib.contextmanager
def with_joined(joined: tuple[int, ...]) -> Iterator[None]:
    """Make a new strategy rank 0's in this context, with the ranks from `learn_settings`."""
    token = _joined.set(joined)
    try:
        yield
    finally:
        _joined.reset(token)


def share_settings(comm: MPI.Intracomm, settings: dict[str, Any]) -> tuple[int, ...]:
    """Send the settings of the new strategy to the ranks that have joined, and return these. Collective over `comm`.

    Those ranks are in `learn_settings` meanwhile.

    Args:
        comm: of all ranks of the strategy, the user's.
        settings: the strategy's arguments that do not differ between ranks.

    Raises:
        ClusterError: on every rank: rank 0 has joined too.
        TypeError: on every rank: rank 0's settings cannot be sent.
    """
    known = _joined.get()
    if known is not None:  # this rank has received the settings
        return known
    return _exchange(comm, settings)[1]


def learn_settings(comm: MPI.Intracomm) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return rank 0's settings, and the ranks that have joined. Collective over `comm`: see `share_settings`."""
    settings, joined = _exchange(comm, None)
    assert settings is not None
    return settings, joined


def _exchange(comm: MPI.Intracomm, own: dict[str, Any] | None) -> tuple[dict[str, Any] | None, tuple[int, ...]]:
    """Return the settings, own or else rank 0's, and the ranks without their own."""
    wait_for_ranks(comm, PARAMETER_SERVER.name)
    flags = np.empty(comm.size, np.int8)
    comm.Allgather(np.array([own is None], np.int8), flags)
    joined = tuple(np.flatnonzero(flags).tolist())
    if not joined:
        return own, ()
    if _CHIEF in joined:
        remedy = "Start the chief's program as rank 0, and call join() on the others"
        expected, got = "a program on rank 0 that the others follow", "join() on rank 0 too"
        raise ClusterError(explain("Server.join", "", expected=expected, got=got, remedy=remedy))
    with together(partial(gather_text, comm), as_told):
        data = _packed(own) if comm.rank == _CHIEF else b""
    data = gather_bytes(comm, data)[_CHIEF]
    return (loads(data, lambda kind, key: None) if own is None else own), joined


def _packed(settings: dict[str, Any] | None) -> bytes:
    try:
        return dumps(settings, lambda thing: None)
    except Exception as error:
        expected = "settings of the strategy that can be pickled"
        raise TypeError(explain("Server.join", "", expected=expected, got=str(error))) from error
