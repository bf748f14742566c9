"""A model of a training step: from constants that `mpistrat bench` measured, its time and memory on other layouts.

A step begins when each rank has written its gradients, and ends when all have the new weights. A node sums as many gradients
as it has ranks, and all its cores work. Between N nodes go 2 (N - 1) / N gradients' bytes of a node. Up to 64 nodes each
updates 1/N of the parameters, whose slots it has, in rounds of 1 MiB or more; on more nodes, and for few parameters, each
node updates all, by all-reduces of 1 MiB, 2 log2 N messages each.
The model knows no NUMA borders, no contention in switches and no noise: predictions are ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from .measure import Spread
from .plan_machine import Machine
from .plan_network import WORD, is_divided, traffic

__all__ = ["Prediction", "layouts", "predict"]

_SLOTS = 2  # of Adam
_OWN = 0.08  # of what is measured, that steps differ from it by themselves
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
        step: all of these, and what the program computes.
        expected: of the step, the likeliest.
        compute: what the program computes.
        bytes: that a node needs for weights, gradients and slots.
        gradient_bytes: of these for gradients, of which each rank has all.
        fits: whether it has as many.
        doubt: why the range is wide, in words; "" where it is not.
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
        """The part of a step in which the program computes: at least, at most."""
        return self.compute / self.step[1], self.compute / self.step[0]

    @property
    def bottleneck(self) -> str:
        """What takes longest: "compute", "memory", "network" or "meetings"."""
        parts = {
            "compute": self.compute,
            "memory": self.memory[1],
            "network": self.network[1],
            "meetings": self.meetings[1],
        }
        return max(parts, key=lambda name: parts[name])


def predict(machine: Machine, parameters: float, compute: float, nodes: int, ranks: int) -> Prediction:
    """Return what a step with Adam in float32 takes.

    Args:
        machine: its constants.
        parameters: of the model.
        compute: seconds that the cores of a node need for the gradients of its part of a batch.
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
    # A network whose speed was told: at best sums travel while a node sums and updates others, at worst its cores carry them.
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
    waited = 1 / messages if divided else 1.0  # of pieces, all messages of a round travel at once
    return wire / usual + waited * latencies, wire / quick + waited * latencies, wire / slow + latencies


def _meetings(machine: Machine, nodes: int, ranks: int) -> Spread:
    """Messages that all ranks wait for: they grow with the height of a tree of ranks."""
    measured, fixed = machine.fixed_over_nodes if nodes > 1 else machine.fixed_on_a_node
    if ranks > machine.cores and nodes == 1 and machine.crowded is not None:
        return machine.crowded.fixed
    height = max(1.0, math.log2(max(nodes * ranks, 2)) / math.log2(max(measured, 2)))
    hops = 0.0 if measured > 1 and nodes * ranks <= measured else 2 * math.log2(nodes) * machine.latency
    return fixed[0] * height, fixed[1], fixed[2] * height + hops


def _lost(machine: Machine, memory: float, network: float, nodes: int, ranks: int) -> Spread:
    """What ranks lose that share cores; between nodes one computes while another waits for messages, which may be a gain."""
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
        return "how fast messages are differs much"
    hides = nodes > 1 and not machine.adds
    return "how much of the sums the network hides is open" if hides else "what was measured differs much"


def layouts(cores: int, nodes: int) -> Iterable[tuple[int, int]]:
    """Return nodes and ranks of each: powers of two of nodes, and so many, by ranks that divide the cores.

    Example:
        >>> list(layouts(6, 3))[-4:]
        [(3, 1), (3, 2), (3, 3), (3, 6)]
    """
    for count in sorted({*(1 << height for height in range(nodes.bit_length())), nodes}):
        for ranks in range(1, cores + 1):
            if cores % ranks == 0:
                yield count, ranks
