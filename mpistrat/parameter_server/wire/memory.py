"""Memory of the servers, one segment each, and the windows through which workers access it; staging of large pushes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from ...comm.process_group import ProcessGroup
from ...comm.window import RemoteWindow, SharedWindow, Window, words_of
from ..layout import Address, MailboxLayout, aligned

__all__ = ["HALVES", "LARGEST_AREA", "ServerMemory", "SharedMemory", "Staging", "area_bytes"]


@final
class ServerMemory:
    """A segment of bytes of each server. Collective over the group.

    Args:
        group: all ranks.
        comm: a communicator of them, for windows.
        servers: the ranks of the servers.
        nbytes: the size of each server's segment.
        shared: whether any worker loads and stores.
        remote: whether any worker uses one-sided calls.
        what: what it is for, in words for errors.

    Raises:
        SharedMemoryError: on every rank, where there is no room on any node.

    Attributes:
        own: this rank's segment; empty on a worker.
        words: the same as words.
        sync: makes this rank's stores seen, and sees what others stored; to be called between the two.
        shared, remote: the windows; None where not needed.
    """

    def __init__(
        self,
        group: ProcessGroup,
        comm: Any,
        servers: Sequence[int],
        nbytes: Sequence[int],
        shared: bool,
        remote: bool,
        what: str,
    ) -> None:
        self._group, self._what = group, what
        topology = group.topology
        sizes = dict(zip(servers, nbytes, strict=True))
        mine = sizes.get(topology.rank, 0)
        self.shared: SharedWindow | None = None
        self.remote: RemoteWindow | None = None
        if shared:
            on_node = topology.ranks_of_node(topology.node_index)
            self.shared = SharedWindow(topology.intra, topology.comm, [sizes.get(r, 0) for r in on_node], what)
        if remote and self.shared is not None:
            self.remote = RemoteWindow.over(comm, self.shared.own, what)
        elif remote:
            self.remote = RemoteWindow.allocate(comm, mine, what)
        window = self.shared or self.remote
        self.own = np.zeros(mine, np.uint8) if window is None else window.own
        self.words = words_of(self.own)
        syncs = [window.sync for window in (self.shared, self.remote) if window is not None]
        self.sync: Callable[[], object] = syncs[0] if len(syncs) == 1 else lambda: [sync() for sync in syncs]

    def window(self, name: str, server_rank: int) -> tuple[Window, int]:
        """Return the window of a transport, and the rank that a server has in it."""
        if name == "shared_window" and self.shared is not None:
            return self.shared, self._group.topology.ranks_of_node(self._group.topology.node_index).index(server_rank)
        if name == "one_sided" and self.remote is not None:
            return self.remote, server_rank
        raise LookupError(f"there is no window for {name}")

    def populate(self, *ranges: tuple[int, int]) -> None:
        """Have the system find memory for ranges of each server's own segment; they differ. Collective.

        Raises:
            SharedMemoryError: on every rank, where it cannot.
        """
        self._group.node.agree_populated(all(self.find(low, high) for low, high in ranges), self._what)

    def find(self, low: int, high: int) -> bool:
        """Have the system find memory for bytes [low, high) of this rank's segment; False where it cannot."""
        window = self.shared or self.remote
        return window is None or window.populate(low, high)

    def close(self) -> None:
        """Free the memory, or leave it to the end of the process if a view of it is left. Collective."""
        self.words.release()
        self.own = np.empty(0, np.uint8)
        for window in (self.remote, self.shared):
            if window is not None:
                window.close()
        self.remote = self.shared = None
        self.sync = lambda: None


HALVES = 2  # a worker writes one while the server applies the other
LARGEST_AREA = 64 << 20  # bytes; what is larger comes in fragments


@final
@dataclass(frozen=True)
class Staging:
    """Two areas for each worker on each server.

    Attributes:
        areas: for each server the bytes of one area.
        memory: the servers' segments.
    """

    areas: Sequence[int]
    memory: ServerMemory

    def offset(self, server: int, worker: int, half: int) -> int:
        """Return where an area lies in its server's segment."""
        return (HALVES * worker + half) * self.areas[server]


def area_bytes(largest: int, now: int, chunk_bytes: int) -> int:
    """Return how large the areas of a server should be.

    Args:
        largest: bytes of the largest of the variables that come.
        now: bytes of an area so far.
        chunk_bytes: what goes with its header anyway.

    Example:
        >>> [area_bytes(largest, 3000, 1024) for largest in (500, 3000, 3001, 9000, 1 << 40)]
        [3000, 3000, 6016, 9024, 3000]
    """
    if largest <= max(now, chunk_bytes) or largest > LARGEST_AREA:
        return now
    return aligned(max(largest, min(2 * now, LARGEST_AREA)))


@final
@dataclass(frozen=True)
class SharedMemory:
    """All memory of the servers that workers access, and where what lies there. It grows with the variables.

    Attributes:
        layout: of the mailboxes.
        mailbox: one for each server.
        addresses: where the variables lie, by number.
        slabs: the memory there.
        stagings: of large pushes.
    """

    layout: MailboxLayout
    mailbox: ServerMemory
    addresses: list[Address] = field(default_factory=list)
    slabs: list[ServerMemory] = field(default_factory=list)
    stagings: list[Staging] = field(default_factory=list)
