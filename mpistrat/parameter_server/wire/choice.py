"""Choice of the transport between a worker and a server: by location, MPI library, network probe, or setting."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import final

from ...base.errors import LayoutError, explain
from ...base.text import plural, ranges
from ...comm.process_group import ProcessGroup
from ...comm.window import WORD, RemoteWindow, has_asynchronous_progress

__all__ = ["TRANSPORTS", "Choice", "choose"]

TRANSPORTS = ("shared_window", "one_sided", "messages")
# MPI libraries and networks with which one-sided calls between nodes were seen to finish. Not MPICH over UCX: with TCP it
# hung when one-sided calls and messages were mixed.
KNOWN_TO_FINISH = (("Open MPI", ""), ("MPICH", "ofi"))


@final
class Choice:
    """The transport of each worker and server: one within a node, one between nodes.

    Args:
        nodes: the node of each rank.
        workers, servers: their ranks.
        within, between: the transports; equal if nodes make no difference.

    Example:
        >>> choice = Choice([0, 0, 1, 1], [0, 1, 2], [3], "shared_window", "messages")
        >>> choice.of(0, 0), choice.workers_by("shared_window", 0)
        ('messages', (2,))
        >>> print(choice.describe())
        server 0 (rank 3): shared_window with worker 2 (rank 2); messages with the others
    """

    def __init__(
        self, nodes: Sequence[int], workers: Sequence[int], servers: Sequence[int], within: str, between: str
    ) -> None:
        self._nodes, self._workers, self._servers = nodes, workers, servers
        self._within, self._between = within, between
        self._near: dict[int, list[int]] = {}  # the workers of each node
        for worker, rank in enumerate(workers):
            self._near.setdefault(nodes[rank], []).append(worker)

    def of(self, worker: int, server: int) -> str:
        """Return the transport of a worker and a server."""
        together = self._nodes[self._workers[worker]] == self._nodes[self._servers[server]]
        return self._within if together else self._between

    def workers_by(self, transport: str, server: int) -> tuple[int, ...]:
        """Return the workers that use a transport with a server, in ascending order."""
        if self._within == self._between:
            return tuple(range(len(self._workers))) if transport == self._within else ()
        near = self._near.get(self._nodes[self._servers[server]], [])
        if transport == self._within:
            return tuple(near)
        beside = set(near)
        return tuple(w for w in range(len(self._workers)) if w not in beside) if transport == self._between else ()

    def used(self) -> set[str]:
        """Return the transports that any worker and server use."""
        homes = {self._nodes[rank] for rank in self._servers}
        found = {self._within} if homes & self._near.keys() else set()
        return found | ({self._between} if len(homes | self._near.keys()) > 1 else set())

    def describe(self) -> str:
        """Return the choice as text, a line for the servers of each node, or of all nodes without workers."""
        groups: dict[str, list[int]] = {}
        everybody = _ranks("worker", range(len(self._workers)), self._workers)
        for server, rank in enumerate(self._servers):
            near = self._near.get(self._nodes[rank], [])
            if self._within == self._between or not near:
                text = f"{self._between} with {everybody}"
            else:
                text = f"{self._within} with {_ranks('worker', near, self._workers)}"
                if len(near) < len(self._workers):
                    text += f"; {self._between} with the others"
            groups.setdefault(text, []).append(server)
        return "\n".join(f"{_ranks('server', group, self._servers)}: {text}" for text, group in groups.items())


def _ranks(noun: str, indices: Sequence[int], ranks: Sequence[int]) -> str:
    return f"{_runs(noun, indices)} ({_runs('rank', [ranks[i] for i in indices])})"


def _runs(noun: str, numbers: Sequence[int]) -> str:
    return f"{plural(len(numbers), noun)} {', '.join(ranges(numbers))}"


def choose(group: ProcessGroup, workers: Sequence[int], servers: Sequence[int], forced: str = "") -> Choice:
    """Return the transport of each worker and server. Collective over the group.

    Within a node it is `shared_window`. Between nodes it is `one_sided` if the MPI library is known to finish and a probe finds
    that the network reads memory without its owner's help, else `messages`.

    Args:
        group: all ranks.
        workers, servers: their ranks.
        forced: a transport to use for all; "" for none.

    Raises:
        ValueError: there is no such transport.
        LayoutError: `shared_window` is forced and ranks do not share memory.
    """
    if forced and forced not in TRANSPORTS:
        got, expected = repr(forced), f"one of {', '.join(TRANSPORTS)}"
        raise ValueError(explain("ParameterServers", "transport", expected=expected, got=got))
    nodes, shared = group.topology.node_of, group.environment.shared_memory
    homes = {nodes[rank] for rank in servers}
    # The first worker that does not share memory with all servers.
    far = next((w for w, rank in enumerate(workers) if not shared or homes != {nodes[rank]}), None)
    reached = [] if far is None else [s for s in servers if not shared or nodes[s] != nodes[workers[far]]]
    if forced == "shared_window" and far is not None:
        server = servers.index(reached[0])
        got = f"worker {far} (rank {workers[far]}) and server {server} (rank {reached[0]}) without"
        raise LayoutError(explain("ParameterServers", "transport", expected="memory that all share", got=got))
    if forced:
        return Choice(nodes, workers, servers, forced, forced)
    # Ranks may have different settings.
    known = far is not None and group.agree(known_to_finish())
    between = "one_sided" if known and _probe(group, workers[far or 0], reached, servers) else "messages"
    return Choice(nodes, workers, servers, "shared_window" if shared else between, between)


def known_to_finish() -> bool:
    """Return whether one-sided calls between nodes are known to finish with this MPI and network."""
    from mpi4py import MPI

    vendor, network = MPI.get_vendor()[0], os.environ.get("MPIR_CVAR_CH4_NETMOD", "")
    return any(vendor == name and netmod in ("", network) for name, netmod in KNOWN_TO_FINISH)


def _probe(group: ProcessGroup, prober: int, far: Sequence[int], servers: Sequence[int]) -> bool:
    """Return whether the worker `prober` reads far servers' memory while they are passive. Collective.

    One worker is tested for all: the network is assumed to be uniform.
    """
    comm, rank = group.topology.comm, group.topology.rank
    window = RemoteWindow.allocate(comm, WORD if rank in servers else 0, "the probe of one-sided calls")
    real = has_asynchronous_progress(
        comm, prober, lambda: [window.get_word(server, 0) for server in far], group.quiet()
    )
    window.close()
    return real
