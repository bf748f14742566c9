"""Objects that all ranks of a strategy create in the same order, such as models: one rank refers to another's by number."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, final

__all__ = ["CommonObjects"]


@final
class CommonObjects:
    """Numbered objects of this rank, the same numbers on every rank. It does not keep them alive.

    Example:
        >>> class Model: pass
        >>> models, model = CommonObjects(), Model()
        >>> models.add(model)
        >>> models.number(model), models.find(0) is model, models.number(Model())
        (0, True, None)
    """

    def __init__(self) -> None:
        self._found: list[Callable[[], Any]] = []
        self._numbers: dict[int, tuple[int, Any]] = {}  # by id: the number, and a reference

    def add(self, thing: Any, find: Callable[[], Any] | None = None) -> None:
        """Give an object the next number.

        Args:
            thing: one that can have weak references.
            find: returns the object that now takes its place; default itself, None once it is deleted.
        """
        reference = weakref.ref(thing)
        self._numbers[id(thing)] = len(self._found), reference
        self._found.append(find or reference)

    def number(self, thing: Any) -> int | None:
        """Return the number of an object; None if it has none."""
        number, reference = self._numbers.get(id(thing), (None, None))
        return number if reference is not None and reference() is thing else None

    def varies(self, number: int) -> bool:
        """Return True if another object may take the place of a numbered one."""
        return not isinstance(self._found[number], weakref.ref)

    def find(self, number: int) -> Any:
        """Return the object of a number on this rank; None if it does not exist."""
        return self._found[number]() if number < len(self._found) else None
