"""A model of a training step: from constants that `mpistrat bench` measured, its time and memory on other layouts.

A rank owns 1/p of its node's M parameters and sums p gradients of them; the ranks of a node share its memory's bandwidth, and
its cores where they are more. Between N nodes go 2 (N - 1) / N gradients' bytes of a node. Up to 64 nodes each updates 1/N of the
parameters, whose slots it has, and a rank sends 2 (N - 1) messages for each round of 1 MiB or more; on more nodes, and for
few parameters, each node updates all, by all-reduces of 1 MiB, 2 log2 N messages each.
The model knows no NUMA borders, no contention in switches and no noise: predictions are ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import numpy as np

from ..cross_device.pieces import round_size
from ..strategy.assemble import MOST_NODES
from ..variables.arena import LEAST_PIECE
from . import constants as of
from .plan_machine import Machine, Spread

__all__ = ["Prediction", "layouts", "predict"]

_WORD = 4  # bytes of a float32
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
    divided = 1 < nodes <= MOST_NODES and parameters * _WORD >= LEAST_PIECE * ranks * nodes
    parts = nodes if divided else 1
    costs = machine.seconds_a_parameter(parameters / ranks, ranks, parts)
    memory = parameters * costs[0], parameters * costs[1], parameters * costs[2]
    network = _network(machine, parameters, nodes, ranks, divided)
    meetings = _meetings(machine, nodes, ranks)
    lost = machine.lost(memory[0]) if ranks > machine.cores else (0.0, 0.0, 0.0)
    # At best a node's sums travel while it sums and updates others; at worst its cores carry what travels.
    both = memory[0] + network[0]
    hidden = (max(memory[0], network[0]) + both) / 2
    expected = compute + hidden + meetings[0] + lost[0]
    least = compute + (1 - _OWN) * (max(memory[1], network[1]) + meetings[1]) + lost[1]
    most = compute + (1 + _OWN) * (memory[2] + network[2] + meetings[2]) + lost[2]
    gradients = parameters * _WORD * ranks
    size = parameters * _WORD * (1 + _SLOTS / parts) + gradients
    doubt = ""
    if max(most - expected, expected - least) > _CLOSE * expected:
        doubt = _doubt(machine, nodes, ranks, most - least, network[2] - network[1], memory[2] - memory[1])
    return Prediction(
        nodes, ranks, memory[1:], network[1:], meetings[1:], (least, most), expected, compute, size, gradients,
        size <= machine.memory, doubt,
    )  # fmt: skip


def _network(machine: Machine, parameters: float, nodes: int, ranks: int, divided: bool) -> Spread:
    if nodes == 1:
        return 0.0, 0.0, 0.0
    wire = 2 * (nodes - 1) / nodes * parameters * _WORD
    round_bytes = round_size(nodes, np.dtype(np.float32)) * nodes * _WORD if divided else of.CHUNK_BYTES
    messages = 2.0 * (nodes - 1) if divided else 2 * math.log2(nodes)
    latencies = math.ceil(parameters / ranks * _WORD / round_bytes) * messages * machine.latency
    slow, quick = machine.network[1:]
    waited = 1.0 if not divided else 1 / messages  # of pieces, all messages of a round travel at once
    return wire / machine.network[0] + waited * latencies, wire / quick, wire / slow + latencies


def _meetings(machine: Machine, nodes: int, ranks: int) -> Spread:
    """Messages that all ranks wait for: they grow with the height of a tree of ranks."""
    measured, fixed = machine.fixed_over_nodes if nodes > 1 else machine.fixed_on_a_node
    if ranks > machine.cores and nodes == 1 and machine.crowded is not None:
        return machine.crowded.fixed
    height = max(1.0, math.log2(max(nodes * ranks, 2)) / math.log2(max(measured, 2)))
    hops = 0.0 if measured > 1 and nodes * ranks <= measured else 2 * math.log2(nodes) * machine.latency
    return fixed[0] * height, fixed[1], fixed[2] * height + hops


def _doubt(machine: Machine, nodes: int, ranks: int, width: float, network: float, memory: float) -> str:
    if ranks > machine.cores:
        return "ranks share cores"
    if machine.cores != machine.measured_cores:
        return "the memory of such a node was not measured"
    if nodes > 1 and network >= memory:
        return "how fast messages are differs much"
    return "how much of the sums the network hides is open" if nodes > 1 else "what was measured differs much"


def layouts(cores: int, nodes: int) -> Iterable[tuple[int, int]]:
    """Return nodes and ranks of each, in powers of two, up to so many nodes, and as many ranks as cores.

    Example:
        >>> list(layouts(4, 2))
        [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)]
    """
    for high in range(nodes.bit_length()):
        for ranks in range(cores.bit_length()):
            yield 1 << high, 1 << ranks
