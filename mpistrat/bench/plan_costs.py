"""What a node takes for a parameter: the sum of its gradients and its update, by ranks and by the size of a core's part.

All cores of a node work, whatever the ranks: compiled loops use those that no rank has. One rank on all of them was measured,
in memory of its own, and all ranks at once, in memory that they share, whose pages may be smaller. Each gradient more has
just been written by another rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from ..base.errors import explain
from . import constants as of
from .measure import Spread

__all__ = ["NodeCosts", "PartCost"]


class PartCost(NamedTuple):
    """Seconds of a node for a parameter, on parts of some size.

    Attributes:
        size: parameters for each core.
        alone: update, by one rank, without its gradient.
        together: the same by several ranks.
        gradient: each gradient.
    """

    size: int
    alone: Spread
    together: Spread
    gradient: Spread


@final
@dataclass(frozen=True)
class NodeCosts:
    """What was measured on a node.

    Attributes:
        cores, ranks: a node's, when it was measured.
        threaded: whether a rank's loops use all cores that it has, as compiled ones do.
        parts: by ascending size.
    """

    cores: int
    ranks: int
    threaded: bool
    parts: Sequence[PartCost]

    @classmethod
    def read(cls, values: Mapping[str, Spread], cores: int, ranks: int, threaded: bool) -> NodeCosts:
        """Return the costs that the constants of a file tell.

        Raises:
            ValueError: they are not there.
        """
        parts = []
        for label, size in of.PARTS.items():
            names = [of.name_of(what, label) for what in (of.ALONE, of.TOGETHER, of.GRADIENT)]
            if all(name in values for name in names):
                alone, together, gradient = (values[name] for name in names)
                parts.append(_part(size, alone, together, gradient, ranks))
        if not parts:
            expected = "constants of at most as many ranks as cores, by this version of mpistrat bench"
            remedy = f"mpistrat run -n {cores} -m mpistrat bench --only constants --json bench.json"
            raise ValueError(
                explain("Machine.read", "document", expected=expected, got="a file without", remedy=remedy)
            )
        return cls(cores, ranks, threaded, parts)

    def seconds_a_parameter(self, parameters: float, cores: int, ranks: int, updated: float) -> Spread:
        """Return what a node takes for a parameter.

        On as many cores as were measured it is known, but for more ranks than were measured of loops that use one core each.
        Other cores come with another memory: where that is the limit, they are as fast, and else the faster the more there are.

        Args:
            parameters: of the model.
            cores: of the node.
            ranks: of the node, each of which has a gradient.
            updated: the part of the parameters that the node updates; it sums gradients of all.
        """
        part = parameters / (cores if self.threaded else min(ranks, cores))
        sizes = [cost.size for cost in self.parts]
        above = next((index for index, size in enumerate(sizes) if size >= part), len(sizes) - 1)
        low, high = self.parts[max(above - 1, 0)], self.parts[above]
        share = 1.0
        if low.size < high.size:
            share = min(max(math.log(part / low.size) / math.log(high.size / low.size), 0.0), 1.0)
        ends = [self._on_part(cost, cores, ranks, updated) for cost in (low, high)]
        median, least, most = (a + (b - a) * share for a, b in zip(*ends, strict=True))
        return median, least, most

    def _on_part(self, cost: PartCost, cores: int, ranks: int, updated: float) -> Spread:
        update, busy = self._update(cost, cores, ranks)
        median, least, most = (one * updated + more * ranks for one, more in zip(update, cost.gradient, strict=True))
        ratio = busy / (cores if self.threaded else min(ranks, cores))
        return median * math.sqrt(ratio), least * min(ratio, 1.0), most * max(ratio, 1.0)

    def _update(self, cost: PartCost, cores: int, ranks: int) -> tuple[Spread, int]:
        """Return the seconds of the update of a parameter, and by how many cores."""
        if self.threaded:
            return cost.alone if ranks == 1 else cost.together, self.cores
        busy = min(ranks, cores, self.ranks)
        # One core each: as quick as so many, up to what all at once are allowed by the memory.
        median, least, most = (max(a / busy, b) for a, b in zip(cost.alone, cost.together, strict=True))
        return (median, least, most), busy


def _part(size: int, alone: Spread, together: Spread, gradient: Spread, ranks: int) -> PartCost:
    """Return the costs of a node out of seconds of a million parameters: of the rank, alone, and of each of all."""
    each = _scaled(gradient, 1 / ranks / of.MILLION)
    one, all_ = _scaled(alone, 1 / of.MILLION), _scaled(together, 1 / ranks / of.MILLION)
    return PartCost(size, _less(one, each), _less(all_, _scaled(each, min(ranks, 2))), each)


def _scaled(spread: Spread, factor: float) -> Spread:
    median, least, most = (value * factor for value in spread)
    return median, least, most


def _less(spread: Spread, other: Spread) -> Spread:
    """Return what is left without the other; quartiles remain as far apart as they are together with the other's."""
    median, least, most = (max(one - less, 0.0) for one, less in zip(spread, other, strict=True))
    return median, least, most
