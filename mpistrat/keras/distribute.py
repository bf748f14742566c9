"""distribute: a Keras model put into a strategy."""

from __future__ import annotations

from typing import Any, TypeVar

import keras

from ..base import context
from ..base.devices import parse
from ..base.errors import LayoutError, check_framework, explain
from .guard import guard
from .link import ModelLink, subclass
from .model import DistributedModel

__all__ = ["distribute"]

M = TypeVar("M")


def distribute(model: M) -> M:
    """Put a Keras model into the current strategy: its fit, evaluate and predict go over all ranks. Collective.

    The same object is returned, compiled before or after. Each step, gradients are averaged over all ranks before Keras's
    optimizer updates; metrics are those of all ranks before callbacks see them at an epoch's end; `predict` returns all rows.
    Weights begin as rank 0's; random numbers, as of dropout, differ from rank to rank. Files are written by rank 0, and are
    Keras's own. Under a MeshStrategy every rank has the whole model: replicas divide batches, the ranks of one compute alike.

    Args:
        model: a keras.Model: functional, Sequential or of a class of yours; built or not; on the CPU.

    Raises:
        ContextError: outside of a strategy's scope.
        LayoutError: a rank has several GPUs, or is a worker of parameter servers with several replicas.
        MissingDependencyError: with JAX as the backend, Keras is older than 3.15 or JAX than 0.6.
        RuntimeError: the model was distributed already.
        TypeError: not a keras.Model.
        ValueError: it was compiled with what cannot be divided over ranks.

    Example:
        >>> with strategy.scope():  # doctest: +SKIP
        ...     model = ms.keras.distribute(model)
        >>> model.fit(x, y, batch_size=256, epochs=5)  # doctest: +SKIP
    """
    function = "ms.keras.distribute"
    context.expect_scope(function, "model = ms.keras.distribute(model)")
    given: Any = model
    if not isinstance(given, keras.Model):
        raise TypeError(explain(function, "model", expected="a keras.Model", got=type(model).__name__))
    if isinstance(given, DistributedModel):
        raise RuntimeError(explain(function, "model", expected="one call for a model", got="a second one"))
    _check_layout(function, context.get_strategy())
    if keras.backend.backend() == "jax":
        import jax

        backend = f"{function} with JAX as Keras's backend"
        check_framework(backend, "keras", keras.__version__, "3.15", "older versions read batches ahead of the step")
        check_framework(backend, "jax", jax.__version__, "0.6", "older versions have no buffer_callback")
    given.__class__ = subclass(type(given), DistributedModel)
    vars(given)["mpistrat"] = ModelLink(context.get_strategy())
    guard(given)
    if given.compiled:
        given.distribute_compiled()
    return model


def _check_layout(function: str, strategy: Any) -> None:
    """Check that a rank can compute for all of its replicas at once.

    Raises:
        LayoutError: it has several GPUs, or several replicas of a worker that steps for itself; or nodes take local steps, or
            gradients are handed over.
    """
    extended = strategy.extended
    extended.placement.require_kept_gradients(function)
    if extended.placement.local_steps is not None:
        got = f"one with {extended.placement.local_steps}"
        expected, remedy = "a strategy whose nodes step together", "Leave local_steps out: Keras's models train in sync"
        raise LayoutError(explain(function, "strategy", expected=expected, got=got, remedy=remedy))
    devices = [device for device in extended.placement.devices if parse(device)[0] != "cpu"]
    served = extended.placement.store is not None
    if len(extended.replicas) > 1 and (devices or served):
        got = f"{type(strategy).__name__} with {len(extended.replicas)} on this one"
        remedy = "Start one process for each device"
        expected = "one replica on each rank, or several on the CPU of ranks that step together"
        raise LayoutError(explain(function, "strategy", expected=expected, got=got, remedy=remedy))
