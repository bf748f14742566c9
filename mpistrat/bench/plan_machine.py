"""The constants of a machine, from which `plan` predicts: those of the files of `mpistrat bench` that tell each best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

from ..base.errors import explain
from . import constants as of
from .measure import Spread
from .plan_costs import NodeCosts
from .plan_network import is_divided, traffic

__all__ = ["Crowded", "Machine"]

_ASSUMED = (
    0.25,
    0.0,
    0.5,
)  # of the time of sums and update, that ranks lose that share cores, where it was not measured
_QUICKEST = 1e13  # bytes a second of a network that is hidden altogether


class Crowded(NamedTuple):
    """What ranks lose that share cores.

    Attributes:
        ranks: of the node.
        fixed: a step on few parameters.
        steps: seconds that sums and update should have taken, and those that were lost besides; in ascending order.
    """

    ranks: int
    fixed: Spread
    steps: list[tuple[float, Spread]]


@final
@dataclass(frozen=True)
class Machine:
    """The constants of a node and of what connects nodes; seconds, bytes.

    Attributes:
        cores: of a node.
        memory: bytes of a node.
        node: what sums and updates take, and on what it was measured.
        fixed_on_a_node, fixed_over_nodes: ranks in all, and what a step takes on them without parameters.
        latency: of a message between nodes.
        network: bytes a second that a node sends while it receives as many: the median, least and most; zeros where it
            was neither measured nor told.
        adds: whether these are of the time that the network adds to a step, as measured; else part of it may be hidden.
        crowded: what was measured with more ranks than cores, if it was.
    """

    cores: int
    memory: float
    node: NodeCosts
    fixed_on_a_node: tuple[int, Spread]
    fixed_over_nodes: tuple[int, Spread]
    latency: float
    network: Spread
    adds: bool = True
    crowded: Crowded | None = None

    @classmethod
    def read(cls, documents: Sequence[Mapping[str, Any]]) -> Machine:
        """Return the constants of what `mpistrat bench --json` has written on some layouts.

        Costs of a node are those of the layout with the most ranks that had a core each, on one node if there is such a one;
        the network is that of a layout of several nodes, and what ranks lose that share cores that of one with more.

        Raises:
            ValueError: the constants are not in a file, or in none of ranks that had a core each.
        """
        runs = [_BenchRun.of(document) for document in documents]
        fitting = [run for run in runs if run.each <= run.cores] or runs
        base = max(fitting, key=lambda run: (run.nodes == 1, run.each))
        wide = max(fitting, key=lambda run: (run.nodes > 1, -run.nodes * run.each))
        latency, network = wide.network() if wide.nodes > 1 else (0.0, (0.0, 0.0, 0.0))
        machine = cls(
            cores=base.cores,
            memory=base.memory,
            node=base.costs(),
            fixed_on_a_node=(base.each, base.values[of.FIXED]),
            fixed_over_nodes=(wide.nodes * wide.each, wide.values[of.FIXED]),
            latency=latency,
            network=network,
        )
        crowded = max(runs, key=lambda run: (run.nodes == 1, run.each / run.cores))
        if crowded.nodes > 1 or crowded.each <= crowded.cores:
            return machine
        return machine.with_crowded(crowded.each, crowded.values)

    def with_crowded(self, ranks: int, values: Mapping[str, Spread]) -> Machine:
        """Return this one with what so many ranks on one node lost in steps that were measured."""
        lost, fixed = [], values[of.FIXED]
        for label, size in of.CROWDED.items():
            step = values.get(of.name_of(of.STEP, label))
            if step is not None:
                count = size * ranks
                should = count * self.seconds_a_parameter(count, ranks, 1.0)[0]
                median, least, most = (max(each - should - fixed[0], 0.0) for each in step)
                lost.append((should, (median, least, most)))
        return replace(self, crowded=Crowded(ranks, fixed, sorted(lost)))

    def lost(self, seconds: float, ranks: int) -> Spread:
        """Return what so many ranks lose that share cores, in a step whose sums and update should take so many seconds.

        Ranks without a core wait for one, and the others for them: that grows with the step, from the largest measured one on
        in proportion. Of other numbers of ranks than were measured, some divide better among the cores, and some worse.
        """
        if self.crowded is None or not self.crowded.steps:
            median, least, most = (seconds * share for share in _ASSUMED)
            return median, least, most
        steps, more = self.crowded.steps, 1.0
        above = next((index for index, (known, _) in enumerate(steps) if known >= seconds), len(steps))
        if above == len(steps):
            known, ends = steps[-1][0], (steps[-1][1], steps[-1][1])
            share, more = 0.0, seconds / known
        elif not above:
            share, ends = 0.0, (steps[0][1], steps[0][1])
        else:
            (low, first), (high, last) = steps[above - 1 : above + 1]
            share, ends = (seconds - low) / (high - low), (first, last)
        median, least, most = (more * (a + (b - a) * share) for a, b in zip(*ends, strict=True))
        return (median, least, most) if ranks == self.crowded.ranks else (median, 0.0, 2 * most)

    def seconds_a_parameter(self, parameters: float, ranks: int, updated: float) -> Spread:
        """Return what a node takes for a parameter of a model, of whose parameters it updates a part."""
        return self.node.seconds_a_parameter(parameters, self.cores, ranks, updated)


class _BenchRun(NamedTuple):
    """What one file of `mpistrat bench` has."""

    nodes: int
    each: int  # ranks of a node
    cores: int
    memory: float
    values: Mapping[str, Spread]
    threaded: bool

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> _BenchRun:
        about, found = document.get("machine", {}), document.get("benchmarks", {}).get("constants")
        if found is None:
            remedy = "mpistrat run -n 4 -m mpistrat bench --only constants --only step --json bench.json"
            expected, got = "a file of mpistrat bench with constants", "one without"
            raise ValueError(explain("Machine.read", "document", expected=expected, got=got, remedy=remedy))
        values = {name: tuple(map(each.__getitem__, of.COLUMNS)) for name, each in found["values"].items()}
        nodes = int(about["nodes"])
        memory = float(about["memory_gib"]) * 2**30
        threaded = bool(about.get("compiled_loops", False))
        return cls(nodes, int(about["ranks"]) // nodes, int(about["cores"]), memory, values, threaded)

    def costs(self) -> NodeCosts:
        """Return what a node takes for a parameter."""
        return NodeCosts.read(self.values, self.cores, self.each, self.threaded)

    def network(self) -> tuple[float, Spread]:
        """Return the seconds of a message, and the bytes a second of a node, from how much longer a step over nodes takes.

        Raises:
            ValueError: such a step is not in the file.
        """
        ping, rates = self.values[of.PING][0], []
        for label, size in of.NETWORK_PART.items():
            step = self.values.get(of.name_of(of.STEP, label))
            if step is None:
                expected, got = "a step over nodes, by this version of mpistrat bench", "a file without"
                raise ValueError(explain("Machine.read", "document", expected=expected, got=got))
            count = size * self.each
            updated = 1 / self.nodes if is_divided(count, self.nodes, self.each) else 1.0
            node = count * self.costs().seconds_a_parameter(count, self.cores, self.each, updated)[0]
            sent = traffic(count, self.nodes, self.each)
            besides = node + self.values[of.FIXED][0] + sent.rounds * ping
            rates = [sent.wire / max(seconds - besides, sent.wire / _QUICKEST) for seconds in step]
        return ping, (rates[0], rates[2], rates[1])
