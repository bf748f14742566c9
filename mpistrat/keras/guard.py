"""Make every Keras optimizer that updates a distributed model's variables a distributed one, however the program holds it.

The optimizers of a model's attributes are found before training (`state.optimizers_in`). All others are found at their first
update: `guard` wraps the two methods by which Keras's optimizers update, in the classes that define them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import keras
from keras.src.optimizers.base_optimizer import BaseOptimizer

from ..base.errors import ContextError, explain
from .optimizer import DistributedOptimizer, distribute_optimizer, in_graph
from .state import arrays_of, describe_optimizer

__all__ = ["guard"]

_models: list[weakref.ref[Any]] = []
_guards = 0  # number of calls of `guard`


def guard(model: Any) -> None:
    """From now on, distribute each optimizer that updates variables of a distributed model."""
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
    """Return a method of optimizers that distributes the optimizer first, if it updates variables of a distributed model."""

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
    """Return the distributed model that has one of the variables that an optimizer updates; else None."""
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
