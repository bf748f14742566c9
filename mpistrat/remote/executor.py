"""A concurrent.futures.Executor whose workers are the coordinator's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from concurrent.futures import wait as wait_for_all
from functools import partial
from typing import Any, TypeVar, final

from ..base.errors import explain
from .values import RemoteValue

__all__ = ["CoordinatorExecutor"]

T = TypeVar("T")
Start = Callable[[], bool]
Callback = Callable[[RemoteValue], None]


@final
class CoordinatorExecutor(Executor):
    """Runs functions on the workers (concurrent.futures.Executor). `ClusterCoordinator.executor()` makes it.

    What a function raises is its future's alone: the coordinator's `join` neither waits for these functions nor raises
    for them.

    Args:
        submit: sends a function and its arguments; calls `start` before it does, which returns whether it shall, and
            `callback` with the value once it is there.
    """

    def __init__(self, submit: Callable[[Any, Any, Any, Start, Callback], RemoteValue]) -> None:
        self._submit, self._open = submit, True
        self._futures: set[Future[Any]] = set()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Return the future of a function that a worker calls. Waits while the queue is full.

        Raises:
            RuntimeError: after `shutdown`.
            TypeError: the function, or what it refers to, cannot be pickled.
        """
        if not self._open:
            raise RuntimeError("CoordinatorExecutor.submit: cannot take new functions after shutdown")
        future: Future[T] = Future()

        def finish(value: RemoteValue) -> None:
            if future.cancelled():
                return
            try:
                result = value.get()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        try:
            self._submit(fn, args, kwargs, future.set_running_or_notify_cancel, finish)
        except BaseException:
            self._futures.discard(future)
            raise
        return future

    def map(
        self, fn: Callable[..., T], *iterables: Iterable[Any], timeout: float | None = None, chunksize: int = 1
    ) -> Iterator[T]:
        """Return an iterator over a function's results, in the order of its arguments.

        Args:
            fn: called with one element of each iterable.
            iterables: read at once, as far as the shortest goes.
            timeout: seconds, counted from this call, until the next result must be there.
            chunksize: how many calls are sent together: more for quick functions.

        Raises:
            TimeoutError: when a result is asked for and does not come in time.
            Exception: what the function raised, when its result is asked for.
        """
        if chunksize < 1:
            raise ValueError(explain("CoordinatorExecutor.map", "chunksize", expected="at least 1", got=chunksize))
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        calls = iter(zip(*iterables, strict=False))
        chunks = iter(lambda: list(itertools.islice(calls, chunksize)), [])
        return itertools.chain.from_iterable(super().map(partial(_call_all, fn), chunks, timeout=timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more functions. The coordinator goes on.

        Args:
            wait: whether to wait for those that were submitted.
            cancel_futures: whether to cancel those that no worker has yet.
        """
        self._open = False
        futures = list(self._futures)
        if cancel_futures:
            for future in futures:
                future.cancel()
        if wait:
            wait_for_all(futures)


def _call_all(fn: Callable[..., T], calls: list[tuple[Any, ...]]) -> list[T]:
    return [fn(*args) for args in calls]
