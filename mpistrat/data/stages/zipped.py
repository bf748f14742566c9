"""Several datasets side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ... import nest
from ...errors import explain
from ..dataset import INFINITE, UNKNOWN, Addresses, Dataset
from ..spec import row_count
from .stage import Combined, cut_chunks

__all__ = ["Zipped"]


@final
class Zipped(Combined):
    """Elements made of one element of each dataset, as many as the shortest has.

    Rows have the same address in all datasets. A row of a batch has the batch's number times the largest size, plus its
    place in the batch.
    """

    def __init__(self, structure: Any) -> None:
        super().__init__("zip", nest.flatten(structure))
        self._structure = structure

    @property
    def row_spec(self) -> Any:
        return self._pack([parent.row_spec for parent in self._parents])

    def _pack(self, elements: Sequence[Any]) -> Any:
        return nest.pack_like(self._structure, list(elements))

    def cardinality(self) -> int:
        counts = [parent.cardinality() for parent in self._parents]
        if 0 in counts:
            return 0
        if UNKNOWN in counts:
            return UNKNOWN
        return min((count for count in counts if count != INFINITE), default=INFINITE)

    def locate(self, epoch: int, position: int) -> Addresses:
        if self._batching is None:
            return np.array([epoch], np.int64), np.array([position], np.int64)
        counts = {int(parent.locate(epoch, position)[0].size) for parent in self._parents}
        if len(counts) > 1:
            raise _uneven(position, sorted(counts))
        rows = counts.pop()
        return np.full(rows, epoch, np.int64), position * self._batching.size + np.arange(rows)

    def _gathers(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Iterator[tuple[Dataset, Addresses]]:
        """What each dataset is asked for."""
        if self._batching is None:
            yield from ((parent, (epochs, positions)) for parent in self._parents)
            return
        numbers, places = np.divmod(positions, self._batching.size)
        keys, key_of = np.unique(np.stack([epochs, numbers]), axis=1, return_inverse=True)
        for parent in self._parents:
            own = np.empty((2, positions.size), np.int64)
            for key in range(keys.shape[1]):
                located = np.stack(parent.locate(int(keys[0, key]), int(keys[1, key])))
                here = key_of.reshape(-1) == key
                own[:, here] = located[:, places[here]]
            yield parent, (own[0], own[1])

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return self._pack([parent.gather(*addresses) for parent, addresses in self._gathers(epochs, positions)])

    def locality(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        found = (parent.locality(*addresses) for parent, addresses in self._gathers(epochs, positions))
        return next((numbers for numbers in found if numbers is not None), None)

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        for parent, addresses in self._gathers(epochs, positions):
            parent.expect(*addresses)

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

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Zipped(self._pack(parents))

    def describe(self) -> str:
        return "zip()"


def _uneven(position: int, counts: list[int]) -> ValueError:
    expected, got = f"batches with equally many rows in element {position}", f"{counts} rows"
    remedy = "Zip the datasets before batch."
    return ValueError(explain("zip", "datasets", expected=expected, got=got, remedy=remedy))
