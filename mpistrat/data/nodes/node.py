"""What every source and every stage of a chain of datasets says about itself, and how it is read.

Most chains are random access. A row is addressed by (epoch, position); a stage translates addresses into those of the
stage below, and the source gathers rows. So no stage holds data, any part of any batch of any epoch can be read by
itself, and each rank of a job reads its own rows only.

What cannot know its elements before it has made those in front (a generator, a filter) reads in order: from there on
each rank makes every element and keeps its own rows, and going to a position means making all that precede it.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from ..._util import nest
from ..look_ahead import LookAhead
from ..options import Options
from ..spec import batch_spec, unstack_rows
from ..successive import successive_batches

if TYPE_CHECKING:
    from ...comm.process_group import ProcessGroup
    from ..dataset import Dataset
    from ..stats import StageStats
    from .batch import Batching

__all__ = ["INFINITE", "UNKNOWN", "Addresses", "Chain", "Source"]

INFINITE = -1  # tf.data.INFINITE_CARDINALITY
UNKNOWN = -2  # tf.data.UNKNOWN_CARDINALITY

Addresses = tuple[NDArray[np.int64], NDArray[np.int64]]  # epochs and positions, one of each a row
Source = tuple["Chain", NDArray[np.int64], NDArray[np.int64]]  # who makes rows, and their addresses there

_ROWS = 64  # single rows that are read together where they are asked for one after the other


def _addresses(epoch: int, start: int, stop: int) -> Addresses:
    positions = np.arange(start, stop, dtype=np.int64)
    return np.full(positions.size, epoch, np.int64), positions


class Chain(ABC):
    """The part of a Dataset that sources and stages define."""

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
        """Return the number of elements of one epoch; `INFINITE` without an end, or `UNKNOWN`."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line about this stage."""

    @abstractmethod
    def rebuild(self, parents: Sequence[Dataset]) -> Dataset:
        """Return this stage over other parents, which have the same specs; a source returns itself."""

    def bind(self, group: ProcessGroup) -> Dataset:
        """Return this chain as the ranks of a group use it. Collective where a cache shares memory, else not.

        `distribute_dataset` calls it. It is this very dataset unless something in it shares memory with other ranks:
        `cache("node")` and `cache("job")` make that memory here.
        """
        parents = [parent.bind(group) for parent in self.parents]
        same = all(bound is parent for bound, parent in zip(parents, self.parents, strict=True))
        return cast("Dataset", self) if same else self.rebuild(parents)

    @property
    def shares_memory(self) -> bool:
        """Whether something in this chain shares memory with other ranks, which `bind` makes."""
        return any(parent.shares_memory for parent in self.parents)

    @property
    def counters(self) -> StageStats | None:
        """What this stage alone has done so far; None where it does not count."""
        return None

    @property
    def deterministic(self) -> bool:
        """Whether an epoch's elements come in the same order every time: all but a `map` that was told otherwise."""
        return all(parent.deterministic for parent in self.parents)

    @property
    def calls_functions(self) -> bool:
        """Whether a function of the user's makes elements of this chain."""
        return any(parent.calls_functions for parent in self.parents)

    @property
    def prefetch_depth(self) -> int | None:
        """How many elements are to be read ahead, as `prefetch` says; None where nothing says it."""
        depths = [parent.prefetch_depth for parent in self.parents]
        return max((depth for depth in depths if depth is not None), default=None)

    @property
    def shard_hinted(self) -> bool:
        """Whether a `shard` of this chain has SHARD_HINT for a number."""
        return any(parent.shard_hinted for parent in self.parents)

    def with_shard(self, num_shards: int, index: int) -> Dataset:
        """Return this chain with these numbers in every `shard` that has SHARD_HINT."""
        return self.rebuild([parent.with_shard(num_shards, index) for parent in self.parents])

    def options(self) -> Options:
        """Return what `with_options` has said about this chain (TF: tf.data.Dataset.options)."""
        merged = Options()
        for parent in self.parents:
            merged = merged.merge(parent.options())
        return merged

    # What random access asks of it.

    @property
    def random_access(self) -> bool:
        """Whether any element can be read without those in front of it: then `locate` and `gather` work."""
        return all(parent.random_access for parent in self.parents)

    def locate(self, epoch: int, position: int) -> Addresses:
        """Return the addresses of the rows that make up one element."""
        raise NotImplementedError(f"{self.describe()} reads in order")

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        """Return the rows at addresses that `locate` gave, stacked along a first axis."""
        raise NotImplementedError(f"{self.describe()} reads in order")

    def source(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Source:
        """Return the dataset below that makes the rows at some addresses, and their addresses there.

        Gathering there gives the same: stages that only put rows into another order pass the question on.
        """
        return self, epochs, positions

    def locality(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return a number in [0, LOCALITIES) for each row, near for rows of the same chunks, or None.

        A batch whose rows are sorted by it can be cut into parts that need few chunks each. It depends on an address
        only, and is None for all of them where no shuffle puts the rows of chunks apart.
        """
        return None

    def expect(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> None:  # noqa: B027
        """Take note that the rows at these addresses will be gathered soon: a source may read ahead."""

    def chunk_starts(self) -> NDArray[np.int64] | None:
        """Return where the pieces that are read as a whole begin, as row numbers, or None.

        Behind them stands the number of rows. None means that single rows are cheap to read.
        """
        return None

    def keep(self, rows: int) -> None:  # noqa: B027
        """Take note that rows are read in windows of so many: a source keeps them decoded."""

    # What reading in order asks of it.

    def elements(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Return an iterator over an epoch's elements from a position on."""
        if not self.random_access:
            return self._in_order(epoch, start)
        if self.batching is not None:
            # No generator: it would hold a batch.
            return map(operator.itemgetter(1), successive_batches(self, epoch, start))
        return self._successive_rows(epoch, start)

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        """The same without random access: the elements before `start` are made for nothing."""
        raise NotImplementedError(f"{self.describe()} needs random access")

    def _successive_rows(self, epoch: int, start: int) -> Iterator[Any]:
        """The same, of rows with random access."""
        length = self.cardinality()
        position, together = start, 1
        ahead = LookAhead(self)
        while length < 0 or position < length:
            stop = position + together if length < 0 else min(position + together, length)
            ahead.rows(_addresses(epoch, stop, stop + _ROWS if length < 0 else min(stop + _ROWS, length)))
            try:
                rows = unstack_rows(self.gather(*_addresses(epoch, position, stop)))
            except Exception:
                if together == 1:
                    raise
                together = 1  # the rows in front of the one that raises come first
                continue
            yield from rows
            position, together = stop, min(2 * together, _ROWS)

    def check(self) -> None:
        """Raise if a source has changed since it was opened; called as an epoch or a pass begins."""
        for parent in self.parents:
            parent.check()

    def count_wait(self, seconds: float) -> None:
        """Take note how long somebody waited for what a thread reads ahead; the last `prefetch` counts."""
        for parent in self.parents:
            parent.count_wait(seconds)

    # What follows from that.

    @property
    def element_spec(self) -> Any:
        """The elements' structure with an `ArraySpec` for every array."""
        if self.batching is None:
            return self.row_spec
        return batch_spec(self.row_spec, self.batching.size if self.batching.drop_remainder else None)

    def element(self, epoch: int, position: int) -> Any:
        """Return one element of an epoch, wherever iteration stands."""
        self.check()
        if not self.random_access:
            return next(self.elements(epoch, position))
        rows = self.gather(*self.locate(epoch, position))
        return rows if self.batching is not None else nest.map_structure(lambda leaf: leaf[0], rows)

    def __str__(self) -> str:
        if not self.parents:
            return self.describe()
        if len(self.parents) > 1:
            marks = ["┌─ ", *["├─ "] * (len(self.parents) - 1)]
            drawn = [mark + str(each).replace("\n", "\n│  ") for mark, each in zip(marks, self.parents, strict=True)]
            return "\n".join([*drawn, f"└─ {self.describe()}"])
        above = str(self.parents[0])
        last = above.splitlines()[-1]
        indent = len(last) - len(last.lstrip(" └─"))
        return f"{above}\n{' ' * indent}└─ {self.describe()}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.describe()}>"
