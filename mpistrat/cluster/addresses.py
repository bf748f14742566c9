"""The addresses of rank 0's machine, and one to which every node of a communicator can connect."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..base.agree import gather_text
from ..base.errors import ClusterError, explain

__all__ = ["own_addresses", "reachable_address"]

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface
_CONNECT = 2.0  # seconds in which a node of the job answers


def reachable_address(comm: Any, node: Any, port: int, function: str, remedy: str) -> str:
    """Return an address of rank 0's machine to which all nodes can connect. Collective over `comm`.

    On one node it is the loopback address.

    Args:
        comm: a communicator of mpi4py.
        node: its ranks on this node, in the same order.
        port: of a socket on which rank 0 listens at all its addresses.
        function: name of the public caller, for errors.
        remedy: what to do if there is none.

    Raises:
        ClusterError: on every rank, if there is none.
    """
    if node.size == comm.size:  # equal on all ranks: a single node has all of them
        return "127.0.0.1"
    own = " ".join(own_addresses()) if comm.rank == 0 else ""
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
    raise ClusterError(explain(function, "address", expected=expected, got=got, remedy=remedy))


def own_addresses() -> list[str]:
    """Return the addresses of this machine, those of its name first, without local ones."""
    found = [*_of_name(), *_of_interfaces()]
    return [one for one in dict.fromkeys(found) if not one.startswith(("127.", "::1", "fe80:", "0."))]


def _of_name() -> list[str]:
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        return [str(entry[4][0]) for entry in found]
    return []


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
