"""Encodings of float32 numbers in fewer bytes for messages between nodes, and their error feedback.

Both encodings give the same bytes with and without the compiled loops. The error of a number is added to its next message, so the
receiver never lacks more than one rounding (error feedback: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014;
Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019).
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
    """The error feedback of a range of an array: float32, zeros at first.

    Args:
        low, high: the elements.
    """

    def __init__(self, low: int, high: int) -> None:
        self.low, self.high = low, high
        self.array = np.zeros(high - low, np.float32)

    def of(self, low: int, high: int) -> np.ndarray:
        """Return a writable view of elements [low, high)."""
        return self.array[low - self.low : high - self.low]


class Wire(ABC):
    """An encoding of float32 numbers. A message cut at multiples of 4,096 numbers is several messages.

    Attributes:
        name: in `CommunicationOptions`.
        feeds_back: True if sums of gradients need error feedback.
    """

    name: str
    feeds_back: bool

    @abstractmethod
    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` numbers."""

    @abstractmethod
    def encode(self, values: np.ndarray, message: np.ndarray) -> None:
        """Encode numbers into `nbytes` bytes."""

    @abstractmethod
    def decode(self, message: np.ndarray, out: np.ndarray, add: bool = False) -> None:
        """Write, or add, the numbers of a message."""

    def encode_sum(self, total: np.ndarray, message: np.ndarray, unsent: np.ndarray, work: np.ndarray) -> None:
        """Encode a sum plus its error feedback, and update the latter. `total` and `work` are overwritten."""
        combine(np.add, [total, unsent], total)
        self.encode(total, message)
        work = work[: total.size]
        self.decode(message, work)
        _subtract(total, work, unsent)

    def encode_change(self, value: np.ndarray, message: np.ndarray, unsent: np.ndarray, work: np.ndarray) -> None:
        """Encode the unsent change of a value, and add to the value what others decode.

        All ranks get the same bits. The remaining error feedback is so small that value plus feedback is the exact value.
        """
        work = work[: value.size]
        combine(np.add, [value, unsent], work)
        self.encode(unsent, message)
        self.decode(message, value, add=True)
        _subtract(work, value, unsent)


def _subtract(first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
    """Write first - second, or 0 if not finite: a lost value must not spoil later messages."""
    if not loops.rest(out, first, second):
        with np.errstate(all="ignore"):
            np.subtract(first, second, out=out)
        out[~np.isfinite(out)] = 0


@final
class Bfloat16(Wire):
    """The upper 16 bits of float32, rounded to nearest, ties to even. NaN and infinities are preserved.

    The relative error is at most 1/256; numbers from 3.39e38 on become infinite.
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
    """Multiples from -127 to 127 of a float32 scale, shared by 4,096 numbers, the largest of which is 127.

    The error is at most half a scale and a rounding. If one of the 4,096 is not finite, all are decoded as NaN.
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
    """Return the encoding with a name in `CommunicationOptions`, None for numbers as they are.

    Example:
        >>> wire_named("int8").nbytes(8192), wire_named(None)
        (8200, None)
    """
    return _BY_NAME.get(name)
