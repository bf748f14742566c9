"""The ranks of a strategy as a chief and those that follow it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from ..errors import LayoutError, explain
from .channel import Channel
from .dispatcher import Dispatcher
from .follower import Follower
from .home import Home
from .pickling import load_cloudpickle, loads

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["Cluster"]

_clusters: weakref.WeakKeyDictionary[Any, Cluster] = weakref.WeakKeyDictionary()


@final
class Cluster:
    """The chief's dispatcher, or another rank's follower, over a communicator of their own. Collective over all ranks.

    Args:
        strategy: a ParameterServerStrategy.

    Attributes:
        chief: its rank.
        workers: the ranks that run functions, by index.
        dispatcher: on the chief.
        follower: on all others.
        home: what tokens stand for on this rank.

    Raises:
        LayoutError: on every rank: there is no worker beside the chief.
        MissingDependencyError: cloudpickle is not installed.
    """

    def __init__(self, strategy: Strategy) -> None:
        load_cloudpickle()
        group, roles = strategy.extended.process_group, _roles(strategy)
        self.chief, *self.workers = roles[0]
        servers = roles[1]
        self.home = Home(strategy)
        self.dispatcher: Dispatcher | None = None
        self.follower: Follower | None = None
        with group.collective("ClusterCoordinator"):
            self._comm: Any = group.topology.comm.Dup()
        channel, rank = Channel(self._comm), group.topology.rank
        if rank == self.chief:
            self.dispatcher = Dispatcher(group, channel, self.workers, servers, self._unpack)
            group.contacts.update(self.workers + list(servers))
        else:
            index = self.workers.index(rank) if rank in self.workers else -1
            self.follower = Follower(group, channel, self.chief, index, self.home, strategy.scope, self._obey)
            group.contacts.add(self.chief)
        self._group = group
        group.attach(self)
        _clusters[strategy] = self

    @classmethod
    def of(cls, strategy: Strategy) -> Cluster:
        """Return the cluster of a strategy. Collective the first time."""
        known = _clusters.get(strategy)
        return cls(strategy) if known is None or known.closed else known

    @property
    def closed(self) -> bool:
        """Whether its communicator was freed. Not collective."""
        return self._comm is None

    def _unpack(self, data: bytes) -> Any:
        return loads(data, self.home.resolve)

    def _obey(self, name: str, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(name)

    def free(self) -> None:
        """Free the communicator. Collective; nothing is under way."""
        comm, self._comm = self._comm, None
        if comm is not None:
            comm.Free()

    def close(self) -> None:
        """Free the communicator, with the strategy. Collective; the group calls it."""
        self.free()

    def leave(self) -> Callable[[], None] | None:
        """Let the others go, at the end of the program. Not collective; the group calls it."""
        if self.dispatcher is not None and self._comm is not None:
            self.dispatcher.leave()
        return None


def _roles(strategy: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks of the workers, the chief first, and of the servers."""
    if not hasattr(strategy, "workers") or not hasattr(strategy, "servers"):
        got = f"a {type(strategy).__name__}"
        raise TypeError(explain("ClusterCoordinator", "strategy", expected="a ParameterServerStrategy", got=got))
    workers, servers = tuple(strategy.workers), tuple(strategy.servers)
    if len(workers) < 2:
        remedy = "Start one rank more: the chief only schedules"
        expected = "a chief and at least one worker beside it"
        got = f"{len(workers)} beside {len(servers)} servers"
        raise LayoutError(explain("ClusterCoordinator", "strategy", expected=expected, got=got, remedy=remedy))
    return workers, servers
