"""The node of operators that read in order: each is a function from the parents' elements to new ones."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from .node import UNKNOWN, Batching, Node, Outcome, Traits

__all__ = ["Streamed", "unknown_unless_empty"]


def unknown_unless_empty(below: int) -> int:
    """Return the number of elements that a condition keeps of `below`: known for 0 only."""
    return 0 if below == 0 else UNKNOWN


@final
class Streamed(Node):
    """Elements that a function makes in order, even if the parents have random access.

    An iterator that starts at a later position makes the elements before it too.

    Args:
        text: the description of the operator.
        parents: the nodes that the function reads.
        read: returns an iterator over the elements of an epoch, given the epoch and the parents.
        length: returns the number of elements, given that of the first parent.
        row_spec: returns the spec of a row, given the parents. None for the spec of the first parent.
        batching: the same for the batching.
        traits: the same for the traits. None for the combined traits of all parents.
        outcomes: as `read`, for `Node.outcomes`. None if nothing can be read after an error.
    """

    random_access = False

    def __init__(
        self, text: str, parents: Sequence[Node], read: Callable[..., Iterator[Any]], *,
        length: Callable[[int], int] = unknown_unless_empty, row_spec: Callable[..., Any] | None = None,
        batching: Callable[..., Batching | None] | None = None, traits: Callable[..., Traits] | None = None,
        outcomes: Callable[..., Iterator[Outcome]] | None = None,
    ) -> None:  # fmt: skip
        self._text, self._parents, self._read = text, tuple(parents), read
        self._length, self._row_spec, self._batching = length, row_spec, batching
        self._traits, self._outcomes = traits, outcomes

    @property
    def parents(self) -> tuple[Node, ...]:
        return self._parents

    def rebuild(self, parents: Sequence[Node]) -> Node:
        return Streamed(
            self._text, parents, self._read, length=self._length, row_spec=self._row_spec, batching=self._batching,
            traits=self._traits, outcomes=self._outcomes,
        )  # fmt: skip

    def describe(self) -> str:
        return self._text

    @functools.cached_property
    def _known_spec(self) -> Any:
        return self._parents[0].row_spec if self._row_spec is None else self._row_spec(*self._parents)

    @property
    def row_spec(self) -> Any:
        return self._known_spec

    @property
    def batching(self) -> Batching | None:
        return self._parents[0].batching if self._batching is None else self._batching(*self._parents)

    @property
    def traits(self) -> Traits:
        return super().traits if self._traits is None else self._traits(*self._parents)

    def cardinality(self) -> int:
        return self._length(self._parents[0].cardinality())

    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        return itertools.islice(self._read(epoch, *self._parents), start, None)

    def outcomes(self, epoch: int) -> Iterator[Outcome]:
        return super().outcomes(epoch) if self._outcomes is None else self._outcomes(epoch, *self._parents)
