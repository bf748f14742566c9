"""Collectives of all ranks outside of steps: barriers, and Python objects, which mpi4py pickles."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ContextError, explain

if TYPE_CHECKING:
    from .extended import StrategyExtended
    from .process_set import ProcessSet

__all__ = ["RankCollectives"]


class RankCollectives(ABC):
    """The calls of a strategy that all its ranks make together, independent of steps."""

    _extended: StrategyExtended

    def barrier(self, timeout: float | None = None, name: str | None = None) -> None:
        """Wait until every rank is here. Collective over all ranks, servers too.

        Unlike `comm.Barrier()` it names the ranks that do not come, and those that come to another collective.

        Args:
            timeout: seconds to wait; default MPISTRAT_ABORT_AFTER.
            name: shown in errors; the same on every rank.

        Raises:
            CollectiveTimeoutError: a rank did not come in time.
            CollectiveMismatchError: a rank came to something else.
            PeerExitError: a rank left the program.
            ValueError: a timeout that is not positive.

        Example:
            >>> ms.get_strategy().barrier(name="shards are written")
        """
        self._together("barrier", None, name or "")
        if timeout is not None and not timeout > 0:
            raise ValueError(explain("Strategy.barrier", "timeout", expected="> 0 seconds", got=repr(timeout)))
        self._extended.process_group.barrier(name or "", timeout)

    def broadcast_object(self, obj: Any = None, root: int = 0) -> Any:
        """Return the root's Python object on every rank. Collective over all ranks, servers too.

        For small things; mpi4py pickles them. Arrays: `extended.broadcast_to`.

        Args:
            obj: the root's counts.
            root: its rank.

        Raises:
            TypeError: on every rank, when it cannot be pickled.
            ValueError: there is no such rank.
        """
        self._together("broadcast_object")
        from .objects import broadcast_object

        return broadcast_object(self._extended.process_group, obj, root)

    def all_gather_object(self, obj: Any = None) -> list[Any]:
        """Return every rank's Python object, in order of rank. Collective over all ranks, servers too.

        For small things; mpi4py pickles them. Arrays: `gather`.

        Raises:
            TypeError: on every rank, when one cannot be pickled.
        """
        self._together("all_gather_object")
        from .objects import all_gather_object

        return all_gather_object(self._extended.process_group, obj)

    def process_set(self, ranks: Sequence[int]) -> ProcessSet:
        """Return what some of the ranks do together, without the others. Collective over all ranks, those outside too.

        Each set has communicators and shared memory of its own: make it once, before the steps. The strategy closes it.

        Args:
            ranks: of the strategy, the same on every rank; numbered in ascending order in the set.

        Raises:
            ValueError: on every rank, for no ranks, one twice, or one that there is not.
            CollectiveMismatchError: on every rank, when they name other ranks.
            ContextError: in a step; or a coordinator runs here, which the other ranks serve.

        Example:
            >>> even = strategy.process_set(range(0, strategy.size, 2))  # doctest: +SKIP
            >>> if even.included:  # doctest: +SKIP
            ...     total = even.all_reduce("SUM", x)
        """
        self._extended.require_cross("Strategy.process_set")
        if self._extended.coordination.leads:
            expected, got = "ranks that run the program themselves", "a coordinator, which the others serve"
            raise ContextError(explain("Strategy.process_set", "", expected=expected, got=got))
        from .process_set import make_process_set

        return make_process_set(self, ranks)

    def _together(self, name: str, *args: Any) -> None:
        """Check a call that all ranks make outside of steps, and announce it to ranks without a program."""
        self._extended.require_cross(f"Strategy.{name}")
        self._extended.coordination.announce(name, *args)
