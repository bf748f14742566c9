"""A call of a collective as data: its text, and the fingerprint that the ranks compare."""

from __future__ import annotations

import math
from binascii import crc32
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.agree import fingerprint
from ..base.text import encoded

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["TEXT_BYTES", "Call", "describe", "payload_bytes"]

TEXT_BYTES = 1000  # shown of a text; the tag covers all of it
_STAMP_BYTES = 100  # of them for the stamp


def describe(op: str, name: str = "", dtype: Any = None, shape: Any = None, detail: Hashable = ()) -> str:
    """Return a collective in words, equal on every rank that makes the same call.

    Example:
        >>> describe("all_reduce", "w", np.float32, (4, 3))
        "all_reduce 'w' float32 (4, 3)"
    """
    words = [op]
    if name:
        words.append(repr(name))
    if dtype is not None:
        words.append(dtype if isinstance(dtype, str) else str(np.dtype(dtype)))
    if shape is not None:
        words.append(str(tuple(int(length) for length in shape)))
    if detail not in ((), ""):
        words.append(detail if isinstance(detail, str) else repr(detail))
    return " ".join(words)


def payload_bytes(dtype: Any, shape: Any) -> int:
    """Return the bytes of an array that a collective moves; 0 if they are unknown.

    Example:
        >>> payload_bytes("float32", (4, 3)), payload_bytes("bfloat16", (2,)), payload_bytes(None, None)
        (48, 4, 0)
    """
    if dtype is None or shape is None:
        return 0
    try:
        itemsize = 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize
    except TypeError:  # PyTorch's own
        return 0
    return itemsize * math.prod(int(length) for length in shape)


class Call:
    """One kind of collective: its operation, name, dtype, shape and further detail, in the words of `describe`.

    Attributes:
        tag, text: fingerprint and text, with `stamp`.
        kind: the fingerprint without it.
        series: operation and name.
        timeout: seconds that a rank waits in it.
        payload: the text in shared memory: two bytes of length, then UTF-8.
        nbytes: of a rank's values in it, for the timeline; 0 if unknown.
    """

    __slots__ = ("_shown", "_stamp", "_text", "kind", "nbytes", "payload", "series", "tag", "timeout")

    def __init__(self, text: str, timeout: float, series: str = "") -> None:
        self._text, self._stamp = text, ""
        self.series, self.timeout, self.nbytes = series, timeout, 0
        self.kind = self.tag = fingerprint(text)
        shown, longest = encoded(text), TEXT_BYTES - _STAMP_BYTES
        if len(shown) > longest:
            shown = shown[: longest - 300] + f" ...[{self.kind:x}]... ".encode() + shown[-250:]
        self._shown = shown
        self.payload = len(shown).to_bytes(2, "little") + shown

    @property
    def text(self) -> str:
        """Its description."""
        return self._text + self._stamp

    @property
    def brief(self) -> str:
        """Its description, cut after 600 characters."""
        return self._text[:600] + self._stamp

    def stamp(self, words: str) -> Self:
        """Add words that must be equal on all ranks this time, and return the call. Before it is entered.

        For words that change from call to call: on a node they are compared each time, between nodes by the next comparison. At
        most 100 characters of ASCII.

        Example:
            >>> Call("step", 60.0).stamp(", number 3").text
            'step, number 3'
        """
        self._stamp, more = words, encoded(words)
        self.tag = (self.kind ^ (crc32(more) << 24)) or 1
        self.payload = (len(self._shown) + len(more)).to_bytes(2, "little") + self._shown + more
        return self

    def begin_again(self) -> None:
        """Let the call begin now, in the recorder, if it is recorded: this rank's GPU had other work until now."""
