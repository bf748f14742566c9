"""Batches taken apart into their rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from numpy.typing import NDArray

from ... import nest
from ...errors import explain
from ..dataset import INFINITE, UNKNOWN, Addresses, Dataset
from ..spec import ArraySpec, row_count, unstack_rows
from .batched import Batched
from .stage import Stage, cut_chunks

__all__ = ["Unbatched"]


class Unbatched(Stage):
    """The rows of batches, or of arrays with a first axis. Right after `batch` they are the rows below it."""

    def __init__(self, parent: Dataset) -> None:
        super().__init__(parent)
        self._rows = parent.parents[0] if isinstance(parent, Batched) else None

    @property
    def random_access(self) -> bool:
        return self._rows is not None and self._rows.random_access

    @property
    def batching(self) -> None:
        return None

    @property
    def row_spec(self) -> Any:
        spec = self._parent.row_spec
        if self._parent.batching is not None:
            return spec
        for name, leaf in zip(nest.paths(spec), nest.flatten(spec), strict=True):
            if not leaf.shape:
                got = f"a scalar{name and ' at ' + name}"
                raise ValueError(explain("Dataset.unbatch", "", expected="arrays with a first axis", got=got))
        return nest.map_structure(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), spec)

    @property
    def prefetch_depth(self) -> int | None:
        depth, batching = self._parent.prefetch_depth, self._parent.batching
        return depth if depth is None or batching is None else depth * batching.size

    def cardinality(self) -> int:
        batches = self._parent.cardinality()
        if batches in (0, INFINITE):
            return batches
        if self._rows is None or self._rows.cardinality() == UNKNOWN:
            return UNKNOWN
        size, rows = self._parent.batching.size, self._rows.cardinality()  # type: ignore[union-attr]
        return min(batches * size, rows)

    def locate(self, epoch: int, position: int) -> Addresses:
        return self._rows_below().locate(epoch, position)

    def gather(self, epochs: NDArray[Any], positions: NDArray[Any]) -> Any:
        return self._rows_below().gather(epochs, positions)

    def _rows_below(self) -> Dataset:
        if self._rows is None:
            raise NotImplementedError(f"{self.describe()} reads in order")
        return self._rows

    def locality(self, epochs: NDArray[Any], positions: NDArray[Any]) -> NDArray[Any] | None:
        return self._rows_below().locality(epochs, positions)

    def expect(self, epochs: NDArray[Any], positions: NDArray[Any]) -> None:
        if self._rows is not None:
            self._rows.expect(epochs, positions)

    def chunk_starts(self) -> NDArray[Any] | None:
        return cut_chunks(self._rows.chunk_starts(), 0, self.cardinality()) if self._rows is not None else None

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        return itertools.islice(self._all(epoch), start, None)

    def _all(self, epoch: int) -> Iterator[Any]:
        for batch in self._parent.elements(epoch):
            counts = {len(leaf) for leaf in nest.flatten(batch)}
            if len(counts) > 1:
                expected, got = "arrays with equally long first axes", f"lengths {sorted(counts)}"
                raise ValueError(explain("Dataset.unbatch", "", expected=expected, got=got))
            if row_count(batch):
                yield from unstack_rows(batch)

    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        return Unbatched(parents[0])

    def describe(self) -> str:
        return "unbatch()"
