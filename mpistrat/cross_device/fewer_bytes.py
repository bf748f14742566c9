"""Reductions whose sums travel between nodes in fewer bytes, because the options of a call ask for it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from ..arena.arithmetic import Arithmetic
from ..arena.encoded import EncodedAllReduce
from ..arena.reduction import BLOCK
from ..arena.wire import wire_named
from ..base.errors import explain
from ..base.log import once
from ..base.options import CommunicationOptions

__all__ = ["check", "sums_between", "warn"]

LEAST_ENCODED = 1 << 16  # bytes of the smallest array that is encoded


def check(options: CommunicationOptions, function: str, algorithm: str, encodes: bool, nodes: int) -> None:
    """Raise ValueError if an algorithm cannot send sums as the options of a call ask; on one node "bfloat16" is legal for all."""
    wire, known = options.wire, "bfloat16"
    if wire == known and (encodes or nodes == 1):
        return
    remedy = "int8 is for optimizer steps, which use error feedback: give it to the strategy"
    if wire == known:
        remedy = "Leave it out, or let HierarchicalAllReduce reduce"
    expected = f"{known if encodes else 'none'}, for reductions by {algorithm}"
    raise ValueError(explain(function, "options.wire", expected=expected, got=repr(wire), remedy=remedy))


def warn(options: CommunicationOptions, nbytes: int, why: str) -> None:
    """Warn that large arrays are not encoded."""
    if nbytes >= LEAST_ENCODED:
        once(logging.WARNING, f"wire={options.wire!r} has no effect: {why} for {nbytes:,} bytes")


def sums_between(options: CommunicationOptions, inter: Any) -> Callable[[np.ndarray, Arithmetic], Any]:
    """Return what `Arithmetic.between` is for calls with these options, over the peers that have the same slice, by node."""
    wire = wire_named(options.wire)
    assert wire is not None
    encoded = EncodedAllReduce(inter, wire, BLOCK)

    def between(array: np.ndarray, how: Arithmetic) -> EncodedAllReduce | None:
        large = array.nbytes >= LEAST_ENCODED and array.dtype == np.float32
        return encoded if large and how.ufunc is np.add else None

    return between
