"""The ranks of a process group of torch.distributed, for monitors, timelines and checkpoints."""

from __future__ import annotations

from typing import Any, final

from ...comm.process_group import ProcessGroup
from ...cross_device.collectives import Collectives

__all__ = ["GroupRanks"]


@final
class GroupRanks:
    """The ranks of a process group of torch.distributed, with the methods of a strategy that a monitor calls.

    Collectives are in order with the group's own, some of which run in a thread.

    Args:
        ranks: the group of ranks.
        text: a description of the group.

    Attributes:
        process_group: the group of ranks.
        first_worker: the first rank that takes steps.
        common_steps: True, as all ranks take each step together.
        rank, size: this rank's number in the group, and the number of ranks.
        num_replicas_in_sync: the number of ranks, each of which has a replica of the model or a shard of one.
    """

    first_worker, common_steps = 0, True

    def __init__(self, ranks: ProcessGroup, text: str) -> None:
        self.process_group, self._text = ranks, text
        self.rank, self.size = ranks.topology.rank, ranks.topology.size
        self.num_replicas_in_sync = self.size
        self._collectives = Collectives(ranks, "GroupRanks")

    @property
    def extended(self) -> GroupRanks:
        """This object, which has what monitors read of a strategy's `extended`."""
        return self

    def barrier(self, timeout: float | None = None, name: str | None = None) -> None:
        """Wait until every rank of the group arrives. Collective. See `Strategy.barrier`."""
        self.process_group.in_order("barrier", lambda: self._collectives.barrier(timeout, name))

    def broadcast_object(self, obj: Any = None, *, root: int = 0) -> Any:
        """Return one rank's Python object on all. Collective. See `Strategy.broadcast_object`."""
        return self.process_group.in_order(
            "broadcast_object", lambda: self._collectives.broadcast_object(obj, root=root)
        )

    def all_gather_object(self, obj: Any = None) -> list[Any]:
        """Return every rank's Python object, by rank. Collective. See `Strategy.all_gather_object`."""
        return self.process_group.in_order("all_gather_object", lambda: self._collectives.all_gather_object(obj))

    def __repr__(self) -> str:
        return self._text
