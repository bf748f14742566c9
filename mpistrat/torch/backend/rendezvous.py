"""Rendezvous of torch.distributed over MPI: the ranks of the world, a store on a free port of rank 0, and the variables.

Rank 0 starts a TCPStore on a port that the system chooses, and MPI sends its address to the others: no two jobs can take the
same port. On several nodes an address is used that every node has connected to.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

from _mpistrat_torch import register, set_variables

from ...base.agree import as_told, gather_text, together
from ...base.errors import ClusterError, ContextError, explain
from ...cluster.rendezvous import wait_for_ranks
from ...cluster.topology import check_comm, given_comm, running_mpi

__all__ = ["meet", "use", "world"]

_FUNCTION = "init_process_group"
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface
_CONNECT = 2.0  # seconds in which a node of the job answers
_comm: Any = None  # given to `use`
_server: Any = (
    None  # rank 0's store, kept until the next rendezvous: other ranks may still use it when rank 0 has left the group
)


def use(comm: Any = None) -> None:
    """Make the ranks of a communicator the world of torch.distributed, for the next `init_process_group`.

    Local: the members call it, and other ranks do not. It also registers the backends in programs in which PyTorch has not
    done so, such as those that no launcher started.

    Args:
        comm: an intracommunicator of mpi4py; default the ranks of the job, or those of this rank's color in MPISTRAT_COLORS.

    Raises:
        ContextError: a default process group exists.
        LayoutError: `comm` is no intracommunicator, or this rank is not a member.

    Example:
        >>> from mpi4py import MPI
        >>> use(MPI.COMM_SELF)  # each rank is a world of its own
        >>> use()
    """
    global _comm
    if dist.is_initialized():
        remedy = "Call dist.destroy_process_group() first, or use() before init_process_group"
        text = explain("mpistrat.torch.use", "", expected="no default process group", got="one", remedy=remedy)
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
        numbers: RANK and WORLD_SIZE as the program or its environment gives them; they must be MPI's.
        timeout: of the store.

    Raises:
        ClusterError: on every rank, if a rank has other numbers than MPI's, or no address of rank 0 is reachable.
        CollectiveTimeoutError: a rank did not come within MPISTRAT_ABORT_AFTER seconds.
    """
    global _server
    given = world(_FUNCTION)
    wait_for_ranks(given, _FUNCTION)
    mpi = running_mpi(_FUNCTION)
    comm = given.Dup()
    comm.Set_errhandler(mpi.ERRORS_RETURN)
    node = comm.Split_type(mpi.COMM_TYPE_SHARED, key=comm.rank)
    exchange = partial(gather_text, comm)
    with together(exchange, as_told):
        _check_numbers(numbers, comm, mpi.COMM_WORLD)
    store, port = None, np.zeros(1, np.int64)
    with together(exchange, as_told):
        if comm.rank == 0:
            store = dist.TCPStore("127.0.0.1", 0, comm.size, True, timeout, wait_for_workers=False)
            port[0] = store.port
    comm.Bcast(port, 0)
    _server = store
    host = _address(comm, node, int(port[0]), exchange)
    with together(exchange):
        if store is None:
            store = dist.TCPStore(host, int(port[0]), comm.size, False, timeout, wait_for_workers=False)
    set_variables(
        {
            "RANK": str(comm.rank),
            "WORLD_SIZE": str(comm.size),
            "LOCAL_RANK": str(node.rank),
            "LOCAL_WORLD_SIZE": str(node.size),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port[0]),
        }
    )
    rank, size = comm.rank, comm.size
    node.Free()
    comm.Free()
    return store, rank, size


def _check_numbers(numbers: Mapping[str, str], comm: Any, whole: Any) -> None:
    """Raise `ClusterError` if RANK or WORLD_SIZE contradict MPI: its numbers in the world, or those in COMM_WORLD."""
    legal = {"RANK": (comm.rank, whole.rank), "WORLD_SIZE": (comm.size, whole.size)}
    for name, value in numbers.items():
        if value not in map(str, legal[name]):
            remedy = "Leave RANK and WORLD_SIZE out to use MPI's; or set MASTER_ADDR and MASTER_PORT, too, to use yours"
            got = f"{value}, from the environment or the call"
            raise ClusterError(
                explain(_FUNCTION, name, expected=f"MPI's, {legal[name][0]}", got=got, remedy=remedy, rank=comm.rank)
            )


def _address(comm: Any, node: Any, port: int, exchange: Any) -> str:
    """Return an address of rank 0's machine that all nodes can connect to. Collective over `comm`."""
    if node.size == comm.size:  # the same on all ranks: the only node has all of them
        return "127.0.0.1"
    own = " ".join(_own_addresses()) if comm.rank == 0 else ""
    addresses = gather_text(comm, own)[0].split()
    reached = np.array([node.rank > 0 or _connects(address, port) for address in addresses], np.int64)
    counts = np.zeros_like(reached)
    if addresses:
        comm.Allreduce(reached, counts)
    for address, count in zip(addresses, counts.tolist(), strict=True):
        if count == comm.size:
            return address
    expected = "an address of rank 0's machine that every node can connect to"
    got = f"{', '.join(addresses) or 'none'}, on port {port}"
    remedy = "Look for a firewall between the nodes; or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    raise ClusterError(explain(_FUNCTION, "address", expected=expected, got=got, remedy=remedy))


def _own_addresses() -> list[str]:
    """Return the addresses of this machine, those of its name first, without those that only it can use."""
    found = list[str]()
    with contextlib.suppress(OSError):
        found += [str(entry[4][0]) for entry in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    found += _of_interfaces()
    return [one for one in dict.fromkeys(found) if not one.startswith(("127.", "::1", "fe80:", "0."))]


def _of_interfaces() -> Iterator[str]:
    """Yield the IPv4 address of each network interface."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                request = struct.pack("256s", name.encode()[:15])
                yield socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), _CONNECT).close()
    except OSError:
        return False
    return True
