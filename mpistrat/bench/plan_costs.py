"""What a node takes for a parameter: the sum of its gradients and its update, by ranks and by the size of a core's part.

All cores of a node work, whatever the ranks: compiled loops use those that no rank has. One rank on all of them was measured,
and all ranks at once; other numbers of ranks lie in between. Each gradient more than one comes from another rank, which has
just written it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from ..errors import explain
from . import constants as of
from .measure import Spread

__all__ = ["NodeCosts", "PartCost"]


class PartCost(NamedTuple):
    """Seconds of a node for a parameter, on parts of some size.

    Attributes:
        size: parameters for each core.
        alone: sum of one gradient, and update, by one rank.
        together: the same by all ranks that were measured.
        gradient: each gradient more.
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
                each = 1 / of.MILLION / ranks
                parts.append(
                    PartCost(size, _scaled(alone, each * ranks), _scaled(together, each), _scaled(gradient, each))
                )
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
        # One gradient is in the update, most of whose time is that of weights and slots.
        total = [one * updated + more * (ranks - updated) for one, more in zip(update, cost.gradient, strict=True)]
        ratio = busy / (cores if self.threaded else min(ranks, cores))
        low, high = total[1] * min(ratio, 1.0), total[2] * max(ratio, 1.0)
        return total[0] * math.sqrt(ratio), low, high

    def _update(self, cost: PartCost, cores: int, ranks: int) -> tuple[Spread, int]:
        """Return the seconds of the update of a parameter, and by how many cores."""
        if self.threaded:
            share = min(math.log(ranks) / math.log(self.ranks), 1.0) if self.ranks > 1 else 0.0
            median, least, most = (a + (b - a) * share for a, b in zip(cost.alone, cost.together, strict=True))
            return (median, least, most), self.cores
        busy = min(ranks, cores, self.ranks)
        # One core each: as quick as so many, up to what all at once are allowed by the memory.
        median, least, most = (max(a / busy, b) for a, b in zip(cost.alone, cost.together, strict=True))
        return (median, least, most), busy


def _scaled(spread: Spread, factor: float) -> Spread:
    median, least, most = (value * factor for value in spread)
    return median, least, most
