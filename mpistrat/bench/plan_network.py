"""What travels between nodes in a step, and how often messages wait for each other."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..arena.arena import LEAST_PIECE
from ..arena.pieces import round_size
from ..arena.reduction import NETWORK_CHUNK
from ..strategy.assemble import MOST_NODES

__all__ = ["WORD", "Traffic", "is_divided", "traffic"]

WORD = 4  # bytes of a float32


class Traffic(NamedTuple):
    """What travels in a step.

    Attributes:
        wire: bytes that a node sends, while it receives as many.
        rounds: that follow each other.
        messages: of a round, one after the other, where each waits for the one before.
    """

    wire: float
    rounds: int
    messages: float


def is_divided(parameters: float, nodes: int, ranks: int) -> bool:
    """Return whether each node updates a piece: where they are few enough, and pieces large enough."""
    return 1 < nodes <= MOST_NODES and parameters * WORD >= LEAST_PIECE * ranks * nodes


def traffic(parameters: float, nodes: int, ranks: int) -> Traffic:
    """Return what travels in a step between several nodes."""
    divided = is_divided(parameters, nodes, ranks)
    round_bytes = round_size(nodes, np.dtype(np.float32)) * nodes * WORD if divided else NETWORK_CHUNK
    rounds = math.ceil(parameters / ranks * WORD / round_bytes)
    messages = 2.0 * (nodes - 1) if divided else 2 * math.log2(nodes)
    return Traffic(2 * (nodes - 1) / nodes * parameters * WORD, rounds, messages)
