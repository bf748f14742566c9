"""One call of a user's function, as it is made in the consumer's process and in worker processes alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["CallError", "call", "call_each", "name_of"]


class CallError(Exception):
    """A function raised an error on one of several elements; never leaves this package.

    Attributes:
        index: which element.
        error: what was raised.
    """

    def __init__(self, index: int, error: BaseException) -> None:
        super().__init__(index, error)
        self.index = index
        self.error = error


def call(function: Callable[..., Any], element: Any) -> Any:
    """The function of an element; a plain tuple is passed as several arguments."""
    if type(element) is tuple:
        return function(*element)
    return function(element)


def call_each(function: Callable[..., Any], elements: Sequence[Any]) -> list[Any]:
    """The function of each element. Raises CallError."""
    results: list[Any] = []
    try:
        for element in elements:
            results.append(function(*element) if type(element) is tuple else function(element))
    except Exception as error:
        raise CallError(len(results), error) from None
    return results


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in a text."""
    return str(getattr(function, "__name__", None) or type(function).__name__)
