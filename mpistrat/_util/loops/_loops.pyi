"""The compiled loops, in C beside this file: each returns whether it did the work.

It leaves that to NumPy where arrays are not for it: they are flat, contiguous, all of float32 or all of float64, of one length,
and none lies across another; None stands for a slot that a rule does not have. Numbers are rounded to the dtype of the arrays.
Gradients are only read. The interpreter's lock is released. Floating-point errors are reported by `loops.report`.
"""

from typing import Any

#: Which of the processor's instructions are used, in words.
INSTRUCTIONS: str

def add(out: Any, parts: list[Any], /) -> bool:
    """Write the sum of the parts, from the first to the last; of 16-bit ones, too, in float32. uint16 are bits of bfloat16."""

def meet(pages: Any, rank: int, sequence: int, tag: int, spin: int, /) -> int:
    """Come to barrier number `sequence` of a node with a tag, and wait for the other ranks for about a millisecond.

    `pages` are the control pages of all ranks (see comm/node.py); for the first `spin` ns no other thread may run.
    Returns how many ns it waited, if all came with this tag; -1 if one came with another; -2 less the ns where not all came.
    """

def narrow(out: Any, values: Any, /) -> bool:
    """Round float32 to float16, or to bfloat16, whose bits `out` has as uint16."""

def gather(out: Any, array: Any, rows: Any, /) -> bool:
    """Copy rows of an array of any type but objects, at int64 places in any order, into a buffer of the same type."""

def permute(positions: Any, keys: Any, count: int, /) -> bool:
    """Put in the place of each int64 position in [0, count) where `data.permutation` sends it, by 12 keys, uint64."""

def unshuffle(out: Any, encoded: Any, size: int, /) -> bool:
    """Undo HDF5's shuffle filter, over elements of so many bytes."""

def encode_int8(out: Any, values: Any, /) -> bool:
    """Write float32 as bytes, with a scale for each 4,096 of them: `cross_device.wire.Int8`."""

def decode_int8(out: Any, message: Any, add: bool, /) -> bool:
    """Write, or add, the float32 that `encode_int8` made bytes of."""

def rest(out: Any, first: Any, second: Any, /) -> bool:
    """Write first - second of float32, 0 where that is not finite."""

def adam(
    gradient: Any,
    weights: Any,
    momentum: Any,
    velocity: Any,
    velocity_hat: Any,
    alpha: float,
    rest_1: float,
    rest_2: float,
    epsilon: float,
    /,
) -> bool: ...
def sgd(gradient: Any, weights: Any, momentum: Any, rate: float, kept: float, nesterov: bool, /) -> bool: ...
def adagrad(gradient: Any, weights: Any, accumulator: Any, rate: float, epsilon: float, /) -> bool: ...
def rmsprop(
    gradient: Any,
    weights: Any,
    velocity: Any,
    average_gradient: Any,
    momentum: Any,
    rate: float,
    rho: float,
    rest: float,
    kept: float,
    epsilon: float,
    /,
) -> bool: ...
