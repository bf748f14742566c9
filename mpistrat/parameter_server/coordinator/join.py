"""Ranks without a program of their own: they take part in what rank 0's program does with all ranks.

Such a rank is in `Server.join()`: it learns the settings of the strategy that rank 0's program makes, makes it too, and
then does what the chief commands (`cluster.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...cluster.rendezvous import wait_for_ranks
from ...comm.agree import as_told, gather_bytes, gather_text, together
from ...errors import ClusterError, explain
from ...strategy.layout import PARAMETER_SERVER
from .registry import dumps, loads

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["learn_settings", "share_settings", "with_joined"]

_CHIEF = 0  # it makes the numbers that variables begin with, so it is the one that leads

_joined: ContextVar[tuple[int, ...] | None] = ContextVar("mpistrat_joined", default=None)


@contextlib.contextmanager
def with_joined(joined: tuple[int, ...]) -> Iterator[None]:
    """While the context lasts, the strategy that is made is rank 0's, as `learn_settings` has told."""
    token = _joined.set(joined)
    try:
        yield
    finally:
        _joined.reset(token)


def share_settings(comm: MPI.Intracomm, settings: dict[str, Any]) -> tuple[int, ...]:
    """Tell the ranks that have joined what strategy is being made, and return who they are. Collective over `comm`.

    Those are in `learn_settings` meanwhile.

    Args:
        comm: of all ranks of the strategy, the user's.
        settings: the arguments of the strategy that are not this rank's own.

    Raises:
        ClusterError: on every rank: rank 0 has joined, too.
        TypeError: on every rank: rank 0's settings cannot be sent.
    """
    known = _joined.get()
    if known is not None:  # this rank has learned them
        return known
    return _exchange(comm, settings)[1]


def learn_settings(comm: MPI.Intracomm) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return rank 0's settings, and the ranks that have joined. Collective over `comm`: see `share_settings`."""
    settings, joined = _exchange(comm, None)
    assert settings is not None
    return settings, joined


def _exchange(comm: MPI.Intracomm, own: dict[str, Any] | None) -> tuple[dict[str, Any] | None, tuple[int, ...]]:
    """Return the settings, own or else rank 0's, and the ranks that have none of their own."""
    wait_for_ranks(comm, PARAMETER_SERVER.name)
    flags = np.empty(comm.size, np.int8)
    comm.Allgather(np.array([own is None], np.int8), flags)
    joined = tuple(np.flatnonzero(flags).tolist())
    if not joined:
        return own, ()
    if _CHIEF in joined:
        remedy = "Start the chief's program as rank 0, and join() on the others"
        expected, got = "a program on rank 0 that the others follow", "join() there, too"
        raise ClusterError(explain("Server.join", "", expected=expected, got=got, remedy=remedy))
    with together(partial(gather_text, comm), as_told):
        data = _packed(own) if comm.rank == _CHIEF else b""
    data = gather_bytes(comm, data)[_CHIEF]
    return (loads(data, lambda kind, key: None) if own is None else own), joined


def _packed(settings: dict[str, Any] | None) -> bytes:
    try:
        return dumps(settings, lambda thing: None)
    except Exception as error:
        expected = "settings of the strategy that can be pickled"
        raise TypeError(explain("Server.join", "", expected=expected, got=str(error))) from error
