"""Datasets that a function makes of elements, and the elements of these in turn."""

from __future__ import annotations

import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, final

from ...base.arguments import integer
from ...base.errors import explain
from ..options import AUTOTUNE, number_of_calls
from .calls import call, check_callable, name_of
from .combine import compare_specs
from .node import UNKNOWN, Batching, Node, Traits
from .stage import InOrder

__all__ = ["FlatMap", "Interleaved", "flat_map", "interleave"]


class FlatMap(InOrder):
    """The elements of datasets that a function makes. They are known in order only."""

    _argument = "map_func"

    def __init__(self, parent: Node, *settings: Any) -> None:
        super().__init__(parent, *settings)
        self._first: Node | None = None
        self._lock = threading.Lock()

    @property
    @abstractmethod
    def _name(self) -> str:
        """The method of Dataset."""

    @abstractmethod
    def _make_first(self, element: Any) -> Node:
        """A dataset like the first that is made, of the first element below."""

    def _known(self) -> Node | None:
        """The dataset that the first element becomes, whose spec all have; None without an element."""
        if self._first is None:
            element = next(self._parent.elements(0), None)
            return None if element is None else self._make_first(element)
        return self._first

    def _checked(self, dataset: Any, number: int) -> Node:
        """What the function returned, the how-manieth time, if it is a dataset like those before."""
        made = getattr(dataset, "node", None)
        if not isinstance(made, Node):
            expected, got = "a function that returns a Dataset", type(dataset).__name__
            raise TypeError(explain(f"Dataset.{self._name}", self._argument, expected=expected, got=got))
        with self._lock:
            if self._first is None:
                self._first = made
        if made is not self._first:
            compare_specs(f"Dataset.{self._name}", self._first.row_spec, made.row_spec, number)
            if (made.batching is None) != (self._first.batching is None):
                expected, got = "all rows or all batches", f"another kind from element {number}"
                raise ValueError(explain(f"Dataset.{self._name}", self._argument, expected=expected, got=got))
        return made

    @property
    def batching(self) -> Batching | None:
        known = self._known()
        return None if known is None else known.batching

    @property
    def row_spec(self) -> Any:
        known = self._known()
        if known is None:
            expected = "at least one element below, to know what the function makes of it"
            raise ValueError(explain(f"Dataset.{self._name}", "", expected=expected, got="none"))
        return known.row_spec

    @property
    def traits(self) -> Traits:
        known, below = self._known(), self._parent.traits
        return below._replace(deterministic=below.deterministic and (known is None or known.traits.deterministic))

    def length_over(self, below: int) -> int:
        return 0 if below == 0 else UNKNOWN


@final
class Interleaved(FlatMap):
    """Blocks of elements from each of several open datasets in turn."""

    def __init__(self, parent: Node, function: Callable[..., Any], cycle_length: int, block_length: int) -> None:
        super().__init__(parent, function, cycle_length, block_length)
        self._function = function
        self._cycle_length = cycle_length
        self._block_length = block_length

    def _make_first(self, element: Any) -> Node:
        return self._make(element, 0)

    def _make(self, element: Any, number: int) -> Node:
        return self._checked(call(self._function, element), number)

    def _all(self, epoch: int) -> Iterator[Any]:
        """TF's order: a dataset that has ended gives up its turn, and the next takes its place one round later."""
        below = enumerate(self._parent.elements(epoch))
        places: list[Iterator[Any] | None] = [None] * self._cycle_length
        more = True
        while more or any(place is not None for place in places):
            for index, place in enumerate(places):
                if place is None and more:
                    number, element = next(below, (-1, None))
                    more = number >= 0
                    if more:
                        place = self._make(element, number).elements(epoch)
                if place is not None:
                    block = 0
                    for element in itertools.islice(place, self._block_length):
                        block += 1
                        yield element
                    places[index] = place if block == self._block_length else None

    @property
    def _name(self) -> str:
        return "flat_map" if self._cycle_length == 1 else "interleave"

    def describe(self) -> str:
        lengths = f", cycle_length={self._cycle_length}, block_length={self._block_length}"
        return f"{self._name}({name_of(self._function)}{lengths if self._cycle_length > 1 else ''})"


def interleave(
    parent: Node, map_func: Callable[..., Any], cycle_length: int | None = None, block_length: int | None = None,
    num_parallel_calls: int | None = None, deterministic: bool | None = None,
) -> Node:  # fmt: skip
    """Make a dataset of every element, and take blocks of elements from several of them in turn.

    It reads in order, like `filter`.

    Args:
        map_func: returns a dataset; a tuple is passed as several arguments.
        cycle_length: how many datasets are open at a time; None and AUTOTUNE are 2.
        block_length: how many elements are taken from one before it is the next one's turn; None is 1.
        num_parallel_calls, deterministic: taken as tf.data does, without effect: elements come in order.

    Example:
        >>> rows = ms.data.from_arrays(np.arange(3)).interleave(lambda n: ms.data.from_arrays(np.full(2, n)))
        >>> [int(row) for row in rows]
        [0, 1, 0, 1, 2, 2]
    """
    check_callable("Dataset.interleave", "map_func", map_func)
    number_of_calls("Dataset.interleave", num_parallel_calls)
    if cycle_length is None or cycle_length == AUTOTUNE:
        cycle_length = 2
    cycle = integer("Dataset.interleave", "cycle_length", cycle_length, 1)
    block = 1 if block_length is None else integer("Dataset.interleave", "block_length", block_length, 1)
    return Interleaved(parent, map_func, cycle, block)


def flat_map(parent: Node, map_func: Callable[..., Any]) -> Node:
    """Make a dataset of every element, and put them one behind the other; reads in order."""
    return interleave(parent, map_func, cycle_length=1)
