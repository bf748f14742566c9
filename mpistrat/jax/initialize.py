"""initialize: jax.distributed over the ranks of a communicator, for arrays divided over all ranks."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..base.agree import as_told, gather_text, together
from ..base.errors import ClusterError, ContextError, DeviceError, explain
from ..cluster.addresses import own_addresses, reachable_address
from ..cluster.launcher_variables import launched_size
from ..cluster.topology import check_comm, own_comm, room_for_communicators, running_mpi

__all__ = ["initialize"]

_FUNCTION = "ms.jax.initialize"


def initialize(comm: Any = None) -> None:
    """Start jax.distributed over the ranks of a communicator. Collective over `comm`; starts MPI if it is not running.

    Call it before JAX computes. Then `jax.devices()` has the devices of all ranks, and jitted functions on them communicate
    by JAX's own collectives: NCCL on GPUs, gloo on CPUs unless `jax_cpu_collectives_implementation` names another. Process
    `i` of JAX is rank `i` of `comm`.

    If the ranks of a node see the same GPUs, each takes one, by its number on the node. The only rank of a node takes all it
    sees, and so does a rank that sees only one in CUDA_VISIBLE_DEVICES. JAX_LOCAL_DEVICE_IDS overrides this.

    Args:
        comm: an intracommunicator of mpi4py; default the ranks of the job, or those of this rank's color in MPISTRAT_COLORS.

    Raises:
        ContextError: on every rank, if a rank has called it before, or has computed, created an array or listed devices with
            JAX.
        ClusterError: no launcher started this process; MPI does not find the ranks that the launcher started; on every rank,
            if no address of rank 0 is reachable from all nodes.
        DeviceError: on every rank, if a node has fewer GPUs than ranks.
        LayoutError: `comm` is not an intracommunicator, or this rank is not a member.
        CollectiveMismatchError: on every rank, if other ranks create a strategy instead.
        CollectiveTimeoutError: a rank did not arrive within MPISTRAT_ABORT_AFTER seconds.

    Example:
        >>> ms.jax.initialize()  # doctest: +SKIP
        >>> mesh = jax.make_mesh((jax.process_count(),), ("ranks",))  # doctest: +SKIP
    """
    mpi = running_mpi(_FUNCTION)
    given = check_comm(mpi, comm, _FUNCTION)
    if comm is None and given.size == 1 and launched_size() is None:
        expected, got = "ranks that a launcher of MPI started", "a process that was started without one"
        remedy = "Start the program with mpiexec, srun or mpistrat run, as in: mpiexec -n 2 python train.py"
        raise ClusterError(explain(_FUNCTION, "", expected=expected, got=got, remedy=remedy))
    own = own_comm(mpi, given, _FUNCTION)
    with room_for_communicators(_FUNCTION):
        node = own.Split_type(mpi.COMM_TYPE_SHARED, key=own.rank)
    try:
        _start(own, node)
    finally:
        node.Free()
        own.Free()


def _start(comm: Any, node: Any) -> None:
    """Check the ranks, and connect them to a service of rank 0. Collective over `comm`."""
    with together(partial(gather_text, comm), as_told):
        _check_start(comm.rank)
        devices = _local_devices(_visible_gpus(), node.rank, node.size, comm.rank)
        if jax.config.jax_cpu_collectives_implementation is None:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        if node.size < comm.size:
            _check_name(comm.rank)
    with _free_port(comm, node) as (host, port):
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        with _without_proxies(), _same_sigterm():
            jax.distributed.initialize(
                address, comm.size, comm.rank, local_device_ids=devices, coordinator_bind_address=address
            )


def _check_start(rank: int) -> None:
    """Raise `ContextError` if jax.distributed can no longer start in this process."""
    if jax.distributed.is_initialized():
        expected, got = "one call in a process", "a second one, or one after jax.distributed.initialize()"
        remedy = "Leave the other call out: jax.distributed starts once"
    elif _has_devices():
        expected, got = "a call before JAX computes", "one after its devices were set up"
        remedy = "Call it before anything that computes, makes an array or lists devices, also in modules"
    else:
        return
    raise ContextError(explain(_FUNCTION, "", expected=expected, got=got, remedy=remedy, rank=rank))


def _has_devices() -> bool:
    """Return whether JAX has set its devices up; False if unknown: then JAX itself raises."""
    try:  # not public
        from jax._src import xla_bridge

        return bool(xla_bridge.backends_are_initialized())
    except (ImportError, AttributeError):
        return False


def _visible_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process sees, without asking JAX; 0 if JAX computes on CPUs."""
    platforms = jax.config.jax_platforms or "cuda"
    plugins = any(importlib.util.find_spec(name) for name in ("jax_cuda12_plugin", "jax_cuda13_plugin"))
    if not plugins or not {"cuda", "gpu"} & set(platforms.split(",")):
        return 0
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        return len([name for name in listed.split(",") if name.strip()])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _local_devices(gpus: int, local_rank: int, local_size: int, rank: int) -> list[int] | None:
    """Return the numbers of the visible GPUs that a rank takes; [] for all, None if a variable sets them.

    Raises:
        DeviceError: there are too few.
    """
    if "JAX_LOCAL_DEVICE_IDS" in os.environ:
        return None
    if gpus == 0 or local_size == 1 or (gpus == 1 and "CUDA_VISIBLE_DEVICES" in os.environ):
        return []
    if gpus < local_size:
        expected, got = f"a GPU for each of the node's {local_size} ranks", f"{gpus}"
        remedy = "Start as many ranks on a node as it has GPUs, or set JAX_PLATFORMS=cpu"
        raise DeviceError(explain(_FUNCTION, "devices", expected=expected, got=got, remedy=remedy, rank=rank))
    return [local_rank]


def _check_name(rank: int) -> None:
    """Raise `ClusterError` if the address of the machine's name, where gloo listens, is unreachable."""
    if jax.config.jax_cpu_collectives_implementation != "gloo" or _visible_gpus():
        return
    name = socket.gethostname()
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        address = str(error)
    if address in own_addresses():
        return
    expected = f"an address of the network for the name {name}, at which JAX's collectives listen"
    remedy = f"Give {name} its address of the network in /etc/hosts of that node"
    raise ClusterError(explain(_FUNCTION, "address", expected=expected, got=address, remedy=remedy, rank=rank))


@contextmanager
def _free_port(comm: Any, node: Any) -> Iterator[tuple[str, int]]:
    """Yield an address of rank 0 and a port that is reserved in the `with` block. Collective over `comm`.

    A socket that does not listen reserves the port; the service of JAX shares it (SO_REUSEPORT).
    """
    port, several = np.zeros(1, np.int64), node.size < comm.size
    kept: socket.socket | None = None
    try:
        with together(partial(gather_text, comm), as_told):
            if comm.rank == 0:
                kept = _bound(several, 0)
                port[0] = kept.getsockname()[1]
        comm.Bcast(port, 0)
        number = int(port[0])
        with _answering(number) if several and comm.rank == 0 else nullcontext():
            host = reachable_address(comm, node, number, _FUNCTION, "Look for a firewall between the nodes")
        yield host, number
    finally:
        if kept is not None:
            kept.close()


def _bound(everywhere: bool, port: int) -> socket.socket:
    """Return a socket bound to a port, at all addresses or at the loopback address."""
    both = everywhere and socket.has_dualstack_ipv6()
    made = socket.socket(socket.AF_INET6 if both else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if both:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    made.bind(("" if everywhere else "127.0.0.1", port))
    return made


@contextmanager
def _answering(port: int) -> Iterator[None]:
    """Accept the connections of all nodes, whose number may exceed the system's backlog."""

    def accept() -> None:
        with suppress(OSError):
            while True:
                listening.accept()[0].close()

    with _bound(True, port) as listening:
        listening.listen()
        thread = threading.Thread(target=accept, name="mpistrat-address", daemon=True)
        thread.start()
        try:
            yield
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@contextmanager
def _without_proxies() -> Iterator[None]:
    """Hide the environment's proxies: JAX's processes would connect to each other through them."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def _same_sigterm() -> Iterator[None]:
    """Keep the program's handler of SIGTERM, if it has one: JAX installs its own."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    if callable(before) and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
