"""Several datasets as one: zipped, concatenated, or chosen by a number per element."""

from __future__ import annotations

import functools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.errors import explain
from ..buffers import RowBuffers
from ..spec import row_count
from .node import INFINITE, NO_ROWS, UNKNOWN, Addresses, Below, Node
from .stage import Combined, common_batching, cut_chunks, one_address
from .streamed import Streamed

__all__ = ["Concatenate", "Join", "Joined", "Zipped", "choose", "compare_specs", "total"]

_CHOOSE = "choose_from_datasets"


@final
class Zipped(Combined):
    """Elements made of one element of each dataset, as many as the shortest has.

    Rows have the same address in all datasets. A row of a batch has the batch's number times the largest size, plus its
    index in the batch.
    """

    def __init__(self, structure: Any) -> None:
        super().__init__("zip", nest.flatten(structure))
        self._structure = structure

    @property
    def row_spec(self) -> Any:
        return self._pack([parent.row_spec for parent in self._parents])

    def _pack(self, elements: Sequence[Any]) -> Any:
        return nest.pack_like(self._structure, list(elements))

    def first_read(self, epoch: int) -> int:
        digests = [parent.first_read(epoch) for parent in self._parents]  # an element has one of each
        return zlib.crc32(repr(digests).encode()) if any(digests) else 0

    def cardinality(self) -> int:
        counts = [parent.cardinality() for parent in self._parents]
        if 0 in counts:
            return 0
        if UNKNOWN in counts:
            return UNKNOWN
        return min((count for count in counts if count != INFINITE), default=INFINITE)

    def locate(self, epoch: int, position: int) -> Addresses:
        if self._batching is None:
            return one_address(epoch, position)
        counts = {int(parent.locate(epoch, position)[0].size) for parent in self._parents}
        if len(counts) > 1:
            raise _uneven(position, sorted(counts))
        rows = counts.pop()
        return np.full(rows, epoch, np.int64), position * self._batching.size + np.arange(rows)

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        if self._batching is None:
            return [(parent, (epochs, positions), None) for parent in self._parents]
        below: list[Below] = []
        numbers, places = np.divmod(positions, self._batching.size)
        keys, key_of = np.unique(np.stack([epochs, numbers]), axis=1, return_inverse=True)
        for parent in self._parents:
            own = np.empty((2, positions.size), np.int64)
            for key in range(keys.shape[1]):
                located = np.stack(parent.locate(int(keys[0, key]), int(keys[1, key])))
                here = key_of.reshape(-1) == key
                own[:, here] = located[:, places[here]]
            below.append((parent, (own[0], own[1]), None))
        return below

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return self._pack([parent.gather(*addresses) for parent, addresses, _ in self.below(epochs, positions)])

    def chunk_starts(self) -> NDArray[np.int64] | None:
        rows = self.cardinality()
        if self._batching is not None or rows < 0:
            return None
        starts = [cut_chunks(parent.chunk_starts(), 0, rows) for parent in self._parents]
        known = [each for each in starts if each is not None]
        return np.unique(np.concatenate(known)) if known else None

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        together = zip(*(parent.elements(epoch, start) for parent in self._parents), strict=False)
        for position, elements in enumerate(together, start):
            if self._batching is not None and len(counts := {row_count(element) for element in elements}) > 1:
                raise _uneven(position, sorted(counts))
            yield self._pack(elements)

    def rebuild(self, parents: Sequence[Node]) -> Node:
        return Zipped(self._pack(parents))

    def describe(self) -> str:
        return "zip()"


def _uneven(position: int, counts: list[int]) -> ValueError:
    expected, got = f"batches with equally many rows in element {position}", f"{counts} rows"
    remedy = "Zip the datasets before batch."
    return ValueError(explain("zip", "datasets", expected=expected, got=got, remedy=remedy))


Choices = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]  # dataset, epoch, position


class Join(ABC):
    """A mapping from positions to elements of several datasets."""

    @abstractmethod
    def cardinality(self, below: Sequence[int]) -> int:
        """Return the number of elements, given that of each dataset."""

    @abstractmethod
    def choices(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: Sequence[int]) -> Choices:
        """Return the dataset and the element's address for each position, for random access."""

    @abstractmethod
    def elements(self, parents: Sequence[Node], epoch: int, start: int) -> Iterator[Any]:
        """Return the elements from a position on, if a dataset reads in order."""

    def chunks(self, starts: Sequence[NDArray[np.int64]]) -> NDArray[np.int64] | None:
        """Return the starts of chunks; None if chunks are split."""
        return None


def total(counts: Sequence[int]) -> int:
    """Return the sum of cardinalities."""
    if INFINITE in counts:
        return INFINITE
    return UNKNOWN if UNKNOWN in counts else sum(counts)


@final
class Concatenate(Join):
    """All elements of the first dataset, then all of the second, and so on."""

    def cardinality(self, below: Sequence[int]) -> int:
        return total(below)

    def choices(self, epochs: NDArray[np.int64], positions: NDArray[np.int64], below: Sequence[int]) -> Choices:
        finite = below[: below.index(INFINITE)] if INFINITE in below else below[:-1]
        ends = np.cumsum(finite, dtype=np.int64)
        which = np.searchsorted(ends, positions, side="right")
        return which, epochs, positions - np.concatenate(([0], ends))[which]

    def elements(self, parents: Sequence[Node], epoch: int, start: int) -> Iterator[Any]:
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

    def __init__(self, parents: Sequence[Node], join: Join) -> None:
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

    def _choices(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Choices:
        """Return the choices of rows; those of batches are in the addresses: `locate` encodes the dataset in the epoch."""
        if self._batching is None:
            return self._join.choices(epochs, positions, [parent.cardinality() for parent in self._parents])
        own, which = np.divmod(epochs, len(self._parents))
        return which, own, positions

    def locate(self, epoch: int, position: int) -> Addresses:
        here = one_address(epoch, position)
        if self._batching is None:
            return here
        below = [parent.cardinality() for parent in self._parents]
        which, own, inside = (int(value[0]) for value in self._join.choices(*here, below))
        epochs, positions = self._parents[which].locate(own, inside)
        return epochs * len(self._parents) + which, positions

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        which, own, inside = self._choices(epochs, positions)
        below: list[Below] = []
        for number in np.unique(which) if which.size else range(len(self._parents)):
            places = np.flatnonzero(which == number)
            below.append((self._parents[number], (own[places], inside[places]), places))
        return below

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        _ = self.row_spec  # raises if the datasets do not match
        below = self.below(epochs, positions)
        if len(below) == 1 or not positions.size:
            parent, addresses, _ = below[0]
            return parent.gather(*addresses)
        out: list[NDArray[Any]] = []
        for parent, addresses, places in below:
            rows = nest.flatten(parent.gather(*addresses))
            if not out:
                shapes = [(positions.size, *leaf.shape[1:]) for leaf in rows]
                out = [self._buffers.empty(i, shapes[i], leaf.dtype) for i, leaf in enumerate(rows)]
            for whole, leaf in zip(out, rows, strict=True):
                whole[places] = leaf
        return nest.pack_like(self._parents[0].row_spec, out)

    def locality(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        if any(parent.locality(*NO_ROWS) is None for parent in self._parents):
            return None  # for any rows: the order must not depend on them
        return super().locality(epochs, positions)

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

    def rebuild(self, parents: Sequence[Node]) -> Node:
        return Joined(parents, self._join)

    def describe(self) -> str:
        return str(self._join)


def compare_specs(function: str, first: Any, other: Any, number: int) -> None:
    """Raise ValueError, naming the array, unless the rows of two datasets have one spec."""
    names, found = nest.paths(first), nest.paths(other)
    wanted, got = f"{names}", f"{found}"
    if names == found:
        try:
            nest.map_structure(lambda *_: None, first, other)
        except ValueError:  # namedtuples of other fields
            wanted, got = nest.form(first), nest.form(other)
    if wanted != got:
        expected = f"the structure of dataset 0, {wanted}"
        raise ValueError(explain(function, "datasets", expected=expected, got=f"{got} in dataset {number}"))
    for name, one, two in zip(names, nest.flatten(first), nest.flatten(other), strict=True):
        if one != two:
            place = f" at {name}" if name else ""
            expected, got = f"{one}{place}, as dataset 0 has", f"{two} in dataset {number}"
            remedy = "Bring all datasets to one structure, dtype and shape with map."
            raise ValueError(explain(function, "datasets", expected=expected, got=got, remedy=remedy))


def choose(choices: Node, datasets: Sequence[Node], stop_on_empty: bool) -> Node:
    """Take each element from the dataset that the next choice names; see `Dataset.choose_from_datasets`."""
    batching = common_batching(_CHOOSE, datasets)
    return Streamed(
        f"choose_from_datasets(stop_on_empty_dataset={stop_on_empty})",
        [choices, *datasets],
        functools.partial(_chosen, stop_on_empty),
        row_spec=_spec_of_chosen,
        batching=lambda *_: batching,
    )


def _spec_of_chosen(choices: Node, *datasets: Node) -> Any:
    first = datasets[0].row_spec
    for number, dataset in enumerate(datasets[1:], 1):
        compare_specs(_CHOOSE, first, dataset.row_spec, number)
    spec = choices.row_spec
    scalar = getattr(spec, "shape", None) == () and spec.dtype.kind in "iu"
    if not scalar or choices.batching is not None:
        expected, got = "a dataset of single integers", "batches" if scalar else str(spec)
        raise TypeError(explain(_CHOOSE, "choice_dataset", expected=expected, got=got))
    return first


def _chosen(stop_on_empty: bool, epoch: int, choices: Node, *datasets: Node) -> Iterator[Any]:
    iterators = [dataset.elements(epoch) for dataset in datasets]
    nothing = object()
    for position, choice in enumerate(choices.elements(epoch)):
        if position == 0:
            _spec_of_chosen(choices, *datasets)  # raises if the datasets do not match
        number = int(np.asarray(choice))
        if not 0 <= number < len(iterators):
            expected = f"numbers in [0, {len(iterators)})"
            raise ValueError(
                explain(_CHOOSE, "choice_dataset", expected=expected, got=f"{number} as element {position}")
            )
        element = next(iterators[number], nothing)
        if element is not nothing:
            yield element
        elif stop_on_empty:
            return
