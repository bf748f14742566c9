"""Statistics of all workers and servers, gathered from all ranks and printed as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from .parameter_servers import ParameterServers

__all__ = ["Exchange", "ParameterServerStats", "ServerLoad", "gather_stats"]


@final
@dataclass(frozen=True)
class Exchange:
    """What one worker exchanged about one variable.

    Attributes:
        variable: its name.
        server, worker: numbers.
        pulls, pulled_bytes: how often it was read, and how much that was.
        pushes, pushed_bytes: how often it was written or given a gradient, and how much that was.
        staleness: how often the server had written it so many times between this worker's read and the gradient.
    """

    variable: str
    server: int
    worker: int
    pulls: int
    pulled_bytes: int
    pushes: int
    pushed_bytes: int
    staleness: Mapping[int, int]

    @property
    def mean_staleness(self) -> float:
        """The mean of the histogram, 0 without gradients."""
        total = sum(self.staleness.values())
        return sum(versions * times for versions, times in self.staleness.items()) / total if total else 0.0


@final
@dataclass(frozen=True)
class ServerLoad:
    """What one server had to do.

    Attributes:
        server: its number.
        busy, idle: seconds of applying pushes, and of waiting for something to do.
        most_waiting: the largest number of parts of pushes that waited at a time.
        dropped: for each worker, how many of its steps came too late (`backup_workers`).
    """

    server: int
    busy: float
    idle: float
    most_waiting: int
    dropped: tuple[int, ...] = ()


@final
@dataclass(frozen=True)
class ParameterServerStats:
    """What workers and servers have exchanged so far; `str()` is a table.

    Attributes:
        exchanges: one for each variable and worker that exchanged anything about it.
        servers: one for each server.
    """

    exchanges: tuple[Exchange, ...]
    servers: tuple[ServerLoad, ...]

    def __str__(self) -> str:
        head = ("variable", "server", "worker", "pulls", "MB", "pushes", "MB", "staleness mean", "largest")
        rows = [
            (
                e.variable,
                str(e.server),
                str(e.worker),
                str(e.pulls),
                f"{e.pulled_bytes / 1e6:.1f}",
                str(e.pushes),
                f"{e.pushed_bytes / 1e6:.1f}",
                f"{e.mean_staleness:.2f}" if e.staleness else "",
                str(max(e.staleness)) if e.staleness else "",
            )
            for e in self.exchanges
        ]
        lines = [_table(head, rows)] if rows else []
        for load in self.servers:
            share = load.busy / max(load.busy + load.idle, 1e-9)
            late = f", {sum(load.dropped)} steps dropped" if any(load.dropped) else ""
            lines.append(f"server {load.server}: busy {share:.0%}, at most {load.most_waiting} parts waiting{late}")
        return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        first, *others = zip(row, widths, strict=True)
        lines.append("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]).rstrip())
    return "\n".join(lines)


def gather_stats(servers: ParameterServers, dropped: Sequence[int] = ()) -> ParameterServerStats:
    """Return what all workers and servers have exchanged so far, on every rank. Collective over all ranks.

    Args:
        servers: the connections.
        dropped: on a server, each worker's steps that came too late.
    """
    servers.group.barrier("ParameterServerStrategy.stats")  # what the workers have flushed by now is counted
    mine = _mine(servers) | {"dropped": list(dropped)}
    with servers.group.collective("ParameterServerStrategy.stats"):
        told = [json.loads(text) for text in servers.group.all_gather_text(json.dumps(mine))]
    return _combine([place.spec for place in servers.places], servers.workers, servers.servers, told)


def _mine(servers: ParameterServers) -> dict[str, Any]:
    if servers.server is None:
        return {
            "pulls": [list(transport.stats.pulls.items()) for transport in servers.transports],
            "pushes": [list(transport.stats.pushes.items()) for transport in servers.transports],
        }
    stats = servers.server.stats
    # Lists first: the server's thread goes on counting.
    staleness = [[(v, list(histogram.items())) for v, histogram in list(of.items())] for of in stats.staleness]
    return {"busy": stats.busy, "idle": stats.idle, "most_waiting": stats.most_waiting, "staleness": staleness}


def _combine(
    specs: Sequence[Any], workers: Sequence[int], servers: Sequence[int], told: Sequence[Mapping[str, Any]]
) -> ParameterServerStats:
    staleness = {
        (worker, variable): dict(map(tuple, histogram))
        for rank in servers
        for worker, of in enumerate(told[rank]["staleness"])
        for variable, histogram in of
    }
    exchanges = []
    for worker, rank in enumerate(workers):
        pulls = {variable: entry for of in told[rank]["pulls"] for variable, entry in of}
        pushes = {variable: entry for of in told[rank]["pushes"] for variable, entry in of}
        for variable in sorted({*pulls, *pushes}):
            spec = specs[variable]
            times, pulled = pulls.get(variable, (0, 0))
            found = staleness.get((worker, variable), {})
            pushed = pushes.get(variable, (0, 0))
            exchange = Exchange(spec.name, spec.server, worker, times, pulled, pushed[0], pushed[1], found)
            exchanges.append((variable, exchange))
    exchanges.sort(key=lambda entry: (entry[0], entry[1].worker))
    loads = [
        ServerLoad(
            number,
            told[rank]["busy"],
            told[rank]["idle"],
            told[rank]["most_waiting"],
            tuple(told[rank]["dropped"]),
        )
        for number, rank in enumerate(servers)
    ]
    return ParameterServerStats(tuple(exchange for _, exchange in exchanges), tuple(loads))
