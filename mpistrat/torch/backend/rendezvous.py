"""Rendezvous of torch.distributed over MPI: the ranks of the world, a store on a free port of rank 0, and the variables.

Rank 0 starts a TCPStore on a port that the system chooses, and MPI sends the address, so two jobs cannot take the same port.
Every node has connected to the address.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from _mpistrat_torch import register, set_variables

from ...base.agree import as_told, gather_text, together
from ...base.errors import ClusterError, CollectiveTimeoutError, ContextError, explain
from ...cluster.addresses import reachable_address
from ...cluster.rendezvous import wait_for_ranks
from ...cluster.topology import check_comm, given_comm, running_mpi
from .exit import wait_for_gloo_at_exit
from .work import torch_error

__all__ = ["meet", "store_of", "use", "world"]

_FUNCTION = "init_process_group"
_comm: Any = None  # of `use`
_server: Any = (
    None  # rank 0's store, kept until the next rendezvous: other ranks may still use it when rank 0 has left the group
)


def use(comm: Any = None) -> None:
    """Make the ranks of a communicator the world of torch.distributed, for the next `init_process_group`.

    Local: its members call it, other ranks do not. It also registers the backends in programs where PyTorch has not, such as
    those started without a launcher.

    Args:
        comm: an intracommunicator of mpi4py; default the ranks of the job, or those of this rank's color in MPISTRAT_COLORS.

    Raises:
        ContextError: a default process group exists.
        LayoutError: `comm` is not an intracommunicator, or this rank is not a member.

    Example:
        >>> from mpi4py import MPI
        >>> use(MPI.COMM_SELF)  # each rank is a world of its own
        >>> use()
    """
    global _comm
    if dist.is_initialized():
        remedy = "Call dist.destroy_process_group() first, or use() before init_process_group"
        text = explain("mpistrat.torch.use", "", expected="no default process group", got="a group", remedy=remedy)
        raise ContextError(text)
    _comm = given_comm(comm, "mpistrat.torch.use")
    register()


def world(function: str) -> Any:
    """Return the communicator whose ranks are the world of torch.distributed; starts MPI if it is not running.

    Raises:
        LayoutError: the communicator was freed, or this rank has no color.
        ClusterError: MPI does not find the ranks that the launcher started.
    """
    return check_comm(running_mpi(function), _comm, function)


def meet(numbers: Mapping[str, str], timeout: timedelta) -> tuple[Any, int, int]:
    """Return a store that all ranks share, this rank and the number of ranks. Collective over the world.

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Args:
        numbers: RANK and WORLD_SIZE of the program or its environment; they must be MPI's.
        timeout: of the store, and of the wait for the ranks.

    Raises:
        ClusterError: on every rank, if a rank has other numbers than MPI's, or no address of rank 0 is reachable.
        CollectiveTimeoutError: a rank did not arrive in time.
    """
    global _server
    given = world(_FUNCTION)
    try:
        wait_for_ranks(given, _FUNCTION, timeout.total_seconds())
    except CollectiveTimeoutError as error:
        raise torch_error(error, "") from None
    mpi = running_mpi(_FUNCTION)
    comm = given.Dup()
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    node = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    with together(partial(gather_text, comm), as_told):
        _check_numbers(numbers, comm, mpi.COMM_WORLD)
    store, host, port = store_of(comm, node, timeout, _FUNCTION)
    _server = store if comm.rank == 0 else None
    set_variables(
        {
            "RANK": str(comm.rank),
            "WORLD_SIZE": str(comm.size),
            "LOCAL_RANK": str(node.rank),
            "LOCAL_WORLD_SIZE": str(node.size),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
    )
    wait_for_gloo_at_exit()  # the group of this store may be gloo's
    rank, size = comm.rank, comm.size
    node.Free()
    comm.Free()
    return store, rank, size


def store_of(comm: Any, node: Any, timeout: timedelta, function: str) -> tuple[Any, str, int]:
    """Return a store on a free port of rank 0's machine that some ranks share, and its address. Collective over `comm`.

    Args:
        comm: a communicator of mpi4py.
        node: its ranks on this node, in the same order.
        timeout: of the store.
        function: the public caller to name in errors.

    Raises:
        ClusterError: on every rank, if no address of rank 0 is reachable.
    """
    exchange = partial(gather_text, comm)
    store, port = None, np.zeros(1, np.int64)
    with together(exchange, as_told):
        if comm.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, comm.size, True, timeout, wait_for_workers=False)
            port[0] = store.port
    comm.Bcast(port, 0)
    remedy = "Look for a firewall between the nodes; or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    host = reachable_address(comm, node, int(port[0]), function, remedy)
    with together(exchange):
        if store is None:
            store = dist.TCPStore(host, int(port[0]), comm.size, False, timeout, wait_for_workers=False)
    return store, host, int(port[0])


def _check_numbers(numbers: Mapping[str, str], comm: Any, whole: Any) -> None:
    """Raise `ClusterError` if RANK or WORLD_SIZE are neither the world's nor COMM_WORLD's."""
    legal = {"RANK": (comm.rank, whole.rank), "WORLD_SIZE": (comm.size, whole.size)}
    for name, value in numbers.items():
        if value not in map(str, legal[name]):
            remedy = "Leave RANK and WORLD_SIZE out to use MPI's; or set MASTER_ADDR and MASTER_PORT, too, to use yours"
            got = f"{value}, from the environment or the call"
            raise ClusterError(
                explain(_FUNCTION, name, expected=f"MPI's, {legal[name][0]}", got=got, remedy=remedy, rank=comm.rank)
            )
