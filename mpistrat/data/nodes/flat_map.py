"""Datasets that a function makes of elements, read in sequence or interleaved."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, final

from ...base.arguments import integer
from ...base.errors import explain
from ..options import AUTOTUNE, number_of_calls
from .calls import call, check_callable, name_of
from .combine import compare_specs
from .node import Batching, Node, Traits
from .streamed import Streamed

__all__ = ["MadeDatasets", "flat_map", "interleave"]


@final
class MadeDatasets:
    """The datasets that a function makes one after the other; all have the spec of the first.

    Args:
        function, argument: the method of Dataset and its argument, for errors.
        make: returns a dataset, given the node below and its own arguments.
        first: returns these arguments for the first element below.
    """

    def __init__(
        self, function: str, argument: str, make: Callable[..., Any], first: Callable[[Any], tuple[Any, ...]]
    ) -> None:
        self._function, self._argument, self._make, self._first_arguments = function, argument, make, first
        self._first: Node | None = None
        self._lock = threading.Lock()

    def streamed(self, text: str, parent: Node, read: Callable[[int, Node], Iterator[Any]]) -> Streamed:
        """Return the node of the elements of these datasets, given its description and the function that reads them."""
        return Streamed(text, [parent], read, row_spec=self._row_spec, batching=self._batching, traits=self._traits)

    def make(self, number: int, below: Node, *arguments: Any) -> Node:
        """Return dataset `number` of the function. Raise unless it is a dataset like the first."""
        dataset = self._make(below, *arguments)
        made = getattr(dataset, "node", None)
        if not isinstance(made, Node):
            expected, got = "a function that returns a Dataset", type(dataset).__name__
            raise TypeError(explain(self._function, self._argument, expected=expected, got=got))
        with self._lock:
            if self._first is None:
                self._first = made
        if made is not self._first:
            compare_specs(self._function, self._first.row_spec, made.row_spec, number)
            if (made.batching is None) != (self._first.batching is None):
                expected, got = "all rows or all batches", f"another kind from element {number}"
                raise ValueError(explain(self._function, self._argument, expected=expected, got=got))
        return made

    def _known(self, below: Node) -> Node | None:
        """Return the dataset made of the first element; None without elements."""
        if self._first is None:
            element = next(below.elements(0), None)
            return None if element is None else self.make(0, below, *self._first_arguments(element))
        return self._first

    def _batching(self, below: Node) -> Batching | None:
        known = self._known(below)
        return None if known is None else known.batching

    def _row_spec(self, below: Node) -> Any:
        known = self._known(below)
        if known is None:
            expected = "at least one element below, to know what the function makes of it"
            raise ValueError(explain(self._function, "", expected=expected, got="none"))
        return known.row_spec

    def _traits(self, below: Node) -> Traits:
        known, traits = self._known(below), below.traits
        return traits._replace(deterministic=traits.deterministic and (known is None or known.traits.deterministic))


def _in_turn(
    datasets: MadeDatasets, cycle_length: int, block_length: int, epoch: int, below: Node
) -> Iterator[Any]:  # fmt: skip
    """Yield elements in TF's order: a dataset that has ended gives up its turn, and the next one replaces it one round later."""
    numbered = enumerate(below.elements(epoch))
    places: list[Iterator[Any] | None] = [None] * cycle_length
    more = True
    while more or any(place is not None for place in places):
        for index, place in enumerate(places):
            if place is None and more:
                number, element = next(numbered, (-1, None))
                more = number >= 0
                if more:
                    place = datasets.make(number, below, element).elements(epoch)
            if place is not None:
                block = 0
                for element in itertools.islice(place, block_length):
                    block += 1
                    yield element
                places[index] = place if block == block_length else None


def interleave(
    parent: Node, map_func: Callable[..., Any], cycle_length: int | None = None, block_length: int | None = None,
    num_parallel_calls: int | None = None, deterministic: bool | None = None,
) -> Node:  # fmt: skip
    """Make a dataset of every element, and read blocks of several of them in turn.

    It reads in order, like `filter`.

    Args:
        map_func: returns a dataset; a tuple is passed as several arguments.
        cycle_length: the number of datasets open at a time; None and AUTOTUNE are 2.
        block_length: the number of elements read from one dataset before the next one's turn; None is 1.
        num_parallel_calls, deterministic: accepted as in tf.data, without effect: elements are in order.

    Example:
        >>> rows = ms.data.from_arrays(np.arange(3))
        >>> rows = rows.interleave(lambda n: ms.data.from_arrays(np.full(2, n)))
        >>> [int(row) for row in rows]
        [0, 1, 0, 1, 2, 2]
    """
    check_callable("Dataset.interleave", "map_func", map_func)
    number_of_calls("Dataset.interleave", num_parallel_calls)
    if cycle_length is None or cycle_length == AUTOTUNE:
        cycle_length = 2
    cycle = integer("Dataset.interleave", "cycle_length", cycle_length, 1)
    block = 1 if block_length is None else integer("Dataset.interleave", "block_length", block_length, 1)
    name = "flat_map" if cycle == 1 else "interleave"
    datasets = MadeDatasets(
        f"Dataset.{name}", "map_func", lambda below, element: call(map_func, element), lambda element: (element,)
    )
    lengths = f", cycle_length={cycle}, block_length={block}" if cycle > 1 else ""
    text = f"{name}({name_of(map_func)}{lengths})"
    return datasets.streamed(text, parent, functools.partial(_in_turn, datasets, cycle, block))


def flat_map(parent: Node, map_func: Callable[..., Any]) -> Node:
    """Make a dataset of every element, and concatenate them; reads in order."""
    return interleave(parent, map_func, cycle_length=1)
