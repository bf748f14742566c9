"""Groups that the program has dropped without closing: they are freed when the same ranks create the next one.

Freeing a communicator is collective, but each rank's Python drops a group at another time. So each rank stores a dropped group
until all ranks have dropped it, which they compare when they create the next. Process sets do the same.
"""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol, final

from ..base.agree import Exchange, gather_text
from ..base.errors import MpistratError
from ..cluster.topology import Topology

__all__ = ["DROPPED", "Dropped", "collect_cycles", "dropped_by_all"]

_MANY = 64  # groups between two searches for reference cycles; MPICH has room for about 500


def collect_cycles(count: int) -> None:
    """Collect dropped groups in reference cycles periodically; `count` is the number of groups created or stored."""
    if count % _MANY == _MANY - 1:
        gc.collect()


def dropped_by_all(exchange: Exchange, mine: Iterable[int]) -> list[int]:
    """Return the numbers that all ranks have dropped, in order. Collective.

    Example:
        >>> dropped_by_all(lambda text: [text, "[7, 2]"], [2, 5, 7])
        [2, 7]
    """
    every = set(exchange(json.dumps(list(mine))))
    return sorted(set.intersection(*(set(json.loads(text)) for text in every)))


class _DroppedGroup(Protocol):
    topology: Topology

    @property
    def healthy(self) -> bool: ...
    def close(self) -> None: ...
    def leave(self) -> None: ...
    def abandon(self, error: MpistratError | None = None) -> None: ...


@final
class Dropped:
    """The dropped groups of this process. There is one instance, `DROPPED`.

    Attributes:
        groups: by the ranks in MPI's world, and the number among the groups of these.
    """

    def __init__(self) -> None:
        self.groups: dict[tuple[tuple[int, ...], int], _DroppedGroup] = {}
        self._made: Counter[tuple[int, ...]] = Counter()

    def number(self, comm: Any) -> tuple[tuple[int, ...], int]:
        """Free the groups of a communicator's ranks that all have dropped; return the key of a new one. Collective."""
        from mpi4py import MPI

        world, own = MPI.COMM_WORLD.Get_group(), comm.Get_group()
        ranks = tuple(MPI.Group.Translate_ranks(own, range(own.size), world))
        world.Free()
        own.Free()
        collect_cycles(self._made[ranks])
        exchange = partial(gather_text, comm)
        groups = list(self.groups.items())  # another thread may collect garbage meanwhile
        mine = [number for (key, number), group in groups if key == ranks and group.healthy]
        for number in dropped_by_all(exchange, mine):
            group = self.groups.pop((ranks, number))
            group.close()
            group.topology.close()
        # A rank that started later has created fewer.
        self._made[ranks] = 1 + max(map(int, exchange(str(self._made[ranks]))))
        return ranks, self._made[ranks]


#: Of this process.
DROPPED = Dropped()
