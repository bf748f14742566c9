"""One pass over a dataset, with a position that can be saved and restored."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any, Protocol

from ..errors import explain
from .prefetch import Prefetcher

__all__ = ["DatasetIterator", "Elements", "PositionReader"]

_NOTHING = object()  # no element was peeked at
PATIENCE = 1e-3  # seconds: a thread takes 0.03 to 0.1 ms to hand an element over, and the node a core
_RECENT = 32  # elements over which the mean is taken; small ones come several at a time
_OUTLIERS = 2  # the slowest of them do not count: they may have met a cold page

Elements = Callable[[int, int], Iterator[Any]]  # (epoch, position) -> the elements from there on


class Supplier(Protocol):
    """What elements come from: a dataset, or the steps of a worker."""

    def check(self) -> None:
        """Raise if a source has changed; called before other elements are read than those that come next."""

    def count_wait(self, seconds: float) -> None:
        """Take note how long somebody waited for what a thread reads ahead."""


class PositionReader:
    """Reads elements one after the other, ahead of need if told to. Position and state are those of what was consumed.

    Args:
        elements: returns an iterator over an epoch's elements from a position on.
        cardinality: elements in an epoch; negative for no end, or an unknown one.
        epoch: which epoch.
        prefetch: how many elements a thread may read ahead; 0 for no thread.
        patience: start the thread when reading an element takes longer than so many seconds, on average; 0 for at once.
        same_length: whether an epoch of the same dataset is as long wherever a state of it is restored.
        supplier: what the elements come from.
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
    ) -> None:
        self._elements = elements
        self._cardinality = cardinality
        self._supplier = supplier
        self._length = {"length": cardinality} if same_length and cardinality >= 0 else {}
        self._depth = prefetch
        self._patience = patience
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds that reading took
        self._slow = patience == 0
        self._epoch = epoch
        self._next = 0
        self._produce: Callable[[], Any] | None = None
        self._prefetcher: Prefetcher | None = None
        self._peeked: Any = _NOTHING
        self._ended = False

    @property
    def epoch(self) -> int:
        """Which epoch it reads."""
        return self._epoch

    @property
    def position(self) -> int:
        """Which element is the next."""
        return self._next

    def next(self) -> Any:
        """Return the next element, or raise StopIteration."""
        element = self.peek()
        self._peeked = _NOTHING
        self._next += 1
        return element

    def peek(self) -> Any:
        """Return the next element without moving on, or raise StopIteration."""
        if self._peeked is _NOTHING:
            self._peeked = self._read()
        return self._peeked

    def _read(self) -> Any:
        if self._ended or 0 <= self._cardinality <= self._next:
            self.close()
            raise StopIteration
        if self._produce is None:
            # The prefetch thread holds the function, not this object.
            self._produce = _producer(self._elements, self._epoch, self._next)
        if self._prefetcher is None and self._depth and self._slow:
            self._prefetcher = Prefetcher(self._produce, self._depth)
            self._produce = self._prefetcher.get
        started = perf_counter()
        try:
            element = self._produce()
            seconds = perf_counter() - started
            self._recent.append(seconds)
            if seconds > self._patience and not self._slow:
                counted = sorted(self._recent)[:-_OUTLIERS]
                self._slow = sum(counted) > self._patience * max(1, len(counted))
            if self._prefetcher is not None and self._supplier is not None:
                self._supplier.count_wait(seconds)
            return element
        except BaseException as error:
            self.close()  # a generator that has raised is over: who asks again begins at this element anew
            self._ended = isinstance(error, StopIteration)
            raise

    def state(self) -> dict[str, int]:
        return {"epoch": self._epoch, "next": self._next, **self._length}

    def restore(self, state: dict[str, int]) -> None:
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
        self.close()
        self._epoch, self._next, self._ended = epoch, following, False

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        self._produce = None
        self._peeked = _NOTHING


def _producer(elements: Elements, epoch: int, start: int) -> Callable[[], Any]:
    iterator = elements(epoch, start)

    def produce() -> Any:
        try:
            return next(iterator)
        except RuntimeError as error:
            if isinstance(error.__cause__, StopIteration):  # from a mapped function: it must not look like the end
                raise RuntimeError("dataset: reading an element raised StopIteration") from error.__cause__
            raise

    return produce


class DatasetIterator(Iterator[Any]):
    """One epoch of an undistributed dataset."""

    def __init__(
        self,
        elements: Elements,
        cardinality: int,
        epoch: int,
        prefetch: int = 0,
        set_epoch: Callable[[int], None] | None = None,
        supplier: Supplier | None = None,
    ) -> None:
        self._reader = PositionReader(elements, cardinality, epoch, prefetch, supplier=supplier)
        self._set_epoch = set_epoch

    def __next__(self) -> Any:
        return self._reader.next()

    def peek(self) -> Any:
        """Return the next element without moving on.

        Raises:
            StopIteration: at the end.

        Example:
            >>> iterator = iter(ms.data.from_arrays(np.arange(3)))
            >>> int(iterator.peek()), int(next(iterator)), int(next(iterator))
            (0, 0, 1)
        """
        return self._reader.peek()

    def state(self) -> dict[str, int]:
        """Return where this iterator stands: the epoch, the next element's position, an epoch's length.

        The length is left out where it is not known.
        """
        return self._reader.state()

    def restore(self, state: dict[str, int]) -> None:
        """Go to where an iterator of the same dataset stood; its next `iter()` begins the epoch after.

        Raises:
            ValueError: for what is no state of this dataset: its epochs have another length, too.
            ShardError: for files that have changed.
        """
        self._reader.restore(state)
        if self._set_epoch is not None:
            self._set_epoch(self._reader.state()["epoch"] + 1)
