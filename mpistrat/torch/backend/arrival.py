"""Arrival of a group's ranks, in PyTorch's store: within MPI, waiting for an absent rank would not end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from ...base.errors import CollectiveTimeoutError
from ...base.text import named
from ...comm.monitor.rank_monitor import user_line
from .work import torch_error

__all__ = ["arrive"]

_SHOWN_RANKS = 20
_ALL = "all"


def arrive(store: Any, name: str, members: Sequence[int], index: int, value: int, timeout: timedelta) -> list[int]:
    """Return the values of all ranks of a new group, by rank, after all have arrived. Collective over these.

    Ranks agree on whether all arrived in time: either all return or all raise, also late ones.

    Args:
        store: the store of the group.
        name: the name of the group.
        members: its ranks, by their numbers in the default group.
        index: the index of this rank among them.
        value: this rank's value.
        timeout: how long it waits for the others.

    Raises:
        CollectiveTimeoutError: on every rank, if one did not arrive in time.
    """
    start = f"mpistrat/{name}/{store.add(f'mpistrat/{name}/turn of {index}', 1)}"  # a store may serve several times
    keys = [f"{start}/{each}" for each in range(len(members))]
    store.set(keys[index], str(value))
    found = _ALL
    try:
        store.wait(keys, timeout)
    except RuntimeError:
        missing = [member for member, key in zip(members, keys, strict=True) if not store.check([key])]
        if missing:
            late = named("rank", missing, _SHOWN_RANKS)
            found = f"rank {members[index]} waited {timeout.total_seconds():g} s for {late}"
    found = store.compare_set(start, "", found).decode()  # the first rank decides
    if found == _ALL:
        return [int(text) for text in store.multi_get(keys)]
    remedy = "All ranks of a group make it: look on that rank for an exit, an `if` or long work before the call"
    text = f"a process group of {named('rank', members, _SHOWN_RANKS)}: {found}. {remedy}"
    raise torch_error(CollectiveTimeoutError(text), user_line(threading.get_ident()))
