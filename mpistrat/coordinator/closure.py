"""A scheduled function on the chief, and the value that stands for what it will return."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

__all__ = ["Closure", "RemoteValue", "RemoteValueStatus"]


class RemoteValueStatus(enum.Enum):
    """How far a RemoteValue is."""

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


@final
class RemoteValue:
    """What a scheduled function returns, once it has run (TF: tf.distribute.coordinator.RemoteValue).

    It may be an argument of another scheduled function, on any worker: that one waits for it, and gets the value.

    Attributes:
        status: NOT_READY, READY, or ABORTED if the function failed or was cancelled.
    """

    def __init__(self, coordinator: Any, number: int) -> None:
        """`ClusterCoordinator.schedule` makes it."""
        self.status = RemoteValueStatus.NOT_READY
        self._coordinator, self._number = coordinator, number
        self._data: bytes | None = None
        self._error: BaseException | None = None
        self._value: Any = None
        self._callbacks: list[Callable[[RemoteValue], None]] = []

    def get(self, timeout: float | None = None) -> Any:
        """Return the value, after waiting for it. For the chief.

        Args:
            timeout: seconds to wait at most; default without limit.

        Raises:
            Exception: what the function raised, with its traceback on the worker as the cause.
            ClosureCancelledError: it was cancelled.
            TimeoutError: it takes longer.
        """
        return self._coordinator.wait_for(self, timeout)

    def fetch(self) -> Any:
        """Return the value, after waiting for it. For the chief. The same as `get()`."""
        return self.get()

    def __repr__(self) -> str:
        return f"RemoteValue({self.status.name})"

    def _finish(self, data: bytes) -> None:
        self._data, self.status = data, RemoteValueStatus.READY

    def _abort(self, error: BaseException) -> None:
        self._error, self.status = error, RemoteValueStatus.ABORTED


@final
@dataclass
class Closure:
    """One scheduled function.

    Attributes:
        number: counted from 1 over all closures.
        what: its name, for errors.
        data: function and arguments as bytes.
        inputs: the RemoteValues among what it refers to.
        value: what it will return.
        worker: the only worker that may run it, or None.
        priority: larger ones go first.
        isolated: whether its error is its caller's alone, instead of the next join's.
        start: called before it is sent the first time; returns whether it shall be.
        kept: what must not be let go of before it has run.
        missing: how many of its inputs are not ready.
    """

    number: int
    what: str
    data: bytes
    inputs: list[RemoteValue]
    value: RemoteValue
    worker: int | None = None
    priority: float = 0
    isolated: bool = False
    start: Callable[[], bool] | None = None
    kept: Sequence[Any] = ()
    missing: int = 0

    @property
    def rank(self) -> tuple[float, int]:
        """The order in the queue."""
        return -self.priority, self.number
