"""Collectives of all ranks outside of steps: barriers, and Python objects, which mpi4py pickles."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, Any

import numpy as np

from ..comm.agree import as_told, together
from ..comm.process_group import ProcessGroup
from ..errors import explain

if TYPE_CHECKING:
    from .extended import StrategyExtended

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
        return _broadcast(self._extended.process_group, obj, root)

    def all_gather_object(self, obj: Any = None) -> list[Any]:
        """Return every rank's Python object, in order of rank. Collective over all ranks, servers too.

        For small things; mpi4py pickles them. Arrays: `gather`.

        Raises:
            TypeError: on every rank, when one cannot be pickled.
        """
        self._together("all_gather_object")
        return _all_gather(self._extended.process_group, obj)

    def _together(self, name: str, *args: Any) -> None:
        """Check a call that all ranks make outside of steps, and announce it to ranks without a program."""
        self._extended.require_cross(f"Strategy.{name}")
        self._extended.coordination.announce(name, *args)


def _broadcast(group: ProcessGroup, obj: Any, root: int) -> Any:
    function, size = "Strategy.broadcast_object", group.topology.size
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < size:
        raise ValueError(explain(function, "root", expected=f"a rank, 0 ≤ root < {size}", got=repr(root)))
    if size == 1:
        return obj
    here = group.topology.rank == root
    with group.collective("broadcast_object", detail=f"root {root}"):
        with together(group.all_gather_text, as_told):
            data = _pickled(group, obj, function) if here else b""
        length = np.array([len(data)], np.int64)
        group.broadcast(length, root)
        buffer = np.frombuffer(data, np.uint8).copy() if here else np.empty(int(length[0]), np.uint8)
        group.broadcast(buffer, root)
    return obj if here else _loads(buffer)


def _all_gather(group: ProcessGroup, obj: Any) -> list[Any]:
    if group.topology.size == 1:
        return [obj]
    with group.collective("all_gather_object"):
        with together(group.all_gather_text, as_told):
            data = _pickled(group, obj, "Strategy.all_gather_object")
        pickles = group.all_gather_bytes(data)
    mine = group.topology.rank
    return [obj if rank == mine else _loads(np.frombuffer(one, np.uint8)) for rank, one in enumerate(pickles)]


def _pickled(group: ProcessGroup, obj: Any, function: str) -> bytes:
    from mpi4py import MPI

    try:
        return bytes(MPI.pickle.dumps(obj))
    except Exception as error:
        got = f"on rank {group.topology.rank}: {type(error).__name__}: {error}"
        raise TypeError(explain(function, "obj", expected="an object that can be pickled", got=got)) from None


def _loads(buffer: np.ndarray) -> Any:
    from mpi4py import MPI

    return MPI.pickle.loads(buffer)
