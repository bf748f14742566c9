"""Forms in which float32 numbers travel between nodes in fewer bytes, and what is kept of what these lose.

Both forms give the same bytes with the compiled loops and without. What a number loses in a message is kept and sent with the
next one, so that never more than a rounding is missing (error feedback: Seide et al., 1-Bit Stochastic Gradient Descent,
Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import numpy as np

from ..base import loops
from .arithmetic import combine

__all__ = ["INT8_BLOCK", "Bfloat16", "Int8", "Unsent", "Wire", "wire_named"]

INT8_BLOCK = 4096  # numbers that share a scale


@final
class Unsent:
    """What was not sent of each of some elements of an array: float32, zeros at first.

    Args:
        low, high: the elements.
    """

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.array = np.zeros(high - low, np.float32)

    def of(self, low: int, high: int) -> np.ndarray:
        """Return that of elements [low, high), to be changed in place."""
        return self.array[low - self.low : high - self.low]


class Wire(ABC):
    """A form of float32 numbers in messages. A message cut at multiples of 4,096 numbers is several messages.

    Attributes:
        name: in `CommunicationOptions`.
        feeds_back: whether sums of gradients lose so much in it that the loss must be sent later.
    """

    name: str
    feeds_back: bool

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Return the bytes of so many numbers."""

    @abstractmethod
    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        """Write numbers into bytes, `nbytes` of them."""

    @abstractmethod
    def decode(self, message: np.ndarray, out: np.ndarray, add: bool = False) -> None:
        """Write what the bytes stand for, or add it."""

    def encode_sum(self, total: np.ndarray, message: np.ndarray, unsent: np.ndarray, work: np.ndarray) -> None:
        """Write a sum with what was not sent before, which becomes what is not sent now. `total` and `work` are overwritten."""
        combine(np.add, [total, unsent], total)
        self.encode(total, message)
        work = work[: total.size]
        self.decode(message, work)
        _subtract(total, work, unsent)

    def encode_change(self, value: np.ndarray, message: np.ndarray, unsent: np.ndarray, work: np.ndarray) -> None:
        """Write the unsent change of a value into a message, and add to the value what others read there.

        All who do so have the same bits. What is still unsent is so small that value and it are the value that was meant.
        """
        work = work[: value.size]
        combine(np.add, [value, unsent], work)
        self.encode(unsent, message)
        self.decode(message, value, add=True)
        _subtract(work, value, unsent)


def _subtract(first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
    """Write first - second, 0 where that is not finite: what is lost already must not spoil what is sent later."""
    if not loops.rest(out, first, second):
        with np.errstate(all="ignore"):
            np.subtract(first, second, out=out)
        out[~np.isfinite(out)] = 0


@final
class Bfloat16(Wire):
    """The upper 16 bits of float32, rounded to the nearest, of two to the even one. NaN and infinities stay what they are.

    A relative error of at most 1/256; numbers from 3.39e38 on become infinite.
    """

    name = "bfloat16"
    feeds_back = False

    def nbytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        halves = message.view(np.uint16)
        if not loops.narrow(halves, values):
            bits = values.view(np.uint32)
            nearest = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16
            is_nan = bits & 0x7FFFFFFF > 0x7F800000
            halves[...] = np.where(is_nan, bits >> 16 | 0x40, nearest)

    def decode(self, message: np.ndarray, out: np.ndarray, add: bool = False) -> None:
        halves: Any = message.view(np.uint16)
        if not loops.add(out, [out, halves] if add else [halves]):
            values = (halves.astype(np.uint32) << 16).view(np.float32)
            if add:
                np.add(out, values, out=out)
            else:
                out[...] = values


@final
class Int8(Wire):
    """Multiples from -127 to 127 of a float32 scale, which 4,096 numbers share: their largest is 127 of it.

    An error of at most half a scale and a rounding. Where one of the 4,096 is not finite, all are read as NaN.
    """

    name = "int8"
    feeds_back = True

    def nbytes(self, count: int) -> int:
        return count + 4 * -(-count // INT8_BLOCK)

    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        if loops.encode_int8(message, values):
            return
        for low in range(0, values.size, INT8_BLOCK):
            part = values[low : low + INT8_BLOCK]
            frame = message[self.nbytes(low) : self.nbytes(low + part.size)]
            largest = (part.view(np.uint32) & 0x7FFFFFFF).max().view(np.float32)
            scale = np.float32(largest / np.float32(127)) if np.isfinite(largest) else np.float32(np.nan)
            frame[:4] = np.array([scale]).view(np.uint8)
            numbers = frame[4:].view(np.int8)
            numbers[...] = np.clip(np.rint(part / scale), -127, 127) if scale > 0 else 0

    def decode(self, message: np.ndarray, out: np.ndarray, add: bool = False) -> None:
        if loops.decode_int8(out, message, add):
            return
        for low in range(0, out.size, INT8_BLOCK):
            part = out[low : low + INT8_BLOCK]
            frame = message[self.nbytes(low) : self.nbytes(low + part.size)]
            values = frame[4:].view(np.int8).astype(np.float32) * frame[:4].copy().view(np.float32)
            if add:
                np.add(part, values, out=part)
            else:
                part[...] = values


_BY_NAME: dict[str | None, Wire] = {wire.name: wire for wire in (Bfloat16(), Int8())}


def wire_named(name: str | None) -> Wire | None:
    """Return the form that has a name in `CommunicationOptions`, None for numbers as they are.

    Example:
        >>> wire_named("int8").nbytes(8192), wire_named(None)
        (8200, None)
    """
    return _BY_NAME.get(name)
