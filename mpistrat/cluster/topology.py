"""Topology of the ranks: the communicators of the world, of a node and between nodes, and each rank's replicas."""

from __future__ import annotations

import bisect
import itertools
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..base.agree import as_told, gather_text, together
from ..base.cores import count_node_cores, usable_cores
from ..base.devices import check_devices, default_devices
from ..base.errors import ClusterError, ContextError, DeviceError, LayoutError, explain
from ..base.partition import block
from ..base.text import printable
from .forks import is_child, refusal
from .launcher_variables import check_launcher, check_size
from .no_rank import is_no_rank
from .rendezvous import wait_for_ranks
from .start import import_mpi, mark_started
from .world import world

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Topology", "check_comm", "given_comm", "own_comm", "room_for_communicators", "running_mpi"]


@final
class Topology:
    """The ranks of one strategy, their nodes and their devices. Create it with `create` (collective) or `single`.

    Nodes are numbered densely in the order of their smallest rank. Replicas are numbered by rank, then by the order of the rank's
    devices. Ranks of a node may be scattered over the world; ranks per node and devices per rank may differ.

    Attributes:
        comm: duplicate of the given communicator, owned by this object; None after `single`.
        intra: the ranks of this node, ordered by rank; None after `single`.
        inter: one rank of each node (those with this rank's `local_rank`), ordered by node; None with a single node and on ranks
            with `local_rank >= slices`.
        rank, size: in `comm`.
        local_rank, local_size: in `intra`.
        node_index, num_nodes: this rank's node, and their number.
        node_of: the node of each rank.
        ranks_per_node: the number of ranks of each node.
        slices: the smallest of `ranks_per_node`, the number of slices of work that every node shares.
        devices: this rank's devices, one replica each.
        num_local_replicas, num_replicas: replicas of this rank, and of all ranks.
        replica_offset: number of the first replica of this rank.
        replicas_per_rank: their number on each rank.
        hostname: MPI's name of this node.
        node_cores: the cores that the ranks of this node may keep busy, together: see `cluster.cores.count_node_cores`.
        thread_level: the thread level that MPI granted (`MPI.THREAD_…`); 0 after `single`.
    """

    def __init__(
        self,
        rank: int,
        node_of: Sequence[int],
        replicas_per_rank: Sequence[int],
        devices: Sequence[str],
        *,
        comm: Any = None,
        intra: Any = None,
        inter: Any = None,
        hostname: str = "",
        thread_level: int = 0,
        node_cores: int = 1,
    ) -> None:
        """Derive the whole layout from exchanged values. Called by `create`."""
        self.comm, self.intra, self._kept = comm, intra, False
        self.inter: MPI.Intracomm | None = inter
        self.hostname, self.thread_level, self.node_cores = hostname, thread_level, node_cores
        self.rank, self.size = rank, len(node_of)
        self.node_of = tuple(node_of)
        self.num_nodes = max(self.node_of) + 1
        self.node_index = self.node_of[rank]
        members: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for other, node in enumerate(self.node_of):
            members[node].append(other)
        self._members = tuple(map(tuple, members))
        self.ranks_per_node = tuple(map(len, self._members))
        self.local_rank = self._members[self.node_index].index(rank)
        self.local_size = self.ranks_per_node[self.node_index]
        self.slices = min(self.ranks_per_node)
        self.devices = tuple(devices)
        self.num_local_replicas = len(self.devices)
        self.replicas_per_rank = tuple(replicas_per_rank)
        self._replicas_before = list(itertools.accumulate(self.replicas_per_rank, initial=0))
        self.num_replicas, self.replica_offset = self._replicas_before[-1], self._replicas_before[rank]

    @classmethod
    def create(
        cls,
        comm: MPI.Intracomm | None = None,
        devices: Sequence[str] | str | None = None,
        function: str = "Topology.create",
        replicas: int | None = None,
    ) -> Topology:
        """Determine the nodes and devices of a communicator's ranks. Collective over `comm`; starts MPI if it is not running.

        Args:
            comm: an intracommunicator, duplicated here; default COMM_WORLD.
            devices: this rank's devices; default: see `devices.default_devices`. Ranks may differ.
            function: name of the public caller, for errors.
            replicas: total number over all ranks, on their CPUs: blocks of nearly equal size; instead of devices.

        Raises:
            LayoutError: `comm` is not an intracommunicator, is null, or MPI is not running, or has no more communicators.
            ClusterError: MPI sees one rank, and the launcher started several.
            DeviceError: on every rank, if the devices of any rank are wrong.
            CollectiveMismatchError: on every rank, if other ranks are here for another `function`.
            CollectiveTimeoutError: a rank did not arrive within MPISTRAT_ABORT_AFTER seconds.
        """
        mpi = running_mpi(function)
        comm = check_comm(mpi, comm, function)
        own = own_comm(mpi, comm, function)
        with room_for_communicators(function):
            intra = own.Split_type(mpi.COMM_TYPE_SHARED, key=own.rank)
        try:
            return cls._exchange(mpi, own, intra, devices, function, replicas)
        except DeviceError:  # raised on every rank, so all can free collectively
            intra.Free()
            own.Free()
            raise

    @classmethod
    def _exchange(
        cls, mpi: Any, own: Any, intra: Any, devices: Sequence[str] | str | None, function: str, replicas: int | None
    ) -> Topology:
        leader = np.array([own.rank], np.int64)
        intra.Bcast(leader, root=0)
        with together(partial(gather_text, own), as_told):
            if replicas is not None:
                devices = _logical_devices(replicas, own.rank, own.size, devices, function)
            mine = _own_devices(devices, own.rank, intra, function)
        table = np.empty((own.size, 2), np.int64)
        own.Allgather(np.array([leader[0], len(mine)], np.int64), table)
        counts: list[int] = table[:, 1].tolist()
        # np.unique sorts: nodes are numbered by their smallest rank.
        node_of: list[int] = np.unique(table[:, 0], return_inverse=True)[1].ravel().tolist()
        with room_for_communicators(function):
            inter = _make_inter(mpi, own, intra, node_of)
        return cls(
            own.rank,
            node_of,
            counts,
            mine,
            comm=own,
            intra=intra,
            inter=inter,
            hostname=printable(mpi.Get_processor_name()),
            thread_level=mpi.Query_thread(),
            node_cores=count_node_cores(intra),
        )

    @classmethod
    def single(cls, devices: Sequence[str] | str = ("cpu:0",), function: str = "Topology.single") -> Topology:
        """Return the topology of this process alone, without MPI: `comm`, `intra` and `inter` are None.

        Raises:
            DeviceError: a device is malformed or missing.

        Example:
            >>> Topology.single(["cpu:0", "cpu:1"]).num_replicas
            2
        """
        names = check_devices(devices, function)
        return cls(0, [0], [len(names)], names, hostname=printable(socket.gethostname()), node_cores=usable_cores())

    def ranks_of_node(self, node: int) -> tuple[int, ...]:
        """Return the ranks of a node in ascending order."""
        return self._members[node]

    def rank_of_replica(self, replica: int) -> tuple[int, int]:
        """Return the rank of a global replica, and its index among that rank's replicas.

        Example:
            >>> Topology.single(["cpu:0", "cpu:1"]).rank_of_replica(1)
            (0, 1)
        """
        rank = bisect.bisect_right(self._replicas_before, replica) - 1
        return rank, replica - self._replicas_before[rank]

    def keep(self) -> None:
        """Do not free the communicators until MPI ends: later ones would reuse their numbers, and get their pending messages."""
        self._kept = True

    def close(self) -> None:
        """Free the communicators. Collective the first time; later calls, and calls after MPI's end, do nothing."""
        held = [comm for comm in (self.inter, self.intra, self.comm) if comm]  # a freed communicator is false
        if not held or self._kept:
            return
        from mpi4py import MPI

        if not (MPI.Is_finalized() or is_child()):
            for comm in held:
                comm.Free()

    @property
    def closed(self) -> bool:
        """True once the communicators are freed; never after `single`."""
        return self.comm is not None and not self.comm

    def __enter__(self) -> Topology:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"Topology(rank {self.rank} of {self.size}, rank {self.local_rank} of {self.local_size} on node"
            f" {self.node_index} of {self.num_nodes}, devices {', '.join(self.devices)}, replicas {self.num_replicas})"
        )


def _logical_devices(
    replicas: int, rank: int, size: int, devices: Sequence[str] | str | None, function: str
) -> tuple[str, ...]:
    """Return a device for each replica of a rank, of the `replicas` of all ranks."""
    if devices is not None:
        expected, got = "devices or replicas", f"devices={devices!r} and replicas={replicas!r}"
        raise DeviceError(explain(function, "replicas", expected=expected, got=got))
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < size:
        expected, remedy = f"a number of at least {size}, that of the ranks", "Each rank needs one: start fewer ranks"
        raise DeviceError(explain(function, "replicas", expected=expected, got=repr(replicas), remedy=remedy))
    low, high = block(replicas, size, rank)
    return tuple(f"cpu:{index}" for index in range(high - low))


def _own_devices(devices: Sequence[str] | str | None, rank: int, intra: Any, function: str) -> tuple[str, ...]:
    try:
        return default_devices(intra.rank, intra.size) if devices is None else check_devices(devices, function)
    except Exception as error:
        raise DeviceError(f"rank {rank}: {error}") from error


def _make_inter(mpi: Any, own: Any, intra: Any, node_of: list[int]) -> Any:
    """Return the communicator of the ranks with this local rank, if every node has one. Collective over `own`."""
    if max(node_of) == 0:
        return None
    slices = int(np.bincount(node_of).min())
    inter = own.Split(intra.rank if intra.rank < slices else mpi.UNDEFINED, key=node_of[own.rank])
    return inter if inter != mpi.COMM_NULL else None


@contextmanager
def room_for_communicators(function: str) -> Iterator[None]:
    """Raise a clear error if MPI has no more communicators, which MPICH reports to all ranks of the parent communicator.

    Raises:
        LayoutError: on every rank.
    """
    try:
        yield
    except RuntimeError as error:
        if "Too many communicators" not in str(error):
            raise
        got = "none: strategies and process sets that were not closed, or the program's own communicators, use all"
        remedy = "Close strategies after use: `with` or close(); free communicators: comm.Free()"
        raise LayoutError(
            explain(function, "", expected="a new communicator of MPI", got=got, remedy=remedy)
        ) from error


def running_mpi(function: str) -> Any:
    """Return the module mpi4py.MPI, importing it, which starts MPI unless the program has started or forbidden it.

    Raises:
        LayoutError: MPI is not running and will not be started, or has ended.
        ClusterError: mpi4py finds no MPI library, or another than the launcher's.
        ContextError: in a process that a rank has forked or started.
    """
    if is_child():
        raise refusal(function)
    if is_no_rank():
        expected, got = "a call by a rank", "one by a process that multiprocessing has started for a rank"
        remedy = "Make the call in the rank itself"
        raise ContextError(explain(function, "", expected=expected, got=got, remedy=remedy))
    check_launcher(function)
    try:
        MPI = import_mpi()
    except ContextError:
        raise
    except (ImportError, RuntimeError) as error:
        remedy = (
            "Load your site's MPI module, or add the folder of its libmpi to LD_LIBRARY_PATH, "
            "or install a wheel: pip install mpich"
        )
        raise ClusterError(explain(function, "", expected="an MPI library", got=str(error), remedy=remedy)) from error

    if MPI.Is_finalized():
        raise LayoutError(explain(function, "comm", expected="a running MPI", got="one that was finalised"))
    if not MPI.Is_initialized():
        remedy = "mpi4py.rc.initialize is False: call MPI.Init_thread() first, or leave it True"
        raise LayoutError(explain(function, "comm", expected="a running MPI", got="none", remedy=remedy))
    if MPI.COMM_WORLD.size > 1:
        mark_started()
    return MPI


def check_comm(mpi: Any, comm: Any, function: str) -> Any:
    """Return the communicator to work on; for None COMM_WORLD, or the ranks that `ms.survive` has left of it.

    Raises:
        LayoutError: `comm` is not an intracommunicator, or is null.
        ClusterError: it is COMM_WORLD with one rank, and the launcher started several.
    """
    expected = "an intracommunicator of mpi4py"
    if comm is None:
        comm = world(mpi)
    if not isinstance(comm, mpi.Comm):
        raise LayoutError(explain(function, "comm", expected=expected, got=f"a {type(comm).__name__}"))
    if comm == mpi.COMM_NULL:
        remedy = "It was freed, or this rank is not a member: only the members of a communicator call this"
        raise LayoutError(explain(function, "comm", expected=expected, got="COMM_NULL", remedy=remedy))
    if comm.Is_inter():
        remedy = "Merge its two groups first: comm.Merge()"
        raise LayoutError(explain(function, "comm", expected=expected, got="an intercommunicator", remedy=remedy))
    if comm == mpi.COMM_WORLD:
        check_size(comm.size)
    return comm


def own_comm(mpi: Any, comm: Any, function: str) -> Any:
    """Wait for the ranks of a communicator, and return a copy of it whose errors are exceptions. Collective over `comm`.

    Raises:
        LayoutError: MPI has no more communicators.
        CollectiveMismatchError: on every rank, if other ranks are here for another `function`.
        CollectiveTimeoutError: a rank did not arrive within MPISTRAT_ABORT_AFTER seconds.
    """
    wait_for_ranks(comm, function)
    with room_for_communicators(function):
        own = comm.Dup()
        own.Set_errhandler(mpi.ERRORS_RETURN)  # regardless of the handler of the user's communicator
        return own


def given_comm(comm: Any, function: str) -> Any:
    """Return a user's optional communicator: for None return None without starting MPI.

    Raises:
        LayoutError, ClusterError: as `check_comm`.
    """
    return None if comm is None else check_comm(running_mpi(function), comm, function)
