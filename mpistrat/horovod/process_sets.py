"""Process sets: subsets of the ranks, with their own collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.errors import explain
from ..cluster.topology import running_mpi

__all__ = ["RankSet", "global_process_set"]


class RankSet:
    """A subset of the ranks; `hvd.ProcessSet`. Usable after `hvd.init(process_sets=…)` or `hvd.add_process_set`.

    Args:
        ranks_or_comm: the ranks, or a communicator of mpi4py with them.

    Attributes:
        process_set_id: the number of the set; None while it is not registered.
        ranks: the ranks in ascending order.
        mpi_comm: the communicator, if one was given.
        group: the ranks as a process group of PyTorch; None on other ranks.

    Raises:
        ValueError: a rank is not a number, or twice in the list.

    Example:
        >>> even = RankSet([2, 0])
        >>> even.ranks, even.size()
        ([0, 2], None)
    """

    def __init__(self, ranks_or_comm: Sequence[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None
        self.group: Any = None
        self.own_rank: int | None = None  # this rank's number in the job, while the set is registered
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            whole, own = running_mpi("hvd.ProcessSet").COMM_WORLD.Get_group(), ranks_or_comm.Get_group()
            self.ranks = sorted(type(own).Translate_ranks(own, range(own.size), whole))
            whole.Free()
            own.Free()
            return
        found = list(ranks_or_comm)
        if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in found) or len(set(found)) < len(
            found
        ):
            expected = "a list of ranks, each once, or a communicator of mpi4py"
            raise ValueError(explain("hvd.ProcessSet", "ranks_or_comm", expected=expected, got=repr(ranks_or_comm)))
        self.ranks = sorted(found)

    def register(self, number: int, rank: int, group: Any) -> None:
        """Set the number of the set, and on its ranks their group."""
        self.process_set_id, self.own_rank, self.group = number, rank, group

    def forget(self) -> Any:
        """Mark the set as not registered. Return its group."""
        group, self.group = self.group, None
        self.process_set_id = self.own_rank = None
        return group

    def size(self) -> int | None:
        """Return the number of ranks; None while the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def included(self) -> bool | None:
        """Return True on the set's ranks; None while it is not registered."""
        return None if self.process_set_id is None else self.own_rank in self.ranks

    def rank(self) -> int | None:
        """Return this rank's number in the set; None on other ranks, and while the set is not registered.

        Collectives take roots by their number in the job, as `hvd.rank()` returns it.
        """
        return self.ranks.index(self.own_rank) if self.own_rank is not None and self.own_rank in self.ranks else None

    def __repr__(self) -> str:
        """Return number, ranks and communicator."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


#: All ranks.
global_process_set = RankSet([])
