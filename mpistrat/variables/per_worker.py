"""The per-worker variable: each worker has its own copy, which it reads and writes locally."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..arena.values import as_flat, move_like, one_value, read_only, zeros
from ..base.errors import explain
from ..base.types import VariableAggregation, VariableSynchronization
from ..comm.arrays import to_host
from .placement import Description, Placement
from .scatter import scatter
from .variable import Variable

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["PerWorkerVariable", "check_per_worker"]


@final
class PerWorkerVariable(Variable):
    """A variable with a copy for each worker, such as a counter (TF: PerWorkerVariable).

    `ms.Variable(..., per_worker_variable=True)` creates it, which is collective; all copies start with the same value. Reading
    and writing use this rank's copy, in and outside of steps, and are local; its replicas share it. A worker is a rank with
    replicas. `save` writes the first worker's copy, `restore` gives it to all.
    """

    __slots__ = ("_copy", "_lock")

    def __init__(self, placement: Placement, description: Description) -> None:
        """Create a zeroed copy."""
        self._hold(placement, description)
        device = placement.arenas.devices[0] if placement.arenas.on_gpu else "cpu:0"
        self._copy: Any = zeros(self.shape, self.dtype, device)
        self._lock = threading.Lock()

    def read_all(self) -> list[np.ndarray]:
        """Return the copies of all workers, in their order, as new arrays. Collective over all ranks of the strategy.

        With a coordinator the chief calls it, the serving ranks take part, and the list has the workers that run functions. It
        does not wait for scheduled functions: call `join` first.

        Raises:
            ContextError: in a step, or in a scheduled function.
        """
        self._require_open()
        extended = self.placement.strategy.extended
        extended.require_cross("Variable.read_all")
        extended.coordination.announce("read_all", self)
        world = self.placement.creators
        runs_steps = self.placement.is_worker and not extended.coordination.leads
        own = b"\1" + self.numpy().tobytes() if runs_steps else b""
        with world.collective("read_all", self.name, self.dtype, self.shape):
            copies = world.all_gather_bytes(own)
        return [np.frombuffer(copy, self.dtype, offset=1).reshape(self.shape).copy() for copy in copies if copy]

    # reading

    @property
    def array(self) -> Any:
        """This rank's copy as a read-only view."""
        self._require_open()
        return read_only(self._copy)

    @property
    def values(self) -> tuple[Any, ...]:
        """The values that each local replica reads: the same copy."""
        return (self.array,) * self.placement.group.topology.num_local_replicas

    @property
    def num_copies(self) -> int:
        """The number of physical copies that this rank writes: 1."""
        self._require_open()
        return 1

    def storage(self, local_replica: int = 0) -> Any:
        """Return this rank's copy, writable; see `Variable.storage`. No rank shares it."""
        self._require_open()
        return self._copy

    @property
    def closed(self) -> bool:
        return self._copy is None

    def _close(self) -> None:
        self._copy = None

    # writing

    def _update(self, op: str, value: Any) -> Self:
        self._require_open()
        function = f"Variable.{op}"
        flat = as_flat(one_value(value, function), self.shape, self.dtype, function)
        new = move_like(flat, self._copy).reshape(self.shape)
        with self._lock:
            if op == "assign":
                self._copy[...] = new
            elif op == "assign_add":
                self._copy += new
            else:
                self._copy -= new
        return self

    def _scatter(self, op: str, depth: int, indices: np.ndarray, updates: np.ndarray) -> Self:
        self._require_open()
        count, width = (int(np.prod(lengths, dtype=np.int64)) for lengths in (self.shape[:depth], self.shape[depth:]))
        rows = self._copy.reshape(count, width)
        with self._lock:
            host = to_host(rows)  # the rows themselves on a CPU
            scatter(op, host, 0, indices, updates)
            if host is not rows:
                rows[...] = move_like(host, rows)
        return self

    # files

    def _value_for_file(self) -> np.ndarray:
        """See `value_for_file`: the first worker's copy. Collective."""
        value, world = self.numpy(), self.placement.creators
        with world.collective("gathered", self.name, self.dtype, self.shape):
            world.broadcast(value, self.placement.first_worker)
        return value


def check_per_worker(
    synchronization: VariableSynchronization, aggregation: VariableAggregation, trainable: bool | None
) -> None:
    """Raise ValueError unless the settings of a variable suit copies that are never combined."""
    for argument, given, legal in (
        ("synchronization", synchronization, (VariableSynchronization.AUTO, VariableSynchronization.ON_READ)),
        ("aggregation", aggregation, (VariableAggregation.NONE,)),
        ("trainable", trainable, (None, False)),
    ):
        if given not in legal:
            expected = f"{' or '.join(getattr(one, 'name', str(one)) for one in legal)} with per_worker_variable=True"
            got = getattr(given, "name", repr(given))
            remedy = "Leave it out: copies of workers are not combined, and optimizers do not update them"
            raise ValueError(explain("Variable", argument, expected=expected, got=got, remedy=remedy))
