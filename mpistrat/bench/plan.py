"""A model of a training step: its time and memory on other layouts, from constants of `mpistrat bench`.

A step starts when each rank has written its gradients, and ends when all have the new weights. A node sums as many gradients
as it has ranks, with all its cores. Between N nodes, each sends 2 (N - 1) / N of the gradient's bytes. On up to 64 nodes each
updates 1/N of the parameters, whose slots it has, in rounds of 1 MiB or more. On more nodes, and for few parameters, each
node updates all, by all-reduces of 1 MiB, 2 log2 N messages each. The model ignores NUMA borders, contention in switches and
noise: predictions are ranges.

`Machine`: the constants of a machine, each from the file of `mpistrat bench` that shows it best.

`NodeCosts`: a node's time per parameter, for the sum of its gradients and its update, by ranks and by parameters per core.
All cores of a node work: compiled loops use those without a rank. Measured were one rank on all cores, in private memory, and
all ranks at once, in shared memory, whose pages may be smaller. Each further gradient has just been written by another rank.

`Traffic`: bytes between nodes in a step, and the number of consecutive messages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import numpy as np

from ..arena.arena import LEAST_PIECE
from ..arena.pieces import round_size
from ..arena.reduction import NETWORK_CHUNK
from ..base.errors import explain
from ..strategy.assemble import MOST_NODES
from . import constants as of
from .measure import Spread

__all__ = [
    "WORD",
    "Crowded",
    "Machine",
    "NodeCosts",
    "PartCost",
    "Prediction",
    "Traffic",
    "is_divided",
    "layouts",
    "predict",
    "traffic",
]


class PartCost(NamedTuple):
    """Seconds of a node per parameter, for a size.

    Attributes:
        size: parameters per core.
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
    """The measured costs of a node.

    Attributes:
        cores, ranks: of the node when it was measured.
        threaded: True if a rank's loops use all its cores, as compiled ones do.
        parts: by ascending size.
    """

    cores: int
    ranks: int
    threaded: bool
    parts: Sequence[PartCost]

    @classmethod
    def read(cls, values: Mapping[str, Spread], cores: int, ranks: int, threaded: bool) -> NodeCosts:
        """Return the costs from the constants of a file.

        Raises:
            ValueError: the file has none.
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
                explain("Machine.read", "document", expected=expected, got="a file without them", remedy=remedy)
            )
        return cls(cores, ranks, threaded, parts)

    def seconds_a_parameter(self, parameters: float, cores: int, ranks: int, updated: float) -> Spread:
        """Return a node's seconds per parameter.

        They are known for the measured number of cores, except for more ranks than measured, with loops that use one core
        each. Another number of cores comes with other memory: bound by it, they are equally fast, else in proportion to their
        number.

        Args:
            parameters: of the model.
            cores: of the node.
            ranks: of the node, each of which has a gradient.
            updated: the fraction of the parameters that the node updates; it sums gradients of all.
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
        """Return the seconds of the update of a parameter, and the number of cores."""
        if self.threaded:
            return cost.alone if ranks == 1 else cost.together, self.cores
        busy = min(ranks, cores, self.ranks)
        # Each rank has one core. They scale with their number, up to the memory bandwidth of all of them.
        median, least, most = (max(a / busy, b) for a, b in zip(cost.alone, cost.together, strict=True))
        return (median, least, most), busy


def _part(size: int, alone: Spread, together: Spread, gradient: Spread, ranks: int) -> PartCost:
    """Return the costs of a node from seconds per million parameters: of the rank, alone, and of each of all."""
    each = _scaled(gradient, 1 / ranks / of.MILLION)
    one, all_ = _scaled(alone, 1 / of.MILLION), _scaled(together, 1 / ranks / of.MILLION)
    return PartCost(size, _less(one, each), _less(all_, _scaled(each, min(ranks, 2))), each)


def _scaled(spread: Spread, factor: float) -> Spread:
    median, least, most = (value * factor for value in spread)
    return median, least, most


def _less(spread: Spread, other: Spread) -> Spread:
    """Return the difference; quartiles keep their distances from those of the other."""
    median, least, most = (max(one - less, 0.0) for one, less in zip(spread, other, strict=True))
    return median, least, most


WORD = 4  # bytes of a float32


class Traffic(NamedTuple):
    """The messages between nodes in a step.

    Attributes:
        wire: bytes that a node sends, while it receives the same number.
        rounds: consecutive rounds.
        messages: consecutive messages of a round, each of which waits for the one before.
    """

    wire: float
    rounds: int
    messages: float


def is_divided(parameters: float, nodes: int, ranks: int) -> bool:
    """Return whether each node updates a slice: with few enough nodes, and large enough slices."""
    return 1 < nodes <= MOST_NODES and parameters * WORD >= LEAST_PIECE * ranks * nodes


def traffic(parameters: float, nodes: int, ranks: int) -> Traffic:
    """Return the messages between several nodes in a step."""
    divided = is_divided(parameters, nodes, ranks)
    round_bytes = round_size(nodes, np.dtype(np.float32)) * nodes * WORD if divided else NETWORK_CHUNK
    rounds = math.ceil(parameters / ranks * WORD / round_bytes)
    messages = 2.0 * (nodes - 1) if divided else 2 * math.log2(nodes)
    return Traffic(2 * (nodes - 1) / nodes * parameters * WORD, rounds, messages)


_ASSUMED = (
    0.25,
    0.0,
    0.5,
)  # of the time of sums and update, lost by ranks that share cores, if not measured
_QUICKEST = 1e13  # bytes per second of a network whose time is hidden completely


class Crowded(NamedTuple):
    """The losses of ranks that share cores.

    Attributes:
        ranks: of the node.
        fixed: a step on few parameters.
        steps: expected seconds of sums and update, and the seconds lost in addition; in ascending order.
    """

    ranks: int
    fixed: Spread
    steps: list[tuple[float, Spread]]


@final
@dataclass(frozen=True)
class Machine:
    """The constants of a node and of its network, in seconds and bytes.

    Attributes:
        cores: of a node.
        memory: bytes of a node.
        node: the costs of sums and updates, and the node that they were measured on.
        fixed_on_a_node, fixed_over_nodes: total ranks, and the seconds of a step on them without parameters.
        latency: of a message between nodes.
        network: bytes per second that a node sends while it receives the same number: the median, least and most; zeros if
            neither measured nor given.
        adds: True if the network's time is added to a step, as measured; else some of it may be hidden.
        crowded: measurements with more ranks than cores, if any.
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
        """Return the constants from documents of `mpistrat bench --json` on some layouts.

        Costs of a node are from the layout with the most ranks that had a core each, on one node if possible; the network is from
        a layout of several nodes, and losses of ranks that share cores from one with more ranks than cores.

        Raises:
            ValueError: the constants are missing in a file, or no file is of ranks that had a core each.
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
        """Return this machine with the seconds that ranks on one node lost in measured steps."""
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
        """Return the seconds lost by ranks that share cores, in a step whose sums and update would take `seconds`.

        Ranks wait for cores, and others for them: the loss grows with the step, above the largest measured one in proportion.
        Other numbers of ranks may divide better or worse among the cores.
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
        """Return a node's seconds per parameter of a model; it updates a fraction of the parameters."""
        return self.node.seconds_a_parameter(parameters, self.cores, ranks, updated)


class _BenchRun(NamedTuple):
    """The contents of one file of `mpistrat bench`."""

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
            expected, got = "a file of mpistrat bench with constants", "a file without constants"
            raise ValueError(explain("Machine.read", "document", expected=expected, got=got, remedy=remedy))
        values = {name: tuple(map(each.__getitem__, of.COLUMNS)) for name, each in found["values"].items()}
        nodes = int(about["nodes"])
        memory = float(about["memory_gib"]) * 2**30
        threaded = bool(about.get("compiled_loops", False))
        return cls(nodes, int(about["ranks"]) // nodes, int(about["cores"]), memory, values, threaded)

    def costs(self) -> NodeCosts:
        """Return a node's costs."""
        return NodeCosts.read(self.values, self.cores, self.each, self.threaded)

    def network(self) -> tuple[float, Spread]:
        """Return the seconds of a message, and a node's bytes per second, from a step's additional time over nodes.

        Raises:
            ValueError: the file has no such step.
        """
        ping, rates = self.values[of.PING][0], []
        for label, size in of.NETWORK_PART.items():
            step = self.values.get(of.name_of(of.STEP, label))
            if step is None:
                expected, got = "a step over nodes, by this version of mpistrat bench", "a file without it"
                raise ValueError(explain("Machine.read", "document", expected=expected, got=got))
            count = size * self.each
            updated = 1 / self.nodes if is_divided(count, self.nodes, self.each) else 1.0
            node = count * self.costs().seconds_a_parameter(count, self.cores, self.each, updated)[0]
            sent = traffic(count, self.nodes, self.each)
            besides = node + self.values[of.FIXED][0] + sent.rounds * ping
            rates = [sent.wire / max(seconds - besides, sent.wire / _QUICKEST) for seconds in step]
        return ping, (rates[0], rates[2], rates[1])


_SLOTS = 2  # of Adam
_OWN = 0.08  # of the measured values, by which steps vary anyway
_CLOSE = 0.15

Range = tuple[float, float]


@final
@dataclass(frozen=True)
class Prediction:
    """A step on a layout; pairs are the least and the most, in seconds.

    Attributes:
        nodes, ranks: the layout: ranks of each node.
        threads: of each rank's loops.
        memory: the sum of gradients and the update.
        network: between nodes.
        meetings: of ranks, and Python.
        step: all of these, and the program's computation.
        expected: the likeliest seconds of the step.
        compute: the program's computation.
        bytes: that a node needs for weights, gradients and slots.
        gradient_bytes: of these for gradients, of which each rank has all.
        fits: True if the node has this memory.
        doubt: the reason for a wide range; "" for a narrow one.
    """

    nodes: int
    ranks: int
    threads: int
    memory: Range
    network: Range
    meetings: Range
    step: Range
    expected: float
    compute: float
    bytes: float
    gradient_bytes: float
    fits: bool
    doubt: str

    @property
    def efficiency(self) -> Range:
        """The fraction of a step in which the program computes: at least, at most."""
        return self.compute / self.step[1], self.compute / self.step[0]

    @property
    def bottleneck(self) -> str:
        """The longest component: "compute", "memory", "network" or "meetings"."""
        parts = {
            "compute": self.compute,
            "memory": self.memory[1],
            "network": self.network[1],
            "meetings": self.meetings[1],
        }
        return max(parts, key=lambda name: parts[name])


def predict(machine: Machine, parameters: float, compute: float, nodes: int, ranks: int) -> Prediction:
    """Predict a step with Adam in float32.

    Args:
        machine: its constants.
        parameters: of the model.
        compute: seconds that the cores of a node need for the gradients of its share of a batch.
        nodes: their number.
        ranks: of each node.
    """
    divided = is_divided(parameters, nodes, ranks)
    parts = nodes if divided else 1
    costs = machine.seconds_a_parameter(parameters, ranks, 1 / parts)
    memory = parameters * costs[0], parameters * costs[1], parameters * costs[2]
    network = _network(machine, parameters, nodes, ranks, divided)
    meetings = _meetings(machine, nodes, ranks)
    lost = _lost(machine, memory[0], network[0], nodes, ranks)
    # A network whose speed was given: at best messages overlap sums and updates, at worst the node's cores carry them.
    both = [one + other for one, other in zip(memory, network, strict=True)]
    hidden = [0.0 if machine.adds else min(one, other) for one, other in zip(memory, network, strict=True)]
    expected = compute + both[0] - hidden[0] / 2 + meetings[0] + lost[0]
    least = compute + (1 - _OWN) * (both[1] - hidden[1] + meetings[1] + lost[1])
    most = compute + (1 + _OWN) * (both[2] + meetings[2] + lost[2])
    gradients = parameters * WORD * ranks
    size = parameters * WORD * (1 + _SLOTS / parts) + gradients
    doubt = ""
    if max(most - expected, expected - least) > _CLOSE * expected:
        doubt = _doubt(machine, nodes, ranks, network[2] - network[1], memory[2] - memory[1])
    threads = max(machine.cores // ranks, 1) if machine.node.threaded else 1
    return Prediction(
        nodes, ranks, threads, memory[1:], network[1:], meetings[1:], (least, most), expected, compute, size, gradients,
        size <= machine.memory, doubt,
    )  # fmt: skip


def _network(machine: Machine, parameters: float, nodes: int, ranks: int, divided: bool) -> Spread:
    if nodes == 1:
        return 0.0, 0.0, 0.0
    wire, rounds, messages = traffic(parameters, nodes, ranks)
    usual, slow, quick = machine.network
    latencies = rounds * messages * machine.latency
    waited = 1 / messages if divided else 1.0  # for slices, all messages of a round are sent at once
    return wire / usual + waited * latencies, wire / quick + waited * latencies, wire / slow + latencies


def _meetings(machine: Machine, nodes: int, ranks: int) -> Spread:
    """Return the time of messages that all ranks wait for: they grow with the height of a tree of ranks."""
    measured, fixed = machine.fixed_over_nodes if nodes > 1 else machine.fixed_on_a_node
    if ranks > machine.cores and nodes == 1 and machine.crowded is not None:
        return machine.crowded.fixed
    height = max(1.0, math.log2(max(nodes * ranks, 2)) / math.log2(max(measured, 2)))
    hops = 0.0 if measured > 1 and nodes * ranks <= measured else 2 * math.log2(nodes) * machine.latency
    return fixed[0] * height, fixed[1], fixed[2] * height + hops


def _lost(machine: Machine, memory: float, network: float, nodes: int, ranks: int) -> Spread:
    """Return the loss of ranks that share cores; between nodes perhaps a gain, as one computes while another waits."""
    if ranks <= machine.cores:
        return 0.0, 0.0, 0.0
    lost = machine.lost(memory, ranks)
    return lost if nodes == 1 else (0.0, -network * (1 - machine.cores / ranks), lost[2])


def _doubt(machine: Machine, nodes: int, ranks: int, network: float, memory: float) -> str:
    if ranks > machine.cores:
        return "ranks share cores"
    if machine.cores != machine.node.cores:
        return "the memory of such a node was not measured"
    if nodes > 1 and network >= memory:
        return "the speed of messages varies"
    hides = nodes > 1 and not machine.adds
    return "the overlap of sums and network is unknown" if hides else "measurements vary"


def layouts(cores: int, nodes: int) -> Iterable[tuple[int, int]]:
    """Return numbers of nodes and ranks per node: powers of two and `nodes`, each with the divisors of `cores`.

    Example:
        >>> list(layouts(6, 3))[-4:]
        [(3, 1), (3, 2), (3, 3), (3, 6)]
    """
    for count in sorted({*(1 << height for height in range(nodes.bit_length())), nodes}):
        for ranks in range(1, cores + 1):
            if cores % ranks == 0:
                yield count, ranks
