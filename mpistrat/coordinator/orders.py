"""What the chief does together with all ranks, carried out on ranks that serve: variables, optimizers, files."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, final

import numpy as np

from .._util import log
from ..optimizers import Optimizer
from ..optimizers import optimizer as optimizers
from ..strategy.show_config import show_config
from ..variables import create_variable
from ..variables.values import initial_array, parse_dtype

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["Orders", "order_of"]

_OWN = {*optimizers.OWN, "slot_names", "name"}


def order_of(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """Return the order that has others take part in what a strategy announces.

    Raises:
        What the call itself will raise, where it would do so before it meets the others.
    """
    if name == "variable":
        return name, (_variable(args, kwargs),)
    if name == "optimizer":
        return name, _optimizer(*args)
    return name, tuple(args)


def _variable(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    bound = dict(inspect.signature(create_variable).bind(None, *args, **kwargs).arguments)
    del bound["placement"]
    value = bound.pop("initial_value", None)
    if value is not None and (not callable(value) or hasattr(value, "__array__")):
        dtype = bound.get("dtype")
        array = initial_array(value, None if dtype is None else parse_dtype(dtype))
        bound["form"] = array.shape, array.dtype
    return bound


def _optimizer(optimizer: Optimizer) -> tuple[Any, ...]:
    own = {name: value for name, value in vars(optimizer).items() if name not in _OWN}
    base = {
        "slot_names": optimizer.slot_names,
        "slot_start": optimizer.slot_start,
        "name": optimizer.name,
    }
    return optimizer.ordinal, type(optimizer), optimizer.given_learning_rate, base, own, list(vars(optimizer))


@final
class Orders:
    """Carries out the chief's orders. Collective over all ranks: the chief does the same.

    Args:
        strategy: this rank's.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._optimizers: list[Optimizer] = []  # nobody else here holds them

    def obey(self, name: str, args: tuple[Any, ...]) -> None:
        """Carry out an order. What fails here fails on the chief as well, which raises it. Collective."""
        own: dict[str, Callable[..., object]] = {
            "variable": self._make_variable,
            "optimizer": self._make_optimizer,
            "show_config": lambda: show_config(self._strategy),
        }
        try:
            (own.get(name) or getattr(self._strategy, name))(*args)
        except Exception as error:
            log.logger.log(logging.WARNING, "%s, which the chief called: %s: %s", name, type(error).__name__, error)

    def _make_variable(self, what: dict[str, Any]) -> None:
        form = what.pop("form", None)
        value = _rank_0_has_it if form is None else np.zeros(*form)
        with self._strategy.scope():
            self._strategy.extended.create_variable(value, **what)

    def _make_optimizer(
        self,
        ordinal: int,
        kind: type[Optimizer],
        rate: Any,
        base: dict[str, Any],
        own: dict[str, Any],
        names: list[str],
    ) -> None:
        optimizer = optimizers.find(ordinal)
        if optimizer is None:
            optimizer = kind.__new__(kind)
            Optimizer.__init__(optimizer, rate, **base)
            optimizers.register(optimizer, ordinal)
            self._optimizers.append(optimizer)
        mine = vars(optimizer)
        mine.update(own)
        ordered = {name: mine[name] for name in names if name in mine}  # in which it describes itself
        mine.clear()
        mine.update(ordered)
        optimizer.learning_rate = rate  # which makes its steps describe it anew


def _rank_0_has_it() -> NoReturn:
    raise RuntimeError("only rank 0 makes initial values")
