"""The closures that wait for a worker, in order of priority, then of number."""

from __future__ import annotations

import heapq
from typing import final

from .closure import Closure

__all__ = ["ClosureQueue"]

Heap = list[tuple[tuple[float, int], Closure]]


@final
class ClosureQueue:
    """Closures for any worker, and closures for one.

    Example:
        >>> queue = ClosureQueue(2)
        >>> len(queue), queue.pop(0)
        (0, None)
    """

    def __init__(self, workers: int) -> None:
        self._any: Heap = []
        self._own: list[Heap] = [[] for _ in range(workers)]

    def __len__(self) -> int:
        return len(self._any) + sum(map(len, self._own))

    def push(self, closure: Closure) -> None:
        """Add a closure."""
        heap = self._any if closure.worker is None else self._own[closure.worker]
        heapq.heappush(heap, (closure.rank, closure))

    def pop(self, worker: int) -> Closure | None:
        """Take the next closure for a worker; None if there is none."""
        heaps = [heap for heap in (self._own[worker], self._any) if heap]
        return heapq.heappop(min(heaps, key=lambda heap: heap[0][0]))[1] if heaps else None

    def take(self, worker: int | None = None) -> list[Closure]:
        """Take all closures, or all that only one worker may run."""
        heaps = [self._any, *self._own] if worker is None else [self._own[worker]]
        taken = sorted(entry for heap in heaps for entry in heap)
        for heap in heaps:
            heap.clear()
        return [closure for _, closure in taken]
