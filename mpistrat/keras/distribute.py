"""distribute: put a Keras model into a strategy.

Each optimizer that updates a distributed model's variables becomes distributed. Those in a model's attributes are found
before training (`state.optimizers_in`), others at their first update: `guard` wraps the two methods of Keras's optimizers
that update.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer

from ..base import context
from ..base.devices import parse
from ..base.errors import ContextError, LayoutError, check_framework, explain
from ..base.types import Quality
from .link import ModelLink, arrays_of, subclass
from .model import DistributedModel
from .optimizer import DistributedOptimizer, distribute_optimizer, in_graph
from .served import ServedLink
from .state import describe_optimizer

__all__ = [
    "distribute",
    "guard",
]


_models: list[weakref.ref[Any]] = []
_guards = 0  # number of calls of `guard`


def guard(model: Any) -> None:
    """Distribute each optimizer that updates variables of a distributed model from now on."""
    global _guards
    _models[:] = [other for other in _models if other() is not None]
    _models.append(weakref.ref(model))
    _guards += 1
    if _guards > 1:
        return

    def init_subclass(cls: type[Any], **kwargs: Any) -> None:
        super(BaseOptimizer, cls).__init_subclass__(**kwargs)
        _wrap(cls)

    waiting: list[type[Any]] = [BaseOptimizer]
    kinds: set[type[Any]] = set()
    while waiting:
        kind = waiting.pop()
        if kind not in kinds and not issubclass(kind, DistributedOptimizer):
            kinds.add(kind)
            waiting += kind.__subclasses__()
    for kind in kinds:
        _wrap(kind)
    BaseOptimizer.__init_subclass__ = classmethod(init_subclass)


def _wrap(kind: type[Any]) -> None:
    for name in ("apply", "stateless_apply"):
        if name in vars(kind):
            setattr(kind, name, _guarded(name, vars(kind)[name]))


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an optimizer's method, to distribute the optimizer first if the model is distributed."""

    @functools.wraps(function)
    def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, DistributedOptimizer) or vars(self).get("mpistrat_checked") == _guards:
            return function(self, *args, **kwargs)
        if name == "apply":
            args, kwargs = _listed(*args, **kwargs)
        model = _model_of(kwargs.get("trainable_variables") if name == "apply" else None, self)
        if model is None or model.mpistrat.in_sum:
            return function(self, *args, **kwargs)
        _join(model, self, keras.tree.flatten((args, kwargs)))
        return getattr(self, name)(*args, **kwargs)

    return guarded


def _listed(grads: Any, trainable_variables: Any = None, **more: Any) -> tuple[Any, Any]:
    if trainable_variables is not None:
        more["trainable_variables"] = list(trainable_variables)
    return (list(grads),), more


def _model_of(variables: Any, optimizer: Any) -> Any:
    """Return the distributed model of an optimizer's variables; else None."""
    theirs = {id(variable) for variable in optimizer._trainable_variables if variable is not None}
    theirs |= {id(variable) for variable in variables or ()}
    for reference in _models:
        model = reference()
        if model is not None and not theirs.isdisjoint(map(id, model.variables)):
            return model
    if optimizer.built:
        vars(optimizer)["mpistrat_checked"] = _guards
    return None


def _join(model: Any, optimizer: Any, given: list[Any]) -> None:
    """Distribute an optimizer that updates a model for the first time. Collective.

    Raises:
        ContextError: in a compiled function, where its state cannot be compared.
        CollectiveMismatchError: on every rank, when its settings differ.
    """
    link = model.mpistrat
    if in_graph(given):
        expected = "an optimizer that is known before a compiled step"
        got = f"{optimizer.name}, which updates {model.name} and was found in its step only"
        remedy = "Make it an attribute of the model, or an item of a list, tuple or dict that is one, before fit"
        raise ContextError(explain("Optimizer.apply", "optimizer", expected=expected, got=got, remedy=remedy))
    distribute_optimizer(link, optimizer)
    link.joined.append(optimizer)
    link.same("Optimizer.apply", "optimizer", describe_optimizer(optimizer))
    theirs = link.broadcast(arrays_of(optimizer.variables))
    for variable, array in zip(optimizer.variables, theirs, strict=True):
        variable.assign(array)


M = TypeVar("M")


def distribute(model: M) -> M:
    """Make a Keras model's fit, evaluate and predict run over all ranks of the current strategy. Collective.

    It returns the same object; compile it before or after. Gradients are averaged over all ranks before Keras's optimizer
    updates. Callbacks at an epoch's end see the metrics of all ranks; `predict` returns all rows. Weights start as rank 0's;
    random numbers, as of dropout, differ between ranks. Rank 0 writes files, in Keras's formats. Under a MeshStrategy every
    rank has the whole model: replicas divide batches, and the ranks of a replica compute the same.

    Args:
        model: a keras.Model: functional, Sequential or of your class; built or not; on the CPU.

    Raises:
        ContextError: outside of a strategy's scope.
        LayoutError: a rank has several GPUs, or is a worker of parameter servers with several replicas.
        MissingDependencyError: with JAX as the backend, Keras is older than 3.15 or JAX than 0.6.
        RuntimeError: the model is distributed already.
        TypeError: not a keras.Model.
        ValueError: a setting of `compile` cannot be divided over ranks.

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
        raise RuntimeError(explain(function, "model", expected="a plain model", got="one distributed already"))
    _check_layout(function, context.get_strategy())
    if keras.backend.backend() == "jax":
        import jax

        backend = f"{function} with JAX as Keras's backend"
        check_framework(backend, "keras", keras.__version__, "3.15", "older versions read batches ahead of the step")
        check_framework(backend, "jax", jax.__version__, "0.6", "older versions have no buffer_callback")
    given.__class__ = subclass(type(given), DistributedModel)
    vars(given)["mpistrat"] = link = _link_of(context.get_strategy())
    link.model = weakref.ref(given)
    context.get_strategy().extended.models.add(given)
    guard(given)
    if given.compiled:
        given.distribute_compiled()
    return model


def _check_layout(function: str, strategy: Any) -> None:
    """Check that a rank can compute for all of its replicas at once.

    Raises:
        LayoutError: it has several GPUs, or is a worker with several replicas; or nodes take local steps, or gradients are
            submitted asynchronously.
    """
    placement = strategy.extended.placement
    placement.require(function, Quality.KEPT_GRADIENTS, "gradients lie in the framework's arrays")
    placement.require(function, Quality.EQUAL_NODES, "Keras's models train in sync")
    devices = [device for device in placement.devices if parse(device)[0] != "cpu"]
    if len(strategy.extended.replicas) > 1 and (devices or placement.lacks(Quality.COMMON_STEPS)):
        got = f"{type(strategy).__name__} with {len(strategy.extended.replicas)} on this one"
        remedy = "Start one process for each device"
        expected = "one replica on each rank, or several on the CPU of ranks that step together"
        raise LayoutError(explain(function, "strategy", expected=expected, got=got, remedy=remedy))


def _link_of(strategy: Any) -> ModelLink:
    if strategy.extended.placement.lacks(Quality.COMMON_STEPS):
        return ServedLink(strategy)
    return ModelLink(strategy, DistributedOptimizer)
