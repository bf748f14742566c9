"""Random keys that differ between replicas."""

from __future__ import annotations

from typing import Any

import jax

from ..base import context

__all__ = ["key"]


def key(seed: int) -> Any:
    """Return a key of `jax.random` that differs between the replicas of the current strategy, and repeats with the seed.

    In a step it is this replica's, outside that of the first local one. For the same key everywhere use `jax.random.key(seed)`.

    Example:
        >>> dropout = jax.random.fold_in(ms.jax.key(0), step)  # doctest: +SKIP
    """
    frame = context.current()
    strategy = frame.strategy
    replica = strategy.extended.sync_topology.replica_offset
    if frame.replica is not None:
        replica = frame.replica.replica_id_in_sync_group
    if not strategy.extended.common_steps:  # workers number their own replicas
        workers = (strategy.worker_index or 0) // strategy.workers_in_sync
        replica += workers * strategy.num_replicas_in_sync
    return jax.random.fold_in(jax.random.key(seed), replica)
