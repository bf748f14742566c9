"""The context of a call: the current strategy, and replica, cross-replica or update context.

Strategies are opaque here; `strategy/` pushes frames, lower layers read them.

| where | has_strategy | in_cross_replica_context | get_replica_context | in_update_context |
|---|---|---|---|---|
| outside every scope | False | False | the default one | False |
| `with strategy.scope():` | True | True | None | False |
| in a function that `run` calls | True | False | the replica's | False |
| in a function that `merge_call` calls | True | True | None | False |
| in a function that `extended.update` calls | True | False | None | True |
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import ContextError, explain

__all__ = [
    "OBSERVERS",
    "Frame",
    "Observer",
    "Parameter",
    "cache_variable_reads",
    "current",
    "default_strategy",
    "expect_cross",
    "expect_outside_steps",
    "expect_replica",
    "expect_scope",
    "get_replica_context",
    "get_strategy",
    "get_update_replica_id",
    "has_strategy",
    "in_cross_replica_context",
    "in_sync_on_read_context",
    "in_update_context",
    "leave",
    "number_of_cache",
    "pop",
    "push",
    "ranks_of",
    "set_default",
    "set_global",
    "variable_sync_on_read_context",
]


@dataclass(frozen=True, slots=True)
class Frame:
    """One level of the context stack.

    `replica` is the ReplicaContext in replica context; `update_replica_id` is set in update context; with neither, the frame is a
    cross-replica context.
    """

    strategy: Any
    replica: Any = None
    update_replica_id: int | None = None


# observers of steps


class Parameter(NamedTuple):
    """A parameter of the program.

    Attributes:
        name: as the program knows it.
        value: its array or tensor, which shares its memory unless there is `assign`.
        assign: sets other values.
    """

    name: str
    value: Any
    assign: Callable[[Any], Any] | None = None


class Observer:
    """The calls that an observer gets, on every rank in the same order. This one ignores them."""

    def batch(self, element: Any) -> None:
        """Handle the local part of a batch that a distributed dataset yields. Local."""

    def run(self, strategy: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Handle the arguments of a call of `strategy.run`. Local."""

    def gradients(
        self, strategy: Any, optimizer: Any, replicas: Sequence[Sequence[tuple[Any, Any]]], aggregate: bool
    ) -> None:
        """Handle the pairs of gradient and variable of each local replica, before they are summed if `aggregate`. Local."""

    def updated(self, strategy: Any, optimizer: Any, replicas: Sequence[Sequence[tuple[Any, Any]]]) -> None:
        """Handle the same pairs after the update. Collective: an error that it raises, it raises on every rank."""

    # steps of models of another library

    def begin_pass(self, strategy: Any, inputs: Mapping[str, Any] | None, parameters: Sequence[Parameter]) -> None:
        """Handle the rows of a step's pass, None if unknown, and the parameters before the step's first one. Local."""

    def gradient(self, name: str, value: Any, factor: float = 1.0, local: bool = True) -> None:
        """Handle a gradient; a local one's sum over the ranks, times the factor, is that of one process. Local."""

    def leave_out(self, operation: str, reason: str, rest: bool = False) -> None:
        """Handle an operation, and all that follows if `rest`, that cannot be equal on several ranks. Local."""

    def end_step(self, strategy: Any, parameters: Sequence[Parameter]) -> None:
        """Handle the parameters after the update of a step. Collective, as `updated`."""


OBSERVERS: list[Observer] = []  # of this process; empty unless a part such as `shadow/` adds one

Stack = tuple[Frame, ...]

_stack: ContextVar[Stack] = ContextVar("mpistrat_frames", default=())
_sync_on_read: ContextVar[bool] = ContextVar("mpistrat_sync_on_read", default=False)
_cache: ContextVar[int] = ContextVar("mpistrat_cache", default=0)
_caches = itertools.count(1)
_global_frame: Frame | None = None  # experimental_set_strategy
_default_factory: Callable[[], Frame] | None = None
_default_frame: Frame | None = None


def set_default(factory: Callable[[], Frame]) -> None:
    """Register the function that creates the default strategy's frame; it is called once, on first use."""
    global _default_factory
    _default_factory = factory


def _default() -> Frame:
    global _default_frame
    if _default_frame is None:
        assert _default_factory is not None, "mpistrat/__init__.py registers it"
        _default_frame = _default_factory()
    return _default_frame


def current() -> Frame:
    """Return the innermost frame; outside every scope, the default strategy's."""
    stack = _stack.get()
    if stack:
        return stack[-1]
    return _global_frame or _default_frame or _default()


def set_global(frame: Frame | None) -> None:
    """Set the frame that is current outside every scope; None resets.

    Raises:
        ContextError: inside a scope.
    """
    global _global_frame
    if _stack.get():
        raise ContextError("set_strategy: expected to be called outside every scope, got a call inside one")
    _global_frame = frame


def push(frame: Frame) -> Token[Stack]:
    """Enter a frame; pass the token to `pop`."""
    return _stack.set((*_stack.get(), frame))


def pop(token: Token[Stack]) -> None:
    """Leave the frame that `push` entered."""
    _stack.reset(token)


def leave(token: Token[Stack], frame: Frame) -> None:
    """Leave a frame that must be the innermost one.

    Raises:
        ContextError: it is not; then nothing changes.
    """
    stack, before = _stack.get(), token.old_value
    if len(stack) != (0 if before is Token.MISSING else len(before)) + 1 or stack[-1] is not frame:
        raise ContextError("scope: expected scopes to be left in the reverse order of entering, got another order")
    _stack.reset(token)


def _own_frame() -> Frame | None:
    """Return the innermost frame of a strategy of the program, or None: the default strategy's frame is not a scope."""
    stack = _stack.get()
    frame = stack[-1] if stack else _global_frame
    if frame is None or (_default_frame is not None and frame.strategy is _default_frame.strategy):
        return None
    return frame


def expect_cross(strategy: Any, function: str) -> None:
    """Raise unless a strategy may act for all its replicas: outside scopes, or in its own scope.

    Raises:
        ContextError: in another strategy's scope, and in replica or update context.
    """
    frame = _own_frame()
    if frame is None:
        return
    if frame.strategy is not strategy:
        expected = f"no scope of another strategy around a {type(strategy).__name__}"
        got = f"a call inside the scope of a {type(frame.strategy).__name__}"
        remedy = "Leave that scope first: strategies do not nest"
        raise ContextError(explain(function, "", expected=expected, got=got, remedy=remedy))
    if frame.replica is not None:
        remedy = "In a step use get_replica_context(): its all_reduce, all_gather, broadcast or merge_call"
        got = "a call in replica context"
        raise ContextError(explain(function, "", expected="cross-replica context", got=got, remedy=remedy))
    if frame.update_replica_id is not None:
        raise ContextError(explain(function, "", expected="cross-replica context", got="a call in update context"))


def expect_outside_steps(function: str) -> None:
    """Raise inside the functions that a strategy's `run` calls.

    Raises:
        ContextError: inside one.
    """
    frame = _own_frame()
    if frame is not None and frame.replica is not None:
        remedy = "Call it outside the step, and pass what it returns in args"
        got = "a call in replica context"
        raise ContextError(explain(function, "", expected="cross-replica context", got=got, remedy=remedy))


def expect_replica(function: str) -> Any:
    """Return the context of the replica that a call belongs to.

    Raises:
        ContextError: outside of `strategy.run`.
    """
    replica = current().replica
    if replica is None:
        expected, got = "a call in replica context", "one outside of it"
        remedy = "Call it in the function that strategy.run runs"
        raise ContextError(explain(function, "", expected=expected, got=got, remedy=remedy))
    return replica


def expect_scope(function: str, call: str) -> None:
    """Raise unless called in a strategy's scope and outside its steps.

    Args:
        function: name of the called function, for the error.
        call: the call as programs write it.

    Raises:
        ContextError: elsewhere.
    """
    if not has_strategy() or not in_cross_replica_context():
        got, remedy = "a call outside of it, or in a step", f"with strategy.scope(): {call}"
        raise ContextError(explain(function, "", expected="a strategy's scope", got=got, remedy=remedy))


def ranks_of(given: Any, function: str) -> Any:
    """Return a strategy, or the ranks of a process group of torch.distributed, through which a monitor reaches the other ranks.

    Both have `rank`, `size`, `barrier`, `broadcast_object` and `all_gather_object`.

    Args:
        given: a strategy, a process group, or None for the default: the strategy of a scope, or outside of scopes the default
            group of torch.distributed, if the program has one.
        function: name of the public caller, for errors.

    Raises:
        ContextError: a process group of several ranks of another backend.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_available():
        return current().strategy if given is None else given
    if given is None and _own_frame() is None and dist.is_initialized():
        given = dist.group.WORLD
    if not isinstance(given, dist.ProcessGroup):
        return current().strategy if given is None else given
    if hasattr(given, "members"):
        return given.members
    if given.size() == 1:
        return _default().strategy
    got = f"a process group of {given.name()}"
    remedy = 'dist.init_process_group("mpi"), or "cpu:mpistrat,cuda:nccl"'
    raise ContextError(explain(function, "strategy", expected="a strategy, or a group of MPI", got=got, remedy=remedy))


def get_strategy() -> Any:
    """Return the current strategy; outside every scope the default strategy."""
    return current().strategy


def default_strategy() -> Any:
    """Return the default strategy, None if the program has never used it."""
    return None if _default_frame is None else _default_frame.strategy


def has_strategy() -> bool:
    """Return True unless the default strategy is active."""
    return current().strategy is not _default().strategy


def in_cross_replica_context() -> bool:
    """Return True in a cross-replica context: in a scope, outside `run` and `update`."""
    frame = current()
    return frame.replica is None and frame.update_replica_id is None


def get_replica_context() -> Any:
    """Return the ReplicaContext inside `run`, the default one outside every scope, else None."""
    return current().replica


def in_update_context() -> bool:
    """Return True in the function of `extended.update`."""
    return current().update_replica_id is not None


def get_update_replica_id() -> int | None:
    """Return the local copy that `extended.update` is updating, None outside it."""
    return current().update_replica_id


@contextlib.contextmanager
def variable_sync_on_read_context() -> Iterator[None]:
    """Aggregate ON_READ variables when they are read in replica context. Re-entrant."""
    token = _sync_on_read.set(True)
    try:
        yield
    finally:
        _sync_on_read.reset(token)


@contextlib.contextmanager
def cache_variable_reads() -> Iterator[None]:
    """Read a variable from its parameter server once, and then from this rank's memory (TF: CachingVariable).

    Writes go to the server; reads inside the context do not see them, not even this rank's own. The next such context reads
    again. Rows that `sparse_read` gets before the whole variable was read are not cached. Variables in this node's memory are
    read as usual.

    Raises:
        ValueError: inside another one.

    Example:
        >>> with ms.cache_variable_reads():      # doctest: +SKIP
        ...     for batch in batches:  # all use the values that the first reads
        ...         strategy.run(step, args=(batch,))

    Source: tensorflow/python/distribute/distribute_utils.py, cache_variable_reads.
    """
    if _cache.get():
        expected, got = "one at a time", "one inside another"
        raise ValueError(explain("cache_variable_reads", "", expected=expected, got=got))
    token = _cache.set(next(_caches))
    try:
        yield
    finally:
        _cache.reset(token)


def number_of_cache() -> int:
    """Return the number of the enclosing `cache_variable_reads`; 0 outside."""
    return _cache.get()


def in_sync_on_read_context() -> bool:
    """Return True inside `variable_sync_on_read_context`."""
    return _sync_on_read.get()
