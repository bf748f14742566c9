"""Variable stored on a parameter server."""

from __future__ import annotations

from typing import Any, final

import numpy as np

from ..arena.values import as_flat, zeros
from ..base.arguments import tensorflow_names
from ..base.devices import parse
from ..base.errors import ContextError, explain
from ..base.types import IndexedSlices, VariableAggregation
from ..comm.arrays import to_host
from ..variables.kinds import OnWriteVariable, SyncOnReadVariable
from ..variables.placement import Description, Placement
from ..variables.scatter import row_numbers
from ..variables.variable import require_gradient
from .operations import Operation
from .worker.access import Access

__all__ = ["CopiesOfWorkers", "ParameterServerVariable"]

_OPERATIONS = {
    "assign": Operation.ASSIGN,
    "assign_add": Operation.ASSIGN_ADD,
    "assign_sub": Operation.ASSIGN_SUB,
}
_SCATTERS = {op: Operation[f"SCATTER_{op.upper()}"] for op in ("update", "add", "sub", "mul", "div", "min", "max")}


@final
class ParameterServerVariable(OnWriteVariable):
    """A variable on one server, which every worker reads and writes without waiting for other workers.

    A read gets the whole variable from its server, between two writes, including this worker's earlier writes; a large one on
    this node is not copied. In a step (`strategy.run`) the first read does so, and later ones of the step return the same
    numbers, as do all reads in `cache_variable_reads`; outside every read asks the server. A write returns when the value was
    submitted; the server applies it once. Neither is collective. In replica context the writes of the worker's own replicas are
    aggregated first.

    Attributes:
        number: of the variable among all on the servers.
        server: the number of its server.
        version: the number of the server's writes at this rank's last read.
    """

    __slots__ = ("_access", "_gradients", "_read_in", "_seen", "_snapshot", "number", "server", "version")

    def __init__(
        self, placement: Placement, description: Description, number: int, server: int, access: Access
    ) -> None:
        """Store the access."""
        self._hold(placement, description)
        self.number, self.server, self.version = number, server, 0
        self._access: Access | None = access
        self._snapshot: Any = None
        self._seen = self._read_in = 0  # the period of the snapshot, the step of the last read
        self._gradients: list[Any] | None = None

    @property
    def device(self) -> str:
        """The device of the variable, in TensorFlow's form: "/job:ps/replica:0/task:0/device:CPU:0" for server 0."""
        return f"/job:ps/replica:0/task:{self.server}/device:CPU:0"

    # reading

    @property
    def array(self) -> Any:
        """The numbers, read-only: of the first read of this step or cache, else the current ones."""
        access, snapshot = self._access, self._snapshot  # before `_seen`: another replica may replace both
        if access is not None and access.step and self._seen == access.step and snapshot is not None:
            return snapshot
        return self._pull()

    @property
    def version_of_step(self) -> int:
        """The version that the current step has read; -1 if it has read none."""
        access = self._access
        return self.version if access is not None and access.step == self._read_in else -1

    def _pull(self) -> Any:
        access = self._access
        if access is None:
            self._require_open()
        assert access is not None
        with access.lock:
            period = access.period()
            if period and self._seen == period:  # in a cache, or another replica was faster
                self._read_in = access.step
                return self._snapshot
            self._seen, self._snapshot = 0, None  # its memory may be reused
            (self.version, out), self._read_in = access.pull(self.number), access.step
            if period:
                self._snapshot, self._seen = out, period
            return out

    @property
    def values(self) -> tuple[Any, ...]:
        """The values that each local replica reads: the same array."""
        return (self.array,) * self.placement.group.topology.num_local_replicas

    @property
    def num_copies(self) -> int:
        """The number of physical copies that this rank writes: 1, the server's."""
        self._require_open()
        return 1

    @tensorflow_names()
    def sparse_read(self, indices: Any) -> Any:
        """Return a new array of the rows with these numbers, in their order; only they are sent."""
        rows, shape = row_numbers(self.shape, indices, "sparse_read")
        access = self._access
        if access is None or ((period := access.period()) and self._seen == period):
            return self.array[rows].reshape(shape)
        out = np.empty((rows.size, *self.shape[1:]), self.dtype)
        with access.lock:
            self.version, self._read_in = access.read_rows(self.number, rows, out), access.step
        return out.reshape(shape)

    # writing

    def _store(self, op: str, flat: Any, only: int | None = None, given: bool = False) -> None:
        access = self._access
        assert access is not None
        with access.lock:
            access.write(self.number, _OPERATIONS[op], np.ascontiguousarray(flat).reshape(self.shape))
            self._seen = min(self._seen, 0)  # the step reads again, to see it; a cache does not

    def _store_rows(
        self, op: str, depth: int, delta: IndexedSlices, only: int | None = None, given: bool = False
    ) -> None:
        access = self._access
        assert access is not None
        rows = np.asarray(delta.indices, np.int64)
        with access.lock:
            access.write_rows(self.number, _SCATTERS[op], rows, np.ascontiguousarray(delta.values), depth)
            self._seen = min(self._seen, 0)

    # gradients

    def gradient(self, local_replica: int) -> Any:
        """Return the writable gradient array of one local replica, which is pushed.

        Raises:
            ValueError: the variable has no gradients.
        """
        gradients = self._gradients
        return (self._make_gradients() if gradients is None else gradients)[local_replica]

    def _make_gradients(self) -> list[Any]:
        """Return the gradient arrays of all local replicas; the first thread allocates them."""
        require_gradient(self)
        devices, access = self.placement.devices, self._access
        assert access is not None
        with access.lock:
            if self._gradients is None:
                alone = len(devices) == 1 and parse(devices[0])[0] == "cpu"
                only = access.gradient(self.number) if alone else None
                self._gradients = [only] if only is not None else [zeros(self.shape, self.dtype, d) for d in devices]
            return self._gradients

    # files

    def _parts_for_file(self, leads: bool, at_home: bool) -> list[tuple[int, Any]]:
        access = self._access
        if not at_home or access is None:
            return super()._parts_for_file(leads, at_home)
        return [(0, np.array(self.numpy()))] if access.holds(self.number) else []

    def _value_for_file(self) -> np.ndarray | None:
        """Return the value for files, see `value_for_file`. Collective."""
        access, group = self._access, self.placement.creators
        assert access is not None
        if access.reaches(self.number, rank=0):
            return self.numpy() if group.topology.rank == 0 else None
        with group.collective("gathered", self.name, self.dtype, self.shape):
            value = self.numpy() if access.holds(self.number) else np.empty(self.shape, self.dtype)
            group.broadcast(value, access.holder(self.number))
        return value

    def load(self, value: np.ndarray) -> None:
        """Write a value, see `Variable.load`. Collective."""
        group = self.placement.creators
        with group.collective("load", self.name, self.dtype, self.shape):
            access = self._access
            assert access is not None
            if access.holds(self.number):
                flat = as_flat(value, self.shape, self.dtype, "Variable.load")
                access.write(self.number, Operation.ASSIGN, np.ascontiguousarray(flat).reshape(self.shape))
        group.barrier("load")

    @property
    def closed(self) -> bool:
        return self._access is None

    def _close(self) -> None:
        self._access = self._snapshot = self._gradients = None


@final
class CopiesOfWorkers(SyncOnReadVariable):
    """An ON_READ variable of workers that step alone: each worker's replicas have copies, and reads aggregate only these.

    With a coordinator a read outside of its functions is the sum over all workers. A file has the sum of the workers' values
    under SUM, else the first worker's.
    """

    __slots__ = ()

    @property
    def led(self) -> bool:
        return bool(self.placement.strategy.extended.coordination.leads)

    @property
    def values(self) -> tuple[Any, ...]:
        """The copy of each local replica, in replica order: read-only views.

        Raises:
            ContextError: with a coordinator, whose workers have the copies.
        """
        if self.led:
            self._require_open()
            expected = "a read of all workers' copies, or a read in a function"
            got = "a read of this rank's copies, which no function writes"
            remedy = "Use numpy(), or return the values from a scheduled function"
            raise ContextError(explain("Variable.values", self.name, expected=expected, got=got, remedy=remedy))
        return super().values

    def gathered(self) -> np.ndarray | None:
        """Return the value as in `Variable.gathered`; with a coordinator the sum of all workers' copies."""
        return self._of_workers() if self.led else super().gathered()

    def _of_all(self) -> Any:
        return self._of_workers() if self.led else super()._of_all()

    def _of_workers(self) -> np.ndarray:
        """Return the sum of the copies of all workers, which serve this rank.

        Raises:
            ContextError: the aggregation is not SUM.
        """
        if self.aggregation is not VariableAggregation.SUM:
            remedy = "Read it in the functions, and return the values you need"
            expected = (
                "aggregation SUM of an ON_READ variable that a coordinator reads: each worker's functions write a copy"
            )
            got = self.aggregation.name
            raise ContextError(explain("Variable", self.name, expected=expected, got=got, remedy=remedy))
        self.placement.strategy.extended.coordination.announce("gathered", self)
        return self._value_for_file()

    def _assign_all(self, op: str, flat: Any) -> None:
        if self.led:
            value = to_host(flat).reshape(self.shape)
            self.placement.strategy.extended.coordination.announce("write_copies", self, op, value)
        super()._assign_all(op, flat)

    # files

    def _value_for_file(self) -> np.ndarray:
        value, world = super()._value_for_file(), self.placement.creators
        with world.collective("gathered", self.name, self.dtype, self.shape):
            if self.aggregation is not VariableAggregation.SUM:
                world.broadcast(value, self.placement.first_worker)
                return value
            leads = self.placement.group.topology.rank == 0  # the workers that step together have one value
            parts = world.all_gather_bytes(value.tobytes() if leads else b"")
        values = [np.frombuffer(part, self.dtype) for part in parts if part]
        return np.add.reduce(values, dtype=self.dtype).reshape(self.shape)

    def load(self, value: np.ndarray) -> None:
        """Write a value, see `Variable.load`. The first worker, with those in sync with it, gets all of a sum."""
        strategy = self.placement.strategy
        whole = self.aggregation is not VariableAggregation.SUM or strategy.worker_index in range(
            strategy.workers_in_sync
        )
        super().load(value if whole else np.zeros_like(value))
