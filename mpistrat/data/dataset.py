"""Dataset: a lazily composed chain from a source of rows, through stages, to elements.

Most chains are random access. A row is addressed by (epoch, position); a stage translates addresses into those of the
stage below, and the source gathers rows. So no stage holds data, any part of any batch of any epoch can be read by
itself, and each rank of a job reads its own rows only.

What cannot know its elements before it has made those in front (a generator, a filter) reads in order: from there on
each rank makes every element and keeps its own rows, and going to a position means making all that precede it.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .. import nest
from ..errors import explain
from .iterator import DatasetIterator
from .spec import batch_spec

if TYPE_CHECKING:
    from ..comm.process_group import ProcessGroup
    from .stages.batched import Batching
    from .stats import StageStats

__all__ = ["INFINITE", "UNKNOWN", "Addresses", "Dataset"]

INFINITE = -1  # tf.data.INFINITE_CARDINALITY
UNKNOWN = -2  # tf.data.UNKNOWN_CARDINALITY

Addresses = tuple[NDArray[np.int64], NDArray[np.int64]]  # epochs and positions, one of each a row


def _count(function: str, argument: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(explain(function, argument, expected="an integer", got=repr(value))) from None
    if number < least:
        raise ValueError(explain(function, argument, expected=f"at least {least}", got=number))
    return number


class Dataset(ABC):
    """A sequence of elements: rows of a source or, after `batch`, batches of rows (TF: tf.data.Dataset).

    Datasets are immutable: each stage returns a new one. Iterating is cheap to begin; each `iter()` is the next epoch.
    An undistributed dataset gives whole global batches; `strategy.distribute_dataset` splits them over the replicas.
    """

    _epoch = 0
    counters: StageStats | None = None  # of this stage alone, where it keeps any

    # What a source or a stage says about itself.

    @property
    @abstractmethod
    def parents(self) -> tuple[Dataset, ...]:
        """The datasets that this one reads from; none for a source."""

    @property
    @abstractmethod
    def batching(self) -> Batching | None:
        """How rows were put into batches; None while elements are rows."""

    @property
    @abstractmethod
    def row_spec(self) -> Any:
        """The specs of one row of an element's arrays, without the axis of the batch."""

    @abstractmethod
    def cardinality(self) -> int:
        """Return the number of elements of one epoch; `INFINITE` without an end, or `UNKNOWN`. Not collective."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line about this stage. Not collective."""

    @abstractmethod
    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        """Return this stage over other parents, which have the same specs; a source returns itself. Not collective."""

    def bind(self, group: ProcessGroup) -> Dataset:
        """Return this chain as the ranks of a group use it; `distribute_dataset` calls it.

        It is this very dataset unless something in it shares memory with other ranks: `cache("node")` and
        `cache("job")` make that memory here. Collective where there is such a stage, else not collective.
        """
        parents = [parent.bind(group) for parent in self.parents]
        same = all(bound is parent for bound, parent in zip(parents, self.parents, strict=True))
        return self if same else self.rebuild(parents)

    # What random access asks of it.

    @property
    def random_access(self) -> bool:
        """Whether any element can be read without those in front of it: then `locate` and `gather` work."""
        return all(parent.random_access for parent in self.parents)

    def locate(self, epoch: int, position: int) -> Addresses:
        """Return the addresses of the rows that make up one element. Not collective."""
        raise NotImplementedError(f"{self.describe()} reads in order")

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        """Return the rows at addresses that `locate` gave, stacked along a first axis. Not collective."""
        raise NotImplementedError(f"{self.describe()} reads in order")

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:  # noqa: B027
        """Take note that the rows at these addresses will be gathered soon: a source may read ahead. Not collective."""

    def chunk_starts(self) -> NDArray[np.int64] | None:
        """Return where the pieces that are read as a whole begin, as row numbers, or None. Not collective.

        Behind them stands the number of rows. None means that single rows are cheap to read.
        """
        return None

    def keep(self, rows: int) -> None:  # noqa: B027
        """Take note that rows are read in windows of so many: a source keeps them decoded. Not collective."""

    # What reading in order asks of it.

    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Return an iterator over an epoch's elements from a position on. Not collective.

        A dataset that reads in order overrides it, and makes the elements before `start` for nothing.
        """
        cardinality = self.cardinality()
        position = start
        while cardinality == INFINITE or position < cardinality:
            yield self.element(epoch, position)
            position += 1

    def check(self) -> None:
        """Raise if a source has changed since it was opened; called as an epoch begins. Not collective."""
        for parent in self.parents:
            parent.check()

    # What a user does with it.

    @property
    def element_spec(self) -> Any:
        """The elements' structure with an `ArraySpec` for every array."""
        if self.batching is None:
            return self.row_spec
        return batch_spec(self.row_spec, self.batching.size if self.batching.drop_remainder else None)

    def element(self, epoch: int, position: int) -> Any:
        """Return one element of an epoch, wherever iteration stands. Not collective."""
        rows = self.gather(*self.locate(epoch, position))
        return rows if self.batching is not None else nest.map_structure(lambda leaf: leaf[0], rows)

    def rows(self, indices: ArrayLike, *, epoch: int = 0) -> Any:
        """Return the rows at some positions of an epoch's order, stacked along a first axis. Not collective.

        Args:
            indices: integers in [0, len), in any order, repeated or not.
            epoch: matters after `shuffle` only.

        Raises:
            ValueError: after `batch`, where elements are no rows.
            IndexError: for an index out of range.
        """
        if self.batching is not None:
            raise ValueError(
                explain(
                    "Dataset.rows", "", expected="a dataset of rows", got="batches", remedy="Call rows before batch."
                )
            )
        positions = np.atleast_1d(np.asarray(indices))
        if positions.size == 0:
            positions = positions.astype(np.int64)
        if positions.ndim != 1 or positions.dtype.kind not in "iu":
            got = f"{positions.dtype} of shape {positions.shape}"
            raise IndexError(explain("Dataset.rows", "indices", expected="integers in one axis", got=got))
        positions = positions.astype(np.int64)
        length = self.cardinality()
        if positions.size and (positions.min() < 0 or (length != INFINITE and positions.max() >= length)):
            got = f"{positions.min()} to {positions.max()}"
            raise IndexError(explain("Dataset.rows", "indices", expected=f"integers in [0, {length})", got=got))
        return self.gather(np.full(positions.size, epoch, np.int64), positions)

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` of this dataset begin that epoch. Not collective; do it on every rank alike."""
        self._epoch = _count("Dataset.set_epoch", "epoch", epoch, 0)

    def __iter__(self) -> DatasetIterator:
        self.check()
        iterator = DatasetIterator(self.elements, self.cardinality(), self._epoch)
        self._epoch += 1
        return iterator

    def __len__(self) -> int:
        length = self.cardinality()
        if length < 0:
            why = "is repeated without end" if length == INFINITE else "reads in order"
            raise TypeError(f"Dataset: len: the dataset {why} and has no length")
        return length

    def __bool__(self) -> bool:
        return True  # else an endless dataset has no truth value

    def __str__(self) -> str:
        if not self.parents:
            return self.describe()
        above = "\n".join(str(parent) for parent in self.parents)
        depth = above.splitlines()[-1]
        indent = len(depth) - len(depth.lstrip(" └─"))
        return f"{above}\n{' ' * indent}└─ {self.describe()}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"

    # The stages.

    def shuffle(self, *, seed: int, reshuffle_each_epoch: bool = True) -> Dataset:
        """Put all elements into a random order that depends on the seed and the epoch only. Not collective.

        Every element may land anywhere, and no table is held. The same seed gives the same order on any number of
        ranks.

        Args:
            seed: any integer, the same on every rank.
            reshuffle_each_epoch: whether every epoch has an order of its own.

        Raises:
            ValueError: for a dataset that is repeated without end.
        """
        from .stages.reindexed import Reindexed, Shuffle

        if self.cardinality() == INFINITE:
            raise ValueError(
                "Dataset.shuffle: expected a dataset with an end, got one repeated for ever: shuffle first"
            )
        try:
            seed = operator.index(seed)
        except TypeError:
            remedy = "All ranks must name the same seed."
            raise TypeError(
                explain("Dataset.shuffle", "seed", expected="an integer", got=repr(seed), remedy=remedy)
            ) from None
        return Reindexed(self, Shuffle(seed, bool(reshuffle_each_epoch)))

    def batch(self, global_batch_size: int, *, drop_remainder: bool = False) -> Dataset:
        """Put successive rows into batches, the batches of all replicas together. Not collective.

        Args:
            global_batch_size: rows in a batch; the last batch may have fewer.
            drop_remainder: leave a smaller last batch out.

        Raises:
            ValueError: for a size below 1, and for a dataset that is batched already.
        """
        from .stages.batched import Batched, Batching

        if self.batching is not None:
            raise ValueError("Dataset.batch: expected a dataset of rows, got one that is batched already")
        size = _count("Dataset.batch", "global_batch_size", global_batch_size, 1)
        return Batched(self, Batching(size, bool(drop_remainder)))

    def map(self, function: Callable[..., Any]) -> Dataset:
        """Apply a function to every element; a tuple is passed as several arguments. Not collective.

        Before `batch` it is called once a row, with arrays as the row has them; after `batch` once a batch, which is
        much quicker. Under a distributed dataset a "batch" is what this rank has of it, so there the function must
        treat each row by itself and keep their number.

        Args:
            function: returns the new element, a nest of arrays or numbers. It is also called once on the first row, to
                learn the element's spec, and never on zero rows unless the dataset is empty.
        """
        from .stages.mapped import Mapped

        if not callable(function):
            raise TypeError(explain("Dataset.map", "function", expected="a callable", got=repr(function)))
        return Mapped(self, function)

    def enumerate(self) -> Dataset:
        """Put each row's position in front: elements are (int64 index, element). Not collective.

        Right after the source, the index names the sample whatever comes later, as `ms.random.rng(sample=…)` needs.

        Raises:
            ValueError: for a dataset that is batched already.
        """
        from .stages.enumerated import Enumerated

        if self.batching is not None:
            raise ValueError("Dataset.enumerate: expected a dataset of rows, got batches: enumerate before batch")
        return Enumerated(self)

    def take(self, count: int) -> Dataset:
        """Keep the first `count` elements. Not collective."""
        from .stages.reindexed import Reindexed, Take

        return Reindexed(self, Take(_count("Dataset.take", "count", count, 0)))

    def skip(self, count: int) -> Dataset:
        """Leave out the first `count` elements. Not collective."""
        from .stages.reindexed import Reindexed, Skip

        return Reindexed(self, Skip(_count("Dataset.skip", "count", count, 0)))

    def repeat(self, count: int | None = None) -> Dataset:
        """Give the elements `count` times, each pass an epoch of what is below; None for ever. Not collective."""
        from .stages.reindexed import Reindexed, Repeat

        return Reindexed(self, Repeat(None if count is None else _count("Dataset.repeat", "count", count, 0)))
