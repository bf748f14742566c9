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

def copy(out: Any, values: Any, /) -> bool:
    """Copy an array of any shape and of any dtype with a format, contiguous, to another one of the same dtype and size."""

def meet(pages: Any, rank: int, sequence: int, tag: int, spin: int, /) -> int:
    """Come to barrier number `sequence` of a node with a tag, and wait for the other ranks for about a millisecond.

    `pages` are the control pages of all ranks (see comm/node.py); for the first `spin` ns no other thread may run.
    Returns how many ns it waited, if all came with this tag; -1 if one came with another; -2 less the ns where not all came.
    """

def await_word(memory: Any, offset: int, least: int, /) -> bool:
    """Wait 50 µs until the word at a byte offset of shared memory is at least so much; return whether it is."""

def await_difference(memory: Any, offsets: tuple[int, ...], /) -> bool:
    """Wait so until the first and second of these words differ, or the third and fourth, …; return whether any do."""

def publish(memory: Any, parts: list[tuple[int, Any]], offset: int, value: int, /) -> bool:
    """Copy bytes to offsets of shared memory, and then write a word there, which tells of them."""

def read_version(out: Any, memory: Any, offset: int, version: int, mailbox: Any, announced: int, value: int, /) -> int:
    """Copy bytes at an offset as they are between two writes, and return how many writes there were; -1 where they are written.

    The offsets of two words: `version` in the memory, which is odd while they are written, and `announced` in the mailbox, which
    has the value meanwhile, and 0 afterwards (see parameter_server/server/atomic_reads.py).
    """

def narrow(out: Any, values: Any, /) -> bool:
    """Round float32 to float16, or to bfloat16, whose bits `out` has as uint16."""

def gather(out: Any, array: Any, rows: Any, /) -> bool:
    """Copy rows of an array of any type but objects, at int64 places in any order, into a buffer of the same type."""

def permute(positions: Any, keys: Any, count: int, /) -> bool:
    """Put in the place of each int64 position in [0, count) where `data.permutation` sends it, by 12 keys, uint64."""

def unshuffle(out: Any, encoded: Any, size: int, /) -> bool:
    """Undo HDF5's shuffle filter, over elements of so many bytes."""

def lzf(out: Any, encoded: Any, /) -> int:
    """Undo h5py's lzf; return how many bytes of `out` that filled, -1 where the stream is damaged, or does not fit."""

def encode_int8(out: Any, values: Any, /) -> bool:
    """Write float32 as bytes, with a scale for each 4,096 of them: `cross_device.wire.Int8`."""

def decode_int8(out: Any, message: Any, add: bool, /) -> bool:
    """Write, or add, the float32 that `encode_int8` made bytes of."""

def rest(out: Any, first: Any, second: Any, /) -> bool:
    """Write first - second of float32, 0 where that is not finite."""

def squares(values: Any, /) -> float | None:
    """Return the sum of squares, in the order that `loops.squares` says; None where it is left to NumPy."""

def update(
    rule: str,
    numbers: tuple[float, ...],
    parts: list[Any],
    weights: Any,
    slots: tuple[Any, ...],
    around: tuple[Any, ...],
    /,
) -> bool:
    """Update a block of weights by the sum of the parts, in one pass.

    Of 16-bit weights slots are float32, and they are widened, and rounded at the end; parts may be of 16 bits, too. The
    rules are those of rules.c: adam, sgd, adagrad, rmsprop; accumulate adds to its slot, and leaves weights alone.

    `around` is what else happens: (limit by which the gradient is clipped or None, its scales, decays, accumulated sums or
    None, number of calls, averages or None, their momentum, whether they overwrite the weights, factor of the sum). The gradient
    is the sum of the parts times that factor; where sums are given it is their mean with it, over so many calls, and they
    become 0. Scales and decays are lists of (low, high, factor), ascending: what the gradient, and the weights before the rule,
    are multiplied by there.
    """

def set_threads(count: int, /) -> None:
    """Set how many threads all loops of this process use, with the caller: at most, and none but the caller in a forked child."""

def threads() -> int:
    """Return that number."""
