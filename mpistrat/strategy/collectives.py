"""Collectives of all ranks, in addition to those of replicas in steps: barriers, Python objects, non-blocking calls."""

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
    """The calls that all ranks of a strategy make together, most of them outside of steps."""

    _extended: StrategyExtended

    def barrier(self, timeout: float | None = None, name: str | None = None) -> None:
        """Wait until every rank is here. Collective over all ranks, servers too.

        Unlike `comm.Barrier()` it names ranks that are missing, or in another collective.

        Args:
            timeout: seconds to wait; default MPISTRAT_ABORT_AFTER.
            name: shown in errors; the same on every rank.

        Raises:
            CollectiveTimeoutError: a rank did not come in time.
            CollectiveMismatchError: a rank called another collective.
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

        For small objects; mpi4py pickles them. Arrays: `extended.broadcast_to`.

        Args:
            obj: used on the root only.
            root: its rank.

        Raises:
            TypeError: on every rank: it cannot be pickled.
            ValueError: there is no such rank.
        """
        self._together("broadcast_object")
        return self._extended.rank_collectives.broadcast_object(obj, root=root)

    def all_gather_object(self, obj: Any = None) -> list[Any]:
        """Return every rank's Python object, in order of rank. Collective over all ranks, servers too.

        For small objects; mpi4py pickles them. Arrays: `gather`.

        Raises:
            TypeError: on every rank: one cannot be pickled.
        """
        self._together("all_gather_object")
        return self._extended.rank_collectives.all_gather_object(obj)

    def all_reduce_async(self, reduce_op: ReduceOp | str, value: Any) -> CollectiveRequest:
        """Start the sum, or another reduction, of a value over all replicas, and return its request. Collective.

        It is `reduce` without an axis, in two parts: `request.wait()` returns the result. All ranks start the same requests in
        the same order, and those of a node synchronize; they wait in any order. The value may be changed at once. Leaves of a
        nest in one dtype are one message, float16 and bfloat16 in float32. MPI_Iallreduce moves it, mostly during MPI calls:
        see "Started now, waited for later" in the reference. Arrays on GPUs go through the host's memory.

        Call it outside of steps, or in steps of ranks with one replica.

        Args:
            reduce_op: ReduceOp.SUM, MEAN, MIN, MAX or PROD, or its name.
            value: as for `reduce`; no IndexedSlices.

        Raises:
            CollectiveMismatchError: ranks start something else, or pass other shapes or dtypes.
            ContextError: in a step of a rank with several replicas.
            TypeError: a value that cannot be reduced; IndexedSlices; MIN or MAX of floats of more than 64 bits.

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
        """Start to send one replica's value to all, and return the request. Collective. See `all_reduce_async`.

        Args:
            value: array or nest of arrays, of the same shapes and dtypes on every replica.
            root: the replica that sends.

        Raises:
            ValueError: there is no such replica.
            CollectiveMismatchError, ContextError: as for `all_reduce_async`.
        """
        started = self._may_start("broadcast_async")
        return started.broadcast_async(self._extended.copies_of_variables(value), root=root)

    def _may_start(self, name: str) -> Collectives:
        """Return the collectives; raise if the call is of one of several replicas in a step, or in another strategy's step."""
        from .contexts import require_one_call, stepping

        if not stepping(self):
            self._extended.require_cross(f"Strategy.{name}")
        require_one_call(self, f"Strategy.{name}")
        return self._extended.collectives

    def process_set(self, ranks: Sequence[int]) -> ProcessSet:
        """Return a set of some of the ranks, with its own collectives. Collective over all ranks, also those outside.

        Each set has its own communicators and shared memory: create it once, before the steps. Sets that no rank references are
        freed when the next one is created; the strategy closes the others.

        Args:
            ranks: of the strategy, the same on every rank; numbered in ascending order in the set.

        Raises:
            ValueError: on every rank: no ranks, one twice, or one that does not exist.
            CollectiveMismatchError: on every rank: they pass other ranks.
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
        """Check a call of all ranks outside of steps, and announce it to ranks without a program."""
        self._extended.require_cross(f"Strategy.{name}")
        self._extended.coordination.announce(name, *args)
