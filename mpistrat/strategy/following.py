"""Ranks without a program of their own: they take part in what rank 0's program does with all ranks.

Such a rank is in `Server.join()`, which makes the strategy that rank 0 makes and then does what it is told. Who tells and
obeys is above this floor: `ms.coordinator` registers it here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..cluster.rendezvous import meet
from ..comm.agree import as_told, gather_bytes, gather_text, together
from ..errors import ClusterError, explain
from .layout import PARAMETER_SERVER

if TYPE_CHECKING:
    from mpi4py import MPI

    from .strategy import Strategy

__all__ = ["Leading", "following", "lead", "learn", "register", "tell"]

_CHIEF = 0  # it makes the numbers that variables begin with, so it is the one that leads

_followers: ContextVar[tuple[int, ...] | None] = ContextVar("mpistrat_followers", default=None)
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
    """Say how ranks are led."""
    global _leading
    _leading = leading


@contextlib.contextmanager
def following(followers: tuple[int, ...]) -> Iterator[None]:
    """While the context lasts, the strategy that is made follows rank 0's, as `learn` has told."""
    token = _followers.set(followers)
    try:
        yield
    finally:
        _followers.reset(token)


def tell(comm: MPI.Intracomm, settings: dict[str, Any]) -> tuple[int, ...]:
    """Tell the ranks that follow what strategy is being made, and return who they are. Collective over `comm`.

    Those are in `learn` meanwhile.

    Args:
        comm: of all ranks of the strategy, the user's.
        settings: the arguments of the strategy that are not this rank's own.

    Raises:
        ClusterError: on every rank: rank 0 follows, too.
        TypeError: on every rank: rank 0's settings cannot be sent.
    """
    known = _followers.get()
    if known is not None:  # this rank has learned them
        return known
    return _agree(comm, False, settings)[1]


def learn(comm: MPI.Intracomm) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return rank 0's settings, and the ranks that follow. Collective over `comm`: see `tell`."""
    return _agree(comm, True, {})


def _agree(comm: MPI.Intracomm, follows: bool, settings: dict[str, Any]) -> tuple[dict[str, Any], tuple[int, ...]]:
    meet(comm, PARAMETER_SERVER.name)
    flags = np.empty(comm.size, np.int8)
    comm.Allgather(np.array([follows], np.int8), flags)
    followers = tuple(np.flatnonzero(flags).tolist())
    if not followers:
        return settings, ()
    if _CHIEF in followers or _leading is None:
        remedy = "Start the chief's program as rank 0, and join() on the others"
        expected, got = "a program on rank 0 that the others follow", "join() there, too"
        raise ClusterError(explain("Server.join", "", expected=expected, got=got, remedy=remedy))
    with together(partial(gather_text, comm), as_told):
        data = _packed(settings) if comm.rank == _CHIEF else b""
    data = gather_bytes(comm, data)[_CHIEF]
    return (_leading.unpack(data) if follows else settings), followers


def _packed(settings: dict[str, Any]) -> bytes:
    assert _leading is not None
    try:
        return _leading.pack(settings)
    except Exception as error:
        expected = "settings of the strategy that can be pickled"
        raise TypeError(explain("Server.join", "", expected=expected, got=str(error))) from error


def lead(strategy: Strategy, followers: tuple[int, ...]) -> None:
    """Begin to lead the ranks that follow, when there are any. Collective over all ranks; the last step of making it."""
    if followers and _leading is not None:
        _leading.start(strategy, followers)
