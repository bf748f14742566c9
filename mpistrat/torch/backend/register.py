"""Functions that torch.distributed calls; the entry point `_mpistrat_torch` registers them."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from _mpistrat_torch import TORCHRUN

from ...base.errors import ClusterError, explain
from ...cluster.world import communicator_of
from .arrival import arrive
from .rendezvous import meet, world
from .steps import note_steps

__all__ = [
    "create",
    "create_mpi",
    "make_mpi",
    "monitored_barrier",
    "refuse_torchrun",
    "rendezvous",
    "shrink_group",
    "split_group",
]

_MAKER, _WORLD = "_new_process_group_helper", "_world"  # names of torch.distributed: it has no public ones
_splits: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how many times a group was split
_asked = threading.local()  # store, name and timeout of the group of "mpi" that this thread makes


def create(opts: Any, options: Any) -> Any:
    """Create a group of "mpistrat", for `Backend.register_backend`. Collective over the members of the group.

    Args:
        opts: PyTorch's description of the group: store, rank, size, ranks, timeout, name.
        options: `pg_options` of the program.

    Raises:
        ClusterError: torchrun started this process, or MPI has fewer ranks than torch.distributed.
    """
    refuse_torchrun("mpistrat")
    comm = world("init_process_group")
    if opts.group_size > comm.size:
        got = f"{opts.group_size} in WORLD_SIZE, and {comm.size} in MPI"
        remedy = "Start the ranks with mpiexec, srun or mpistrat run, and do not set RANK and WORLD_SIZE"
        expected = "as many ranks of torch.distributed as MPI has, or fewer"
        raise ClusterError(explain("init_process_group", "mpistrat", expected=expected, got=got, remedy=remedy))
    group: Any = importlib.import_module(".group", __package__)
    return group.create(opts, options)


def make_mpi(
    theirs: Callable[..., Any],
    size: int,
    rank: int,
    ranks: Any,
    backend: Any,
    store: Any,
    name: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Make a group with a backend of "mpi", by PyTorch's function that makes every group. Collective over its members.

    PyTorch makes the backend without store, name and timeout, and its default group without a store, with which no group of
    another backend can follow.

    Args:
        theirs: PyTorch's function; the others are its arguments.

    Raises:
        ClusterError: torchrun started this process.
    """
    refuse_torchrun()
    timeout = kwargs.get("timeout")
    timeout = timeout if isinstance(timeout, timedelta) else default_pg_timeout
    if backend == "mpi" and not ranks:
        store = _store(timeout)
    _asked.store, _asked.name, _asked.timeout = store, name, timeout
    return theirs(size, rank, ranks, backend, store, name, *args, **kwargs)


def create_mpi(ranks: Sequence[int]) -> Any:
    """Create a group of "mpi", instead of `ProcessGroupMPI.create`. Collective over the members of the group.

    Args:
        ranks: the members, numbered as in the default group; none for the default group.

    Raises:
        CollectiveTimeoutError: a rank did not arrive in time.
    """
    group: Any = importlib.import_module(".group", __package__)
    name, timeout = str(_asked.name), _asked.timeout
    store = dist.PrefixStore(f"mpi {name}", _asked.store)
    whole = world("init_process_group")
    note_steps()
    members = list(ranks) or list(range(whole.size))
    if len(members) > 1:
        arrive(store, name, members, members.index(whole.rank), whole.rank, timeout)
    if not ranks:
        return group.over(whole, store, timeout, name)
    comm = communicator_of(whole, ranks, name)
    try:
        return group.over(comm, store, timeout, name)
    finally:
        comm.Free()


def _store(timeout: timedelta) -> Any:
    """Return a store of all ranks, for the default group of "mpi". Collective over the world."""
    # PyTorch's description of a group, and dist.get_backend_config, read the devices of its backend here.
    dist.Backend.backend_capability["mpi"] = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    module = sys.modules["torch.distributed.rendezvous"]
    found, _, _ = next(module.rendezvous("env://", timeout=timeout))
    return found


def rendezvous(numbers: Mapping[str, str], **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and size as PyTorch's handler of env:// does. Collective over the world.

    Args:
        numbers: RANK and WORLD_SIZE, if the program or its environment sets them.
        **kwargs: those of PyTorch's handlers; `timeout` is used.
    """
    yield meet(numbers, kwargs.get("timeout", default_pg_timeout))


def monitored_barrier(
    theirs: Callable[..., Any], group: Any = None, timeout: Any = None, wait_all_ranks: bool = False
) -> Any:
    """Wait until all ranks of a group arrive, for `dist.monitored_barrier`, which PyTorch only has for gloo. Collective.

    Args:
        theirs: PyTorch's function, for groups of other backends.
        group, timeout, wait_all_ranks: those of PyTorch's function.

    Raises:
        RuntimeError: a rank did not arrive; rank 0 names it.
    """
    own = _own_group(group)
    if own is None:
        return theirs(group, timeout, wait_all_ranks)
    return own.monitored_barrier(timeout, wait_all_ranks)


def split_group(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Split a group, for `dist.split_group`, which PyTorch only has for some of its own backends. Collective.

    The new groups have the parent's backend. Their ranks are numbered in the order of their list.

    Args:
        theirs: PyTorch's function, for groups of other backends; the others are its arguments.

    Raises:
        ValueError: wrong lists of ranks, or another backend.
        CollectiveMismatchError: the lists differ between ranks.
    """
    given = inspect.signature(theirs).bind(*args, **kwargs).arguments
    own = _own_group(given.get("parent_pg"))
    if own is None:
        return theirs(*args, **kwargs)
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    known = getattr(c10d, _WORLD)
    backend = known.pg_map[own][0]
    if given.get("backend", backend) not in (None, backend):
        expected, got = f"{backend!r}, the one of the group, or None", repr(given["backend"])
        raise ValueError(explain("dist.split_group", "backend", expected=expected, got=got))
    lists = own.agree_on_split(given.get("split_ranks"))
    times = _splits[own] = _splits.get(own, 0) + 1
    found = [(index, ranks) for index, ranks in enumerate(lists) if own.rank() in ranks]
    if not found:
        return dist.GroupMember.NON_GROUP_MEMBER
    index, mine = found[0]
    ranks = [dist.get_global_rank(own, rank) for rank in mine]
    group, _ = getattr(c10d, _MAKER)(
        len(mine),
        mine.index(own.rank()),
        ranks,
        backend,
        known.pg_map[dist.group.WORLD][1],
        # A name that the members know: dist.new_group would count the groups of each of them.
        f"{own.group_name}:split:{times}:{index}",
        given.get("pg_options"),
        timeout=given.get("timeout") or default_pg_timeout,
        group_desc=given.get("group_desc"),
    )
    known.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


def shrink_group(theirs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Refuse to leave ranks out of a group of this package, for `dist.shrink_group`, which PyTorch has for groups of NCCL.

    Args:
        theirs: PyTorch's function, for groups of other backends; the others are its arguments.

    Raises:
        NotImplementedError: the group is one of this package.
    """
    own = _own_group(inspect.signature(theirs).bind(*args, **kwargs).arguments.get("group"))
    if own is None:
        return theirs(*args, **kwargs)
    remedy = (
        "Call dist.split_group with the ranks that stay. After a rank has died, restart the ranks: mpistrat run --restarts,"
        " or continue without it: ms.survive"
    )
    expected, got = "a group of NCCL", f"one of {dist.get_backend(own)!r}"
    raise NotImplementedError(explain("dist.shrink_group", "group", expected=expected, got=got, remedy=remedy))


def _shutdown_backend(theirs: Callable[..., Any], pg: Any) -> Any:
    """Shut down a group, for `dist.destroy_process_group` of older versions of PyTorch, which do so with NCCL's only."""
    own = _own_group(pg)
    return theirs(pg) if own is None else own.shutdown()


def _maybe_attach_flight_recorder(theirs: Callable[..., Any], pg: Any, *args: Any) -> None:
    """Record a group by PyTorch's flight recorder, which cannot record groups of Python, from PyTorch 2.15 on."""
    if _own_group(pg) is None:
        theirs(pg, *args)


def _own_group(group: Any) -> Any:
    """Return a group, by default the default group, if it is one of this package; else None."""
    module: Any = sys.modules.get(f"{__package__}.group")
    found = dist.group.WORLD if group is None else group
    return found if module is not None and isinstance(found, module.MpiProcessGroup) else None


def refuse_torchrun(name: str = "mpi") -> None:
    """Raise `ClusterError` if torchrun started this process."""
    if TORCHRUN not in os.environ:
        return
    remedy = (
        "torchrun starts processes without MPI. Start them with mpiexec, srun, or torchrun's own options under"
        ' mpistrat run --torchrun; or use "gloo" or "nccl"'
    )
    expected, got = "ranks that a launcher of MPI started", f"a process of torchrun ({TORCHRUN} is set)"
    raise ClusterError(explain("init_process_group", repr(name), expected=expected, got=got, remedy=remedy))
