"""Agreement of ranks: raise one rank's error on every rank, and compare values that must be equal everywhere.

Work that one rank does alone before a collective (open a file, check an argument, call the user's function) may fail there, and
the others would wait forever. So do it inside `together`, at the end of which all ranks exchange their errors:

    exchange = functools.partial(group.exchange, "restore", detail=path)  # the collective's name, for errors
    with together(exchange):
        file = open_file(path) if rank == 0 else None
    same(exchange, repr(settings), lambda texts: CollectiveMismatchError(f"different settings: {by_rank(texts)}"))

An `Exchange` returns every rank's text: `ProcessGroup.exchange`, or `ProcessGroup.all_gather_text` inside `collective()`, or
`functools.partial(gather_text, comm)` if there is no group yet. This module needs MPI only if an exchange does.
"""

from __future__ import annotations

import builtins
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, final

import numpy as np

from . import errors
from .errors import CollectiveMismatchError, MpistratError, ShardError, by_rank, explain
from .text import counted, encoded, error_text

__all__ = [
    "Exchange",
    "Failure",
    "Ranks",
    "all_alike",
    "as_told",
    "fingerprint",
    "first",
    "first_rank",
    "gather_bytes",
    "gather_text",
    "mismatch",
    "only_differences",
    "same",
    "tell",
    "together",
]

Exchange = Callable[[str], Sequence[str]]

_PARTS = re.compile(r"""(?:(?<= )'[^']*'|"[^"]*"|[^,]|,(?! ))+""")  # text between commas; a nest's form is one match
_FEW = 8  # the most different texts that are sent one by one
_LONG = 100  # characters; of longer texts only the differences are shown
_KNOWN = (
    MpistratError, ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError, OSError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


class Failure(NamedTuple):
    """An exception of another rank: its class's name, and its text."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"

    def error(self, text: str) -> Exception:
        """Return an exception of the same class with another text; MpistratError if the class is not Python's or ours."""
        known = getattr(errors, self.kind, None) or getattr(builtins, self.kind, None)
        if isinstance(known, type) and issubclass(known, _KNOWN):
            try:
                return known(text)
            except TypeError:  # UnicodeDecodeError needs more than a text
                pass
        return MpistratError(text)


def first(failures: Mapping[int, Failure]) -> Exception:
    """Return the error of the first rank that failed, with the rank: "rank 1: no such file".

    Example:
        >>> first({1: Failure("TypeError", "expected a number"), 2: Failure("OSError", "no room")})
        TypeError('rank 1: expected a number')
    """
    rank, failure = next(iter(failures.items()))
    return failure.error(f"rank {rank}: {failure.text}")


def as_told(failures: Mapping[int, Failure]) -> Exception:
    """Return the first failed rank's error with its own text, for calls in which one rank acts for all."""
    failure = next(iter(failures.values()))
    return failure.error(failure.text)


@contextmanager
def together(exchange: Exchange, error: Callable[[Mapping[int, Failure]], Exception] = first) -> Iterator[None]:
    """Exchange errors at the end of a `with` block: an exception on any rank raises on every rank. Collective.

    A rank raises its own exception if it has one; the others raise the result of `error(failures by rank)`: `first`, `as_told`,
    or the caller's own.
    """
    try:
        yield
    except BaseException as problem:
        tell(exchange, problem)
        raise
    failures = {rank: Failure(*text.split("\n", 1)) for rank, text in enumerate(exchange("")) if text}
    if failures:
        raise error(failures)


def tell(exchange: Exchange, problem: BaseException) -> None:
    """Send an exception of this rank to the others, which are at the end of `together`. Collective."""
    kind, _, text = error_text(problem).partition(": ")
    exchange(f"{kind}\n{text or f'{kind}()'}")


def same(
    exchange: Exchange, value: str, error: Callable[[dict[int, str]], Exception], shown: str | None = None
) -> None:
    """Raise `error(texts by rank)` on every rank unless all ranks have the same text. Collective.

    With `shown`, the error gets each rank's `shown` instead of the text.
    """
    mine = value if shown is None else f"{fingerprint(value)}\0{shown}"
    texts = exchange(mine)
    if len({text.split("\0", 1)[0] for text in texts} if shown is not None else set(texts)) > 1:
        raise error({rank: text if shown is None else text.split("\0", 1)[1] for rank, text in enumerate(texts)})


@final
class Ranks:
    """The ranks of a communicator, or one rank alone (None), which needs no MPI: of a command, or of a set of shards.

    `function` is the name of the user's call, for errors.
    """

    def __init__(self, comm: Any, function: str) -> None:
        self._function, self.comm = function, comm
        self.rank: int = 0 if comm is None else comm.rank
        self.size: int = 1 if comm is None else comm.size

    def exchange(self, text: str) -> list[str]:
        """Return every rank's text, in rank order. Collective."""
        return [text] if self.comm is None else gather_text(self.comm, text)

    def together(self) -> AbstractContextManager[None]:
        """Exchange errors at the end of a `with` block; an exception on one rank raises on every rank. Collective.

        Raises:
            ShardError: on a rank without an exception of its own, naming those that had one.
        """
        return together(self.exchange, self._failed)

    def _failed(self, failures: Mapping[int, Failure]) -> Exception:
        got = by_rank({rank: str(failure) for rank, failure in failures.items()})
        return ShardError(explain(self._function, "", expected="every rank to get here", got=got))

    def agree(self, text: str) -> None:
        """Raise unless all ranks have the same text. Collective.

        Raises:
            CollectiveMismatchError: on every rank, with the text of each.
        """
        same(self.exchange, text, mismatch)


# bytes and texts of all ranks


def gather_text(comm: Any, text: str) -> list[str]:
    """Return every rank's text, in order of rank, also text that is not UTF-8. Collective over `comm`."""
    return [data.decode(errors="surrogatepass") for data in gather_bytes(comm, text.encode(errors="surrogatepass"))]


def gather_bytes(comm: Any, mine: bytes) -> list[bytes]:
    """Return every rank's bytes, in order of rank. Collective over `comm`.

    Usually all are equal (no error, or equal settings): then 16 bytes are reduced, whatever the number of ranks. If there are a
    few different ones, each is sent once.
    """
    if comm.size == 1:
        return [mine]
    mark = _hash(mine)
    if all_alike(comm, [mark])[0]:
        return [mine] * comm.size
    table = np.empty((comm.size, 2), np.int64)
    comm.Allgather(np.array([mark, len(mine)], np.int64), table)
    marks, roots = np.unique(table[:, 0], return_index=True)
    data = np.frombuffer(mine, np.uint8)
    if len(marks) <= _FEW:
        found = {}
        for mark, root in zip(marks.tolist(), roots.tolist(), strict=True):
            part = data.copy() if root == comm.rank else np.empty(int(table[root, 1]), np.uint8)
            comm.Bcast(part, root)
            found[mark] = part.tobytes()
        return [found[mark] for mark in table[:, 0].tolist()]
    counts = np.ascontiguousarray(table[:, 1])
    everything = np.empty(int(counts.sum()), np.uint8)
    ends = np.cumsum(counts)
    comm.Allgatherv(data, [everything, (counts, ends - counts)])
    return [part.tobytes() for part in np.split(everything, ends[:-1])]


def all_alike(comm: Any, numbers: Sequence[int]) -> np.ndarray:
    """Return for each number True if it is the same on all ranks. Collective over `comm`."""
    from mpi4py import MPI

    mine = np.asarray(numbers, np.int64)
    least = np.empty(2 * mine.size, np.int64)
    comm.Allreduce(np.concatenate([mine, ~mine]), least, MPI.MIN)  # the least of ~x is ~ the largest x
    return least[: mine.size] == ~least[mine.size :]


def first_rank(comm: Any, condition: bool) -> int | None:
    """Return the first rank on which a condition holds, None if there is none. Collective over `comm`."""
    from mpi4py import MPI

    least = np.empty(1, np.int64)
    comm.Allreduce(np.array([comm.rank if condition else comm.size], np.int64), least, MPI.MIN)
    return int(least[0]) if least[0] < comm.size else None


def fingerprint(text: str) -> int:
    """Return a hash of a text with 63 bits, the same in every process, never 0."""
    return _hash(encoded(text))


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1 or 1


# differences between ranks


def mismatch(texts: Mapping[int, str], ago: int = 0) -> CollectiveMismatchError:
    """Return the error with each rank's call, which was `ago` collectives ago."""
    when = f" {counted(ago, 'collective')} ago" if ago else ""
    look_for = "look for one that depends on the rank, or a loop with fewer passes on some"
    remedy = f". All ranks must make the same calls in the same order: {look_for}"
    others = len({text.split(" ", 1)[0] for text in texts.values()}) > 1
    what = by_rank(only_differences(texts))
    return CollectiveMismatchError(f"the ranks entered different collectives{when}: {what}{remedy * others}")


def only_differences(texts: Mapping[int, str]) -> dict[int, str]:
    """Return the texts; of long ones leave out the parts between commas that are equal in all.

    Example:
        >>> numbers = ", ".join(f"number_{i}={i}" for i in range(9))
        >>> only_differences({0: f"step(rate=1, {numbers})", 1: f"step(rate=1, {numbers}, limit=2)"})
        {0: 'step(rate=1, ..., number_8=8)', 1: 'step(rate=1, ..., number_8=8, limit=2)'}
    """
    if max(map(len, texts.values())) < _LONG:
        return dict(texts)
    alike: dict[tuple[str, ...], dict[str, list[str]]] = {}  # by operation
    for text in dict.fromkeys(texts.values()):
        alike.setdefault(tuple(text.split(" ", 2)[:2]), {})[text] = [part.lstrip() for part in _PARTS.findall(text)]
    shown = {whole: text for parts in alike.values() for whole, text in _cut_all(parts).items()}
    return {rank: shown[text] for rank, text in texts.items()}


def _cut_all(parts: Mapping[str, list[str]]) -> dict[str, str]:
    shortest = min(map(len, parts.values()))
    first = next((i for i in range(shortest) if len({own[i] for own in parts.values()}) > 1), shortest)
    last = next(
        (i for i in range(shortest - first) if len({own[-1 - i] for own in parts.values()}) > 1), shortest - first
    )
    if len(set(map(len, parts.values()))) > 1 and last:
        last -= 1  # show a neighbour if one text has more parts
    return {text: _cut(own, first, last, parts) for text, own in parts.items()}


def _cut(own: list[str], first: int, last: int, parts: Mapping[str, list[str]]) -> str:
    """Return one text: its beginning, and the parts from `first` to all but the `last` that differ."""
    shown = own[:1]
    same_length = len(set(map(len, parts.values()))) == 1
    for index, part in enumerate(own[1:], 1):
        inside = first <= index < len(own) - last
        if inside and not (same_length and len({other[index] for other in parts.values()}) == 1):
            shown.append(part)
        elif shown[-1] != "...":
            shown.append("...")
    return ", ".join(shown)
