"""`ms.context`: the current strategy and context."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .base import context as _context
from .base.context import (
    Frame,
    cache_variable_reads,
    current,
    default_strategy,
    expect_cross,
    expect_outside_steps,
    expect_replica,
    expect_scope,
    get_replica_context,
    get_update_replica_id,
    has_strategy,
    in_cross_replica_context,
    in_sync_on_read_context,
    in_update_context,
    leave,
    number_of_cache,
    pop,
    push,
    set_default,
    set_global,
    variable_sync_on_read_context,
)
from .base.global_batch import global_batch_size, set_global_batch_size

if TYPE_CHECKING:
    from .strategy import Strategy

get_strategy: Callable[[], Strategy] = _context.get_strategy

__all__ = [
    "Frame",
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
    "global_batch_size",
    "has_strategy",
    "in_cross_replica_context",
    "in_sync_on_read_context",
    "in_update_context",
    "leave",
    "number_of_cache",
    "pop",
    "push",
    "set_default",
    "set_global",
    "set_global_batch_size",
    "variable_sync_on_read_context",
]
