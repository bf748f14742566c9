"""Operators that keep elements by a condition: a predicate, uniqueness, or the absence of an error."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...base import log, nest
from ...base.errors import ShardError, explain
from ...base.files import with_zero_padding
from ...base.masks import plain_array
from .calls import call, check_callable, name_of
from .node import Node, Outcome
from .streamed import Streamed

__all__ = ["filter", "ignore_errors", "take_while", "unique"]

_NOT_IGNORED = (ShardError, MemoryError)  # may occur on some ranks only
_filter = filter  # the builtin: the operator below has its name


def _holds(name: str, predicate: Callable[..., Any], element: Any) -> bool:
    """Return the result of the predicate of the method `name` of Dataset."""
    kept = call(predicate, element)
    if isinstance(kept, bool):
        return kept
    answer = plain_array(kept, f"Dataset.{name}", "predicate")
    if answer.dtype != np.bool_ or answer.size != 1:
        expected, got = "a function that returns a bool", f"{kept!r:.60}"
        raise TypeError(explain(f"Dataset.{name}", "predicate", expected=expected, got=got))
    return bool(answer.item())


def _filtered_outcomes(keeps: Callable[[Any], bool], epoch: int, below: Node) -> Iterator[Outcome]:
    for element, error in below.outcomes(epoch):
        try:
            if error is None and not keeps(element):
                continue
        except Exception as raised:
            yield None, raised
            continue
        yield element, error


def _each_once(epoch: int, below: Node) -> Iterator[Any]:
    seen: set[Any] = set()
    for element in below.elements(epoch):
        content = tuple(map(_content, nest.flatten(element)))
        if content not in seen:
            seen.add(content)
            yield element


def _without_errors(log_warning: bool, epoch: int, below: Node) -> Iterator[Any]:
    for position, (element, error) in enumerate(below.outcomes(epoch)):
        if isinstance(error, _NOT_IGNORED):
            raise error
        if error is None:
            yield element
        elif log_warning:
            what = f"{type(error).__name__}: {error}"
            log.logger.warning("ignore_errors: element %d of epoch %d is left out: %s", position, epoch, what)


def _content(leaf: Any) -> Any:
    """Return a key that is equal for equal arrays only; floating-point numbers are compared by their bits."""
    if isinstance(leaf, (str, bytes)):
        return leaf
    array = np.asarray(leaf)
    if array.dtype.hasobject:
        return array.shape, tuple(map(_content, array.reshape(-1).tolist()))
    return array.shape, with_zero_padding(array).tobytes()


def filter(parent: Node, predicate: Callable[..., Any]) -> Node:
    """Keep the elements for which a function returns True; a tuple is passed as several arguments.

    From here on elements are read in order: every rank reads all of them, and a restored iterator makes those before its
    position again.
    """
    check_callable("Dataset.filter", "predicate", predicate)
    keeps = functools.partial(_holds, "filter", predicate)
    return Streamed(
        f"filter({name_of(predicate)})",
        [parent],
        lambda epoch, below: _filter(keeps, below.elements(epoch)),
        outcomes=functools.partial(_filtered_outcomes, keeps),
    )


def take_while(parent: Node, predicate: Callable[..., Any]) -> Node:
    """Stop before the first element for which a function returns False; a tuple is passed as several arguments.

    It reads in order, like `filter`.

    Example:
        >>> [int(x) for x in ms.data.Dataset.range(10).take_while(lambda x: x < 5)]
        [0, 1, 2, 3, 4]
    """
    check_callable("Dataset.take_while", "predicate", predicate)
    keeps = functools.partial(_holds, "take_while", predicate)
    text = f"take_while({name_of(predicate)})"
    return Streamed(text, [parent], lambda epoch, below: itertools.takewhile(keeps, below.elements(epoch)))


def unique(parent: Node) -> Node:
    """Keep the first of equal elements; reads in order.

    All arrays of an element are compared, with any dtype and shape; floating-point numbers by their bits, so 0.0 and -0.0
    differ. The elements seen in an epoch are in memory.

    Example:
        >>> numbers = ms.data.from_arrays(np.array([1, 37, 2, 37, 2, 1]))
        >>> [int(x) for x in numbers.unique()]
        [1, 37, 2]
    """
    return Streamed("unique()", [parent], _each_once)


def ignore_errors(parent: Node, log_warning: bool = False) -> Node:
    """Skip the elements for which a function of `map`, `filter` or the like raises an error.

    It reads in order, like `filter`. With random access below, any stage may raise the error. Else it must be `map` or
    `filter`, with only `map`, `filter` and `prefetch` between it and here; other stages cannot continue after an error,
    so it is raised. ShardError and MemoryError are also raised, since they may occur on some ranks only: functions must
    raise an error on all ranks or on none, or ranks have different rows.

    Args:
        log_warning: log each error with its position.

    Example:
        >>> numbers = ms.data.from_arrays([1.0, 2.0, 0.0, 4.0])
        >>> numbers = numbers.map(lambda x: 1 / float(x)).ignore_errors()
        >>> [float(x) for x in numbers]
        [1.0, 0.5, 0.25]
    """
    text = f"ignore_errors({'log_warning=True' if log_warning else ''})"
    return Streamed(text, [parent], functools.partial(_without_errors, bool(log_warning)))
