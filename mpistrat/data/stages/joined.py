"""Several datasets as one: every element is an element of one of them. Here: one dataset behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import NDArray

from ... import nest
from ...errors import explain
from ..buffers import RowBuffers
from ..dataset import INFINITE, UNKNOWN, Addresses, Dataset
from .stage import Combined, cut_chunks

__all__ = ["Concatenate", "Join", "Joined", "compare_specs", "total"]

Choices = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # which dataset, its epoch, its position


class Join(Protocol):
    """Which dataset's element stands where."""

    def cardinality(self, below: Sequence[int]) -> int:
        """How many elements, from how many each dataset has."""

    def source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: Sequence[int]) -> Choices:
        """Which dataset and which of its elements, for random access."""

    def elements(self, parents: Sequence[Dataset], epoch: int, start: int) -> Iterator[Any]:
        """The elements from a position on, where a dataset reads in order."""

    def chunks(self, starts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64] | None:
        """Where the chunks begin, if chunks are left together."""


def total(counts: Sequence[int]) -> int:
    """The sum of cardinalities."""
    if INFINITE in counts:
        return INFINITE
    return UNKNOWN if UNKNOWN in counts else sum(counts)


@final
class Concatenate:
    """All elements of the first dataset, then all of the second, and so on."""

    def cardinality(self, below: Sequence[int]) -> int:
        return total(below)

    def source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: Sequence[int]) -> Choices:
        finite = below[: below.index(INFINITE)] if INFINITE in below else below[:-1]
        ends = np.cumsum(finite, dtype=np.int64)
        which = np.searchsorted(ends, positions, side="right")
        return which, epochs, positions - np.concatenate(([0], ends))[which]

    def elements(self, parents: Sequence[Dataset], epoch: int, start: int) -> Iterator[Any]:
        for parent in parents:
            length = parent.cardinality()
            if 0 <= length <= start:
                start -= length
                continue
            for element in parent.elements(epoch, 0 if length == UNKNOWN else start):
                if start and length == UNKNOWN:
                    start -= 1
                else:
                    yield element
            start = start if length == UNKNOWN else 0

    def chunks(self, starts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64] | None:
        offsets = np.concatenate(([0], np.cumsum([each[-1] for each in starts])))
        inner = [each[:-1] + offset for each, offset in zip(starts, offsets, strict=False)]
        return np.concatenate([*inner, offsets[-1:]]).astype(np.int64)

    def __str__(self) -> str:
        return "concatenate()"


@final
class Joined(Combined):
    """Several datasets as one."""

    def __init__(self, parents: Sequence[Dataset], join: Join) -> None:
        super().__init__(str(join), parents)
        self._join = join
        self._buffers = RowBuffers()
        self._checked = False

    @property
    def row_spec(self) -> Any:
        first = self._parents[0].row_spec
        if not self._checked:
            for number, parent in enumerate(self._parents[1:], 1):
                compare_specs(str(self._join), first, parent.row_spec, number)
            self._checked = True
        return first

    def cardinality(self) -> int:
        return self._join.cardinality([parent.cardinality() for parent in self._parents])

    def _source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Choices:
        """Of rows it is computed; the addresses of batches' rows say it: `locate` put the dataset into the epoch."""
        if self._batching is None:
            return self._join.source(epochs, positions, [parent.cardinality() for parent in self._parents])
        own, which = np.divmod(epochs, len(self._parents))
        return which, own, positions

    def locate(self, epoch: int, position: int) -> Addresses:
        here = np.array([epoch], np.int64), np.array([position], np.int64)
        if self._batching is None:
            return here
        below = [parent.cardinality() for parent in self._parents]
        which, own, inside = (int(value[0]) for value in self._join.source(*here, below))
        epochs, positions = self._parents[which].locate(own, inside)
        return epochs * len(self._parents) + which, positions

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        _ = self.row_spec  # raises where the datasets do not match
        which, own, inside = self._source(epochs, positions)
        numbers = np.unique(which)
        if numbers.size <= 1:
            return self._parents[int(numbers[0]) if numbers.size else 0].gather(own, inside)
        out: list[NDArray[Any]] = []
        for number in numbers:
            places = np.flatnonzero(which == number)
            rows = nest.flatten(self._parents[number].gather(own[places], inside[places]))
            if not out:
                out = [self._buffers.empty(i, (which.size, *leaf.shape[1:]), leaf.dtype) for i, leaf in enumerate(rows)]
            for whole, leaf in zip(out, rows, strict=True):
                whole[places] = leaf
        return nest.pack_like(self._parents[0].row_spec, out)

    def locality(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        which, own, inside = self._source(epochs, positions)
        out = np.empty(positions.size, np.int64)
        for number, parent in enumerate(self._parents):
            places = np.flatnonzero(which == number)
            found = parent.locality(own[places], inside[places])
            if found is None:
                return None  # whichever rows these are: an order must not depend on that
            out[places] = found
        return out

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        which, own, inside = self._source(epochs, positions)
        for number in np.unique(which):
            places = np.flatnonzero(which == number)
            self._parents[number].expect(own[places], inside[places])

    def chunk_starts(self) -> NDArray[np.int64] | None:
        starts = [parent.chunk_starts() for parent in self._parents]
        known = [
            cut_chunks(each, 0, parent.cardinality())
            for each, parent in zip(starts, self._parents, strict=True)
            if each is not None and self._batching is None
        ]
        return self._join.chunks([each for each in known if each is not None]) if len(known) == len(starts) else None

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        return self._join.elements(self._parents, epoch, start)

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Joined(parents, self._join)

    def describe(self) -> str:
        return str(self._join)


def compare_specs(function: str, first: Any, other: Any, number: int) -> None:
    """Raise, naming the array, unless the rows of two datasets look alike."""
    names, found = nest.paths(first), nest.paths(other)
    if names != found:
        expected, got = f"the structure of dataset 0, {names}", f"{found} in dataset {number}"
        raise ValueError(explain(function, "datasets", expected=expected, got=got))
    for name, one, two in zip(names, nest.flatten(first), nest.flatten(other), strict=True):
        if one != two:
            place = f" at {name}" if name else ""
            expected, got = f"{one}{place}, as dataset 0 has", f"{two} in dataset {number}"
            remedy = "Bring all datasets to one structure, dtype and shape with map."
            raise ValueError(explain(function, "datasets", expected=expected, got=got, remedy=remedy))
