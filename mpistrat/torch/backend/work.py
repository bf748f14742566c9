"""The Work of an operation: the object that torch.distributed returns for `async_op=True`, and its future."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch.distributed as dist
from torch.futures import Future

from ...base.errors import CollectiveTimeoutError, MpistratError

__all__ = ["OperationWork", "WorkOfSeveral", "seconds_of", "torch_error"]

_classes: dict[type[MpistratError], type[Exception]] = {}

# C++ of older versions drops the Python part of a Work that a group returns, and then waits for its own, which has no end.
_DROPPED = not hasattr(dist.ProcessGroup, "shutdown")
_kept: set[dist.Work] = set()  # there: until the program waits for them, or takes their future


def seconds_of(timeout: timedelta | float | None) -> float | None:
    """Return torch's timeout in seconds; None for none, and for torch's negative "unset"."""
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    return seconds if seconds > 0 else None


def torch_error(error: Exception, line: str) -> Exception:
    """Make an error of the package a RuntimeError, too, like torch's, and add the user's line."""
    if not isinstance(error, MpistratError):
        return error
    first, newline, rest = str(error).partition("\n")
    colon = ":" if newline and first.endswith(":") else ""
    kind = " (a timeout of the process group)" if isinstance(error, CollectiveTimeoutError) else ""
    where = f", called at {line}" if line else ""
    changed = _torch_class(type(error))(f"{first.removesuffix(colon)}{kind}{where}{colon}{newline}{rest}")
    changed.__dict__.update(error.__dict__)
    changed.__cause__ = error.__cause__
    return changed.with_traceback(error.__traceback__)


def _torch_class(plain: type[MpistratError]) -> type[Exception]:
    if issubclass(plain, RuntimeError):
        return plain
    if plain not in _classes:
        _classes[plain] = type(
            plain.__name__, (plain, RuntimeError), {"__module__": plain.__module__, "__doc__": plain.__doc__}
        )
    return _classes[plain]


def _keep(work: dist.Work) -> None:
    if _DROPPED:
        _kept.add(work)


class OperationWork(dist.Work):
    """The state of one operation. The thread that runs it calls `finish`.

    Attributes:
        what: the operation, as "dist.all_reduce".
        source: the sender of a finished receive, by its rank in the group; -1 for all else.
    """

    def __init__(self, what: str, result: Any) -> None:
        super().__init__()
        self.what, self.source = what, -1
        self._result = result
        self._error: Exception | None = None
        self._done, self._lock = False, threading.Lock()
        self._event: threading.Event | None = None  # of a thread that waits: most operations have ended by then
        self._ended: Future[None] | None = None
        self._future: Future[Any] | None = None
        _keep(self)

    @final
    def finish(self, error: Exception | None = None) -> None:
        """Set the outcome, wake the waiting threads and run the callbacks of the future in this thread."""
        with self._lock:
            self._error, self._done = error, True
            ended, event = self._ended, self._event
        if event is not None:
            event.set()
        if ended is not None:
            ended.set_result(None)

    def _outcome(self, ended: Future[None]) -> Any:
        """Return the tensors of the operation, or raise its error."""
        if self._error is not None:
            raise self._error
        return self._result

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until the operation has ended, and raise its error.

        Raises:
            RuntimeError: the operation takes longer than `timeout`; it continues.
        """
        if not self._done and not self._await_end(seconds_of(timeout)):
            text = f"{self.what}: Timed out waiting {timeout} for the operation, which continues"
            raise torch_error(CollectiveTimeoutError(text), "")
        _kept.discard(self)
        if self._error is not None:
            raise self._error
        return True

    @final
    def _await_end(self, seconds: float | None) -> bool:
        """Wait until the operation has ended; return False if it takes longer."""
        with self._lock:
            if self._event is None:
                self._event = threading.Event()
            if self._done:
                return True
        return self._event.wait(seconds)

    def synchronize(self) -> None:
        """Wait until the operation has ended."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if the operation has ended."""
        return self._done

    def is_success(self) -> bool:
        """Return True if the operation has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Return the error of a failed operation."""
        return self._error

    def result(self) -> Any:
        """Return the tensors of the operation."""
        return self._result

    def source_rank(self) -> int:
        """Return the sender of a finished receive."""
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return the future that the operation sets: to its tensors, or to its error.

        A callback raises the error: `Future.set_exception` would give C++ the exception instead of tensors. In the backward
        pass of DistributedDataParallel that ends the process by SIGSEGV.
        """
        _kept.discard(self)
        with self._lock:
            if self._future is None:
                self._ended = Future()
                self._future = self._ended.then(self._outcome)
                if self._done:
                    self._ended.set_result(None)
            return self._future


@final
class WorkOfSeveral(dist.Work):
    """The state of several operations, as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = tuple(works)
        _keep(self)

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait until all operations have ended, each at most `timeout`, and raise the first error."""
        _kept.discard(self)
        limit = () if seconds_of(timeout) is None else (timeout,)
        for work in self._works:
            work.wait(*limit)
        return True

    def synchronize(self) -> None:
        """Wait until all operations have ended."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if all operations have ended."""
        return all(work.is_completed() for work in self._works)
