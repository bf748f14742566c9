"""Where a call happens: which strategy is current, and whether we are in replica, cross-replica or update context.

The strategies themselves are opaque here; floor 6 pushes frames, floors 4 and 5 read them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from .errors import ContextError

__all__ = [
    "Frame",
    "current",
    "entered",
    "get_replica_context",
    "get_strategy",
    "get_update_replica_id",
    "global_batch_size",
    "has_strategy",
    "in_cross_replica_context",
    "in_sync_on_read_context",
    "in_update_context",
    "set_default",
    "set_global",
    "set_global_batch_size",
    "variable_sync_on_read_context",
]


@dataclass(frozen=True)
class Frame:
    """One level of the context stack.

    `replica` is the ReplicaContext in replica context; `update_replica_id` is set in update context; with neither,
    the frame is a cross-replica context.
    """

    strategy: Any
    replica: Any = None
    update_replica_id: int | None = None


_stack: ContextVar[tuple[Frame, ...]] = ContextVar("mpistrat_frames", default=())
_sync_on_read: ContextVar[bool] = ContextVar("mpistrat_sync_on_read", default=False)
_global_batch: ContextVar[int | None] = ContextVar("mpistrat_global_batch", default=None)
_global_frame: Frame | None = None  # experimental_set_strategy
_default_factory: Callable[[], Frame] | None = None
_default_frame: Frame | None = None


def set_default(factory: Callable[[], Frame]) -> None:
    """Register how the frame of the default strategy is made, once and on first use. Not collective."""
    global _default_factory
    _default_factory = factory


def _default() -> Frame:
    global _default_frame
    if _default_frame is None:
        if _default_factory is None:
            raise ContextError("context.current: no default strategy was registered: import mpistrat first")
        _default_frame = _default_factory()
    return _default_frame


def current() -> Frame:
    """Return the innermost frame; outside every scope, the one of the default strategy. Not collective."""
    stack = _stack.get()
    if stack:
        return stack[-1]
    return _global_frame or _default()


def set_global(frame: Frame | None) -> None:
    """Make a frame the one that holds outside every scope; None resets. Not collective.

    Raises:
        ContextError: inside a scope.
    """
    global _global_frame
    if _stack.get():
        raise ContextError("set_strategy: expected to be called outside every scope, got a call inside one")
    _global_frame = frame


@contextlib.contextmanager
def entered(frame: Frame) -> Iterator[Frame]:
    """Enter a frame for a `with` block; exits must be last in, first out. Not collective."""
    before = _stack.get()
    inside = (*before, frame)
    _stack.set(inside)
    try:
        yield frame
    finally:
        if _stack.get() is not inside:
            _stack.set(before)
            raise ContextError("scope: expected scopes to be left in the reverse order of entering, got another order")
        _stack.set(before)


def get_strategy() -> Any:
    """Return the current strategy; outside every scope the default strategy. Not collective."""
    return current().strategy


def has_strategy() -> bool:
    """Return whether the current strategy is another one than the default. Not collective."""
    return current().strategy is not _default().strategy


def in_cross_replica_context() -> bool:
    """Return whether this is a cross-replica context: in a scope, outside `run` and `update`. Not collective."""
    frame = current()
    return frame.replica is None and frame.update_replica_id is None


def get_replica_context() -> Any:
    """Return the ReplicaContext inside `run`, None in cross-replica and update context. Not collective."""
    return current().replica


def in_update_context() -> bool:
    """Return whether this call is made by the function of `extended.update`. Not collective."""
    return current().update_replica_id is not None


def get_update_replica_id() -> int | None:
    """Return which local copy `extended.update` is updating, None outside it. Not collective."""
    return current().update_replica_id


@contextlib.contextmanager
def variable_sync_on_read_context() -> Iterator[None]:
    """Inside, an ON_READ variable read in replica context gives the aggregate. Re-entrant. Not collective by itself."""
    token = _sync_on_read.set(True)
    try:
        yield
    finally:
        _sync_on_read.reset(token)


def in_sync_on_read_context() -> bool:
    """Return whether the call is inside `variable_sync_on_read_context`. Not collective."""
    return _sync_on_read.get()


def set_global_batch_size(examples: int | None) -> None:
    """Say how many examples the current step has over all replicas; distributed datasets do. Not collective."""
    _global_batch.set(examples)


def global_batch_size() -> int | None:
    """Return the current step's true number of examples over all replicas, None where unknown. Not collective."""
    return _global_batch.get()
