"""Elements out of a Python generator."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

from .._util import nest
from ..errors import explain
from .dataset import UNKNOWN, Dataset
from .nodes.stage import RowSource
from .spec import ArraySpec, conform, spec_of_element

__all__ = ["from_generator"]


@final
class _Generated(RowSource):
    """What a function's iterator gives."""

    def __init__(self, function: Callable[..., Iterable[Any]], element_spec: Any) -> None:
        self._function = function
        self._given = element_spec is not None
        self._spec = element_spec
        self._start = _epoch_argument(function)

    @property
    def random_access(self) -> bool:
        return False

    @property
    def row_spec(self) -> Any:
        if self._spec is None and next(self.elements(0), None) is None:
            remedy = "Give element_spec."
            expected = "a first element, to learn what elements look like"
            raise ValueError(explain("from_generator", "function", expected=expected, got="none", remedy=remedy))
        return self._spec

    def cardinality(self) -> int:
        return UNKNOWN

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        return itertools.islice(self._all(epoch), start, None)

    def _all(self, epoch: int) -> Iterator[Any]:
        made: object = self._start(epoch)
        if not isinstance(made, Iterable):
            expected, got = "a function that returns an iterator", type(made).__name__
            raise TypeError(explain("from_generator", "function", expected=expected, got=got))
        for position, element in enumerate(made):
            if self._spec is None:
                self._spec = spec_of_element(element)
            try:
                arrays = conform(element, self._spec)
            except ValueError as error:
                why = "as element_spec says" if self._given else "as the first element was: give element_spec otherwise"
                raise ValueError(f"from_generator: element {position}: {error} ({why})") from None
            yield arrays

    def describe(self) -> str:
        name = getattr(self._function, "__name__", None) or type(self._function).__name__
        if self._spec is None:
            return f"from_generator({name})"
        leaves = zip(nest.paths(self._spec), nest.flatten(self._spec), strict=True)
        fields = ", ".join(f"{path.strip('[]')} {spec}".strip() for path, spec in leaves)
        return f"from_generator({name}): {fields}"


def _epoch_argument(function: Callable[..., Any]) -> Callable[[int], Any]:
    """The function of an epoch. It is given the epoch as a parameter of that name, or as the one it cannot do without."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return lambda epoch: function()
    if "epoch" in signature.parameters:
        return lambda epoch: function(epoch=epoch)
    try:
        signature.bind()
    except TypeError:
        return function
    return lambda epoch: function()


def from_generator(function: Callable[..., Iterable[Any]], element_spec: Any = None) -> Dataset:
    """Make a dataset of what a function's iterator gives (TF: tf.data.Dataset.from_generator).

    It reads in order: every rank runs the whole iterator, which must give the same elements everywhere, and an iterator
    over the dataset that is restored runs it again up to its position.

    Args:
        function: returns a fresh iterator at every call, for one epoch. Called with the epoch if it must have an
            argument or has one of that name.
        element_spec: a nest of `ArraySpec`, with None in a shape for a length that varies. Without it the first element
            says what all look like, and the iterator is begun once more for it where that is asked before reading.

    Raises:
        TypeError: for what is no function, or no nest of ArraySpec.
        ValueError: while reading, for an element that does not fit, naming its position. Lists are structures here:
            make arrays of those that are not.

    Example:
        >>> dataset = from_generator(lambda epoch: (10 * epoch + i for i in range(3)))
        >>> [int(x) for x in dataset], [int(x) for x in dataset]
        ([0, 1, 2], [10, 11, 12])
    """
    given: object = function
    if not callable(given):
        remedy = "Give the function itself, not what it returns: every epoch calls it again."
        got = type(given).__name__
        raise TypeError(explain("from_generator", "function", expected="a callable", got=got, remedy=remedy))
    if element_spec is not None:
        for name, leaf in zip(nest.paths(element_spec), nest.flatten(element_spec), strict=True):
            if not isinstance(leaf, ArraySpec):
                place = f"element_spec{name}"
                raise TypeError(explain("from_generator", place, expected="an ArraySpec", got=repr(leaf)))
    return _Generated(function, element_spec)
