"""Access to the variables: of a worker by its connections to the servers, of a server in its own memory."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, final

import numpy as np

from ...base.context import number_of_cache
from ...base.errors import ContextError, explain
from ...cluster.forks import ParentsOnly, is_child, refusal, refuse_in_children
from ...comm.process_group import ProcessGroup
from ...comm.recorder import RECORDER
from ..connections import ParameterServers
from ..operations import Operation, apply_operation, pack, sum_duplicate_rows
from ..server.server import VariableServer
from ..wire.transport import FINISHED

__all__ = ["Access", "ServerAccess", "WorkerAccess"]

_PULL, _PUSH = RECORDER.name("p", "pull"), RECORDER.name("p", "push")


class Access(ABC):
    """The reads and writes of one rank. Threads take turns.

    Attributes:
        step: the number of the current training step, counted from 1; 0 outside.
        lock: held during communication with servers.
    """

    def __init__(self, servers: ParameterServers) -> None:
        self.step = 0
        self.lock: Any = threading.RLock()
        self._servers, self._addresses = servers, servers.addresses
        refuse_in_children(self)

    def refuse_in_child(self) -> None:
        """Refuse use in a forked process, see `cluster.forks`."""
        self.lock = ParentsOnly("a parameter server's variable")

    @property
    def together(self) -> bool:
        """True if this rank reads together with others in a step, and alone outside."""
        return False

    @final
    def period(self) -> int:
        """Return the number of the period in which reads return the same: a step's, or less than 0 in `cache_variable_reads`.

        0 if each read asks the server. Workers in sync cache only values that all have read together.
        """
        cache = number_of_cache()
        return -cache if cache and (self.step or not self.together) else self.step

    @final
    def holder(self, variable: int) -> int:
        """Return the rank that stores a variable."""
        return self._servers.servers[self._addresses[variable].spec.server]

    @final
    def holds(self, variable: int) -> bool:
        """Return whether this rank stores a variable."""
        return self.holder(variable) == self._servers.group.topology.rank

    @final
    def reaches(self, variable: int, rank: int) -> bool:
        """Return whether a rank can read a variable: every worker, and its server."""
        return rank in self._servers.workers or rank == self.holder(variable)

    @property
    def in_pass(self) -> bool:
        """True if this rank is reading a dataset, or has taken a step since it left a pass; False on a server."""
        return False

    def flush(self) -> None:  # noqa: B027 - a server writes its own memory at once
        """Wait until all pushes of this rank are applied."""

    @abstractmethod
    def pull(self, variable: int) -> tuple[int, np.ndarray]:
        """Return a variable's version, and a read-only array of it, including this rank's earlier writes.

        The array does not change while anything refers to it.
        """

    def gradient(self, variable: int) -> np.ndarray | None:
        """Return memory from which gradients are pushed without a copy, initially zeros; None if there is none."""
        return None

    @abstractmethod
    def read_rows(self, variable: int, rows: np.ndarray, out: np.ndarray) -> int:
        """Copy rows of one version of a variable; return the version."""

    @abstractmethod
    def write(self, variable: int, operation: Operation, array: np.ndarray) -> None:
        """Assign, add or subtract an array."""

    @abstractmethod
    def write_rows(self, variable: int, operation: Operation, rows: np.ndarray, values: np.ndarray, depth: int) -> None:
        """Change rows of a variable.

        Args:
            variable: its number.
            operation: the operation.
            rows: their numbers, (k,).
            values: (k, c).
            depth: the number of dimensions that count as rows.
        """


@final
class WorkerAccess(Access):
    """A worker's client for the parameter servers.

    - A read waits until this worker's earlier pushes to the same server are applied: it sees its own writes.
    - Workers in sync are one worker to the others: their first rank reads for all in a step, and writes and pushes for all. In
      a step reading is collective over them; writing always is.
    - With `max_staleness` 0 a step starts when the last one is applied, which needs all workers' pushes.
    - With a larger one it starts when this worker's finished steps of the pass exceed the slowest worker's by at most that
      number. The pushes of a finished step are applied. A clock is the number of the pass times 2^32 plus the finished steps of
      the pass: workers with more steps in a pass are not ahead forever.

    Args:
        servers: the connections.
        sync_group: the ranks that step together.
        max_staleness: see above; None for no bound.
    """

    def __init__(self, servers: ParameterServers, sync_group: ProcessGroup, max_staleness: int | None = None) -> None:
        super().__init__(servers)
        self._transports = servers.transports
        self._sync_group = sync_group if sync_group.topology.size > 1 else None
        self._leads = sync_group.topology.rank == 0
        self._limit, self._synchronous = max_staleness or None, max_staleness == 0
        self._steps = self._passes = self._finished = self._open = 0
        self.left, self._left_at = False, 0  # whether it has left for good; the step after which it left a pass
        self._pushed = False  # whether the current step has pushed or written anything
        self._suspended = 0  # open datasets of a pass that was signed off
        self._unsigned = 0  # ended passes that are not signed off yet
        if self._limit is not None:
            self._publish()

    # steps

    def begin_step(self) -> None:
        """Start a training step, after waiting for slower workers."""
        if self._unsigned:
            self._sign_off_ended()
        if self._synchronous:
            self.flush()
        elif self._limit is not None and self._leads:
            self._wait_for_the_slowest(self._limit)
        self._steps += 1
        self.step, self._pushed = self._steps, False

    def end_step(self) -> None:
        """End the step. It counts if it has pushed or written anything."""
        self.step = 0
        if self._unsigned:
            self._sign_off_ended()
        if not self._pushed:
            return
        self._finished += 1
        if self._limit is not None:
            with self.lock:
                self.flush()
                self._publish()

    def _wait_for_the_slowest(self, limit: int) -> None:
        with self.lock, RECORDER.span("p", "a wait for slower workers"):
            transport, wait = self._transports[0], None
            clock = self._clock()
            while clock - int(transport.clocks().min()) > limit:
                wait = wait or transport.pair.wait_for_server(
                    "a wait for slower workers",
                    "A worker that takes no more steps must leave the pass: strategy.leave()",
                )
                wait.pause()

    def _clock(self) -> int:
        return (self._passes << 32) + self._finished

    def _publish(self) -> None:
        self._transports[0].publish_clock(self._clock())

    # passes

    @property
    def in_pass(self) -> bool:
        return self._open > 0 or self._steps > self._left_at

    def begin_pass(self) -> None:
        """Record a dataset being read. Several at a time are one pass."""
        self._sign_off_ended()
        self._open += 1

    def end_pass(self) -> None:
        """Record the end of a dataset, and of the pass after the last one: sign off at every server."""
        if self._suspended and not self._open:  # its pass was already signed off
            self._suspended -= 1
            return
        self._open -= 1
        self._left_at = self._steps
        if self._open or self.left:
            return
        if self.lock._is_owned():  # the garbage collector ended an iterator during a request
            self._unsigned += 1
            return
        self._sign_off()

    def suspend_pass(self) -> None:
        """Sign off with open datasets; `resume_pass` continues them."""
        self._suspended += self._open - 1
        self._open = 1
        self.end_pass()

    def resume_pass(self) -> None:
        """Start a pass, with the datasets of a suspended one."""
        self.begin_pass()
        self._open += self._suspended
        self._suspended = 0

    def _sign_off_ended(self) -> None:
        """Sign off from passes that ended during a request, which another message would have disturbed."""
        while self._unsigned and not self.left:
            self._unsigned -= 1
            self._sign_off()

    def _sign_off(self) -> None:
        with self.lock:
            self._passes += 1
            self._finished = 0
            for transport in self._transports:
                transport.leave(clock=self._clock() if self._limit is not None else FINISHED)

    def leave(self) -> None:
        """Sign off for good at the end of the program. The group calls it."""
        self.leave_for_good()

    def abandon(self) -> None:
        self.left = True

    def refuse_in_child(self) -> None:
        super().refuse_in_child()
        self.left = True  # a child's datasets have no passes

    def leave_for_good(self) -> None:
        """Sign off for good: there are no later pushes."""
        if self.left:
            return
        self.left = True
        with self.lock:
            for transport in self._transports:
                transport.leave(for_good=True)

    def close(self) -> None:
        """Sign off for good; the group calls it. Collective, like closing the group."""
        self.leave_for_good()

    @property
    def together(self) -> bool:
        return self._sync_group is not None

    @property
    def num_servers(self) -> int:
        """The number of servers."""
        return len(self._transports)

    # reading

    def pull(self, variable: int) -> tuple[int, np.ndarray]:
        """Read a variable, see `Access.pull`. Collective over workers in sync in a step."""
        with self.lock:
            if self._sync_group is not None and self.step:
                return self._pull_together(self._sync_group, variable)
            event = RECORDER.begin(_PULL, variable)
            try:
                found = self._up_to_date(variable).pull(variable)
                RECORDER.count("bytes", found[1].nbytes)
                return found
            finally:
                RECORDER.end(event)

    def _pull_together(self, group: ProcessGroup, variable: int) -> tuple[int, np.ndarray]:
        spec, version = self._addresses[variable].spec, np.zeros(1, np.int64)
        out = np.empty(spec.shape, spec.dtype)
        with group.collective("read", detail=variable):
            if self._leads:
                version[0] = self._up_to_date(variable).read(variable, out)
            group.broadcast(out)
            group.broadcast(version)
        out.flags.writeable = False
        return int(version[0]), out

    def read_rows(self, variable: int, rows: np.ndarray, out: np.ndarray) -> int:
        with self.lock:
            return self._up_to_date(variable).read_rows(variable, rows, out)

    def _up_to_date(self, variable: int) -> Any:
        transport = self._transports[self._addresses[variable].spec.server]
        transport.flush()
        return transport

    # writing

    def gradient(self, variable: int) -> np.ndarray | None:
        with self.lock:
            return self._transport(variable).gradient(variable) if self._sync_group is None else None

    def write(self, variable: int, operation: Operation, array: np.ndarray) -> None:
        with self.lock:
            if self._leads:
                self._transport(variable).push(variable, array, what=pack(operation))
            self._hand_over()

    def write_rows(self, variable: int, operation: Operation, rows: np.ndarray, values: np.ndarray, depth: int) -> None:
        values = values.reshape(rows.size, *self._addresses[variable].spec.shape[depth:])
        with self.lock:
            if self._leads:
                if operation in (Operation.SCATTER_ADD, Operation.SCATTER_SUB):
                    rows, values = sum_duplicate_rows(rows, values, "push_rows")
                self._transport(variable).push_rows(variable, rows, values, what=pack(operation), depth=depth)
            self._hand_over()

    def _hand_over(self) -> None:
        """Wait until pushed arrays may be changed, and in a group of workers in sync until its pushes are applied."""
        self._pushed = True
        for transport in self._transports:
            transport.settle()
        if self._sync_group is not None:
            if self._leads:
                self.flush()
            self._sync_group.barrier("write")

    def push(self, variable: int, gradient: np.ndarray, what: int, version: int, last: bool) -> None:
        """Send a gradient, computed from a version of the variable.

        Args:
            variable: its number.
            gradient: of its shape and dtype.
            what: a GRADIENT, packed with the key of its optimizer.
            version: of the variable.
            last: whether it is this step's last to its server, which then counts the step.
        """
        if not self._leads:
            return
        with self.lock:
            event = RECORDER.begin(_PUSH, variable)
            try:
                self._transport(variable).push(variable, gradient, what=what, version=version, commit=last)
                RECORDER.count("bytes", gradient.nbytes)
            finally:
                RECORDER.end(event)

    def shares_memory(self, variable: int) -> bool:
        """Return True if this worker writes pushes of a variable into its server's memory."""
        return self._transport(variable).name == "shared_window"

    def push_encoded(
        self, variable: int, message: np.ndarray, encoding: int, what: int, version: int, last: bool
    ) -> None:
        """Send an encoded gradient: see `push`, and `Transport.push_encoded`."""
        if self._leads:
            with self.lock:
                self._transport(variable).push_encoded(
                    variable, message, encoding, what=what, version=version, commit=last
                )

    def push_rows(
        self, variable: int, rows: np.ndarray, values: np.ndarray, what: int, version: int, last: bool
    ) -> None:
        """Send a gradient of some rows; duplicate rows are summed."""
        if not self._leads:
            return
        with self.lock:
            transport = self._transport(variable)
            if rows.size:
                rows, values = sum_duplicate_rows(rows, values, "push_rows")
                transport.push_rows(variable, rows, values, what=what, version=version, commit=last)
            elif last:
                transport.commit(what=what)

    def finish_step(self, what: int, others: Iterable[int]) -> None:
        """Announce that all gradients of a step were sent.

        Args:
            what: as in `push`.
            others: servers without a gradient: they count the step, too.
        """
        with self.lock:
            for server in others if self._leads else ():
                self._transports[server].commit(what=what)
            self._hand_over()

    def skip_step(self, what: int) -> None:
        """End a step without pushes; `what` is a SKIPPED, packed with the key of the optimizer.

        If workers train in step, the others then do not wait for it.
        """
        with self.lock:
            if self._synchronous and self._leads:
                for transport in self._transports:
                    transport.commit(what=what)
            self._hand_over()

    def _transport(self, variable: int) -> Any:
        return self._transports[self._addresses[variable].spec.server]

    def flush(self) -> None:
        with self.lock, RECORDER.span("p", "flush"):
            for transport in self._transports:
                transport.flush()


@final
class ServerAccess(Access):
    """A server's access to its own variables, and to no others."""

    def __init__(self, server: VariableServer, servers: ParameterServers) -> None:
        super().__init__(servers)
        self._server = server

    def pull(self, variable: int) -> tuple[int, np.ndarray]:
        self._check(variable, "read")
        spec = self._addresses[variable].spec
        out = np.empty(spec.shape, spec.dtype)
        version = self._server.read(variable, out)
        out.flags.writeable = False
        return version, out

    def read_rows(self, variable: int, rows: np.ndarray, out: np.ndarray) -> int:
        self._check(variable, "read")
        version, out[...] = self._server.read_rows(variable, rows)
        return version

    def write(self, variable: int, operation: Operation, array: np.ndarray) -> None:
        self._check(variable, "assign")
        with self._server.replacing(variable) as (old, new):
            if new is not old and operation is not Operation.ASSIGN:
                np.copyto(new, old)
            apply_operation(operation, new, None, array)

    def write_rows(self, variable: int, operation: Operation, rows: np.ndarray, values: np.ndarray, depth: int) -> None:
        self._check(variable, "scatter")
        with self._server.writing(variable) as value:
            apply_operation(operation, value, rows, values)

    def _check(self, variable: int, function: str) -> None:
        if is_child():
            raise refusal(f"Variable.{function}")
        if not self.holds(variable):
            spec = self._addresses[variable].spec
            remedy = "Call it on a worker: `if not strategy.is_server:`"
            expected = f"a worker, or server {spec.server}, which holds it"
            got = f"a call on server {self._server.index}"
            raise ContextError(explain(f"Variable.{function}", spec.name, expected=expected, got=got, remedy=remedy))
