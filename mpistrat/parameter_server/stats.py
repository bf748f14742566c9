"""Counters of traffic between workers and servers: plain numbers, less than a microsecond per push."""

from __future__ import annotations

from typing import final

__all__ = ["LARGEST_STALENESS", "ServerStats", "TransportStats", "count"]

LARGEST_STALENESS = 1000  # anything above counts as this

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
    """What a worker exchanged with one server.

    Attributes:
        pulls, pushes: for each variable, by number, how often, and how many bytes. Row numbers count as bytes of pushes.
    """

    __slots__ = ("pulls", "pushes")

    def __init__(self) -> None:
        self.pulls: Counts = {}
        self.pushes: Counts = {}


@final
class ServerStats:
    """What a server did.

    Attributes:
        pushes: for each worker, by variable, how many pushes came, and how many bytes.
        commits: of each worker.
        staleness: for each worker, by variable, how often a push was so many versions old when it was applied.
        busy: seconds in the handler.
        idle: seconds in which nothing came.
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
        """Count a push that was so many versions old.

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
