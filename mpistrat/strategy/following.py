"""Ranks without a program of their own: they take part in what rank 0's program does with all ranks.

Such a rank is in `Server.join()`, which makes the strategy that rank 0 makes and then does what it is told. Who tells and
obeys is above this floor: `ms.coordinator` registers it here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..errors import ClusterError, explain

if TYPE_CHECKING:
    from mpi4py import MPI

    from .strategy import Strategy

__all__ = ["Leading", "agree", "following", "lead", "register"]

_CHIEF = 0  # it makes the numbers that variables begin with, so it is the one that leads

_follows: ContextVar[bool] = ContextVar("mpistrat_follows", default=False)
_leading: Leading | None = None


@final
@dataclass(frozen=True)
class Leading:
    """How ranks are led.

    Args:
        pack: returns settings as bytes.
        unpack: returns the settings of bytes.
        start: takes a new strategy and the ranks that follow; collective over all ranks.
    """

    pack: Callable[[dict[str, Any]], bytes]
    unpack: Callable[[bytes], dict[str, Any]]
    start: Callable[[Strategy, tuple[int, ...]], None]


def register(leading: Leading) -> None:
    """Say how ranks are led. Not collective."""
    global _leading
    _leading = leading


@contextlib.contextmanager
def following() -> Iterator[None]:
    """While the context lasts, a strategy that is made takes rank 0's settings. Not collective."""
    token = _follows.set(True)
    try:
        yield
    finally:
        _follows.reset(token)


def agree(comm: MPI.Intracomm, settings: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return the settings that hold on this rank, and the ranks that follow. Collective over `comm`.

    Args:
        comm: of all ranks of the strategy, the user's.
        settings: this program's, which hold where there is one; elsewhere rank 0's do.

    Raises:
        ClusterError: on every rank: rank 0 follows, too.
        TypeError: on every rank: rank 0's settings cannot be sent.
    """
    flags = np.empty(comm.size, np.int8)
    comm.Allgather(np.array([_follows.get()], np.int8), flags)
    followers = tuple(np.flatnonzero(flags).tolist())
    if not followers:
        return settings, ()
    if _CHIEF in followers or _leading is None:
        remedy = "Start the chief's program as rank 0, and join() on the others"
        expected, got = "a program on rank 0 that the others follow", "join() there, too"
        raise ClusterError(explain("Server.join", "", expected=expected, got=got, remedy=remedy))
    data, error = b"", None
    if comm.rank == _CHIEF:
        try:
            data = _leading.pack(settings)
        except Exception as problem:
            error = problem
    size = np.array([len(data) if error is None else -1], np.int64)
    comm.Bcast(size, _CHIEF)
    if size[0] < 0:
        expected, got = "settings of the strategy that can be pickled", str(error or "others, on rank 0")
        raise TypeError(explain("Server.join", "", expected=expected, got=got)) from error
    buffer = np.frombuffer(data, np.uint8).copy() if comm.rank == _CHIEF else np.empty(int(size[0]), np.uint8)
    comm.Bcast(buffer, _CHIEF)
    return (_leading.unpack(buffer.tobytes()) if _follows.get() else settings), followers


def lead(strategy: Strategy, followers: tuple[int, ...]) -> None:
    """Begin to lead the ranks that follow, when there are any. Collective over all ranks; the last step of making it."""
    if followers and _leading is not None:
        _leading.start(strategy, followers)
