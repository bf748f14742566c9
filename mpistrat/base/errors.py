"""The exceptions that mpistrat raises on purpose: one small tree, each leaf also a built-in error."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .text import named, printable

__all__ = [
    "BatchError",
    "ClosedError",
    "ClusterError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ContextError",
    "DeviceError",
    "DifferenceError",
    "JobError",
    "LaunchError",
    "LayoutError",
    "MissingDependencyError",
    "MpistratError",
    "PeerExitError",
    "RanksLostError",
    "ShardError",
    "SharedMemoryError",
    "explain",
]


class MpistratError(Exception):
    """Base of all errors of this package. Catch it to catch them all."""


class ClusterError(MpistratError, ValueError):
    """The description of the cluster (TF_CONFIG, roles, a batch system's or launcher's variables) is wrong or contradicts MPI."""


class LayoutError(MpistratError, ValueError):
    """The strategy does not fit its ranks and nodes."""


class DeviceError(MpistratError, ValueError):
    """A device string is malformed, or names a device that this rank does not have."""


class DifferenceError(MpistratError, AssertionError):
    """A program on several ranks computed other numbers than the recorded one on one process.

    Attributes:
        step: the first step that differs, from 1.
        ranks: those that differ.
        operation: the first that differs, such as "output of layers.1 (BatchNorm1d)".
    """

    def __init__(self, text: str, step: int = 0, ranks: Sequence[int] = (), operation: str = "") -> None:
        super().__init__(text)
        self.step, self.ranks, self.operation = step, tuple(ranks), operation


class JobError(MpistratError, OSError):
    """A batch system rejected a job, or its command is missing."""


class LaunchError(MpistratError, RuntimeError):
    """A rank that `ms.launch` or `ms.MultiProcessRunner` has started raised an error or died."""


class ContextError(MpistratError, RuntimeError):
    """A call was made in the wrong context: scope, replica, cross-replica or update."""


class BatchError(ContextError):
    """The global batch of a pass's rows is unknown, while replicas have unequal parts of batches."""


class CollectiveMismatchError(MpistratError, ValueError):
    """Ranks entered the same collective with different operations, names, dtypes, shapes or values."""


class CollectiveTimeoutError(MpistratError, TimeoutError):
    """A rank did not arrive at a collective in time."""


class PeerExitError(MpistratError, RuntimeError):
    """A rank left the program while others were waiting for it in a collective.

    Attributes:
        status: the argument of its sys.exit, 0 without one: the job's exit status if the program does not catch this error.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class RanksLostError(MpistratError, RuntimeError):
    """Ranks died, and MPI continues without them. `ms.survive` catches this error and calls the program's function again."""


class SharedMemoryError(MpistratError, MemoryError):
    """The node's shared memory (/dev/shm) is too small for the request."""


class ClosedError(MpistratError, RuntimeError):
    """A strategy, or something that belonged to one, was used after `close()`."""


class ShardError(MpistratError, OSError):
    """An HDF5 shard is missing, damaged, or does not match its siblings."""


class MissingDependencyError(MpistratError, ImportError):
    """An optional library that the call needs is not installed."""


def explain(
    function: str, argument: str, *, expected: str, got: object, remedy: str = "", rank: int | None = None
) -> str:
    """Return an error text about an argument, in this package's form: one line, without control characters.

    Example:
        >>> explain("Strategy.gather", "axis", expected="0 <= axis < 2", got=5)
        'Strategy.gather: axis: expected 0 <= axis < 2, got 5'
    """
    where = "".join(f"{name}: " for name in (function, argument) if name)
    text = f"{where}expected {expected}, got {got}"
    if rank is not None:
        text = f"rank {rank}: {text}"
    return printable(f"{text}. {remedy}" if remedy else text)


def by_rank(texts: Mapping[int, str]) -> str:
    """Return each different text with its ranks.

    Example:
        >>> by_rank({0: "a", 1: "b", 2: "a"})
        'ranks 0, 2: a; rank 1: b'
    """
    ranks: dict[str, list[str]] = {}
    for rank, text in texts.items():
        ranks.setdefault(text, []).append(str(rank))
    return "; ".join(f"{named('rank', who)}: {text}" for text, who in ranks.items())


def shard_error(
    where: object, expected: str, got: object, remedy: str = "", function: str = "HDF5Dataset"
) -> ShardError:
    """Return the error of a file that is not as expected."""
    return ShardError(explain(function, str(where), expected=expected, got=got, remedy=remedy))


def missing_framework(extra: str, framework: str, error: ImportError) -> MissingDependencyError:
    """Return the error of `ms.torch`, `ms.jax` and `ms.keras` if their framework is not installed."""
    remedy = f"pip install 'mpistrat[{extra}]'"
    text = explain(f"mpistrat.{extra}", "", expected=framework, got=f"no module {error.name}", remedy=remedy)
    return MissingDependencyError(text)


def check_framework(function: str, framework: str, version: str, least: str, why: str) -> None:
    """Raise MissingDependencyError if a framework is older than this package supports.

    Args:
        function: the module or function that needs it.
        framework: the name of its distribution.
        version: the installed one, as `3.15.1` or `0.6.0.dev1`; one that does not begin with two numbers passes.
        least: two numbers, as `3.12`.
        why: the problem of older versions.
    """
    found = re.match(r"(\d+)\.(\d+)", str(version))
    if found and tuple(map(int, found.groups())) < tuple(map(int, least.split("."))):
        remedy = f"pip install --upgrade '{framework}>={least}' ({why})"
        expected, got = f"{framework} {least} or newer", f"{framework} {version}"
        raise MissingDependencyError(explain(function, "", expected=expected, got=got, remedy=remedy))


for _name in __all__:
    if isinstance(globals()[_name], type):
        globals()[_name].__module__ = "mpistrat.errors"  # the name in programs and tracebacks
