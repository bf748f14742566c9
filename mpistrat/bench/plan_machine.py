"""The constants of a machine, from which `plan` predicts: those of the files of `mpistrat bench` that tell each best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

from ..errors import explain
from . import constants as of
from .training_step import OURS, SIZES

__all__ = ["Crowded", "Machine", "Spread"]

_ASSUMED = (
    0.25,
    0.0,
    0.5,
)  # of the time of sums and update, that ranks lose that share cores, where it was not measured
_BOUND = 1.1  # times as long as one rank takes: then all together are bound by the memory

Spread = tuple[float, float, float]  # the median, the least, the most


class PartCost(NamedTuple):
    """Seconds of a parameter, on parts of some size.

    Attributes:
        size: parameters of a rank's part.
        update: sum of one gradient, and update.
        gradient: each gradient more.
    """

    size: int
    update: Spread
    gradient: Spread


class Crowded(NamedTuple):
    """What ranks lose that share cores.

    Attributes:
        fixed: a step on few parameters.
        steps: seconds that sums and update should have taken, and those that were lost besides; in ascending order.
    """

    fixed: Spread
    steps: list[tuple[float, float]]


@final
@dataclass(frozen=True)
class Machine:
    """The constants of a node and of what connects nodes; seconds, bytes.

    Attributes:
        cores: of a node.
        memory: bytes of a node.
        ranks, measured_cores: a node's, when it was measured.
        alone, together: what a parameter takes, one rank of a node alone or all of them at once; by ascending size.
        fixed_on_a_node, fixed_over_nodes: ranks in all, and what a step takes on them without parameters.
        latency: of a message between nodes.
        network: bytes a second that a node sends while it receives as many: the median, least and most; zeros where it
            was neither measured nor told.
        crowded: what was measured with more ranks than cores, if it was.
        threaded: whether a rank's loops use all cores that it has, as compiled ones do.
    """

    cores: int
    memory: float
    ranks: int
    measured_cores: int
    alone: list[PartCost]
    together: list[PartCost]
    fixed_on_a_node: tuple[int, Spread]
    fixed_over_nodes: tuple[int, Spread]
    latency: float
    network: Spread
    crowded: Crowded | None = None
    threaded: bool = False

    @classmethod
    def read(cls, documents: Sequence[Mapping[str, Any]]) -> Machine:
        """Return the constants of what `mpistrat bench --json` has written on some layouts.

        Costs of a node are those of the layout with the most ranks that had a core each, on one node if there is such a one;
        the network is that of a layout of several nodes, and what ranks lose that share cores that of one with more.

        Raises:
            ValueError: the constants are not in a file.
        """
        runs = [_Run.of(document) for document in documents]
        fitting = [run for run in runs if run.each <= run.cores] or runs
        base = max(fitting, key=lambda run: (run.nodes == 1, run.each))
        wide = max(runs, key=lambda run: (run.nodes > 1, -run.nodes * run.each))
        crowded = max(runs, key=lambda run: (run.nodes == 1, run.each / run.cores))
        latency, network = wide.network() if wide.nodes > 1 else (0.0, (0.0, 0.0, 0.0))
        machine = cls(
            cores=base.cores,
            memory=base.memory,
            ranks=base.each,
            measured_cores=base.cores,
            alone=base.costs(together=False),
            together=base.costs(together=True),
            fixed_on_a_node=(base.each, base.values[of.FIXED]),
            fixed_over_nodes=(wide.nodes * wide.each, wide.values[of.FIXED]),
            latency=latency,
            network=network,
            threaded=base.threaded,
        )
        if crowded.nodes > 1 or crowded.each <= crowded.cores:
            return machine
        return machine.with_crowded(crowded.each, crowded.values[of.FIXED], crowded.steps)

    def with_crowded(self, ranks: int, fixed: Spread, steps: Mapping[str, float]) -> Machine:
        """Return this one with what so many ranks lost in steps by number of parameters, as `training_step` names it."""
        lost = []
        for case, seconds in steps.items():
            should = SIZES[case] * self.seconds_a_parameter(SIZES[case] / ranks, ranks, 1)[0]
            lost.append((should, max(seconds - should - fixed[0], 0.0)))
        return Machine(**{**vars(self), "crowded": Crowded(fixed, sorted(lost))})

    def lost(self, seconds: float) -> Spread:
        """Return what ranks lose that share cores, in a step whose sums and update should take so many seconds.

        Their cores go from one to another while they wait for each other: that grows with the step, from the largest measured
        one on in proportion.
        """
        if self.crowded is None or not self.crowded.steps:
            median, least, most = (seconds * share for share in _ASSUMED)
            return median, least, most
        steps = self.crowded.steps
        above = next((index for index, (known, _) in enumerate(steps) if known >= seconds), len(steps))
        if above == len(steps):
            median = steps[-1][1] * seconds / steps[-1][0]
        elif not above:
            median = steps[0][1]
        else:
            (low, first), (high, last) = steps[above - 1 : above + 1]
            median = first + (last - first) * (seconds - low) / (high - low)
        return median, median / 2, 1.5 * median + 0.1 * seconds

    def seconds_a_parameter(self, part: float, ranks: int, parts: int) -> Spread:
        """Return what a node takes for a parameter, of which each rank has a gradient, and it updates one of so many parts.

        One rank is bound by its core, all together by the memory: as fast as was measured at most, as the cores at least. That
        is all that is known where the memory's limit was not met, as all at once were as fast each as alone, or where nodes
        have other cores than those that were measured, and so another memory.
        """
        alone, together = _cost(self.alone, part, ranks, parts), _cost(self.together, part, ranks, parts)
        workers, met = min(ranks, self.cores), min(self.ranks, self.measured_cores)
        # Compiled loops use the cores that no rank has; each was measured with so many.
        own = max(self.measured_cores // self.ranks, 1)
        free = max(self.cores / own, 1.0) if self.threaded else float(workers)
        known = self.cores == self.measured_cores and self.ranks > 1
        bound = known and together[0] > _BOUND * alone[0]
        if free == 1 or (bound and alone[0] / free >= together[0] / met):
            return alone[0] / free, alone[1] / free, alone[2] / free
        least, most = alone[1] / free, max(together[2] / met, alone[2] / free)
        if bound or (known and free <= met):
            shared = [max(one / free, all_ / met) for one, all_ in zip(alone, together, strict=True)]
            return shared[0], shared[1], shared[2]
        return math.sqrt(max(alone[0], 1e-15) / free * max(together[0] / met, alone[0] / free)), least, most


class _Run(NamedTuple):
    """What one file of `mpistrat bench` has."""

    nodes: int
    each: int  # ranks of a node
    cores: int
    memory: float
    values: Mapping[str, Spread]
    steps: Mapping[str, float]
    threaded: bool

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> _Run:
        about, benchmarks = document.get("machine", {}), document.get("benchmarks", {})
        found = benchmarks.get("constants")
        if found is None:
            remedy = "mpistrat run -n 4 -m mpistrat bench --only constants --only step --json bench.json"
            expected, got = "a file of mpistrat bench with constants", "one without"
            raise ValueError(explain("Machine.read", "document", expected=expected, got=got, remedy=remedy))
        values = {name: tuple(map(each.__getitem__, of.COLUMNS)) for name, each in found["values"].items()}
        steps = {case: each[OURS] for case, each in benchmarks.get("step", {"values": {}})["values"].items()}
        nodes = int(about["nodes"])
        memory = float(about["memory_gib"]) * 2**30
        threaded = bool(about.get("compiled_loops", False))
        return cls(nodes, int(about["ranks"]) // nodes, int(about["cores"]), memory, values, steps, threaded)

    def costs(self, together: bool) -> list[PartCost]:
        """Return what a parameter takes on parts of each size."""
        found = []
        for label, size in of.PARTS.items():
            names = [of.name_of(what, label, together) for what in (of.UPDATE, of.GRADIENT)]
            if names[0] in self.values:
                update, gradient = (_scaled(self.values[name], 1 / of.MILLION) for name in names)
                found.append(PartCost(size, update, gradient))
        return found

    def network(self) -> tuple[float, Spread]:
        """Return the seconds of a message, and the bytes a second of a node: both of both directions at once."""
        ping, exchange = self.values[of.PING], self.values[of.EXCHANGE]
        rates = [self.each * of.CHUNK_BYTES / max(seconds - ping[0], 1e-9) for seconds in exchange]
        return ping[0], (rates[0], rates[2], rates[1])


def _cost(known: Sequence[PartCost], part: float, ranks: int, parts: int) -> Spread:
    """Return what a parameter takes of a rank, on a part of a size between those that are known."""
    above = next((index for index, cost in enumerate(known) if cost.size >= part), len(known) - 1)
    low, high = known[max(above - 1, 0)], known[above]
    share = 1.0 if high.size == low.size else min(max(math.log(part / low.size) / math.log(high.size / low.size), 0), 1)
    ends = []
    for cost in (low, high):
        per = [max(u - g, 0.0) / parts + ranks * g for u, g in zip(cost.update, cost.gradient, strict=True)]
        # What is measured as a gradient more is not in the update: quartiles of the latter are taken for both.
        width = [cost.update[index] / max(cost.update[0], 1e-15) for index in (1, 2)]
        ends.append((per[0], per[0] * min(width[0], 1.0), per[0] * max(width[1], 1.0)))
    median, least, most = (a + (b - a) * share for a, b in zip(*ends, strict=True))
    return median, least, most


def _scaled(spread: Spread, factor: float) -> Spread:
    median, least, most = (value * factor for value in spread)
    return median, least, most
