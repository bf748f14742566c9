"""A user's function called on elements: here, in a pool of threads, or in processes."""

from __future__ import annotations

import itertools
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, final

from ... import partition
from ...cluster.cores import usable_cores
from ..options import AUTOTUNE
from ..stats import StageStats
from .call import CallError, call_each

if TYPE_CHECKING:
    from .processes import Processes

__all__ = ["Calls"]


_MOST_AUTOTUNED = 8  # of a rank: its neighbours on the node may count the same cores


@final
class Calls:
    """How `map` calls its function. Threads and processes start at the first call and end with the dataset.

    Args:
        function: gets an element; a plain tuple is passed as several arguments.
        parallel: how many calls at a time; None for one, by the thread that asks; AUTOTUNE for one a core.
        deterministic: whether results of a stream come in the order of what they are made of.
        processes: whether the calls are made in processes, as many as `parallel` says.

    Attributes:
        told: `parallel` as it was given, in words, which are the same on every rank.
        counters: calls, and the seconds spent in them, over all threads or processes.
    """

    def __init__(
        self, function: Callable[..., Any], parallel: int | None, deterministic: bool, processes: bool
    ) -> None:
        self.function = function
        self.told = "AUTOTUNE" if parallel == AUTOTUNE else str(parallel or 1)
        if parallel == AUTOTUNE:
            parallel = min(usable_cores(), _MOST_AUTOTUNED)
        self.parallel = parallel if parallel is not None or not processes else 1
        self.deterministic = deterministic
        self.processes = processes
        self.counters = StageStats()
        self._pool: ThreadPoolExecutor | None = None
        self._processes: Processes | None = None
        if processes:
            from .processes import Processes

            self._processes = Processes(function, self.parallel or 1)

    def _submit(self, elements: Sequence[Any]) -> Future[list[Any]]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.parallel, "mpistrat-map")
            weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True).atexit = False
        return self._pool.submit(self._call, elements)

    def _call(self, elements: Sequence[Any]) -> list[Any]:
        started = time.perf_counter()
        try:
            if self._processes is not None:
                return self._processes.call_each(elements)
            return call_each(self.function, elements)
        finally:
            self.counters.add(calls=len(elements), seconds=time.perf_counter() - started)

    def each(self, elements: Sequence[Any]) -> list[Any]:
        """Return the function's results on these elements, in their order. Raises CallError with the place."""
        if self.parallel is None or (len(elements) < 2 and not self.processes):
            return self._call(elements)
        shares = [(low, high) for low, high in partition.bounds(len(elements), self.parallel) if low < high]
        futures = [self._submit(elements[low:high]) for low, high in shares]
        results: list[Any] = []
        try:
            for future in futures:
                results += future.result()
        except CallError as error:
            raise CallError(len(results) + error.index, error.error) from None
        finally:
            for future in futures:
                future.cancel()
        return results

    def stream(self, elements: Iterator[Any], start: int) -> Iterator[tuple[int, Any]]:
        """The positions of elements, counted from start, and the function's results on them, made ahead of need.

        As many elements are taken ahead as calls are made at a time.
        """
        if self.parallel is None:
            for position, element in enumerate(elements, start):
                yield position, _only(position, self.each, [element])
            return
        numbered = enumerate(elements, start)
        waiting: deque[tuple[int, Future[list[Any]]]] = deque()
        try:
            while True:
                for position, element in itertools.islice(numbered, self.parallel - len(waiting)):
                    waiting.append((position, self._submit([element])))
                if not waiting:
                    return
                if not self.deterministic:
                    done, _ = wait([future for _, future in waiting], return_when=FIRST_COMPLETED)
                    while waiting[0][1] not in done:
                        waiting.rotate(-1)
                position, future = waiting.popleft()
                yield position, _only(position, future.result)
        finally:
            for _, future in waiting:
                future.cancel()


def _only(position: int, results: Callable[..., list[Any]], *arguments: Any) -> Any:
    """The only result; a CallError then names the position in the stream."""
    try:
        return results(*arguments)[0]
    except CallError as error:
        raise CallError(position, error.error) from None
