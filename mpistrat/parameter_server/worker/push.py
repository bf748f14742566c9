"""One training step with parameter servers: sum the worker's gradients, send each to its server, and commit the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ...arena.wire import wire_named
from ...base.distributed_values import DistributedValues, PerReplica
from ...base.errors import explain
from ...base.options import WIRES
from ...base.types import IndexedSlices, ReduceOp
from ...base.underflow import may_underflow
from ...comm.arrays import accumulation_dtype, to_host
from ...optimizers.gradients import checked
from ...optimizers.rule import UpdateRun
from ..operations import Operation, optimizer_key, pack, sum_duplicate_rows
from ..variable import ParameterServerVariable
from .access import WorkerAccess

if TYPE_CHECKING:
    from ...cross_device.ops import CrossDeviceOps
    from ...optimizers.optimizer import Optimizer

__all__ = ["PushStep"]


@final
class PushStep(UpdateRun):
    """The step of one optimizer on one set of variables, on a worker. It does not wait for other workers."""

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: Any,
        variables: Sequence[ParameterServerVariable],
        access: WorkerAccess,
        check_numerics: bool = False,
        wire: str | None = None,
    ) -> None:
        if "direct" in optimizer._core.passes:
            kind, remedy = type(optimizer).__name__, "Use Adam with parameter servers"
            expected, got = f"variables that are whole on each rank's node, for {kind}", "variables on servers"
            raise ValueError(explain("apply_gradients", optimizer.name, expected=expected, got=got, remedy=remedy))
        refused = "use_ema", "gradient_accumulation_steps"
        kept = [name for name in refused if getattr(optimizer, name)]
        if kept:
            remedy = "Remove it with parameter servers; to accumulate, add up the gradients in the program"
            expected, got = f"an optimizer without {kept[0]}", f"{kept[0]}={getattr(optimizer, kept[0])!r}"
            raise ValueError(explain("apply_gradients", optimizer.name, expected=expected, got=got, remedy=remedy))
        self.strategy, self._check_numerics = strategy, check_numerics
        self._optimizer, self._variables, self._access = optimizer, tuple(variables), access
        coded = [v for v in variables if wire and v.dtype == np.float32 and not access.shares_memory(v.number)]
        self._encoded = {variable.number: _Encoder(wire or "") for variable in coded}
        placement = variables[0].placement
        self._ops: CrossDeviceOps = placement.ops
        self._alone = placement.group.topology.num_replicas == 1
        self._replicas: Sequence[Sequence[tuple[Any, Any]]] = ()
        servers = [variable.server for variable in variables]
        # Every server counts every step of an optimizer: it may store one of its variables later.
        self._others = sorted(set(range(access.num_servers)) - set(servers))
        self._last = [server not in servers[i + 1 :] for i, server in enumerate(servers)]
        self.describe()

    def describe(self) -> None:
        """Update the description of the optimizer, after its numbers have changed."""
        optimizer = self._optimizer
        key = optimizer_key(optimizer)
        self._what, self._skipped = pack(Operation.GRADIENT, key), pack(Operation.SKIPPED, key)
        self._factor = 1 / (optimizer.loss_scale_factor or 1.0)
        self._checks = self._check_numerics or optimizer.check_numerics
        self._clips = optimizer.global_clipnorm is not None or optimizer.clipnorm is not None

    def load(self, replicas: Sequence[Sequence[tuple[Any, Any]]], key: tuple[int, ...]) -> None:
        """Store the gradients of the local replicas. Arguments as `load_gradients`."""
        self._replicas = replicas

    def run(self, aggregate: bool) -> None:
        """Send the gradients. In cross-replica context.

        Args:
            aggregate: whether gradients are summed over the worker's replicas; else they are already equal on all.

        Raises:
            FloatingPointError: with `check_numerics`: a gradient is not finite; nothing was pushed.
        """
        replicas, self._replicas = self._replicas, ()
        if self._alone or not aggregate:
            gradients = [g if _fits(g, v) else checked(g, v) for g, v in replicas[0] if g is not None]
        else:
            own = [[(g, v) for g, v in pairs if g is not None] for pairs in replicas]
            gradients = self._sum([[checked(pairs[i][0], v) for pairs in own] for i, (_, v) in enumerate(own[0])])
        if self._factor != 1:
            gradients = [_scaled(gradient, self._factor) for gradient in gradients]
        if self._checks:
            try:
                for variable, gradient in zip(self._variables, gradients, strict=True):
                    self._check_finite(variable, gradient)
            except FloatingPointError:
                self._access.skip_step(self._skipped)
                raise
        if self._clips:
            gradients = self._clipped(gradients)
        with self._access.lock:
            for variable, gradient, last in zip(self._variables, gradients, self._last, strict=True):
                self._push(variable, gradient, last)
            self._access.finish_step(self._what, self._others)

    def _clipped(self, gradients: list[Any]) -> list[Any]:
        if self._optimizer.global_clipnorm is not None:
            return _clip(gradients, self._optimizer.global_clipnorm)
        limit = self._optimizer.clipnorm or 0.0
        return [clipped for gradient in gradients for clipped in _clip([gradient], limit)]

    def _sum(self, gradients: Sequence[Sequence[Any]]) -> list[Any]:
        totals = self._ops.batch_reduce(ReduceOp.SUM, [(PerReplica(values), None) for values in gradients])
        return [total.values[0] if isinstance(total, DistributedValues) else total for total in totals]

    def _check_finite(self, variable: ParameterServerVariable, gradient: Any) -> None:
        array = to_host(gradient.values if isinstance(gradient, IndexedSlices) else gradient)
        finite = np.isfinite(array)
        if not finite.all():
            count = int(finite.size - np.count_nonzero(finite))
            rank, step = self.strategy.rank, self._optimizer._core.calls + 1
            got = f"{count} that are not, of {finite.size}, on rank {rank}, in step {step}"
            remedy = "Look at the loss and the learning rate; nothing of this step was pushed"
            raise FloatingPointError(
                explain("apply_gradients", variable.name, expected="finite numbers", got=got, remedy=remedy)
            )

    @may_underflow
    def _push(self, variable: ParameterServerVariable, gradient: Any, last: bool) -> None:
        access, dtype = self._access, variable.dtype
        if isinstance(gradient, IndexedSlices):
            rows = np.asarray(to_host(gradient.indices), np.int64)
            values = np.asarray(to_host(gradient.values)).astype(dtype, copy=False)
            access.push_rows(variable.number, rows, values, self._what, variable.version_of_step, last)
            return
        if type(gradient) is not np.ndarray or gradient.dtype != dtype:
            gradient = np.asarray(to_host(gradient)).astype(dtype, copy=False)
        encoder = self._encoded.get(variable.number)
        if encoder is not None:
            message = encoder.encode(gradient)
            access.push_encoded(variable.number, message, encoder.number, self._what, variable.version_of_step, last)
            return
        access.push(variable.number, gradient, self._what, variable.version_of_step, last)


@final
class _Encoder:
    """The encoding of one variable's gradients, with its error feedback.

    Args:
        name: one of `WIRES`.

    Attributes:
        number: its index there.
    """

    def __init__(self, name: str) -> None:
        wire = wire_named(name)
        assert wire is not None
        self._wire, self.number = wire, WIRES.index(name)
        self._unsent: np.ndarray | None = None

    def encode(self, gradient: np.ndarray) -> np.ndarray:
        """Return a float32 gradient as bytes."""
        flat = np.ascontiguousarray(gradient).reshape(-1)
        message = np.empty(self._wire.nbytes(flat.size), np.uint8)
        if not self._wire.feeds_back:
            self._wire.encode(flat, message)
            return message
        if self._unsent is None:
            self._unsent = np.zeros_like(flat)
        self._wire.encode_sum(flat.copy(), message, self._unsent, np.empty_like(flat))
        return message


def _fits(gradient: Any, variable: ParameterServerVariable) -> bool:
    """Return whether a gradient is an array of the variable's shape and dtype, without a full check."""
    return type(gradient) is np.ndarray and gradient.dtype == variable.dtype and gradient.shape == variable.shape


def _each_row_once(gradient: IndexedSlices) -> IndexedSlices:
    """Return the gradient with duplicate rows summed, as norms need it."""
    rows, values = sum_duplicate_rows(to_host(gradient.indices), to_host(gradient.values), "apply_gradients")
    return IndexedSlices(values, rows, gradient.dense_shape)


@may_underflow
def _clip(gradients: list[Any], limit: float) -> list[Any]:
    """Scale gradients together so that their norm does not exceed a limit; NaN in one makes all NaN."""
    gradients = [_each_row_once(g) if isinstance(g, IndexedSlices) else g for g in gradients]
    arrays = [g.values if isinstance(g, IndexedSlices) else g for g in gradients]
    norm = math.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in map(to_host, arrays)))
    if norm <= limit:
        return gradients
    scale = limit / norm if math.isfinite(norm) else math.nan
    return [_scaled(gradient, scale) for gradient in gradients]


def _scaled(gradient: Any, factor: float) -> Any:
    """Return a gradient times a number, in the dtype in which gradients are summed; integers become floats."""
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(_scaled(gradient.values, factor), gradient.indices, gradient.dense_shape)
    return gradient.astype(accumulation_dtype(gradient.dtype), copy=False) * factor
