"""Iterators over an epoch's elements, with optional read-ahead in a thread and a position to save."""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import weakref
from abc import ABC
from collections import deque
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Protocol, final

from ...base.errors import explain

__all__ = ["DatasetIterator", "Elements", "Feed"]

_PATIENCE = 10.0  # seconds that the end of the program waits for running reads


_running: dict[threading.Thread, Callable[[], None]] = {}  # functions that end the threads


def _end_all() -> None:
    """End the threads before the interpreter ends: one inside HDF5 could crash it or block it forever."""
    running = list(_running.items())
    for _, end in running:
        end()
    for thread, _ in running:
        thread.join(_PATIENCE)


def _fill(produce: Callable[[], Any], room: SimpleQueue[bool], items: SimpleQueue[tuple[bool, Any]]) -> None:
    """Produce items while there is room, until StopIteration, an error, or the reader's end."""
    try:
        while room.get():
            try:
                item = True, produce()
            except StopIteration:
                item = False, None
            except BaseException as error:  # any error is raised in the reader
                item = False, error
            items.put(item)
            if not item[0]:
                return
            del item  # only the reader references it
    finally:
        _running.pop(threading.current_thread(), None)


def _end(room: SimpleQueue[bool], items: SimpleQueue[tuple[bool, Any]]) -> None:
    """End the thread that fills `items`; the reader gets no more items."""
    with contextlib.suppress(Empty):
        while True:
            room.get_nowait()
    room.put(False)
    items.put((False, None))


class ReadAhead:
    """A thread that calls a function up to `depth` results ahead, in order.

    The thread references the queues, not this object, so that both can be freed.

    Args:
        produce: returns the next item or raises StopIteration; called in the thread only.
        depth: the most results to buffer, at least 1.
    """

    def __init__(self, produce: Callable[[], Any], depth: int) -> None:
        self._room: SimpleQueue[bool] = SimpleQueue()  # one entry per item to make; False ends the thread
        self._items: SimpleQueue[tuple[bool, Any]] = SimpleQueue()  # (True, item), at last (False, error or None)
        for _ in range(depth):
            self._room.put(True)
        queues = self._room, self._items
        self._thread = threading.Thread(target=_fill, args=(produce, *queues), name="mpistrat-prefetch", daemon=True)
        self._end = weakref.finalize(self, _end, *queues)
        atexit.unregister(_end_all)  # functions registered last are called first: before h5py's exit handler
        atexit.register(_end_all)
        _running[self._thread] = functools.partial(_end, *queues)
        self._thread.start()

    def get(self) -> Any:
        """Return the next item. Raises StopIteration at the end, and the function's error in its turn."""
        more, item = self._items.get()
        if more:
            self._room.put(True)
            return item
        self._items.put((more, item))  # for later calls
        if item is not None:
            raise item
        raise StopIteration

    def close(self) -> None:
        """End the thread and wait for it; buffered items are dropped. Safe to call twice."""
        self._end()
        self._thread.join()


NOTHING = object()  # no element was peeked at
PATIENCE = 1e-3  # seconds; a thread adds 0.03 to 0.1 ms per element, and uses a core of the node
_RECENT = 32  # elements in the mean; small ones are read several at a time
_OUTLIERS = 2  # slowest ones to ignore: they may have hit a cold page

Elements = Callable[[int, int], Iterator[Any]]  # (epoch, position) -> the elements from there on


class Supplier(Protocol):
    """The origin of elements: a dataset, or the steps of a worker."""

    def check(self) -> None:
        """Raise if a source has changed; called before the iterator moves."""

    def count_wait(self, seconds: float) -> None:
        """Record the loop's wait for the thread that reads ahead."""


class Feed(Iterator[Any], ABC):
    """An iterator over one epoch, with optional read-ahead.

    Position and state are those of consumed elements. The thread that reads ahead does not reference this object, and
    ends with it.

    Args:
        elements: returns an iterator over an epoch's elements from a position on.
        cardinality: elements in an epoch; negative for no end or an unknown one.
        prefetch: the most elements that a thread reads ahead; 0 for no thread.
        patience: start the thread when elements take longer on average, in seconds; 0 for immediately.
        same_length: whether an epoch has the same length wherever its state is restored.
        supplier: the origin of the elements.
        set_epoch: called with the epoch after a restored one.
    """

    def __init__(
        self,
        elements: Elements,
        cardinality: int,
        epoch: int,
        prefetch: int,
        patience: float = 0.0,
        same_length: bool = True,
        supplier: Supplier | None = None,
        set_epoch: Callable[[int], None] | None = None,
    ) -> None:
        self._elements = elements
        self._cardinality = cardinality
        self._supplier, self._set_epoch = supplier, set_epoch
        self._length = {"length": cardinality} if same_length and cardinality >= 0 else {}
        self._depth = prefetch
        self._patience = patience
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds of the latest reads
        self._slow = patience == 0
        self._epoch = epoch
        self._next = 0
        self._produce: Callable[[], Any] | None = None
        self._read_ahead: ReadAhead | None = None
        self._peeked: Any = NOTHING
        self._ended = False

    def _read(self) -> Any:
        if self._ended or 0 <= self._cardinality <= self._next:
            self._stop()
            raise StopIteration
        if self._produce is None:
            # The prefetch thread holds the iterator, not this object.
            self._produce = self._elements(self._epoch, self._next).__next__
        if self._read_ahead is None and self._depth and self._slow:
            self._read_ahead = ReadAhead(self._produce, self._depth)
            self._produce = self._read_ahead.get
        started = perf_counter()
        try:
            element = self._produce()
            seconds = perf_counter() - started
            self._recent.append(seconds)
            if seconds > self._patience and not self._slow:
                counted = sorted(self._recent)[:-_OUTLIERS]
                self._slow = sum(counted) > self._patience * max(1, len(counted))
            if self._read_ahead is not None and self._supplier is not None:
                self._supplier.count_wait(seconds)
            return element
        except BaseException as error:
            self._stop()  # a generator ends when it raises; the next call restarts at this element
            self._ended = isinstance(error, StopIteration)
            if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
                # From a mapped function: it must not end the iteration.
                raise RuntimeError("dataset: reading an element raised StopIteration") from error.__cause__
            raise

    def state(self) -> dict[str, int]:
        """Return the position after the consumed elements, equal on every rank: {"epoch", "next", "length"}.

        "length" is the number of elements of an epoch. It is absent if unknown, and with parameter servers.
        """
        return {"epoch": self._epoch, "next": self._next, **self._length}

    def restore(self, state: dict[str, int]) -> None:
        """Move to the state of an iterator of the same dataset; the next `iter()` starts the epoch after it.

        Raises:
            ValueError: for a state of another dataset, or with another number of elements per epoch.
            ShardError: for files that have changed.
        """
        try:
            epoch, following = int(state["epoch"]), int(state["next"])
            length = int(state.get("length", self._cardinality))
        except (AttributeError, KeyError, TypeError, ValueError):
            raise ValueError(
                explain("restore", "state", expected='{"epoch": int, "next": int}, from state()', got=repr(state))
            ) from None
        if length != self._length.get("length", length):
            expected = f"a state of epochs of {self._cardinality} elements, as this dataset has"
            remedy = (
                "The batch size, the files, the policy or the number of ranks changed: restore on the same dataset."
            )
            raise ValueError(explain("restore", "state", expected=expected, got=repr(state), remedy=remedy))
        if epoch < 0 or following < 0 or 0 <= self._cardinality < following:
            expected = f"an epoch of at least 0 and a position in [0, {self._cardinality}]"
            remedy = "The state belongs to another dataset."
            raise ValueError(explain("restore", "state", expected=expected, got=repr(state), remedy=remedy))
        if self._supplier is not None:
            self._supplier.check()
        self._stop()
        self._epoch, self._next, self._ended = epoch, following, False
        if self._set_epoch is not None:
            self._set_epoch(epoch + 1)

    def _stop(self) -> None:
        """End the thread, and drop elements that were read but not consumed."""
        if self._read_ahead is not None:
            self._read_ahead.close()
            self._read_ahead = None
        self._produce = None
        self._peeked = NOTHING


@final
class DatasetIterator(Feed):
    """One epoch of an undistributed dataset."""

    def __next__(self) -> Any:
        element = self._read() if self._peeked is NOTHING else self._peeked
        self._peeked = NOTHING
        self._next += 1
        return element

    def peek(self) -> Any:
        """Return the next element without consuming it.

        Raises:
            StopIteration: at the end.

        Example:
            >>> iterator = iter(ms.data.from_arrays(np.arange(3)))
            >>> int(iterator.peek()), int(next(iterator)), int(next(iterator))
            (0, 0, 1)
        """
        if self._peeked is NOTHING:
            self._peeked = self._read()
        return self._peeked
