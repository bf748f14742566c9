"""Deprecated parameters of collectives, which still work with a DeprecationWarning."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["formerly"]

F = TypeVar("F", bound=Callable[..., Any])


def formerly(**old: str) -> Callable[[F], F]:
    """Return a decorator that accepts calls with a method's old parameters, with a DeprecationWarning.

    A call is old if it has more positional arguments than the method takes, or lacks a required keyword. A missing reduce_op is
    "SUM".

    Args:
        old: the new name of each old parameter, in the old order; default: the parameters of the method.
    """

    def decorate(method: F) -> F:
        parameters = inspect.signature(method).parameters.values()
        order = ["self", *(old.values() or (p.name for p in parameters if p.name != "self"))]
        named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
        most, required = len(parameters) - len(named), {p.name for p in named if p.default is p.empty}
        defaults = {"reduce_op": "SUM"} if any(p.name == "reduce_op" for p in parameters) else {}
        shown = ", ".join(f"{p.name}=" if p in named else p.name for p in parameters if p.name != "self")

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= most and required <= kwargs.keys():
                return method(*args, **kwargs)
            given = defaults | dict(zip(order, args, strict=False))
            given |= {old.get(name, name): value for name, value in kwargs.items()}
            if len(args) > len(order) or not isinstance(given.get("mesh_axis", ""), str):
                return method(*args, **kwargs)  # this raises TypeError
            text = (
                f"write {method.__qualname__}({shown}): another order and other names of its arguments are deprecated"
            )
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return method(**given)

        return cast(F, call)

    return decorate
