"""The value of one replica on every rank."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from ..comm.arrays import array_module, is_gpu, on_device_of, to_host
from ..comm.dtypes import check_movable
from ..comm.process_group import ProcessGroup

__all__ = ["broadcast_value", "rank_of_replica"]


def rank_of_replica(replicas_per_rank: Sequence[int], replica: int) -> tuple[int, int]:
    """Return the rank of a global replica and its index among that rank's replicas.

    Example:
        >>> rank_of_replica([1, 2, 1], 2)
        (1, 1)
    """
    offsets = list(accumulate(replicas_per_rank, initial=0))
    rank = bisect_right(offsets, replica) - 1
    return rank, replica - offsets[rank]


def broadcast_value(group: ProcessGroup, values: Sequence[Any], root: int) -> Any:
    """Return the array of global replica `root`, a new one. Collective, inside one.

    Args:
        group: the ranks.
        values: one array for each local replica, of the same shape and dtype everywhere.
        root: a global replica.

    Raises:
        TypeError: Python objects or structured arrays.
    """
    like = values[0]
    check_movable(like.dtype, "broadcast")
    rank, index = rank_of_replica(group.topology.replicas_per_rank, root)
    if rank == group.topology.rank:
        host = np.array(to_host(values[index]), order="C")
    else:
        host = np.empty(like.shape, like.dtype)
    if group.topology.size > 1 and host.size:
        group.broadcast(host, root=rank)
    if not is_gpu(like):
        return host
    with on_device_of(like):
        return array_module(like).asarray(host)
