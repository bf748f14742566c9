"""Layouts: the box of an array that each rank of a mesh holds, the whole from its boxes, and the elements read from a file."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np

from ..base.errors import explain
from ..comm.process_group import ProcessGroup

__all__ = ["DATA", "Box", "Grid", "Part", "Receiver", "check_layouts", "exchanged", "part_of"]

DATA = "data"  # the axis whose coordinates are replicas


def _nothing() -> None:
    """Do nothing."""


class Receiver(NamedTuple):
    """The elements that a rank reads from an array in a file, and the functions that store them.

    Attributes:
        ranges: the element ranges in the flat array.
        take: stores elements from an offset on, which are inside one of the ranges.
        finish: called after all elements of all arrays; it may be collective.
    """

    ranges: Sequence[tuple[int, int]]
    take: Callable[[int, np.ndarray], None]
    finish: Callable[[], None] = _nothing

    @classmethod
    def whole(cls, array: np.ndarray, finish: Callable[[], None] = _nothing) -> Receiver:
        """Return a receiver that fills a C-contiguous array."""
        flat = array.reshape(-1)

        def take(start: int, part: np.ndarray) -> None:
            flat[start : start + part.size] = part

        return cls([(0, flat.size)], take, finish)


@final
class Box:
    """A box of a whole array: a range of each dimension, and the offsets of its elements in the flat whole.

    Attributes:
        shape: of the whole.
        elements: `Part.elements`, if each rank of a replica has a box of the whole; else None.
        whole_size, size: numbers of elements.
        first: the offset of its first element in the whole.

    Example:
        >>> box = Box((3, 4), ((1, 3), (0, 2)))
        >>> box.first, list(box.spans(0, 12, 0, 4))
        (4, [(4, 0, 2), (8, 2, 2)])
    """

    def __init__(
        self,
        shape: Sequence[int],
        ranges: Sequence[tuple[int, int]] = (),
        elements: Callable[..., np.ndarray] | None = None,
    ) -> None:
        """Take ranges of all dimensions, or of the first ones."""
        self.shape, self._given, self.elements = tuple(shape), tuple(ranges), elements
        self.first, self.whole_size = 0, math.prod(self.shape)
        self.size, stride = self.whole_size, self.whole_size
        for (low, high), length in zip(self._given, self.shape, strict=False):
            stride //= max(length, 1)
            self.first += low * stride
            self.size = self.size // max(length, 1) * (high - low)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """First and last index, exclusive, in each dimension."""
        return self._given + tuple((0, length) for length in self.shape[len(self._given) :])

    @property
    def is_whole(self) -> bool:
        """True if it has the shape of the whole."""
        return all(high - low == length for (low, high), length in zip(self._given, self.shape, strict=False))

    @property
    def slices(self) -> tuple[Any, ...]:
        """The box as an index of the whole array."""
        return (*(slice(low, high) for low, high in self._given), ...)

    def cut(self, whole: Any) -> Any:
        """Return the box of a whole array: a view."""
        return whole[self.slices]

    @property
    def contiguous(self) -> bool:
        """True if its elements are adjacent in the whole."""
        return not self._given or self._starts.size <= 1

    def spans(self, begin: int, end: int, low: int, high: int) -> Iterator[tuple[int, int, int]]:
        """Yield the overlaps of elements [begin, end) of the whole and [low, high) of the box: both offsets, and the length."""
        starts = self._starts
        length = self.size // max(starts.size, 1)
        if not length:
            return
        nearest = max(int(np.searchsorted(starts, begin, "right")) - 1, low // length, 0)
        for number in range(nearest, starts.size):
            start, mine = int(starts[number]), number * length
            if start >= end or mine >= high:
                return
            skip = max(begin - start, low - mine, 0)
            count = min(end - start, high - mine, length) - skip
            if count > 0:
                yield start + skip, mine + skip, count

    def receiver(self, own: Receiver) -> Receiver:
        """Return a receiver for the whole, from one for the box.

        It takes everything from the first to the last element of a range, and ignores elements outside the box.
        """
        if self.contiguous:
            first = self.first
            moved = [(first + low, first + high) for low, high in own.ranges]
            return Receiver(moved, lambda start, flat: own.take(start - first, flat), own.finish)
        ranges = []
        for low, high in own.ranges:
            found = list(self.spans(0, self.whole_size, low, low + 1))
            found += self.spans(0, self.whole_size, high - 1, high)
            ranges.append((found[0][0], found[-1][0] + 1))

        def take(start: int, flat: np.ndarray) -> None:
            for low, high in own.ranges:
                for at, mine, count in self.spans(start, start + flat.size, low, high):
                    own.take(mine, flat[at - start : at - start + count])

        return Receiver(ranges, take, own.finish)

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """The offset in the whole of each contiguous run of elements."""
        cut = [d for d, (low, high) in enumerate(self._given) if high - low != self.shape[d]]
        starts: Any = 0
        for d in range(max(cut) + 1 if cut else 0):
            low, high = self._given[d]
            rows = np.arange(low, high if d < max(cut) else low + 1)
            starts = np.add.outer(starts, rows * math.prod(self.shape[d + 1 :]))
        return np.array(starts, np.int64).reshape(-1)


@final
@dataclass(frozen=True, eq=False)
class Grid:
    """The ranks of a mesh.

    Attributes:
        sizes: the length of each axis, the fastest last.
        at: this rank's coordinate on each.
        world: all ranks, which create variables together.
        replica: the ranks of this rank's replica, which hold the parts of its variables, in the order of their coordinates.
        replica_ranks: their ranks in `world`.
    """

    sizes: Mapping[str, int]
    at: Mapping[str, int]
    world: ProcessGroup
    replica: ProcessGroup
    replica_ranks: Sequence[int]

    @property
    def model_axes(self) -> tuple[str, ...]:
        """The axes over which a replica is divided."""
        return tuple(axis for axis in self.sizes if axis != DATA)

    def coordinates(self, index: int) -> dict[str, int]:
        """Return the coordinates of a rank of the replica, by its number there."""
        found: dict[str, int] = {}
        for axis in reversed(self.model_axes):
            index, found[axis] = divmod(index, self.sizes[axis])
        return found


@final
class Part:
    """The part of a whole array that each rank of a replica holds: a box.

    Attributes:
        layout: for each dimension its axis, or None if it is not divided.
        whole_shape: shape of the whole.
        shape: shape of the part, the same on every rank.
        split: True if the part is not the whole.
        box: the part of this rank.
        slices: the box as an index of the whole array.
        whole_size: number of elements of the whole.
    """

    def __init__(self, grid: Grid, whole_shape: Sequence[int], layout: Sequence[str | None], name: str) -> None:
        """Divide an array. Equal on every rank except `box`.

        Raises:
            TypeError: not a tuple of names.
            ValueError: an axis that does not exist, is given twice, or whose length does not divide the dimension's.
        """
        self._grid, self.whole_shape, self.layout = grid, tuple(whole_shape), _checked(grid, whole_shape, layout, name)
        lengths = [grid.sizes.get(axis or "", 1) for axis in self.layout]
        self.shape = tuple(n // cuts for n, cuts in zip(self.whole_shape, lengths, strict=True))
        self.split = self.shape != self.whole_shape
        self._boxes: dict[tuple[int, ...], Box] = {}
        self.box = Box(self.whole_shape, self._box(grid.at).ranges, self.elements)
        self.slices, self.whole_size = self.box.slices, self.box.whole_size

    @functools.cached_property
    def holders(self) -> list[int]:
        """The ranks of the replica, by their numbers there, that together hold each part once."""
        return sorted(set(self.same))

    @functools.cached_property
    def same(self) -> list[int]:
        """For each rank of the replica the first one that holds the same part."""
        first: dict[tuple[int, ...], int] = {}
        ranks = range(self._grid.replica.topology.size)
        return [first.setdefault(self._corner(self._grid.coordinates(rank)), rank) for rank in ranks]

    def elements(self, own: Any, wanted: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return elements of the flat whole, of which each rank has its part or all of it. Collective over the replica.

        Args:
            own: this rank's part, flat; or the whole, on all ranks.
            wanted: for each rank of the replica the range that it gets.
        """
        group = self._grid.replica
        rank = group.topology.rank
        low, high = wanted[rank]
        if own.size == self.whole_size:
            return own[low:high]
        holders, boxes = self.holders, [self._box(self._grid.coordinates(r)) for r in range(len(wanted))]
        sent: list[list[Any]] = [[] for _ in wanted]
        if rank in holders:
            for other, (begin, end) in enumerate(wanted):
                mine = self.box.spans(begin, end, 0, own.size)
                sent[other] = [own[at : at + count] for _, at, count in mine]
        places = [list(box.spans(low, high, 0, own.size)) if r in holders else [] for r, box in enumerate(boxes)]
        counts = [sum(count for *_, count in spans) for spans in places]
        with group.collective("parts", "", own.dtype, self.whole_shape, self.layout):
            found = exchanged(group, own.dtype, sent, counts)
        result, at = np.empty(high - low, own.dtype), 0
        for spans in places:
            for start, _, count in spans:
                result[start - low : start - low + count] = found[at : at + count]
                at += count
        return result

    def cut(self, whole: Any) -> Any:
        """Return this rank's part of a whole array: a view. Local."""
        return self.box.cut(whole)

    def whole(self, own: Any) -> np.ndarray:
        """Return the whole on every rank, from each rank's part. Collective over the replica."""
        every = [(0, self.whole_size)] * self._grid.replica.topology.size
        return np.array(self.elements(own.reshape(-1), every)).reshape(self.whole_shape)

    def _corner(self, at: Mapping[str, int]) -> tuple[int, ...]:
        """Return the number of the part at some coordinates, in each dimension."""
        return tuple(at[axis] if axis else 0 for axis in self.layout)

    def _box(self, at: Mapping[str, int]) -> Box:
        """Return the box at some coordinates."""
        corner = self._corner(at)
        if corner not in self._boxes:
            ranges = [(n * c, n * c + n) for n, c in zip(self.shape, corner, strict=True)]
            self._boxes[corner] = Box(self.whole_shape, ranges)
        return self._boxes[corner]


def part_of(
    grid: Grid | None,
    layout: Sequence[str | None] | None,
    shape: Sequence[int],
    name: str,
    own: bool,
    constrained: bool,
) -> Part | None:
    """Return the part of a new variable that each rank holds; None if each has all.

    Args:
        grid: the mesh of the strategy, if it has one.
        layout: as given, or None.
        shape, name: of the variable.
        own: True if each replica has its own value.
        constrained: True if there is a constraint.

    Raises:
        ValueError: a layout without a mesh, for a variable of which each replica has its own value, or with a constraint; one
            that does not fit.
        TypeError: not a tuple of names.
    """
    if layout is not None and grid is None:
        expected, got = "a strategy with a mesh, for a layout", f"{layout!r} under another one"
        remedy = 'ms.MeshStrategy(axes={"data": -1, "model": 4}); or leave layout out'
        raise ValueError(explain("Variable", f"{name}: layout", expected=expected, got=got, remedy=remedy))
    if layout is not None and own:
        expected = "none for an ON_READ variable, of which each replica has its own"
        raise ValueError(explain("Variable", f"{name}: layout", expected=expected, got=repr(layout)))
    if grid is None or own:
        return None
    part = Part(grid, shape, (None,) * len(shape) if layout is None else layout, name)
    if part.split and constrained:
        expected, got = "no constraint, which is a function of the whole array", f"a constraint and the layout {layout}"
        raise ValueError(explain("Variable", f"{name}: constraint", expected=expected, got=got))
    return part


def check_layouts(function: str, layouts: Any, names: Sequence[str]) -> None:
    """Check the layouts passed to a framework's `distribute`, by parameter name; creating the variables checks the rest.

    Raises:
        TypeError: not a dict.
        ValueError: a name that no parameter has.
    """
    if not isinstance(layouts, Mapping):
        expected = 'a dict of names and layouts, such as {"fc1.weight": ("model", None)}'
        raise TypeError(explain(function, "layouts", expected=expected, got=type(layouts).__name__))
    for name in layouts:
        if name not in names:
            expected = f"names of parameters: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
            raise ValueError(explain(function, "layouts", expected=expected, got=repr(name)))


def exchanged(group: ProcessGroup, dtype: np.dtype, sent: Sequence[Sequence[Any]], counts: Sequence[int]) -> np.ndarray:
    """Return the elements that all ranks have sent to this one, in the order of the ranks. Collective; inside `collective()`.

    Args:
        group: the ranks.
        dtype: of the elements.
        sent: for each rank, flat arrays that this one sends to it.
        counts: the number of elements that each rank sends to this one.
    """
    from mpi4py import MPI

    flat = [np.concatenate(parts) if parts else np.empty(0, dtype) for parts in sent]
    rank, found = group.topology.rank, np.empty(sum(counts), dtype)
    places = np.split(found, np.cumsum(counts)[:-1])
    places[rank][:] = flat[rank]
    # Leave this rank's own elements out: MPICH 5.0.2 copies them at a tenth of the memory's rate.
    starts = [sum(counts[:other]) for other in range(len(counts))]
    flat[rank] = flat[rank][:0]
    coming = [0 if other == rank else count for other, count in enumerate(counts)]
    data = np.concatenate(flat)
    element = MPI.BYTE.Create_contiguous(dtype.itemsize).Commit()
    try:
        outgoing = [data.view(np.uint8), ([part.size for part in flat], None), element]
        group.topology.comm.Alltoallv(outgoing, [found.view(np.uint8), (coming, starts), element])
    finally:
        element.Free()
    return found


def _checked(grid: Grid, shape: Sequence[int], layout: Sequence[str | None], name: str) -> tuple[str | None, ...]:
    """Return a layout with an entry for each dimension of a shape."""
    what, axes = f"{name}: layout", ", ".join(map(repr, grid.model_axes)) or "none"
    if not isinstance(layout, (tuple, list)) or not all(axis is None or isinstance(axis, str) for axis in layout):
        raise TypeError(explain("Variable", what, expected="a tuple of names of axes and None", got=repr(layout)))
    if len(layout) != len(shape):
        expected = f"an axis or None for each of the {len(shape)} dimensions"
        raise ValueError(explain("Variable", what, expected=expected, got=repr(tuple(layout))))
    used = [axis for axis in layout if axis is not None]
    if DATA in used:
        remedy = 'Each coordinate of "data" is a replica, which has all of a variable; optimizers divide their slots'
        raise ValueError(explain("Variable", what, expected=f"axes of a replica: {axes}", got='"data"', remedy=remedy))
    for axis in used:
        if axis not in grid.sizes or used.count(axis) > 1:
            got = f"{axis!r}" + " twice" * (axis in grid.sizes)
            raise ValueError(explain("Variable", what, expected=f"axes of the mesh, each once: {axes}", got=got))
    for length, axis in zip(shape, layout, strict=True):
        if axis is not None and length % grid.sizes[axis]:
            expected = f"a dimension that the {grid.sizes[axis]} ranks of axis {axis!r} divide"
            remedy = f"Pad it to {-(-length // grid.sizes[axis]) * grid.sizes[axis]}, or write None for it"
            raise ValueError(explain("Variable", what, expected=expected, got=f"one of {length}", remedy=remedy))
    return tuple(layout)
