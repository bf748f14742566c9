"""Forked children of a rank: they share its communicators and memory, and their calls would count as the rank's.

So calls that act for a rank raise ContextError in them. Data and variables may be read. Calls do not check for a fork: objects
that must refuse are replaced in the child when it starts.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn, Protocol, final

from ..base.errors import ContextError, explain
from .start import running

__all__ = ["ParentsOnly", "is_child", "refusal", "refuse_in_children"]

_child = False


class _OfParent(Protocol):
    def refuse_in_child(self) -> None: ...


_of_parent: weakref.WeakSet[Any] = weakref.WeakSet()


def is_child() -> bool:
    """Return True if this process was forked from one of several ranks."""
    return _child


def refuse_in_children(thing: _OfParent) -> None:
    """Call an object's `refuse_in_child` in each process that this one forks. The object is not kept alive."""
    _of_parent.add(thing)


def refusal(function: str = "") -> ContextError:
    """Return the error of a call that only the rank itself may make. `function` is the call, if no other text names it."""
    expected, got = "a call by a rank", f"one by process {os.getpid()}, which a rank has forked"
    remedy = "A forked process, such as a worker of a DataLoader, may read data and variables only: call it in the rank itself"
    return ContextError(explain(function, "", expected=expected, got=got, remedy=remedy).removeprefix(": "))


@final
class ParentsOnly:
    """A stand-in for a rank's communicator, window or lock in a child: using it raises ContextError."""

    def __init__(self, what: str) -> None:
        self._what = what

    def _refuse(self) -> NoReturn:
        raise refusal(self._what)

    def __getattr__(self, name: str) -> Any:
        self._refuse()

    def __enter__(self) -> None:
        self._refuse()

    def __exit__(self, *exc_info: object) -> None: ...


def _begin_child() -> None:
    global _child
    mpi = running()
    if mpi is not None:
        _child = mpi.COMM_WORLD.size > 1  # the child of a single process may have its own strategies
        for thing in list(_of_parent):
            thing.refuse_in_child()


os.register_at_fork(after_in_child=_begin_child)
