"""Transport protocol between a worker and a server, independent of its implementation.

- Pushes are numbered 1, 2, 3, … by each worker for each server. The server applies each exactly once, in order; a duplicate is
  ignored. It publishes the fragments it has taken (their memory is free again) and the last push applied. A commit is a
  push without a payload; it ends a step, and is free with the last push of the step.
- Flow control: a worker posts at most `slots` fragments that the server has not taken, which bounds the memory of pushes and
  throttles a worker that is faster than the server.
- Reads are atomic: a variable, or the requested rows, between two writes of the server, with its version, the number of
  writes. Versions that a worker reads never decrease.
- A worker publishes a clock, the number of its finished steps, and leaves each pass explicitly.
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import numpy as np

from ...base.buffers import BufferPool
from ...base.errors import explain
from ...base.masks import plain_array
from ...base.waiting import PeerWait
from ...comm.process_group import ProcessGroup
from ..layout import Address, MailboxLayout, VariableSpec
from ..report import TransportStats, count
from .fragments import LARGEST_WHAT, Fragment, MessageKind

__all__ = ["FINISHED", "FOR_GOOD", "Pair", "Port", "Transport", "flat_bytes"]

_SERVE = (
    "A server answers until its program closes the strategy; where MPI allows one thread only, while it is in serve() or"
    " iterates a distributed dataset"
)

_POOL, _BYTES = BufferPool(kept=8), np.dtype(np.uint8)
_PUSH_AND_COMMIT = MessageKind.PUSH | MessageKind.ENDS_STEP
FINISHED = 1 << 62  # the clock of a worker that has signed off
FOR_GOOD = 1 << 62  # the passes of a worker that will not return


@final
@dataclass(frozen=True)
class Pair:
    """A worker and a server.

    Attributes:
        group: all ranks.
        worker, server: numbers among the workers and the servers, from 0.
        server_rank: in the group.
        layout: of the servers' mailboxes.
        addresses: of the variables, by number; the list grows.
    """

    group: ProcessGroup
    worker: int
    server: int
    server_rank: int
    layout: MailboxLayout
    addresses: list[Address]

    def wait_for_server(self, what: str, remedy: str = _SERVE) -> PeerWait:
        """Return a wait for the server."""
        text = f"{what} (worker {self.worker}, server {self.server})"
        return PeerWait(self.group, text, (self.server_rank,), remedy=remedy)


class Transport(ABC):
    """A worker's end of the connection with one server. One thread at a time.

    Attributes:
        name: of the transport.
        pair: the worker and the server.
        pushed: the number of the last push.
        stats: the statistics.
    """

    name: ClassVar[str]

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.pushed = 0
        self.stats = TransportStats()
        self._passes = 0
        self._found: dict[int, Address] = {}

    @final
    def read(self, variable: int, out: np.ndarray) -> int:
        """Copy a whole variable into an array, and return its version.

        Args:
            variable: its number.
            out: C-contiguous array of the variable's dtype and shape.
        """
        address = self._address(variable, "read")
        spec = address.spec
        if type(out) is not np.ndarray or out.dtype != spec.dtype or out.shape != spec.shape:
            _check_array(spec, "read", "out", out, spec.shape)
        version = self._read(address, flat_bytes(_contiguous(out, "read")))
        count(self.stats.pulls, variable, spec.nbytes)
        return version

    @final
    def pull(self, variable: int) -> tuple[int, np.ndarray]:
        """Return a variable's version, and the variable, read-only: in place, or in new memory.

        The array does not change while anything refers to it.
        """
        address = self._found.get(variable) or self._address(variable, "pull")
        found, spec = self._view(address) if address.near else None, address.spec
        if found is None:
            memory = _POOL.empty(spec.nbytes, _BYTES)
            found = self._read(address, memory), np.ndarray(spec.shape, spec.dtype, memory)
            found[1].flags.writeable = False
        count(self.stats.pulls, variable, spec.nbytes)
        return found

    @final
    def read_rows(self, variable: int, rows: Any, out: np.ndarray) -> int:
        """Copy rows of one version of a variable into an array; return the version.

        Args:
            variable: its number.
            rows: integers, one dimension, in any order, with duplicates or not.
            out: C-contiguous array of the variable's dtype, with one row for each of `rows`.
        """
        address = self._address(variable, "read_rows")
        numbers = self._check_rows(address, "read_rows", rows)
        _check_array(address.spec, "read_rows", "out", out, (numbers.size, *address.spec.shape[1:]))
        table = flat_bytes(_contiguous(out, "read_rows")).reshape(numbers.size, address.spec.row_bytes)
        version = self._read_rows(address, numbers, table)
        count(self.stats.pulls, variable, table.nbytes)
        return version

    @final
    def push(self, variable: int, array: Any, *, what: int = 0, version: int = 0, commit: bool = False) -> None:
        """Send an array to the server, which applies it once. Returns when the array may be changed.

        The memory of `gradient(variable)` is not copied, and must not be changed before `settle` has returned.

        Args:
            variable: its number.
            array: of the variable's dtype and shape.
            what: an integer for the server's handler, 0 <= what < 2^47.
            version: of the variable, for the handler, too.
            commit: whether a commit goes with it.
        """
        spec = (self._found.get(variable) or self._address(variable, "push")).spec
        if type(array) is not np.ndarray or array.dtype != spec.dtype or array.shape != spec.shape:
            array = plain_array(array, "push", "array")
            _check_array(spec, "push", "array", array, spec.shape)
        _check_what(what, "push")
        kind, nbytes = _PUSH_AND_COMMIT if commit else MessageKind.PUSH, spec.nbytes
        array = array if array.flags.c_contiguous else np.ascontiguousarray(array)
        self._push(Fragment(kind, variable, self.pushed + 1, 0, what, version, 0, nbytes, nbytes), (flat_bytes(array),))

    @final
    def push_encoded(
        self,
        variable: int,
        message: np.ndarray,
        encoding: int,
        *,
        what: int = 0,
        version: int = 0,
        commit: bool = False,
    ) -> None:
        """Send a float32 array that is encoded. Returns when `message` may be changed.

        Args:
            variable, what, version, commit: as in `push`.
            message: bytes.
            encoding: the index of its encoding in `WIRES`.
        """
        _check_what(what, "push")
        kind = MessageKind.PUSH_ENCODED + encoding
        kind = kind | MessageKind.ENDS_STEP if commit else kind
        nbytes = message.nbytes
        self._push(Fragment(kind, variable, self.pushed + 1, 0, what, version, 0, nbytes, nbytes), (message,))

    @final
    def push_rows(
        self,
        variable: int,
        rows: Any,
        values: Any,
        *,
        what: int = 0,
        version: int = 0,
        commit: bool = False,
        depth: int = 1,
    ) -> None:
        """Send rows to the server unchanged, in their order, with duplicates or not; it applies them once.

        Args:
            variable, what, version, commit: as in `push`.
            rows: integers, one dimension.
            values: array of the variable's dtype, with one row for each of `rows`.
            depth: the number of dimensions that count as rows; with 2 a (4, 5, 6) array has 20 rows of 6.
        """
        address = self._address(variable, "push_rows")
        numbers, values = (
            self._check_rows(address, "push_rows", rows, depth),
            plain_array(values, "push_rows", "values"),
        )
        _check_array(address.spec, "push_rows", "values", values, (numbers.size, *address.spec.shape[depth:]))
        _check_what(what, "push_rows")
        kind = MessageKind.PUSH_ROWS | MessageKind.ENDS_STEP if commit else MessageKind.PUSH_ROWS
        payload, nbytes = (
            (flat_bytes(numbers), flat_bytes(np.ascontiguousarray(values))),
            numbers.nbytes + values.nbytes,
        )
        number = self.pushed + 1
        self._push(Fragment(kind, variable, number, numbers.size, what, version, 0, nbytes, nbytes), payload)

    def _push(self, fragment: Fragment, payload: tuple[Any, ...]) -> None:
        self._post(fragment, payload)
        self.pushed = fragment.number
        count(self.stats.pushes, fragment.variable, fragment.total)

    @final
    def commit(self, *, what: int = 0) -> None:
        """Send a push without variable and payload: it ends a step."""
        _check_what(what, "commit")
        self._post(Fragment(MessageKind.COMMIT, -1, self.pushed + 1, 0, what), ())
        self.pushed += 1

    def gradient(self, variable: int) -> np.ndarray | None:
        """Return memory from which pushes of a variable are not copied, initially zeros; None if there is none."""
        return None

    def settle(self) -> None:  # noqa: B027  # nothing to do if pushes are copied
        """Wait until memory of `gradient` may be changed after a push."""

    @final
    def flush(self) -> None:
        """Wait until all pushes of this worker to this server are applied.

        Raises:
            PeerExitError: the server has left the program.
            CollectiveTimeoutError: the server takes longer than `environment.abort_after`.
        """
        if self.acknowledged() < self.pushed:
            self._wait_for_all()

    def _wait_for_all(self) -> None:
        if not self._waited_shortly():  # most end here; creating a wait costs as much
            wait = self.pair.wait_for_server(f"flush of push {self.pushed}")
            while self.acknowledged() < self.pushed:
                wait.pause()

    def _waited_shortly(self) -> bool:
        """Wait a little until all pushes are applied; return whether they are."""
        return False

    @final
    def leave(self, *, for_good: bool = False, clock: int = FINISHED) -> None:
        """Flush, then sign off from this pass.

        Args:
            for_good: sign off from all passes; later calls have no effect.
            clock: the clock to publish.
        """
        if self._passes == FOR_GOOD:
            return
        self.flush()
        self._passes = FOR_GOOD if for_good else self._passes + 1
        self._leave(self._passes, FINISHED if for_good else clock)

    @abstractmethod
    def acknowledged(self) -> int:
        """Return the number of this worker's last applied push; all before it are applied."""

    @abstractmethod
    def publish_clock(self, steps: int) -> None:
        """Publish the number of steps that this worker has finished."""

    @abstractmethod
    def clocks(self) -> np.ndarray:
        """Return the finished steps of every worker, as this server knows them; int64."""

    def _view(self, address: Address) -> tuple[int, np.ndarray] | None:
        return None

    @abstractmethod
    def _read(self, address: Address, out: np.ndarray) -> int: ...

    @abstractmethod
    def _read_rows(self, address: Address, rows: np.ndarray, out: np.ndarray) -> int: ...

    @abstractmethod
    def _post(self, message: Fragment, payload: Sequence[np.ndarray]) -> None: ...

    @abstractmethod
    def _leave(self, passes: int, clock: int) -> None: ...

    def _address(self, variable: int, function: str) -> Address:
        address = self._found.get(variable)
        if address is None:
            address = self._found[variable] = self._find(variable, function)
        return address

    def _find(self, variable: int, function: str) -> Address:
        addresses, server = self.pair.addresses, self.pair.server
        if not 0 <= variable < len(addresses):
            raise ValueError(explain(function, "variable", expected=f"0 <= variable < {len(addresses)}", got=variable))
        address = addresses[variable]
        if address.spec.server != server:
            got = f"{address.spec.name!r} on server {address.spec.server}"
            raise ValueError(explain(function, "variable", expected=f"one on server {server}", got=got))
        return address

    def _check_rows(self, address: Address, function: str, rows: Any, depth: int = 1) -> np.ndarray:
        numbers = plain_array(rows, function, "rows")
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu") or len(address.spec.shape) < depth:
            got = f"{numbers.dtype} of shape {numbers.shape} for a variable of shape {address.spec.shape}"
            raise ValueError(explain(function, "rows", expected="one dimension of integers", got=got))
        length = math.prod(address.spec.shape[:depth])
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < length:
            got = f"{int(numbers.min())} to {int(numbers.max())}"
            expected = f"0 <= row < {length} for {address.spec.name!r}"
            raise ValueError(explain(function, "rows", expected=expected, got=got))
        return np.ascontiguousarray(numbers, np.int64)


class Port(ABC):
    """A server's end of the connections with all workers that use one transport.

    Attributes:
        patience: how often the server yields, when idle, before it sleeps.
    """

    patience = 100

    def give_way(self) -> None:
        """Yield to other processes; if possible wait a little for arrivals."""
        os.sched_yield()

    @abstractmethod
    def poll(self) -> int:
        """Take arrived fragments, a few of each worker. Return how many waited, 0 if none was taken."""

    @abstractmethod
    def acknowledge(self, worker: int, number: int) -> None:
        """Publish the number of a worker's last applied push."""

    @abstractmethod
    def busy(self) -> bool:
        """Return whether data are in flight to a worker."""

    def drop(self, worker: int) -> None:  # noqa: B027  # what it has posted whole may be applied
        """Expect nothing more from a worker that died."""

    def move(self) -> None:  # noqa: B027  # nothing to do if workers move the data
        """Advance and start large messages while a push is being applied, without taking one."""


def flat_bytes(array: np.ndarray) -> np.ndarray:
    """Return a C-contiguous array as flat bytes, not copied.

    Example:
        >>> flat_bytes(np.zeros((2, 3), np.float16)).shape
        (12,)
    """
    return array.reshape(-1).view(np.uint8)


def _check_what(what: int, function: str) -> None:
    if not 0 <= what <= LARGEST_WHAT:
        raise ValueError(explain(function, "what", expected=f"0 <= what <= {LARGEST_WHAT}", got=what))


def _check_array(spec: VariableSpec, function: str, argument: str, array: Any, shape: tuple[int, ...]) -> None:
    if getattr(array, "dtype", None) == spec.dtype and array.shape == shape:
        return
    expected = f"{spec.dtype} of shape {shape} for {spec.name!r}"
    if getattr(array, "dtype", None) != spec.dtype:
        got = f"dtype {getattr(array, 'dtype', type(array).__name__)}"
        raise TypeError(explain(function, argument, expected=expected, got=got))
    raise ValueError(explain(function, argument, expected=expected, got=f"shape {array.shape}"))


def _contiguous(out: np.ndarray, function: str) -> np.ndarray:
    if not (out.flags.c_contiguous and out.flags.writeable):
        got = "another memory order" if out.flags.writeable else "a read-only one"
        raise ValueError(explain(function, "out", expected="a writable C-contiguous array", got=got))
    return out
