"""The collective contract: what every rank must say alike before data moves, and how differences are told.

A `Call` is the fingerprint of one kind of collective: operation, name, dtype, shape and further detail. On a node its tag
travels with every barrier (see `node`); between nodes the ranks compare tags now and then (`compare`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ..errors import CollectiveMismatchError

if TYPE_CHECKING:
    from .node import Node
    from .watchdog import Watch

__all__ = ["TEXT_BYTES", "Call", "Comparison", "by_rank", "describe", "fingerprint", "gather_text", "mismatch"]

TEXT_BYTES = 1000  # of a fingerprint are shown; its tag covers all of it


def describe(op: str, name: str = "", dtype: Any = None, shape: Any = None, detail: Hashable = ()) -> str:
    """Return a collective in words, the same on every rank that means the same. Not collective.

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
    if detail != ():
        words.append(detail if isinstance(detail, str) else repr(detail))
    return " ".join(words)


def fingerprint(text: str) -> int:
    """Return 63 bits that stand for a text, the same in every process, never 0. Not collective."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1 or 1


@final
class Call:
    """One kind of collective of one group, as a reusable context manager; `ProcessGroup.collective` makes and keeps it.

    Attributes:
        tag, text: fingerprint, and what it stands for.
        timeout: seconds that a rank waits in it.
        payload: the text as it is laid into shared memory: two bytes of length, then UTF-8.
    """

    __slots__ = (
        "_checked",
        "_comparison",
        "_node",
        "_outer",
        "_watch",
        "payload",
        "synchronize",
        "tag",
        "text",
        "timeout",
    )

    def __init__(
        self, text: str, timeout: float, watch: Watch, node: Node, comparison: Comparison | None, synchronize: bool
    ) -> None:
        self.text = text
        self.tag = fingerprint(text)
        self.timeout = timeout
        shown = text.encode()[:TEXT_BYTES]
        self.payload = len(shown).to_bytes(2, "little") + shown
        self.synchronize = synchronize and node.size > 1
        self._watch = watch
        self._node = node
        self._comparison = comparison
        self._checked = False
        self._outer: Any = None

    def __enter__(self) -> Call:
        watch = self._watch
        if watch.refusal is not None:
            watch.refuse(self.text)
        if watch.size == 1:
            return self
        watch.number += 1
        self._outer = watch.place
        watch.place = (monotonic(), self, watch.number)
        try:
            comparison = self._comparison
            if comparison is not None and (not self._checked or watch.number % comparison.every == 0):
                self._node.barrier(self)
                comparison.compare(self)
                self._checked = True
            elif self.synchronize:
                self._node.barrier(self)
        except BaseException:
            watch.place = self._outer
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._watch.place, self._outer = self._outer, None


@final
class Comparison:
    """Compares the calls of all ranks over a communicator on which nothing else is reduced."""

    def __init__(self, comm: Any, every: int) -> None:
        from mpi4py import MPI

        self.every = every
        self._comm, self._min = comm, MPI.MIN
        self._pair, self._least = np.empty(2, np.int64), np.empty(2, np.int64)

    def compare(self, call: Call) -> None:
        """Check that all ranks make the same call. Collective.

        Raises:
            CollectiveMismatchError: on every rank, with what each of them does.
        """
        self._pair[0], self._pair[1] = call.tag, ~call.tag  # the least of ~tag tells the largest tag
        self._comm.Allreduce(self._pair, self._least, self._min)
        if self._least[0] != ~self._least[1]:
            raise mismatch(dict(enumerate(gather_text(self._comm, call.text))))


def mismatch(texts: Mapping[int, str]) -> CollectiveMismatchError:
    """Return the error that tells what each rank did. Not collective."""
    return CollectiveMismatchError(f"the ranks entered different collectives: {by_rank(texts)}")


def by_rank(texts: Mapping[int, str]) -> str:
    """Return each different text with the ranks it belongs to. Not collective.

    Example:
        >>> by_rank({0: "a", 1: "b", 2: "a"})
        'ranks 0, 2: a; rank 1: b'
    """
    ranks: dict[str, list[str]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(str(rank))
    return "; ".join(f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {text}" for text, who in ranks.items())


def gather_text(comm: Any, text: str) -> list[str]:
    """Return every rank's text, in order of rank. Collective over `comm`."""
    data = np.frombuffer(text.encode(), np.uint8)
    counts = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([data.size], np.int64), counts)
    everything = np.empty(int(counts.sum()), np.uint8)
    ends = np.cumsum(counts)
    comm.Allgatherv(data, [everything, (counts, ends - counts)])
    return [piece.tobytes().decode(errors="replace") for piece in np.split(everything, ends[:-1])]
