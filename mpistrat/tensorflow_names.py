"""TensorFlow's names of arguments, beside this package's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .errors import explain

__all__ = ["tensorflow_names"]

F = TypeVar("F", bound=Callable[..., Any])


def tensorflow_names(*unused: str, **ours: str) -> Callable[[F], F]:
    """Let a function's arguments carry TensorFlow's names, too, and let it take a `name`, which only graphs need.

    Args:
        unused: TensorFlow's arguments that say nothing here, beside `name`.
        ours: this package's name of each of TensorFlow's.

    Example:
        >>> @tensorflow_names(batch_size="global_batch_size")
        ... def batch(global_batch_size):
        ...     return global_batch_size
        >>> batch(batch_size=3, name="b"), batch(global_batch_size=4)
        (3, 4)
    """

    nothing = ("name", *unused)

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if not kwargs:
                return function(*args)
            for theirs in nothing:
                kwargs.pop(theirs, None)
            for theirs, own in ours.items():
                if theirs in kwargs:
                    if own in kwargs:
                        expected = f"{own} or {theirs}, TensorFlow's name for it"
                        raise TypeError(explain(function.__qualname__, own, expected=expected, got="both"))
                    kwargs[own] = kwargs.pop(theirs)
            return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorate
