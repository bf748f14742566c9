"""Batches of successive rows, of one shape or padded to one, and batches taken apart into their rows."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ..._util import nest
from ...errors import explain
from ..buffers import RowBuffers
from ..spec import ArraySpec, empty_rows, is_ragged, row_count, stack_rows, unstack_rows
from .node import INFINITE, UNKNOWN, Addresses, Batching, Node, ReadPlan
from .stage import Stage, cut_chunks

__all__ = ["Batched", "Batches", "Padded", "Padding", "Unbatched"]


class Batches(Stage):
    """Batches of successive rows, of one shape or not."""

    _function: str  # of Dataset, that makes it

    def __init__(self, parent: Node, batching: Batching, *settings: Any) -> None:
        super().__init__(parent, batching, *settings)
        self._batching = batching
        self._buffers = RowBuffers()

    @abstractmethod
    def _stack(self, rows: list[Any]) -> Any:
        """The batch of some rows."""

    @property
    def batching(self) -> Batching:
        return self._batching

    @property
    def prefetch_depth(self) -> int | None:
        rows = self._parent.prefetch_depth
        return None if rows is None else -(-rows // self._batching.size)

    def cardinality(self) -> int:
        rows, size = self._parent.cardinality(), self._batching.size
        if rows < 0:
            return rows
        return rows // size if self._batching.drop_remainder else -(-rows // size)

    def locate(self, epoch: int, position: int) -> Addresses:
        return self.locate_range(epoch, position, position + 1)[0]

    def locate_range(self, epoch: int, start: int, stop: int) -> tuple[Addresses, list[int]]:
        rows, size = self._parent.cardinality(), self._batching.size
        first, end = start * size, stop * size
        positions = np.arange(first, end if rows < 0 else min(end, rows), dtype=np.int64)
        counts = [size] * (stop - start)
        counts[-1] -= end - first - positions.size  # the last of an epoch may be smaller
        return (np.full(positions.size, epoch, np.int64), positions), counts

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        size = self._batching.size
        rows = self._parent.elements(epoch, start * size)
        while len(batch := list(itertools.islice(rows, size))) == size:
            yield self._stack(batch)
        if batch and not self._batching.drop_remainder:
            yield self._stack(batch)

    def chunk_starts(self) -> None:
        return None

    def resized(self, size: int) -> Node:
        """The same stage with batches of another size."""
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
            for name, leaf in zip(nest.paths(spec), nest.flatten(spec), strict=True):
                if is_ragged(leaf):
                    got = f"{leaf}{name and ' at ' + name}"
                    remedy = "Use padded_batch, or bring the rows to one shape with map."
                    raise ValueError(explain("Dataset.batch", "", expected="rows of one shape", got=got, remedy=remedy))
            self._checked = True
        return spec

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        if not self._checked:
            _ = self.row_spec  # raises for ragged rows
        return self._parent.gather(epochs, positions)

    def read_plan(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> ReadPlan:
        if not self._checked:
            _ = self.row_spec  # raises for ragged rows
        return self._parent.read_plan(epochs, positions)

    def _stack(self, rows: list[Any]) -> Any:
        return stack_rows(rows, self.row_spec, self._buffers)


FUNCTION = "Dataset.padded_batch"


@final
class Padding:
    """The shapes to pad to and the values to pad with, as the user gave them.

    Args:
        shapes: None, or a nest of shapes (tuples, where None or -1 stands for the longest of the batch).
        values: None for 0 and "", one value for all arrays, or a nest of values.
    """

    def __init__(self, shapes: Any, values: Any) -> None:
        self._shapes = shapes
        self._values = values

    def spec(self, row_spec: Any) -> Any:
        """The spec of a padded row: None where the longest of a batch decides."""
        return nest.pack_like(row_spec, [spec for spec, _ in self.leaves(row_spec)])

    def leaves(self, row_spec: Any) -> list[tuple[ArraySpec, Any]]:
        """The padded spec and the value of each array."""
        specs, names = nest.flatten(row_spec), nest.paths(row_spec)
        shapes = [None] * len(specs) if self._shapes is None else _leaves_like(self._shapes, row_spec, "padded_shapes")
        single = self._values is None or not nest.is_nested(self._values)
        values = [self._values] * len(specs) if single else _leaves_like(self._values, row_spec, "padding_values")
        return [_leaf(*each) for each in zip(specs, names, shapes, values, strict=True)]


def _leaves_like(given: Any, row_spec: Any, argument: str) -> list[Any]:
    """The parts of a nest in the places of the spec's leaves; a shape is a tuple or list, so it is no nest there."""
    found: list[Any] = []

    def visit(spec: Any, part: Any) -> None:
        if not nest.is_nested(spec):
            found.append(part)
            return
        keys = list(spec) if isinstance(spec, dict) else None
        if keys is not None and isinstance(part, dict) and set(part) == set(keys):
            for key in sorted(keys):
                visit(spec[key], part[key])
        elif isinstance(spec, (tuple, list)) and isinstance(part, (tuple, list)) and len(part) == len(spec):
            for below, here in zip(spec, part, strict=True):
                visit(below, here)
        else:
            expected = f"the structure of an element, {nest.paths(row_spec)}"
            raise ValueError(explain(FUNCTION, argument, expected=expected, got=repr(given)))

    visit(row_spec, given)
    return found


def _leaf(spec: ArraySpec, name: str, shape: Any, value: Any) -> tuple[ArraySpec, Any]:
    """One array's padded spec and value."""
    place = f"padded_shapes{name}"
    if shape is None:
        shape = spec.shape
    elif not isinstance(shape, (tuple, list)) or len(shape) != len(spec.shape):
        raise ValueError(explain(FUNCTION, place, expected=f"a shape of {len(spec.shape)} axes", got=repr(shape)))
    shape = tuple(None if length == -1 else length for length in shape)
    for here, wanted in zip(spec.shape, shape, strict=True):
        if here is not None and wanted is not None and wanted < here:
            raise ValueError(explain(FUNCTION, place, expected=f"at least the rows' {spec}", got=shape))
    # Where all rows have the same length, it is known.
    shape = tuple(here if wanted is None else wanted for here, wanted in zip(spec.shape, shape, strict=True))
    if spec.dtype == object:
        value = "" if value is None else value
    elif value is None:
        value = np.zeros((), spec.dtype)[()]
    elif not np.can_cast(np.min_scalar_type(value), spec.dtype, "same_kind"):
        raise ValueError(explain(FUNCTION, f"padding_values{name}", expected=f"a {spec.dtype}", got=repr(value)))
    return ArraySpec(shape, spec.dtype), value


@final
class Padded(Batches):
    """Batches of successive rows, every array padded to a given shape or to the longest of the batch.

    Row p of what is below is address p here, too. Where the longest of a batch decides, a part of a batch is made of the
    whole one.
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
            return self._pad(self._parent.gather(epochs, positions), spec)
        batches = np.unique(np.stack([epochs, positions // self._batching.size]), axis=1).T.tolist()
        if len(batches) > 1:
            raise ValueError(explain(FUNCTION, "", expected="rows of one batch at a time", got=f"{len(batches)}"))
        ((epoch, number),) = batches
        whole = self.locate(epoch, number)
        rows = self._pad(self._parent.gather(*whole), spec)
        wanted = positions - number * self._batching.size
        if np.array_equal(wanted, np.arange(whole[0].size)):
            return rows
        return nest.map_structure(lambda leaf: leaf[wanted], rows)

    def _pad(self, rows: Any, row_spec: Any) -> Any:
        """Stacked rows, ragged or not, as dense arrays."""
        leaves = zip(nest.flatten(rows), self._padding.leaves(row_spec), nest.paths(row_spec), strict=True)
        padded = [self._pad_leaf(leaf, spec, value, name) for leaf, (spec, value), name in leaves]
        return nest.pack_like(row_spec, padded)

    def _pad_leaf(self, rows: NDArray[Any], spec: ArraySpec, value: Any, name: str) -> NDArray[Any]:
        shapes = np.array([row.shape for row in rows] if spec.shape else np.empty((len(rows), 0)), np.int64)
        longest = shapes.max(axis=0) if len(rows) else np.zeros(len(spec.shape), np.int64)
        shape = tuple(int(n) if wanted is None else wanted for n, wanted in zip(longest, spec.shape, strict=True))
        if (longest > np.array(shape, np.int64)).any():
            row = int(np.flatnonzero((shapes > np.array(shape, np.int64)).any(axis=1))[0])
            got = f"{tuple(int(n) for n in shapes[row])} in row {row} of a batch"
            raise ValueError(explain(FUNCTION, f"padded_shapes{name}", expected=f"rows of at most {shape}", got=got))
        if (shapes == np.array(shape, np.int64)).all() and rows.shape[1:] == shape:
            return rows
        out = self._buffers.empty(name, (len(rows), *shape), spec.dtype)
        out[...] = value
        for i, row in enumerate(rows):
            out[i][tuple(slice(n) for n in row.shape)] = row
        return out

    def _stack(self, rows: list[Any]) -> Any:
        spec = self._parent.row_spec
        return self._pad(stack_rows(rows, spec), spec)


class Unbatched(Stage):
    """The rows of batches, or of arrays with a first axis. Right after `batch` they are the rows below it."""

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

    def _rows_below(self) -> Node:
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

    def _all(self, epoch: int) -> Iterator[Any]:
        for batch in self._parent.elements(epoch):
            counts = {len(leaf) for leaf in nest.flatten(batch)}
            if len(counts) > 1:
                expected, got = "arrays with equally long first axes", f"lengths {sorted(counts)}"
                raise ValueError(explain("Dataset.unbatch", "", expected=expected, got=got))
            if row_count(batch):
                yield from unstack_rows(batch)

    def describe(self) -> str:
        return "unbatch()"
