"""The axes of a mesh: lengths, coordinates, and the ranks along each, checked against the existing ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

from ..base.errors import LayoutError, explain
from ..base.text import counted, named
from ..cluster.topology import Topology
from ..variables import DATA

__all__ = ["Axes"]

_NAME = "MeshStrategy"


@final
class Axes:
    """The axes of a mesh of ranks, the last one fastest: rank = (… · length + coordinate) · length + coordinate.

    Attributes:
        sizes: the length of each axis; "data" comes first, with length 1, if it was not given.
    """

    def __init__(self, given: Any, size: int) -> None:
        """Compute the lengths for `size` ranks.

        Raises:
            TypeError: no dict of names and whole numbers.
            ValueError: a length that is neither positive nor -1, or several that are -1.
            LayoutError: they do not multiply to the number of ranks.
        """
        self.sizes = _lengths(given)
        known = math.prod(length for length in self.sizes.values() if length != -1)
        free = next((axis for axis, length in self.sizes.items() if length == -1), None)
        if free is not None and size % known == 0:
            self.sizes[free] = size // known
        elif free is not None or known != size:
            expected = f"{counted(known, 'rank')}{' or a multiple of it' if free else ''}"
            factors = [n for n in range(1, size + 1) if size % n == 0]
            remedy = f"Start that many, or let the lengths divide {size}: by {', '.join(map(str, factors[:12]))}"
            text = explain(_NAME, f"axes={given!r}", expected=expected, got=f"{size}", remedy=remedy)
            raise LayoutError(text)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's coordinate on each axis."""
        found = {}
        for axis in reversed(self.sizes):
            rank, found[axis] = divmod(rank, self.sizes[axis])
        return {axis: found[axis] for axis in self.sizes}

    def along(self, axes: Sequence[str], rank: int) -> list[int]:
        """Return the ranks that differ from one only in their coordinates on some axes, in order."""
        here = self.coordinates(rank)
        total = math.prod(self.sizes.values())
        return [
            other
            for other, at in ((other, self.coordinates(other)) for other in range(total))
            if all(at[axis] == here[axis] for axis in self.sizes if axis not in axes)
        ]

    def check_node(self, topology: Topology) -> None:
        """Raise LayoutError, on every rank, unless the ranks along the last axis are on one node; replicas may be on several."""
        last = next(reversed(self.sizes))
        if last == DATA:
            return
        for first in range(0, topology.size, self.sizes[last]):
            ranks = range(first, first + self.sizes[last])
            nodes = sorted({topology.node_of[rank] for rank in ranks})
            if len(nodes) > 1:
                got = f"{named('rank', ranks)} on {named('node', nodes)}"
                fewest = topology.slices
                remedy = (
                    f"A length that divides the ranks of a node ({fewest}), or ranks numbered node by node "
                    "(mpiexec --map-by node:..., srun --distribution=block), or another axis last"
                )
                expected = f"the {self.sizes[last]} ranks along it on one node"
                raise LayoutError(explain(_NAME, f"axis {last!r}", expected=expected, got=got, remedy=remedy))


def _lengths(given: Any) -> dict[str, int]:
    if not isinstance(given, Mapping) or not given:
        expected = 'a dict of names and lengths, such as {"data": -1, "model": 4}'
        raise TypeError(explain(_NAME, "axes", expected=expected, got=repr(given)))
    for axis, length in given.items():
        whole = isinstance(length, int) and not isinstance(length, bool)
        if not isinstance(axis, str) or not axis or not whole:
            expected, got = "names, each with a whole number", f"{axis!r}: {length!r}"
            raise TypeError(explain(_NAME, "axes", expected=expected, got=got))
        if length < 1 and length != -1:
            expected, got = "lengths of at least 1, or -1 for the rest", f"{axis!r}: {length}"
            raise ValueError(explain(_NAME, "axes", expected=expected, got=got))
    if list(given.values()).count(-1) > 1:
        raise ValueError(explain(_NAME, "axes", expected="-1 for one axis at most", got=repr(dict(given))))
    return dict(given) if DATA in given else {DATA: 1, **given}
