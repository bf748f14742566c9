"""The compiled loops if they were built and are enabled; else functions that leave all work to NumPy.

`_loops.pyi` describes their arguments. A loop returns False without the module, for GPU arrays and for other dtypes; the caller
then uses NumPy.
"""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..underflow import may_underflow

__all__ = [
    "Around",
    "CompiledLoop",
    "Span",
    "add",
    "await_difference",
    "await_word",
    "copy",
    "decode_int8",
    "encode_int8",
    "gather",
    "leave_to_numpy",
    "lzf",
    "meet",
    "narrow",
    "permute",
    "publish",
    "read_version",
    "report",
    "rest",
    "set_threads",
    "squares",
    "threads",
    "unshuffle",
    "update",
    "used",
]


Span = tuple[int, int, Any]  # elements [low, high), and a number for them, which may be on a GPU


class CompiledLoop(NamedTuple):
    """An update rule for `update`, and for `kernels.update` on GPUs; a slot that its settings do not need is ""."""

    rule: str
    numbers: tuple[float, ...]
    slots: tuple[str, ...]


class Around(NamedTuple):
    """Further operations on a block in `update`, and in `kernels.update` on GPUs."""

    limit: float | None = None
    scales: Sequence[Span] = []
    decays: Sequence[Span] = []
    sums: Any = None
    calls: int = 0
    averages: Any = None
    momentum: float | None = None
    overwrites: bool = False
    factor: float = 1.0


def leave_to_numpy(*_: Any) -> bool:
    """Return False, in place of a compiled loop."""
    return False


def _unread(*_: Any) -> int:
    """Return -1, in place of `read_version` and `lzf`."""
    return -1


def _no_threads(count: int) -> None:
    """Do nothing, in place of `set_threads`."""


def _one() -> int:
    """Return 1, in place of `threads`."""
    return 1


_instructions, _reason = "", ""
try:
    if os.environ.get("MPISTRAT_COMPILED_LOOPS") == "0":
        raise ImportError("switched off by MPISTRAT_COMPILED_LOOPS=0")
    from ._loops import INSTRUCTIONS as _instructions
    from ._loops import (
        add,
        await_difference,
        await_word,
        copy,
        decode_int8,
        encode_int8,
        gather,
        lzf,
        meet,
        narrow,
        permute,
        publish,
        read_version,
        rest,
        set_threads,
        threads,
        unshuffle,
        update,
    )
    from ._loops import squares as _squares
except ModuleNotFoundError:
    _reason = "not built when mpistrat was installed; building needs a C compiler and Python's headers"
except ImportError as error:
    _reason = error.msg
if _reason:
    _instructions = ""
    add = copy = gather = meet = narrow = permute = unshuffle = update = _squares = leave_to_numpy
    await_difference = await_word = decode_int8 = encode_int8 = publish = rest = leave_to_numpy
    lzf = read_version = _unread
    set_threads, threads = _no_threads, _one


def used() -> tuple[str, str]:
    """Return the processor instructions of the compiled loops, or "" and the reason why there are none."""
    return _instructions, _reason


def report(divide: bool, overflow: bool, invalid: bool) -> None:
    """Report floating-point errors of a compiled loop like NumPy's own, as set by `np.errstate`."""
    one = np.ones(1)
    if divide:
        np.divide(one, 0)
    if overflow:
        np.multiply(one * 1e300, 1e300)
    if invalid:
        np.subtract(one * np.inf, np.inf)


_LANES, _TOGETHER = 64, 4096  # numbers whose squares are summed in parallel, and at a time


def squares(values: Any) -> float:
    """Return the sum of squares of a flat array of floats: by blocks, in a fixed order."""
    total = _squares(values)
    if isinstance(total, float):
        return total
    whole = len(values) // _TOGETHER * _TOGETHER
    rest = values[whole:]
    sums = [_by_lanes(values[:whole].reshape(-1, _TOGETHER // _LANES, _LANES))]
    if len(rest):
        padded = np.zeros_like(values, shape=-(-len(rest) // _LANES) * _LANES)
        padded[: len(rest)] = rest
        sums.append(_by_lanes(padded.reshape(1, -1, _LANES)))
    numbers = [number for each in sums for number in each.tolist()]
    return functools.reduce(operator.add, numbers, 0.0)  # sum() in Python 3.12 gives other bits


@may_underflow
def _by_lanes(values: Any) -> Any:
    """Return the sums of squares of each (rows, lanes): each lane sequentially, then the lanes by halves."""
    lanes = (values * values).sum(axis=1)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]
