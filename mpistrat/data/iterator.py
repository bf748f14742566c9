"""One pass over a random-access dataset, with a position that can be saved and restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..errors import explain
from .prefetch import Prefetcher

__all__ = ["DatasetIterator", "PositionReader"]


class PositionReader:
    """Reads elements one after the other, ahead of need if told to. Position and state are those of what was consumed.

    Args:
        read: returns the element at (epoch, position).
        cardinality: elements in an epoch; negative for no end.
        epoch: which epoch.
        prefetch: how many elements a thread may read ahead; 0 for no thread.
    """

    def __init__(self, read: Callable[[int, int], Any], cardinality: int, epoch: int, prefetch: int) -> None:
        self._read = read
        self._cardinality = cardinality
        self._depth = prefetch
        self._epoch = epoch
        self._next = 0
        self._prefetcher: Prefetcher | None = None

    def _producer(self) -> Callable[[], Any]:
        """A function without a reference to this object: the thread holds it."""
        read, epoch, cardinality = self._read, self._epoch, self._cardinality
        position = self._next

        def produce() -> Any:
            nonlocal position
            if 0 <= cardinality <= position:
                raise StopIteration
            element = _read_element(read, epoch, position)
            position += 1
            return element

        return produce

    def next(self) -> Any:
        """Return the next element, or raise StopIteration."""
        if 0 <= self._cardinality <= self._next:
            self.close()
            raise StopIteration
        if self._depth == 0:
            element = _read_element(self._read, self._epoch, self._next)
        else:
            if self._prefetcher is None:
                self._prefetcher = Prefetcher(self._producer(), self._depth)
            element = self._prefetcher.get()
        self._next += 1
        return element

    def state(self) -> dict[str, int]:
        return {"epoch": self._epoch, "next": self._next}

    def restore(self, state: dict[str, int]) -> None:
        try:
            epoch, following = int(state["epoch"]), int(state["next"])
        except (KeyError, TypeError, ValueError):
            raise ValueError(
                explain("restore", "state", expected='{"epoch": int, "next": int}, from state()', got=repr(state))
            ) from None
        if epoch < 0 or following < 0 or 0 <= self._cardinality < following:
            expected = f"an epoch of at least 0 and a position in [0, {self._cardinality}]"
            remedy = "The state belongs to another dataset."
            raise ValueError(explain("restore", "state", expected=expected, got=repr(state), remedy=remedy))
        self.close()
        self._epoch, self._next = epoch, following

    def close(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None


def _read_element(read: Callable[[int, int], Any], epoch: int, position: int) -> Any:
    try:
        return read(epoch, position)
    except StopIteration as error:  # from a mapped function: it must not look like the end (PEP 479)
        raise RuntimeError(f"dataset: reading element {position} raised StopIteration") from error


class DatasetIterator(Iterator[Any]):
    """One epoch of an undistributed dataset. Not collective."""

    def __init__(self, read: Callable[[int, int], Any], cardinality: int, epoch: int) -> None:
        self._reader = PositionReader(read, cardinality, epoch, prefetch=0)

    def __next__(self) -> Any:
        return self._reader.next()

    def state(self) -> dict[str, int]:
        """Return where this iterator stands: the epoch and the next element's position. Not collective."""
        return self._reader.state()

    def restore(self, state: dict[str, int]) -> None:
        """Go to where an iterator of the same dataset stood. Not collective.

        Raises:
            ValueError: for what is no state of this dataset.
        """
        self._reader.restore(state)
