"""Choice of the transport between a worker and a server: by location, MPI library, network probe, or setting."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from ..._util.text import named
from ...comm.process_group import ProcessGroup
from ...comm.window import WORD, RemoteWindow, has_asynchronous_progress
from ...errors import LayoutError, explain

__all__ = ["TRANSPORTS", "choose", "describe"]

TRANSPORTS = ("shared_window", "one_sided", "messages")
# Where one-sided calls between nodes were seen to finish, by MPI library and network. MPICH over UCX is not here: with TCP
# it hung where one-sided calls met messages.
KNOWN_TO_FINISH = (("Open MPI", ""), ("MPICH", "ofi"))


def choose(
    group: ProcessGroup, workers: Sequence[int], servers: Sequence[int], forced: str = ""
) -> dict[tuple[int, int], str]:
    """Return the name of the transport of each (worker, server). Collective over the group.

    Within a node it is `shared_window`. Between nodes it is `one_sided` if the MPI library is known to finish and a probe
    finds that the network reads memory without its owner's help, else `messages`.

    Args:
        group: all ranks.
        workers, servers: their ranks.
        forced: a transport to use for all, whatever else is known; "" for none.

    Raises:
        ValueError: there is no such transport.
        LayoutError: `shared_window` is asked for where ranks do not share memory.
    """
    if forced and forced not in TRANSPORTS:
        got, expected = repr(forced), f"one of {', '.join(TRANSPORTS)}"
        raise ValueError(explain("ParameterServers", "transport", expected=expected, got=got))
    node_of, shared = group.topology.node_of, group.environment.shared_memory
    together = {
        (i, j): shared and node_of[worker] == node_of[server]
        for i, worker in enumerate(workers)
        for j, server in enumerate(servers)
    }
    if forced == "shared_window" and not all(together.values()):
        worker, server = next(pair for pair, near in together.items() if not near)
        got = f"worker {worker} (rank {workers[worker]}) and server {server} (rank {servers[server]}) without"
        raise LayoutError(explain("ParameterServers", "transport", expected="memory that all share", got=got))
    if forced:
        return dict.fromkeys(together, forced)
    far = next((worker for (worker, _), near in together.items() if not near), None)
    between = "messages"
    if far is not None and group.agree(known_to_finish()):  # ranks may have been started with different settings
        reached = [rank for j, rank in enumerate(servers) if not together[far, j]]
        if _probe(group, workers[far], reached, servers):
            between = "one_sided"
    return {pair: "shared_window" if near else between for pair, near in together.items()}


def describe(choice: Mapping[tuple[int, int], str], workers: Sequence[int], servers: Sequence[int]) -> str:
    """Return the choice in words, a line for each server and transport.

    Example:
        >>> print(describe({(0, 0): "messages", (1, 0): "shared_window"}, [0, 1], [2]))
        server 0 (rank 2): messages with worker 0 (rank 0); shared_window with worker 1 (rank 1)
    """
    lines = []
    for server, rank in enumerate(servers):
        groups = []
        for name in TRANSPORTS[::-1]:
            which = [f"{w} (rank {workers[w]})" for (w, s), used in choice.items() if s == server and used == name]
            if which:
                groups.append(f"{name} with {named('worker', which)}")
        lines.append(f"server {server} (rank {rank}): {'; '.join(groups)}")
    return "\n".join(lines)


def known_to_finish() -> bool:
    """Return whether one-sided calls between nodes are known to finish with this MPI and network."""
    from mpi4py import MPI

    vendor, network = MPI.get_vendor()[0], os.environ.get("MPIR_CVAR_CH4_NETMOD", "")
    return any(vendor == name and netmod in ("", network) for name, netmod in KNOWN_TO_FINISH)


def _probe(group: ProcessGroup, prober: int, far: Sequence[int], servers: Sequence[int]) -> bool:
    """Return whether the worker `prober` reads far servers' memory while they do nothing. Collective.

    One worker stands for all: a network is of one kind.
    """
    comm, rank = group.topology.comm, group.topology.rank
    window = RemoteWindow.allocate(comm, WORD if rank in servers else 0, "the probe of one-sided calls")
    real = has_asynchronous_progress(
        comm, prober, lambda: [window.get_word(server, 0) for server in far], group.quiet()
    )
    window.close()
    return real
