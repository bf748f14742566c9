"""Collectives of all ranks beside those of replicas in steps: barriers, Python objects, what is started and waited for later."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..base.errors import ContextError, explain
from ..base.types import ReduceOp
from .old_calls import formerly

if TYPE_CHECKING:
    from ..cross_device.collectives import Collectives
    from ..cross_device.nonblocking import CollectiveRequest
    from .extended import StrategyExtended
    from .process_set import ProcessSet

__all__ = ["RankCollectives"]


class RankCollectives(ABC):
    """The calls of a strategy that all its ranks make together, most of them outside of steps."""

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
        self._extended.rank_collectives.barrier(timeout, name)

    @formerly()
    def broadcast_object(self, obj: Any = None, *, root: int = 0) -> Any:
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
        return self._extended.rank_collectives.broadcast_object(obj, root=root)

    def all_gather_object(self, obj: Any = None) -> list[Any]:
        """Return every rank's Python object, in order of rank. Collective over all ranks, servers too.

        For small things; mpi4py pickles them. Arrays: `gather`.

        Raises:
            TypeError: on every rank, when one cannot be pickled.
        """
        self._together("all_gather_object")
        return self._extended.rank_collectives.all_gather_object(obj)

    def all_reduce_async(self, reduce_op: ReduceOp | str, value: Any) -> CollectiveRequest:
        """Start the sum, or another reduction, of a value over all replicas, and return what waits for it. Collective.

        It is `reduce` without an axis, in two parts: `request.wait()` returns the result. All ranks start the same ones in the
        same order, and those of a node meet for it; they wait in any order. The value may be changed at once. Leaves of a nest
        that are combined in one dtype are one message, float16 and bfloat16 in float32. MPI moves it (MPI_Iallreduce), mostly
        while ranks are in calls of MPI: see "Started now, waited for later" in the reference. Arrays on GPUs go through the
        host's memory.

        It may be called outside of steps, and in the steps of ranks with one replica.

        Args:
            reduce_op: ReduceOp.SUM, MEAN, MIN, MAX or PROD, or its name.
            value: as for `reduce`; no IndexedSlices.

        Raises:
            CollectiveMismatchError: ranks start something else, or pass other shapes or dtypes.
            ContextError: in a step of a rank with several replicas.
            TypeError: what cannot be reduced; IndexedSlices; MIN or MAX of floats of more than 64 bits.

        Example:
            >>> strategy = ms.get_strategy()
            >>> request = strategy.all_reduce_async("SUM", {"loss": 2.0, "rows": 4})
            >>> squares = [n * n for n in range(3)]  # meanwhile
            >>> request.wait()["rows"]
            4

        Source: MPI 4.1, section 6.12, nonblocking collective operations.
        """
        started = self._may_start("all_reduce_async")
        return started.all_reduce_async(reduce_op, self._extended.copies_of_variables(value))

    @formerly()
    def broadcast_async(self, value: Any, *, root: int = 0) -> CollectiveRequest:
        """Start to send one replica's value to all, and return what waits for it. Collective. See `all_reduce_async`.

        Args:
            value: array or nest of arrays, of the same shapes and dtypes on every replica.
            root: the replica whose value it is.

        Raises:
            ValueError: there is no such replica.
            CollectiveMismatchError, ContextError: as for `all_reduce_async`.
        """
        started = self._may_start("broadcast_async")
        return started.broadcast_async(self._extended.copies_of_variables(value), root=root)

    def _may_start(self, name: str) -> Collectives:
        """Check that this is no call of one of several replicas in a step, nor in another strategy's."""
        from .contexts import require_one_call, stepping

        if not stepping(self):
            self._extended.require_cross(f"Strategy.{name}")
        require_one_call(self, f"Strategy.{name}")
        return self._extended.collectives

    def process_set(self, ranks: Sequence[int]) -> ProcessSet:
        """Return what some of the ranks do together, without the others. Collective over all ranks, those outside too.

        Each set has communicators and shared memory of its own: make it once, before the steps. Sets to which no rank has a
        reference are freed when the next one is made; the strategy closes the others.

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
