"""The servers and workers of a group, their memory and their connections."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from ..base import log
from ..base.errors import ClosedError, LayoutError, explain
from ..base.waiting import CEILING
from ..comm.process_group import ProcessGroup
from ..comm.shared_memory import free_space
from .layout import (
    HALVES,
    Address,
    MailboxLayout,
    ServerMemory,
    SharedMemory,
    Staging,
    VariableSpec,
    aligned,
    area_bytes,
)
from .report import ParameterServerStats, combine, of_server, of_worker
from .roles import register_role
from .server.server import VariableServer
from .wire.choice import choose
from .wire.message_port import MessagePort
from .wire.messages import MessageTransport
from .wire.transport import Pair, Transport
from .wire.windows import OneSidedTransport, SharedWindowTransport, WindowPort

__all__ = ["ParameterServers"]

SLOTS = 4  # fragments of pushes that each worker may post before a server takes one
CHUNK_BYTES = 1 << 20  # the largest payload of a fragment; a server has SLOTS * CHUNK_BYTES of memory for each worker
FIRST_SLAB = 16 << 20
LARGEST_SLAB = 1 << 30
UNLIMITED = 1 << 62
_SHORTEST_BACK_OFF = 1e-6  # seconds


@final
class ParameterServers:
    """Ranks that store variables, and ranks that read them and push updates. Collective over the group.

    Args:
        group: all ranks; some may be neither worker nor server.
        workers, servers: ranks, the same lists on every rank.
        transport: one for all pairs; default the environment's, else chosen for each pair (`choice.choose`).
        back_off: the longest sleep, in seconds, of an idle server; see `ParameterServerStrategy`.

    Raises:
        LayoutError: on every rank: no worker, no server, a rank that is both, or a transport that does not fit.
        SharedMemoryError: on every rank: there is no room.

    Attributes:
        workers, servers: ranks.
        choice: the transport of each worker and server.
        addresses: the variables, by number.
        server: on a server its variables and its service, not started yet; else None.
        transports: on a worker its connection with each server, else empty.
    """

    def __init__(
        self,
        group: ProcessGroup,
        workers: Sequence[int],
        servers: Sequence[int],
        *,
        transport: str = "",
        back_off: float = CEILING,
    ) -> None:
        self.group, self.workers, self.servers = group, tuple(workers), tuple(servers)
        _check_roles(group, self.workers, self.servers)
        register_role(group, self.workers, self.servers)
        if not back_off >= _SHORTEST_BACK_OFF:
            expected = f"at least {_SHORTEST_BACK_OFF:g}"
            raise ValueError(explain("ParameterServers", "back_off", expected=expected, got=back_off))
        with group.collective("ParameterServers", detail=(self.workers, self.servers, transport)):
            self.choice = choose(group, self.workers, self.servers, transport or group.environment.transport)
        log.once(logging.INFO, "parameter servers: " + self.describe())
        self.server: VariableServer | None = None
        self._threads = _several_threads()
        self.transports: list[Transport] = []
        self._used = self._room = [0] * len(self.servers)
        self._next_slab = FIRST_SLAB
        self._comm: Any = group.topology.comm.Dup()
        used = self.choice.used()
        self._windows = "shared_window" in used, "one_sided" in used
        self._on_node = group.topology.ranks_of_node(group.topology.node_index)
        self._places: Sequence[int] | None = None  # of this node's ranks among those at first, once some have died
        layout = MailboxLayout(len(self.workers), SLOTS if any(self._windows) else 0, CHUNK_BYTES)
        self._posting = MailboxLayout(len(self.workers), SLOTS, CHUNK_BYTES)
        sizes = [layout.nbytes] * len(self.servers)
        mailbox = self._allocate(sizes, "the servers' mailboxes")
        mailbox.populate((0, mailbox.own.nbytes))
        self._memory = SharedMemory(layout, mailbox)
        self.addresses = self._memory.addresses
        self._connect(back_off)
        group.attach(self)
        group.barrier("ParameterServers")

    def _connect(self, back_off: float) -> None:
        topology = self.group.topology
        if topology.rank in self.servers:
            self._open_ports(self.servers.index(topology.rank), back_off)
            self.group.contacts.update(self.workers)
        if topology.rank in self.workers:
            worker = self.workers.index(topology.rank)
            self.group.contacts.update(self.servers)
            for server, rank in enumerate(self.servers):
                pair = Pair(self.group, worker, server, rank, self._posting, self.addresses)
                self.transports.append(self._transport(pair, self.choice.of(worker, server)))

    def _transport(self, pair: Pair, name: str) -> Transport:
        if name == "messages":
            return MessageTransport(pair, self._comm)
        kind = SharedWindowTransport if name == "shared_window" else OneSidedTransport
        return kind(pair, self._memory)

    def _open_ports(self, index: int, back_off: float) -> None:
        by_messages = list(self.choice.workers_by("messages", index))
        by_windows = sorted(set(range(len(self.workers))).difference(by_messages))
        comm, bear = self._comm, self.group.bear
        server = self.server = VariableServer(
            self.group, index, self.workers, self._memory, by_windows, comm.Iprobe, back_off, self._threads,
            lambda error: bear(error, comm),
        )  # fmt: skip
        if by_windows:
            server.add_port(WindowPort(server, by_windows, self._memory), by_windows)
        if by_messages:
            ranks = {self.workers[w]: w for w in by_messages}
            port = MessagePort(server, ranks, self._memory, comm, server.deliver, bear)
            server.add_port(port, by_messages)

    def add_variables(self, specs: Sequence[VariableSpec]) -> list[int]:
        """Allocate variables on their servers, initially zeros, and return their numbers. Collective.

        Add many at a time: memory comes in slabs, and all ranks synchronize in each call.

        Raises:
            CollectiveMismatchError: on every rank: the specifications differ.
            SharedMemoryError: on every rank: there is no room.
        """
        self._check_open()
        for spec in specs:
            if not 0 <= spec.server < len(self.servers):
                expected = f"0 <= server < {len(self.servers)}"
                raise ValueError(
                    explain("add_variables", f"server of {spec.name!r}", expected=expected, got=spec.server)
                )
        detail = tuple((s.name, s.shape, s.dtype.str, s.server) for s in specs)
        with self.group.collective("add_variables", detail=detail):
            needed, near = [0] * len(self.servers), self._near(specs)
            for spec, workers in zip(specs, near, strict=True):
                needed[spec.server] += Address.after(0, 0, spec, 0, workers).end
            self._grow_staging(specs)
            if not self._memory.slabs or any(u + n > r for u, n, r in zip(self._used, needed, self._room, strict=True)):
                self._add_slab(needed)
            slab, own = len(self._memory.slabs) - 1, []
            for spec, workers in zip(specs, near, strict=True):
                address = Address.after(self._used[spec.server], len(self.addresses), spec, slab, workers)
                self.addresses.append(address)
                self._used[spec.server] = address.end
                if self.server is not None and self.server.index == spec.server:
                    own.append((address.start, address.buffer(1)))
            self._memory.slabs[slab].populate(*own)
        return list(range(len(self.addresses) - len(specs), len(self.addresses)))

    def _near(self, specs: Sequence[VariableSpec]) -> list[tuple[int, ...]]:
        """Return for each variable the workers that may read it in place: see `atomic_reads.py`. Collective.

        None if there is little memory, or if a network may read it: then all of it would be allocated at once.
        """
        large = [s.nbytes > self._posting.chunk_bytes and not self._windows[1] for s in specs]
        near: list[tuple[int, ...]] = [
            self.choice.workers_by("shared_window", spec.server) if wanted else ()
            for spec, wanted in zip(specs, large, strict=True)
        ]
        more = sum(
            Address.after(0, 0, spec, 0, workers).end for spec, workers in zip(specs, near, strict=True) if workers
        )
        if not more:
            return near
        free = free_space()
        return near if self.group.agree(free is None or free // 4 > more, "min") else [()] * len(specs)

    def _add_slab(self, needed: Sequence[int]) -> None:
        free = free_space() if any(self._windows) else None
        limit = self.group.agree(UNLIMITED if free is None else free // 4 // len(self.servers), "min")
        wanted = min(self._next_slab, limit)
        self._next_slab = min(2 * self._next_slab, LARGEST_SLAB)
        self._room = [aligned(max(n, wanted)) for n in needed]
        self._used = [0] * len(self.servers)
        self._memory.slabs.append(self._allocate(self._room, "the servers' variables"))

    def _allocate(self, nbytes: Sequence[int], what: str) -> ServerMemory:
        return ServerMemory(self.group, self._comm, self.servers, nbytes, *self._windows, what, places=self._places)

    @property
    def outlive_workers(self) -> bool:
        """True if servers and other workers continue when a worker dies: not with MPI's one-sided calls."""
        return not self._windows[1]

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Continue after the death of workers with the group's new numbers of the others, by the old ones. Collective.

        Existing variables and connections stay as they are. A dead worker keeps its index, with rank -1.
        """
        self.workers, self._on_node = (
            tuple(numbers.get(rank, -1) for rank in ranks) for ranks in (self.workers, self._on_node)
        )
        self.servers = tuple(numbers[rank] for rank in self.servers)
        topology = self.group.topology
        self._places = [self._on_node.index(rank) for rank in topology.ranks_of_node(topology.node_index)]
        register_role(self.group, self.workers, self.servers)
        self._comm = topology.comm.Dup()
        for memory in self._memories():
            memory.keep()
        for transport in self.transports:
            transport.pair = replace(transport.pair, server_rank=self.servers[transport.pair.server])
        if self.server is not None:
            self.server.renumber(self.workers)

    def _memories(self) -> list[ServerMemory]:
        stagings = [staging.memory for staging in self._memory.stagings]
        return [*self._memory.slabs, *stagings, self._memory.mailbox]

    def _grow_staging(self, specs: Sequence[VariableSpec]) -> None:
        """Allocate staging for large pushes, if there is enough memory; without it they are sent in fragments. Collective."""
        now = self._memory.stagings[-1].areas if self._memory.stagings else [0] * len(self.servers)
        largest = [max([s.nbytes for s in specs if s.server == i], default=0) for i in range(len(self.servers))]
        wanted = [area_bytes(new, old, self._posting.chunk_bytes) for new, old in zip(largest, now, strict=True)]
        if not any(self._windows) or wanted == list(now):
            return
        free, nbytes = free_space(), [area * HALVES * len(self.workers) for area in wanted]
        if self.group.agree(free is None or free // 4 > sum(nbytes), "min"):
            memory = self._allocate(nbytes, "large pushes to the servers")
            memory.populate((0, memory.own.nbytes))
            self._memory.stagings.append(Staging(wanted, memory))

    def stats(self, dropped: Sequence[int] = ()) -> ParameterServerStats:
        """Return the statistics of all workers and servers so far, on every rank. Collective.

        Args:
            dropped: on a server, each worker's late steps.
        """
        self.group.barrier("ParameterServerStrategy.stats")  # all pushes that workers have flushed are counted
        server = self.server
        mine = of_worker([t.stats for t in self.transports]) if server is None else of_server(server.stats, dropped)
        with self.group.collective("ParameterServerStrategy.stats"):
            by_rank = [json.loads(text) for text in self.group.all_gather_text(json.dumps(mine))]
        return combine([address.spec for address in self.addresses], self.workers, self.servers, by_rank)

    def describe(self) -> str:
        """Return the transport of each worker and server, as text."""
        return self.choice.describe()

    def close(self) -> None:
        """Sign off workers for good, end the servers, and free windows and communicator. Collective the first time.

        Views of variables that a server still has stay valid. The group's `close()` calls it.
        """
        if self._comm is None:
            return
        with self.group.collective("ParameterServers.close"):
            for transport in self.transports:
                transport.leave(for_good=True)
            self.transports.clear()
            if self.server is not None:
                self.server.wait(None)
                self.server.close()
                self.server = None
            for memory in self._memories():
                memory.close()
        self._memory.slabs.clear()
        self._memory.stagings.clear()
        comm, self._comm = self._comm, None
        comm.Free()

    def leave(self) -> None:
        """Stop, at the end of the program."""
        self.transports.clear()
        if self.server is not None:
            self.server.stop()
        self.server = self._comm = None

    def abandon(self) -> None:
        self.transports.clear()
        if self.server is not None:
            self.server.abandon()
        self.server = self._comm = None

    def _check_open(self) -> None:
        if self._comm is None:
            raise ClosedError("ParameterServers: closed")


def _check_roles(group: ProcessGroup, workers: Sequence[int], servers: Sequence[int]) -> None:
    for name, ranks in (("workers", workers), ("servers", servers)):
        wrong = [rank for rank in ranks if not 0 <= rank < group.topology.size]
        if not ranks or wrong or len(set(ranks)) != len(ranks):
            expected = f"at least one rank below {group.topology.size}, none twice"
            raise LayoutError(explain("ParameterServers", name, expected=expected, got=list(ranks)))
    if both := sorted(set(workers) & set(servers)):
        raise LayoutError(explain("ParameterServers", "servers", expected="other ranks than the workers", got=both))


def _several_threads() -> bool:
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)
