"""A model of a training step: from constants that `mpistrat bench` measured, its time and memory on other layouts.

A rank owns 1/p of its node's M parameters and sums p gradients of them; the ranks of a node share its memory's bandwidth.
Between N nodes go 2 (N - 1) / N gradients' bytes of a node. Up to 64 nodes each updates 1/N of the parameters, whose slots it
has, and a rank sends 2 (N - 1) messages for each round of 1 MiB or more; on more nodes, and for few parameters, each node
updates all, by all-reduces of 1 MiB, 2 log2 N messages each.
The model knows no NUMA borders, no contention in switches and no noise: predictions are ranges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..cross_device.pieces import round_size
from ..errors import explain
from ..strategy.assemble import MOST_NODES
from ..variables.arena import LEAST_PIECE
from . import constants as of

__all__ = ["Machine", "Prediction", "layouts", "predict"]

_WORD = 4  # bytes of a float32
_SLOTS = 2  # of Adam


@final
@dataclass(frozen=True)
class Machine:
    """The constants of a node and of what connects nodes; seconds, bytes.

    Attributes:
        cores: of a node.
        memory: bytes of a node.
        ranks, measured_cores: a node's, when it was measured.
        update, gradient: of a parameter, of one rank alone: sum of one gradient and update; each gradient more.
        update_all, gradient_all: the same, all ranks of a node at once.
        fixed: what a step takes without parameters, on so many ranks as were measured.
        measured_ranks: of all nodes.
        latency: of a message between nodes.
        network: bytes a second that a node sends while it receives as many; 0 where neither was measured nor told.
    """

    cores: int
    memory: float
    ranks: int
    measured_cores: int
    update: float
    gradient: float
    update_all: float
    gradient_all: float
    fixed: float
    measured_ranks: int
    latency: float
    network: float

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Machine:
        """Return the constants of what `mpistrat bench --json` has written.

        Raises:
            ValueError: the constants are not in it.
        """
        about, found = document.get("machine", {}), document.get("benchmarks", {}).get("constants")
        if found is None:
            remedy = "mpistrat run -n 4 -m mpistrat bench --only constants --only step --json bench.json"
            expected, got = "a file of mpistrat bench with constants", "one without"
            raise ValueError(explain("Machine.read", "document", expected=expected, got=got, remedy=remedy))
        values = {name: each["a rank"] for name, each in found["values"].items()}
        ranks, nodes = int(about["ranks"]), int(about["nodes"])
        each, hops = ranks // nodes, 2 * math.log2(max(nodes, 2))
        latency = network = 0.0
        if of.CHUNK in values:
            latency = values[of.LATENCY] / hops
            wire = each * 2 * (nodes - 1) / nodes * of.CHUNK_BYTES
            network = wire / max(values[of.CHUNK] - values[of.LATENCY], 1e-9)
        kept = {name: values[name] / of.MILLION for name in (of.UPDATE, of.GRADIENT, of.UPDATE_ALL, of.GRADIENT_ALL)}
        return cls(
            cores=int(about["cores"]),
            memory=float(about["memory_gib"]) * 2**30,
            ranks=each,
            measured_cores=int(about["cores"]),
            update=kept[of.UPDATE],
            gradient=kept[of.GRADIENT],
            update_all=kept[of.UPDATE_ALL],
            gradient_all=kept[of.GRADIENT_ALL],
            fixed=values[of.FIXED],
            measured_ranks=ranks,
            latency=latency,
            network=network,
        )

    def parameters_a_second(self, ranks: int, parts: int) -> tuple[float, float]:
        """Return how many parameters a node sums a second, and updates its part of: at least, at most.

        Each rank has a gradient of them; of what a node has summed it updates one of so many parts. One rank is bound by its
        core, all together by the memory: as fast as was measured at least, as the cores at most. That is all that is known
        where the memory's limit was not met, as all at once were as fast each as alone, or where nodes have other cores than
        those that were measured, and so another memory.
        """
        alone = max(self.update - self.gradient, 0.0) / parts + ranks * self.gradient
        together = max(max(self.update_all - self.gradient_all, 0.0) / parts + ranks * self.gradient_all, alone)
        free, met = min(ranks, self.cores) / alone, min(self.ranks, self.measured_cores) / together
        limited = together > 1.1 * alone and self.ranks > 1 and self.cores == self.measured_cores
        return min(free, met), min(free, met) if limited else free


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
        compute: what the program computes.
        bytes: that a node needs for weights, gradients and slots.
        fits: whether it has as many.
    """

    nodes: int
    ranks: int
    memory: tuple[float, float]
    network: tuple[float, float]
    meetings: tuple[float, float]
    step: tuple[float, float]
    compute: float
    bytes: float
    fits: bool

    @property
    def efficiency(self) -> tuple[float, float]:
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

    Example:
        >>> node = Machine(64, 256e9, 64, 64, 2e-9, 1e-10, 2e-9, 1e-10, 0.0, 64, 2e-6, 25e9)
        >>> found = predict(node, 1e9, 0.5, nodes=4, ranks=8)
        >>> round(found.network[1], 2), round(found.memory[1], 4), found.bytes / 1e9
        (0.25, 0.1594, 38.0)
    """
    divided = 1 < nodes <= MOST_NODES and parameters * _WORD >= LEAST_PIECE * ranks * nodes
    parts = nodes if divided else 1
    least, most = machine.parameters_a_second(ranks, parts)
    memory = parameters / most, parameters / least
    network = (0.0, 0.0)
    if nodes > 1:
        wire = 2 * (nodes - 1) / nodes * parameters * _WORD
        round_bytes = round_size(nodes, np.dtype(np.float32)) * nodes * _WORD if divided else of.CHUNK_BYTES
        messages = 2.0 * (nodes - 1) if divided else 2 * math.log2(nodes)
        each = math.ceil(parameters / ranks * _WORD / round_bytes) * messages * machine.latency
        network = wire / machine.network, wire / machine.network + each
    # Messages that all ranks wait for: they grow with the height of a tree of ranks.
    height = math.log2(max(nodes * ranks, 2)) / math.log2(max(machine.measured_ranks, 2))
    meetings = machine.fixed, machine.fixed * max(1.0, height) + 2 * math.log2(nodes) * machine.latency
    # At best a node's sums travel while it sums and updates others.
    step = compute + max(memory[0], network[0]) + meetings[0], compute + memory[1] + network[1] + meetings[1]
    size = parameters * _WORD * (1 + ranks + _SLOTS / parts)
    return Prediction(
        nodes, ranks, memory, network, meetings, step, compute, size, size <= machine.memory
    )  # fmt: skip


def layouts(cores: int, nodes: int) -> Iterable[tuple[int, int]]:
    """Return nodes and ranks of each, in powers of two, up to so many nodes, and as many ranks as cores.

    Example:
        >>> list(layouts(4, 2))
        [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)]
    """
    for high in range(nodes.bit_length()):
        for ranks in range(cores.bit_length()):
            yield 1 << high, 1 << ranks
