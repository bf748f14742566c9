"""Scan: a function from a state and an element to the next state and a new element."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, final

import numpy as np

from ...base import nest
from ...base.errors import explain
from ..spec import ArraySpec, conform, spec_of_element
from .calls import Calls, check_callable, name_of
from .map import Mapped
from .node import Node
from .streamed import Streamed

__all__ = ["State", "scan"]


@final
class State:
    """The state between elements: a nest of arrays, whose lengths may change.

    Args:
        function: the method of Dataset, for errors.
        initial: the state before the first element.
    """

    def __init__(self, function: str, initial: Any) -> None:
        self._function = function
        try:
            self._spec = nest.map_structure(_any_lengths, spec_of_element(initial))
        except ValueError as error:
            text = str(error).removeprefix("element: ")
            raise ValueError(f"{function}: initial_state: {text}") from None
        self.value = copy.deepcopy(self._conformed("initial_state", initial))  # the function may overwrite it

    def set(self, argument: str, value: Any) -> None:
        """Replace the state; ValueError unless it has the structure and dtypes of the first."""
        self.value = self._conformed(argument, value)

    def _conformed(self, argument: str, value: Any) -> Any:
        try:
            return conform(value, self._spec)
        except (TypeError, ValueError) as error:
            expected, got = "a state like the initial one", f"another: {error}"
            raise ValueError(explain(self._function, argument, expected=expected, got=got)) from None


def _any_lengths(spec: ArraySpec) -> ArraySpec:
    return ArraySpec((None,) * len(spec.shape), spec.dtype)


@final
class _Pass(Mapped):
    """One pass of a function with a state over elements."""

    def __init__(self, parent: Node, initial: Any, function: Callable[[Any, Any], Any], row_spec: Any) -> None:
        self._function, self._state = function, State("Dataset.scan", initial)
        super().__init__(parent, Calls(self._step, None, True, False), row_spec)

    @functools.cached_property
    def _of_tuples(self) -> bool:
        return type(self._parent.row_spec) is tuple

    def _step(self, *element: Any) -> Any:
        result = self._function(self._state.value, element if self._of_tuples else element[0])
        if not isinstance(result, tuple) or len(result) != 2:
            expected, got = "a function that returns the new state and the new element", f"{result!r:.60}"
            raise TypeError(explain("Dataset.scan", "scan_func", expected=expected, got=got))
        self._state.set("scan_func", result[0])
        return _apart(result[1], self._state.value)

    def describe(self) -> str:
        return f"scan({name_of(self._function)})"


def _apart(element: Any, state: Any) -> Any:
    """Return the element with copies of arrays shared with the state, which the next call may change in place."""
    held = [leaf for leaf in nest.flatten(state) if isinstance(leaf, np.ndarray)]

    def own(leaf: Any) -> Any:
        shared = isinstance(leaf, np.ndarray) and any(np.may_share_memory(leaf, other) for other in held)
        return leaf.copy() if shared else leaf

    return nest.map_structure(own, element) if held else element


def scan(
    parent: Node, initial_state: Any, scan_func: Callable[[Any, Any], Any], *, element_spec: Any = None
) -> Node:  # fmt: skip
    """Apply a function with a state to successive elements.

    It reads in order, like `filter`: every rank makes all elements. Each epoch starts with the initial state. After
    `batch` the function gets whole batches, and must keep their number of rows.

    Args:
        initial_state: a nest of arrays or numbers.
        scan_func: returns the new state and the new element, given a state and an element; a tuple is one argument. The
            state keeps its structure and dtypes, and may be changed in place. It is called once more, with the first
            element, to get the spec.
        element_spec: the spec of a new element, a nest of `ArraySpec`, if the first does not show it, as for `map`.

    Raises:
        TypeError: for a function that is not callable; while reading, for one that does not return two values.
        ValueError: while reading, for a state or an element unlike the first.

    Example:
        >>> sums = ms.data.Dataset.range(5).scan(
        ...     np.int64(0), lambda state, x: (state + x, state + x)
        ... )
        >>> [int(x) for x in sums]
        [0, 1, 3, 6, 10]
    """
    check_callable("Dataset.scan", "scan_func", scan_func)

    def new_pass(below: Node) -> _Pass:
        return _Pass(below, initial_state, scan_func, element_spec)

    new_pass(parent)  # raises for an initial state that is not a nest of arrays
    return Streamed(
        f"scan({name_of(scan_func)})",
        [parent],
        lambda epoch, below: new_pass(below).stream(below.elements(epoch), epoch, 0),
        length=lambda below: below,
        row_spec=lambda below: new_pass(below).row_spec,
        traits=lambda below: below.traits._replace(calls_functions=True),
    )
