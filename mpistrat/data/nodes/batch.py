"""Batches of successive rows, equal in shape or padded, and batches split into rows."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.arguments import integer
from ...base.errors import explain
from ..buffers import RowBuffers
from ..options import number_of_calls
from ..spec import ArraySpec, empty_rows, is_ragged, row_count, stack_rows, unstack_rows
from .nested import as_rows
from .node import INFINITE, UNKNOWN, Addresses, Batching, Below, LocatedRange, Node, OwnRows, own_rows
from .padding import FUNCTION, Padding
from .stage import Stage, cut_chunks

__all__ = ["Batched", "Batches", "Padded", "Ragged", "Unbatched", "batch", "padded_batch", "ragged_batch", "refuse_batches",
           "require_end", "require_one_shape", "unbatch"]  # fmt: skip


class Batches(Stage):
    """Batches of successive rows, equal in shape or not."""

    _function: str  # the method of Dataset that makes it

    def __init__(self, parent: Node, batching: Batching, *settings: Any) -> None:
        super().__init__(parent, batching, *settings)
        self._batching = batching
        self._buffers = RowBuffers()

    @abstractmethod
    def _stack(self, rows: list[Any]) -> Any:
        """Return the batch of some rows."""

    @property
    def batching(self) -> Batching:
        return self._batching

    @property
    def prefetch_depth(self) -> int | None:
        rows = self._parent.prefetch_depth
        return None if rows is None else -(-rows // self._batching.size)

    def length_over(self, below: int) -> int:
        size = self._batching.size
        if below < 0:
            return below
        return below // size if self._batching.drop_remainder else -(-below // size)

    def locate(self, epoch: int, position: int) -> Addresses:
        return self.locate_range(epoch, position, position + 1)[0]

    def locate_range(self, epoch: int, start: int, stop: int, own: OwnRows | None = None) -> LocatedRange:
        counts = self._counts(start, stop)
        if own is None or all(
            own(count) == (0, count) for count in set(counts)
        ):  # one worker, for which a range is faster
            first, ends = start * self._batching.size, list(itertools.accumulate(counts))
            positions = np.arange(first, first + ends[-1], dtype=np.int64)
        else:
            firsts = np.arange(start, stop, dtype=np.int64) * self._batching.size
            positions, ends = own_rows(firsts, counts, own)
        return (np.full(positions.size, epoch, np.int64), positions), counts, ends

    def _counts(self, start: int, stop: int) -> list[int]:
        rows, size = self._parent.cardinality(), self._batching.size
        last = size if rows < 0 else min(size, rows - (stop - 1) * size)
        return [size] * (stop - start - 1) + [last]

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        size = self._batching.size
        rows = self._parent.elements(epoch, start * size)
        while len(batch := list(itertools.islice(rows, size))) == size:
            yield self._stack(batch)
        if batch and not self._batching.drop_remainder:
            yield self._stack(batch)

    def resized(self, size: int) -> Node:
        """Return the same stage with another batch size."""
        batching, *settings = self._settings
        return type(self)(self._parent, replace(batching, size=size), *settings)

    def describe(self) -> str:
        return f"{self._function}({self._batching.size}, drop_remainder={self._batching.drop_remainder})"


@final
class Batched(Batches):
    """Batches of rows of one shape."""

    _function = "batch"

    def __init__(self, parent: Node, batching: Batching) -> None:
        super().__init__(parent, batching)
        self._checked = False

    @property
    def row_spec(self) -> Any:
        spec = self._parent.row_spec
        if not self._checked:
            require_one_shape("Dataset.batch", spec)
            self._checked = True
        return spec

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        if not self._checked:
            _ = self.row_spec  # raises for ragged rows
        return super().below(epochs, positions)

    def _stack(self, rows: list[Any]) -> Any:
        return stack_rows(rows, self.row_spec, self._buffers)


@final
class Padded(Batches):
    """Batches of successive rows, with each array padded to a given shape or to the longest in the batch.

    Row p below has address p here too. If the longest row of a batch decides, a slice of a batch is cut from the whole batch.
    """

    _function = "padded_batch"

    def __init__(self, parent: Node, batching: Batching, padding: Padding) -> None:
        super().__init__(parent, batching, padding)
        self._padding = padding

    @property
    def row_spec(self) -> Any:
        return self._padding.spec(self._parent.row_spec)

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        spec = self._parent.row_spec
        if positions.size == 0:
            return empty_rows(self.row_spec)
        if not any(is_ragged(leaf) for leaf in nest.flatten(self.row_spec)):
            return self._padding.pad(self._parent.gather(epochs, positions), spec, self._buffers)
        batches = np.unique(np.stack([epochs, positions // self._batching.size]), axis=1).T.tolist()
        if len(batches) > 1:
            raise ValueError(explain(FUNCTION, "", expected="rows of one batch at a time", got=f"{len(batches)}"))
        ((epoch, number),) = batches
        whole = self.locate(epoch, number)
        rows = self._padding.pad(self._parent.gather(*whole), spec, self._buffers)
        wanted = positions - number * self._batching.size
        if np.array_equal(wanted, np.arange(whole[0].size)):
            return rows
        return nest.map_structure(lambda leaf: leaf[wanted], rows)

    def _stack(self, rows: list[Any]) -> Any:
        spec = self._parent.row_spec
        return self._padding.pad(stack_rows(rows, spec), spec, self._buffers)


@final
class Ragged(Batches):
    """Batches of rows that may differ in shape: such arrays are 1-D object arrays of arrays."""

    _function = "ragged_batch"

    def _stack(self, rows: list[Any]) -> Any:
        return stack_rows(rows, self.row_spec, self._buffers)


class Unbatched(Stage):
    """The rows of batches, or of arrays with a first axis. Directly after `batch` they are the rows below it."""

    def __init__(self, parent: Node) -> None:
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
        _refuse_scalars([len(leaf.shape) for leaf in nest.flatten(spec)], spec)
        return nest.map_structure(lambda leaf: ArraySpec(leaf.shape[1:], leaf.dtype), spec)

    @property
    def prefetch_depth(self) -> int | None:
        depth, batching = self._parent.prefetch_depth, self._parent.batching
        return depth if depth is None or batching is None else depth * batching.size

    def length_over(self, below: int) -> int:
        return below if below in (0, INFINITE) else UNKNOWN

    def cardinality(self) -> int:
        length = super().cardinality()
        if length != UNKNOWN or self._rows is None or self._rows.cardinality() == UNKNOWN:
            return length
        size, rows = self._parent.batching.size, self._rows.cardinality()  # type: ignore[union-attr]
        return min(self._parent.cardinality() * size, rows)

    def locate(self, epoch: int, position: int) -> Addresses:
        if self._rows is None:
            raise NotImplementedError(f"{self.describe()} reads in order")
        return self._rows.locate(epoch, position)

    def below(self, epochs: NDArray[Any], positions: NDArray[Any]) -> list[Below]:
        return [] if self._rows is None else [(self._rows, (epochs, positions), None)]

    def chunk_starts(self) -> NDArray[Any] | None:
        return cut_chunks(self._rows.chunk_starts(), 0, self.cardinality()) if self._rows is not None else None

    def _all(self, epoch: int) -> Iterator[Any]:
        for batch in self._parent.elements(epoch):
            _refuse_scalars([np.ndim(leaf) for leaf in nest.flatten(batch)], batch)
            counts = {len(leaf) for leaf in nest.flatten(batch)}
            if len(counts) > 1:
                expected, got = "arrays with equally long first axes", f"lengths {sorted(counts)}"
                raise ValueError(explain("Dataset.unbatch", "", expected=expected, got=got))
            if row_count(batch):
                yield from unstack_rows(batch)

    def describe(self) -> str:
        return "unbatch()"


def _refuse_scalars(dimensions: list[int], element: Any) -> None:
    """Raise ValueError if an array of an element has no rows."""
    if 0 in dimensions:
        name = nest.paths(element)[dimensions.index(0)]
        got = f"a scalar{name and ' at ' + name}"
        remedy = "Batch the rows first: batch(n)"
        raise ValueError(explain("Dataset.unbatch", "", expected="arrays with a first axis", got=got, remedy=remedy))


def batch(
    parent: Node, global_batch_size: int, drop_remainder: bool = False, num_parallel_calls: int | None = None,
    deterministic: bool | None = None,
) -> Node:  # fmt: skip
    """Combine successive rows into global batches, for all replicas together.

    Batches of batches work as in tf.data: arrays with one more axis. The batches below must have equal lengths.

    Args:
        global_batch_size: rows in a batch; the last batch may have fewer.
        drop_remainder: drop a smaller last batch.
        num_parallel_calls, deterministic: accepted as in tf.data, without effect: batches are in order, and their rows
            are read together.

    Raises:
        ValueError: for a size below 1; while reading, for batches of batches of different lengths.
    """
    number_of_calls("Dataset.batch", num_parallel_calls)
    size = integer("Dataset.batch", "global_batch_size", global_batch_size, 1)
    return Batched(as_rows("Dataset.batch", parent, one_length=True), Batching(size, bool(drop_remainder)))


def padded_batch(
    parent: Node, global_batch_size: int, padded_shapes: Any = None, padding_values: Any = None,
    drop_remainder: bool = False,
) -> Node:  # fmt: skip
    """Combine successive rows that differ in shape into batches, padded to one shape.

    If the longest row of the batch decides a shape, every rank reads the whole batch for its slice: on several ranks
    fixed `padded_shapes` are faster.

    Args:
        global_batch_size: rows in a batch; the last batch may have fewer.
        padded_shapes: a nest of shapes, one per array; None (or -1) for the longest in the batch.
        padding_values: a nest of values, or one for all arrays; None for 0 and "".
        drop_remainder: drop a smaller last batch.

    Raises:
        ValueError: for shapes and values that do not fit the rows, and while reading for a row that is longer.

    Example:
        >>> spec = ms.data.ArraySpec((None,), np.int64)
        >>> rows = [np.array([1, 2]), np.array([3])]
        >>> words = ms.data.from_generator(lambda: iter(rows), spec)
        >>> next(iter(words.padded_batch(2))).tolist()
        [[1, 2], [3, 0]]
    """
    size = integer(FUNCTION, "global_batch_size", global_batch_size, 1)
    return Padded(
        as_rows(FUNCTION, parent, one_length=False),
        Batching(size, bool(drop_remainder)),
        Padding(padded_shapes, padding_values),
    )


def ragged_batch(parent: Node, global_batch_size: int, drop_remainder: bool = False) -> Node:
    """Combine successive rows that may differ in shape into batches, without padding.

    Arrays of one shape are stacked as by `batch`. Those of varying length (None in the spec) become a 1-D array of dtype
    object with an array per row, where TensorFlow has a RaggedTensor.

    Args:
        global_batch_size: rows in a batch; the last batch may have fewer.
        drop_remainder: drop a smaller last batch.

    Raises:
        ValueError: for a size below 1.

    Example:
        >>> spec = ms.data.ArraySpec((None,), np.int64)
        >>> rows = ms.data.Dataset.range(4).map(np.arange, element_spec=spec)
        >>> [[row.tolist() for row in batch] for batch in rows.ragged_batch(2)]
        [[[], [0]], [[0, 1], [0, 1, 2]]]
    """
    size = integer("Dataset.ragged_batch", "global_batch_size", global_batch_size, 1)
    return Ragged(
        as_rows("Dataset.ragged_batch", parent, one_length=False, ragged=True), Batching(size, bool(drop_remainder))
    )


def unbatch(parent: Node) -> Node:
    """Split batches into rows, and unbatched arrays along their first axis.

    Directly after `batch` random access remains; else rows are read in order, and a restored iterator makes the rows
    before its position again.
    """
    return Unbatched(parent)


def require_one_shape(function: str, spec: Any) -> None:
    """Raise ValueError, naming the function and the array, for rows that differ in shape."""
    for name, leaf in zip(nest.paths(spec), nest.flatten(spec), strict=True):
        if is_ragged(leaf):
            got = f"{leaf}{name and ' at ' + name}"
            remedy = "Use padded_batch or ragged_batch, or bring the rows to one shape with map."
            raise ValueError(explain(function, "", expected="rows of one shape", got=got, remedy=remedy))


def refuse_batches(function: str, parent: Node) -> None:
    """Raise ValueError, naming the function, for a dataset of batches."""
    if parent.batching is not None:
        expected, got = "a dataset of rows", "one that is batched already"
        raise ValueError(explain(function, "", expected=expected, got=got))


def require_end(function: str, parent: Node, remedy: str) -> None:
    """Raise ValueError, naming the function, for a dataset without an end. Files are opened only if a node repeats."""
    if parent.traits.repeated and parent.cardinality() == INFINITE:
        expected, got = "a dataset with an end", "an endless one"
        raise ValueError(explain(function, "", expected=expected, got=got, remedy=remedy))
