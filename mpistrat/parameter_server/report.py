"""Statistics of workers and servers: counters, at less than 1 µs per push, and the table of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

__all__ = [
    "LARGEST_STALENESS",
    "Exchange",
    "ParameterServerStats",
    "ServerLoad",
    "ServerStats",
    "TransportStats",
    "combine",
    "count",
    "of_server",
    "of_worker",
]

LARGEST_STALENESS = 1000  # larger values count as this

Counts = dict[int, list[int]]  # times and bytes, by variable


def count(counts: Counts, variable: int, nbytes: int) -> None:
    """Count one exchange of a variable.

    Example:
        >>> counts: Counts = {}
        >>> for nbytes in (100, 20):
        ...     count(counts, 3, nbytes)
        >>> counts
        {3: [2, 120]}
    """
    entry = counts.get(variable)
    if entry is None:
        counts[variable] = [1, nbytes]
    else:
        entry[0] += 1
        entry[1] += nbytes


@final
class TransportStats:
    """A worker's statistics with one server.

    Attributes:
        pulls, pushes: for each variable, by number: count and bytes. Row numbers count as bytes of pushes.
    """

    __slots__ = ("pulls", "pushes")

    def __init__(self) -> None:
        self.pulls: Counts = {}
        self.pushes: Counts = {}


@final
class ServerStats:
    """A server's statistics.

    Attributes:
        pushes: for each worker, by variable: count and bytes of pushes.
        commits: of each worker.
        staleness: for each worker, by variable: a histogram of the age of pushes, in versions, when applied.
        busy: seconds in the handler.
        idle: seconds without work.
        most_waiting: the largest number of parts that waited at a time.
    """

    __slots__ = ("busy", "commits", "idle", "most_waiting", "pushes", "staleness")

    def __init__(self, workers: int) -> None:
        self.pushes: list[Counts] = [{} for _ in range(workers)]
        self.commits = [0] * workers
        self.staleness: list[dict[int, dict[int, int]]] = [{} for _ in range(workers)]
        self.busy = self.idle = 0.0
        self.most_waiting = 0

    def stale(self, worker: int, variable: int, versions: int) -> None:
        """Count a push of an age in versions.

        Example:
            >>> stats = ServerStats(2)
            >>> for versions in (0, 3, 0, 5000):
            ...     stats.stale(1, 7, versions)
            >>> stats.staleness
            [{}, {7: {0: 2, 3: 1, 1000: 1}}]
        """
        histogram = self.staleness[worker].get(variable)
        if histogram is None:
            histogram = self.staleness[worker][variable] = {}
        versions = min(versions, LARGEST_STALENESS)
        histogram[versions] = histogram.get(versions, 0) + 1


@final
@dataclass(frozen=True)
class Exchange:
    """The statistics of one worker and one variable.

    Attributes:
        variable: its name.
        server, worker: numbers.
        pulls, pulled_bytes: count and bytes of reads.
        pushes, pushed_bytes: count and bytes of writes and gradients.
        staleness: a histogram of the server's writes between this worker's read and its gradient.
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
    """The load of one server.

    Attributes:
        server: its number.
        busy, idle: seconds of applying pushes, and without work.
        most_waiting: the largest number of parts of pushes that waited at a time.
        dropped: for each worker, the number of its late steps (`backup_workers`).
    """

    server: int
    busy: float
    idle: float
    most_waiting: int
    dropped: tuple[int, ...] = ()


@final
@dataclass(frozen=True)
class ParameterServerStats:
    """The statistics of all workers and servers so far; `str()` is a table.

    Attributes:
        exchanges: one for each variable and worker with any exchange.
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


def of_worker(stats: Sequence[TransportStats]) -> dict[str, Any]:
    """Return a worker's statistics with each server, for JSON."""
    return {"pulls": [list(one.pulls.items()) for one in stats], "pushes": [list(one.pushes.items()) for one in stats]}


def of_server(stats: ServerStats, dropped: Sequence[int]) -> dict[str, Any]:
    """Return a server's statistics, for JSON.

    Args:
        stats: the server's.
        dropped: each worker's late steps.
    """
    # Lists first: the server's thread keeps counting.
    staleness = [[(v, list(histogram.items())) for v, histogram in list(of.items())] for of in stats.staleness]
    load = {"busy": stats.busy, "idle": stats.idle, "most_waiting": stats.most_waiting}
    return load | {"staleness": staleness, "dropped": list(dropped)}


def combine(
    specs: Sequence[Any], workers: Sequence[int], servers: Sequence[int], by_rank: Sequence[Mapping[str, Any]]
) -> ParameterServerStats:
    """Return the statistics of all ranks.

    Args:
        specs: of the variables, by number.
        workers, servers: ranks; -1 for a worker that died.
        by_rank: the results of `of_worker` or `of_server` there.
    """
    staleness = {
        (worker, variable): dict(map(tuple, histogram))
        for rank in servers
        for worker, of in enumerate(by_rank[rank]["staleness"])
        for variable, histogram in of
    }
    exchanges = []
    for worker, rank in enumerate(workers):
        if rank < 0:  # it died
            continue
        pulls = {variable: entry for of in by_rank[rank]["pulls"] for variable, entry in of}
        pushes = {variable: entry for of in by_rank[rank]["pushes"] for variable, entry in of}
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
            by_rank[rank]["busy"],
            by_rank[rank]["idle"],
            by_rank[rank]["most_waiting"],
            tuple(by_rank[rank]["dropped"]),
        )
        for number, rank in enumerate(servers)
    ]
    return ParameterServerStats(tuple(exchange for _, exchange in exchanges), tuple(loads))
