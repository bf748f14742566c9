"""Process group: the ranks of one strategy. Every collective of the package runs inside `collective()`."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeVar, final

import numpy as np

from ..base import agree, log
from ..base.environment import Environment
from ..base.errors import ClosedError, CollectiveMismatchError, MpistratError, RanksLostError, by_rank, explain
from ..base.text import named
from ..cluster.forks import is_child
from ..cluster.topology import Topology, room_for_communicators
from ..cluster.world import failed_ranks, is_loss, reports_death, survives
from .call import describe, payload_bytes
from .contract import Collective, Comparison
from .dropped import DROPPED
from .monitor import abort, exit_report
from .monitor.group_monitor import Watchdog
from .monitor.rank_monitor import RankMonitor, monitored, no_more_use
from .monitor.survey import Nodes
from .node import Node
from .recorder import RECORDER

__all__ = ["Attachment", "ProcessGroup", "abandon", "open_groups"]

R = TypeVar("R")
_CHUNK = 1 << 30  # bytes in one MPI call: Open MPI rejects counts of 2^31
_KEPT_CALLS = 4096


class Attachment(Protocol):
    """A user of a group's memory or communicators, which ends with it."""

    def close(self) -> None:
        """Free its resources. Collective over the group; `ProcessGroup.close` calls it first."""

    def leave(self) -> Callable[[], None] | None:
        """Publish that this rank leaves, at the end of the program or if the others cannot be reached.

        The returned function is called last before MPI ends: it may wait until all others have left, too.
        """

    def abandon(self) -> None:
        """Stop threads immediately without contacting other ranks (some are gone). Local."""


@final
class ProcessGroup:
    """The ranks of one strategy and their shared resources. Create it with `create` (collective) or `single`.

    A memory domain is a node, or one rank if `environment.shared_memory` is False. Work that all domains share is cut into
    `slices`; the ranks that own the same slice in each domain communicate over `inter`.

    Attributes:
        topology: the layout; its owner closes it.
        node: the ranks of this memory domain.
        environment: the settings, equal on all ranks.
        closed: True after `close()`.
        num_nodes, node_index: number of memory domains, and this rank's.
        slices: number of slices, the smallest number of ranks in a domain.
        slice_index: the slice of this rank, None if it has none.
        inter: communicator of the owners of this rank's slice; None with one domain, and without a slice.
        replicas_of_node: number of local replicas of each rank of the domain.
        monitor: the activity of this rank.
        gathered: the most bytes of a rank in each of the last four gathers of arrays with lengths; equal on all ranks.
        parted: the most bytes of a part in each of the last four all-to-alls with lengths; equal on all ranks.
        expendable: ranks without which the program continues if they die: workers of a coordinator. Until `reopen` the group
            makes no collectives then.
        lost: those of them that have died, as far as this rank knows.
        contacts: ranks that wait for this one outside collectives, and receive a message when it leaves the program.
        label: the name of its ranks, shown with the names of its calls; "" for all of them.
        lane: makes a call, given the name of its function, after the collectives that this rank has started; None if the calling
            thread makes them all.
    """

    def __init__(self, topology: Topology, environment: Environment, private: Any = None) -> None:
        """Derive the layout and set up shared memory. Called by `create` and `single`."""
        self.contacts: set[int] = set()
        self.expendable: set[int] = set()
        self._attached: list[Attachment] = []
        self._open(topology, environment, private)

    def _open(self, topology: Topology, environment: Environment, private: Any) -> None:
        self.topology, self.environment, self.closed = topology, environment, False
        self.label = ""
        self.lane: Callable[[str, Callable[[], Any]], Any] | None = None
        self._comm: Any = topology.comm if private is not None else None
        self._private = private
        self._key: tuple[tuple[int, ...], int] | None = None  # see `dropped`
        self.monitor = RankMonitor(topology.rank, topology.size, environment.abort_after, environment.warn_after)
        self._comparison: Comparison | None = None  # with other nodes
        self._calls: dict[Hashable, Collective] = {}
        self.gathered = self.parted = (0, 0, 0, 0)
        self.lost: set[int] = set()
        ranks: Sequence[int] = (topology.rank,)
        if environment.shared_memory and private is not None:
            ranks = topology.ranks_of_node(topology.node_index)
            self.node = Node(self.monitor, topology.intra, topology.comm, ranks, topology.node_cores)
            self.num_nodes, self.slices, self.inter = topology.num_nodes, topology.slices, topology.inter
        else:
            self.node = Node(self.monitor, ranks=ranks)
            self.num_nodes, self.slices, self.inter = topology.size, 1, self._comm
        self.node_index = topology.node_index if self.num_nodes == topology.num_nodes else topology.rank
        self.slice_index = self.node.rank if self.node.rank < self.slices else None
        self.replicas_of_node = [topology.replicas_per_rank[rank] for rank in ranks]
        if self.num_nodes > 1:
            self._comparison = Comparison(private, environment.check_every, self.node.draws)
            self.monitor.recent = self._comparison.recent

    @classmethod
    def create(cls, topology: Topology, environment: Environment | None = None) -> ProcessGroup:
        """Create the group of a topology's ranks. Collective over them.

        With several ranks it makes uncaught exceptions end the job, and starts the watchdog.

        Args:
            topology: created by `Topology.create`; it must outlive the group.
            environment: settings; default: those of the environment variables.

        Raises:
            CollectiveMismatchError: on every rank, if the settings differ.
            SharedMemoryError: on every rank, if /dev/shm of any node is too small.
        """
        environment = environment or Environment.read()
        RECORDER.open(environment.events)
        if topology.size == 1:
            return cls(topology, environment)
        abort.install(topology.rank, topology.size)
        log.set_rank(topology.rank)
        exit_report.start(topology)
        with room_for_communicators("ProcessGroup.create"):
            private = topology.comm.Dup()
        try:
            exchange = functools.partial(agree.gather_text, private)
            agree.same(exchange, repr(replace(environment, log="")), _different_settings)
            key = DROPPED.number(private)
            group = cls(topology, environment, private)
            group._key = key
        except Exception:  # raised on every rank
            private.Free()
            raise
        group._watch()
        _at_exit(group)
        return group

    def _watch(self) -> None:
        """Start to monitor the ranks. Collective."""
        nodes = Nodes(self.num_nodes, functools.partial(_ranks_of, self.topology, self.num_nodes), self.node_index)
        reference = weakref.WeakMethod(self.bear)  # the watchdog keeps no group that the program has dropped

        def bear(error: BaseException, comm: Any) -> None:
            method = reference()
            if method is None:
                raise error
            method(error, comm)

        Watchdog.add(self.monitor, self._private, self.node, nodes, bear)
        exit_report.begin(self.topology)

    def reopen(self, comm: Any) -> dict[int, int]:
        """Continue with the ranks of another communicator, all living ones; return their new numbers by their old ones.

        Collective over these, of which none is in a collective. Attached objects stay, and keep their own communicators. Memory
        that this group shared is freed with its last user.

        Raises:
            RanksLostError: on every rank: others than expendable ranks have died.
        """
        from mpi4py import MPI

        topology, old = self.topology, self.topology.comm.Get_group()
        fresh = Topology.create(comm, topology.devices, "ClusterCoordinator")
        new = fresh.comm.Get_group()
        numbers = dict(enumerate(MPI.Group.Translate_ranks(old, range(old.size), new)))
        numbers = {rank: number for rank, number in numbers.items() if number != MPI.UNDEFINED}
        old.Free()
        new.Free()
        self.lost.update({*range(topology.size)} - {*numbers})
        self._refuse_other_losses()
        Watchdog.remove(self.monitor)
        vars(topology).update(vars(fresh))
        abort.renumber()
        abort.install(topology.rank, topology.size)
        log.set_rank(topology.rank)
        exit_report.start(topology)
        private = topology.comm.Dup()
        key = DROPPED.number(private)
        self.contacts, self.expendable = (
            {numbers[rank] for rank in ranks if rank in numbers} for ranks in (self.contacts, self.expendable)
        )
        vars(self).pop("comm", None)
        stop = self.monitor.stop
        self._open(topology, self.environment, private)
        self.monitor.stop = stop
        self._key = key
        self._watch()
        return numbers

    @classmethod
    def single(cls) -> ProcessGroup:
        """Return the group of this process alone, without MPI: its collectives do nothing."""
        return cls(Topology.single(), Environment())

    def subgroup(
        self, members: Sequence[int], function: str, label: str = "", devices: Sequence[str] | None = None
    ) -> ProcessGroup:
        """Return the group of some of the ranks, this one among them, in that order. Collective over all ranks.

        Each rank is in one subgroup, whose members pass the same; the caller closes it, and its topology.

        Args:
            members: the ranks.
            function: name of the public caller, for errors.
            label: see `label`.
            devices: this rank's, one replica each; default its current ones.
        """
        topology = self.topology
        devices = topology.devices if devices is None else devices
        with room_for_communicators(function):
            key = list(members).index(topology.rank)
            comm = None if self._comm is None else self._comm.Split(members[0], key=key)
        if len(members) > 1:
            group = ProcessGroup.create(Topology.create(comm, devices, function), self.environment)
        else:
            group = ProcessGroup(Topology.single(devices), self.environment)
        if comm is not None:
            comm.Free()
        group.label = label
        log.set_rank(topology.rank)
        return group

    def collective(
        self,
        op: str,
        name: str = "",
        dtype: Any = None,
        shape: Sequence[int] | None = None,
        detail: Hashable = (),
        *,
        timeout: float | None = None,
        synchronize: bool = True,
    ) -> Collective:
        """Return the context in which one collective runs. Entering it is collective over all ranks.

        On entry the ranks of a node wait for each other and compare their calls. Between nodes they compare unexpected calls (see
        `Comparison`), and every `environment.check_every` collectives; then they find every difference since the last comparison.

        Args:
            op, name, dtype, shape, detail: must be equal on every rank. `detail` must have the same repr there.
            timeout: seconds to wait for others; default `environment.abort_after`.
            synchronize: False if the caller itself calls `node.barrier(call)` as its first synchronisation.

        Raises:
            CollectiveMismatchError: the ranks differ; on every rank that compares itself with one that does.
            CollectiveTimeoutError: a rank did not arrive in time.
            PeerExitError: a rank left the program.
            ClosedError: after `close()`.

        Example:
            >>> with ProcessGroup.single().collective("all_reduce", "w", "float32", (4, 3)) as call:
            ...     call.text
            "all_reduce 'w' float32 (4, 3)"
        """
        key = (op, name, dtype, shape, detail, timeout, synchronize)
        call = self._calls.get(key)
        return call if call is not None else self._make_call(key)

    def _make_call(self, key: tuple[Any, ...]) -> Collective:
        op, name, *what, timeout, synchronize = key
        name = ": ".join(filter(None, (self.label, name)))
        if len(self._calls) >= _KEPT_CALLS:  # the ranks make the same calls, so they clear at the same time
            self._calls.clear()
        timeout = self.environment.abort_after if timeout is None else timeout
        text, series = describe(op, name, *what), describe(op, name)
        call = self._calls[key] = Collective(
            text, timeout, series, self.monitor, self.node, self._comparison, synchronize
        )
        call.nbytes = payload_bytes(*what[:2])
        return call

    def refuse_after(self, error: BaseException, left: str) -> None:
        """Make the next collectives raise ClosedError after an error, also those that other ranks of the node make. Local.

        Args:
            error: a loss of ranks reports itself again, and does not change the group.
            left: the pending transfers, which a later collective could receive, in words.
        """
        if self.monitor.refusal is None and not is_loss(error):
            why = f"an error {left} pending: {type(error).__name__}: {error}"
            self.monitor.refusal = ClosedError(no_more_use(why))
            self.node.refuse()

    def in_order(self, function: str, call: Callable[[], R]) -> R:
        """Return the result of a call that makes collectives, after those that this rank has started. Collective.

        A group of torch.distributed makes some of its collectives in a separate thread, and the call must come at the same
        position between them on every rank.

        Args:
            function: name of the public caller, for errors.
            call: makes the collectives.

        Example:
            >>> group = ProcessGroup.single()
            >>> group.in_order("times", lambda: group.exchange("times", "text"))
            ['text']
        """
        return call() if self.lane is None else self.lane(function, call)

    def quiet(self) -> AbstractContextManager[Any]:
        """Return a context in which the watchdog makes no MPI calls, while this rank measures whether MPI needs any."""
        return Watchdog.instance.lock if Watchdog.instance is not None else contextlib.nullcontext()

    @functools.cached_property
    def comm(self) -> Any:
        """The communicator for programs: the topology's, whose blocking calls the watchdog sees."""
        return self.topology.comm if self._private is None else monitored(self.topology.comm, self.monitor)

    # raw transfers, for use inside collective()

    def broadcast(self, array: np.ndarray, root: int = 0) -> None:
        """Overwrite a C-contiguous host array on every rank with the root's. Collective; inside `collective()`."""
        if self._comm is None or array.nbytes == 0:
            return
        from mpi4py import MPI

        flat = array.reshape(-1).view(np.uint8)
        for start in range(0, flat.nbytes, _CHUNK):
            self._comm.Bcast([flat[start : start + _CHUNK], MPI.BYTE], root)

    def all_gather_int(self, values: Sequence[int]) -> np.ndarray:
        """Return an int64 array (size, len(values)) of every rank's numbers. Collective; inside `collective()`."""
        mine = np.asarray(values, np.int64)
        table = np.empty((self.topology.size, mine.size), np.int64)
        if self._comm is None:
            table[0] = mine
        else:
            self._comm.Allgather(mine, table)
        return table

    def sum_int(self, values: Sequence[int]) -> np.ndarray:
        """Return the sums of every rank's numbers, int64. Collective; inside `collective()`."""
        mine = np.array(values, np.int64)
        if self._comm is None:
            return mine
        from mpi4py import MPI

        total = np.empty_like(mine)
        self._comm.Allreduce(mine, total, MPI.SUM)
        return total

    def of_first_node(self, numbers: np.ndarray) -> np.ndarray:
        """Return the float64 numbers of the first node's owners of slices, a row each. Collective; inside `collective()`.

        They have the same bits on every rank; the amount of data does not grow with the number of ranks.
        """
        own = np.array(numbers, np.float64)
        if self.inter is not None:
            self.inter.Bcast(own, 0)
        return self.of_own_node(own)

    def of_own_node(self, numbers: np.ndarray) -> np.ndarray:
        """Return the float64 numbers of this node's owners of slices, a row each. Collective on the node."""
        own = np.array(numbers, np.float64)
        if not self.node.shared:
            return own[np.newaxis]
        table = np.empty((self.node.size, own.size))
        self.topology.intra.Allgather(own, table)
        return table[: self.slices]

    def nodes_alike(self, numbers: Sequence[int]) -> bool:
        """Return True if the owners of each slice have the same numbers on all nodes. Collective; inside `collective()`."""
        if self._comm is None:
            return True
        differ = self.inter is not None and not agree.all_alike(self.inter, numbers).all()
        return agree.first_rank(self._comm, differ) is None

    def all_gather_text(self, text: str) -> list[str]:
        """Return every rank's text, by rank. Collective; inside `collective()`."""
        return [text] if self._comm is None else agree.gather_text(self._comm, text)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, by rank. Collective; inside `collective()`."""
        return [data] if self._comm is None else agree.gather_bytes(self._comm, data)

    def exchange(self, op: str, text: str, detail: Hashable = ()) -> list[str]:
        """Return every rank's text, by rank, as a separate collective. Collective. See `agree.Exchange`."""
        with self.collective(op, detail=detail):
            return self.all_gather_text(text)

    def agree(self, value: int, op: Literal["min", "max"] = "min") -> int:
        """Return the least or largest of every rank's number. Collective; inside `collective()`."""
        if self._comm is None:
            return int(value)
        from mpi4py import MPI

        result = np.empty(1, np.int64)
        self._comm.Allreduce(np.array([value], np.int64), result, MPI.MIN if op == "min" else MPI.MAX)
        return int(result[0])

    def barrier(self, name: str = "", timeout: float | None = None, function: str = "barrier") -> None:
        """Wait until every rank is here, at most `timeout` seconds. Collective. Errors name `function`.

        Raises:
            ValueError: a timeout that is not positive.
        """
        if timeout is not None and not timeout > 0:
            raise ValueError(explain(function, "timeout", expected="> 0 seconds", got=repr(timeout)))
        with self.collective(function, name, timeout=timeout):
            if self.num_nodes > 1:
                self._comm.Barrier()

    def attach(self, attachment: Attachment) -> None:
        """Register an object to be closed before the group, in reverse order; the same on every rank."""
        self._attached.append(attachment)

    def close(self) -> None:
        """Free shared memory and communicators; the topology stays. Collective the first time.

        After a collective that timed out, and after MPI's end, resources are left to the end of the process. In a forked child it
        does nothing.
        """
        if self.closed or is_child():
            return
        healthy = self.healthy
        self.closed = True
        _groups.discard(self)
        if self._private is not None and healthy:
            try:
                with self.collective("close"):
                    pass
            except ClosedError:  # another rank refuses
                healthy = False
        attached, self._attached = self._attached, []
        for attachment in reversed(attached):
            if healthy:
                attachment.close()
            else:
                _note_leaving(attachment)
        Watchdog.remove(self.monitor, self._private if healthy else None)
        self.monitor.refusal = ClosedError("the strategy is closed")
        self._calls.clear()
        if self._private is None:
            self.node.close()
        elif healthy:
            self.node.close()
            self._private.Free()
        else:
            self.topology.keep()

    @property
    def healthy(self) -> bool:
        """True if its ranks can still make collectives, as far as this one knows."""
        return not self.closed and self.monitor.refusal is None and not (self._private is not None and _mpi_ended())

    def drop(self) -> None:
        """Leave the group to be freed when its ranks, once all have dropped it, create the next group. Local."""
        if self._key is not None and not self.closed:
            DROPPED.groups[self._key] = self
            _groups.discard(self)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Keep shared resources until all ranks can free them."""
        if not is_finalizing():  # `sys` may be None by then
            self.drop()

    def abandon(self, error: MpistratError | None = None) -> None:
        """Make every later collective raise an error, default RanksLostError, and free nothing. Local."""
        self.closed = True
        _groups.discard(self)
        self.monitor.refusal = error or RanksLostError(no_more_use("ranks were lost"))
        Watchdog.remove(self.monitor)
        attached, self._attached = self._attached, []
        for attachment in attached:
            attachment.abandon()

    def ranks_of(self, node_index: int) -> Sequence[int]:
        """Return the ranks of a memory domain."""
        return _ranks_of(self.topology, self.num_nodes, node_index)

    def has_left(self, rank: int) -> bool:
        """Return True if a rank has left the program, as far as this one knows."""
        if rank in self.lost:
            return True
        if rank in self.node.ranks:
            return self.node.has_left(self.node.ranks.index(rank))
        return rank in self.monitor.left

    def look_for_losses(self) -> None:
        """Raise MPI's error of lost ranks, in a program that survives it. Local; for waits without other calls of MPI."""
        if survives():
            if isinstance(self.monitor.refusal, RanksLostError):
                raise self.monitor.refusal
            self._refuse_other_losses()
            try:
                self.topology.comm.Iprobe()
            except Exception as error:
                self.bear(error, self.topology.comm)

    def bear(self, error: BaseException, comm: Any) -> None:
        """Record which ranks an error of MPI reports as dead; raise it unless all of them are expendable. Local.

        Args:
            error: of a call that involves one rank, or any rank.
            comm: the communicator of the call.
        """
        if not (self.expendable and survives() and isinstance(error, _mpi_error())):
            raise error
        dead = failed_ranks(comm, self.topology.comm)
        new = not dead <= self.lost
        self.lost |= dead
        self._refuse_other_losses(error)
        if not new and not reports_death(error):
            raise error

    def _refuse_other_losses(self, error: BaseException | None = None) -> None:
        others = self.lost - self.expendable
        if others:
            raise RanksLostError(f"{named('rank', sorted(others))} died") from error

    def leave(self) -> None:
        """Report to the others, at the end of the program, that this rank takes part in no more calls."""
        if self.closed or self._private is None:
            return
        for attachment in reversed(self._attached):
            _note_leaving(attachment)
        self.node.leave(abort.exit_status())
        mine, count = self.node_index, self.num_nodes
        # One rank of another domain is enough: it waits for this one in the next collective, and raises there. Of those
        # that have left, one precedes a domain that has not, whose rank receives it; more domains receive it sooner.
        told = {0, *((mine + (1 << power)) % count for power in range((count - 1).bit_length()))} - {mine}
        ranks = [self.ranks_of(domain) for domain in sorted(told)]
        informed = {domain[self.node.rank % len(domain)] for domain in ranks}
        Watchdog.report_left(self.monitor, sorted(informed | (self.contacts - {*self.node.ranks})))


def _ranks_of(topology: Topology, num_nodes: int, node_index: int) -> Sequence[int]:
    return topology.ranks_of_node(node_index) if num_nodes == topology.num_nodes else (node_index,)


def _different_settings(texts: Mapping[int, str]) -> CollectiveMismatchError:
    return CollectiveMismatchError(f"the ranks have different settings: {by_rank(texts)}")


def _mpi_error() -> type[Exception]:
    from mpi4py import MPI

    return MPI.Exception


def _mpi_ended() -> bool:
    from mpi4py import MPI

    return MPI.Is_finalized()


def open_groups() -> set[Any]:
    """Return the groups of this process that are not closed, dropped ones too."""
    return {*_groups, *DROPPED.groups.values()}


def abandon(kept: Collection[Any] = (), error: MpistratError | None = None) -> None:
    """Abandon all groups of this process but some, after a loss of ranks: shared resources are freed with their last user.

    Args:
        kept: groups that ranks still use.
        error: raised by later collectives; default RanksLostError.
    """
    for group in open_groups().difference(kept):
        group.abandon(error)


_groups: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()  # not closed
_waits: list[Callable[[], None]] = []  # before MPI ends
_process: int | None = None


def _note_leaving(attachment: Attachment) -> None:
    wait = attachment.leave()
    if wait is not None:
        _waits.append(wait)


def _at_exit(group: ProcessGroup) -> None:
    """End the watchdog, and report the end to the others, before MPI ends in any way."""
    global _process
    _groups.add(group)
    if _process is None:
        from mpi4py import MPI

        _process = os.getpid()
        atexit.register(_leave)
        # MPI.Finalize() begins by deleting the attributes of COMM_SELF.
        key = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, value: _leave())
        MPI.COMM_SELF.Set_attr(key, None)


def _leave() -> None:
    """End the watchdog and report the end to the others.

    In a forked child, and after MPI's end, there is nothing to do; MPICH also finalises within Abort.
    """
    if os.getpid() != _process or abort.ending or _mpi_ended():
        return
    abort.end_on_uncaught()
    Watchdog.stop()
    for group in [*_groups, *DROPPED.groups.values()]:
        group.leave()
    for wait in _waits:  # others may still need this rank; MPI's end waits for them anyway
        wait()
    _waits.clear()
    exit_report.end(abort.exit_status())
