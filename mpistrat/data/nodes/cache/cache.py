"""Elements cached in memory on first reading: by each rank, or by the ranks of a node or job together."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, final

import numpy as np
from numpy.typing import NDArray

from ....base import log, nest
from ....base.errors import explain
from ....base.text import decimal_size
from ...memory_limit import available_memory, require_memory
from ...spec import is_ragged
from ...stats import StageStats
from ..batch import require_end
from ..node import Addresses, Below, Node, Traits
from ..stage import Stage
from .fill import Claims, FilledMemory, node_memory
from .job import job_memory
from .rows import ParentRows, RowChunks, RowMemory

if TYPE_CHECKING:
    from ....comm.process_group import ProcessGroup

__all__ = ["Cached", "CachedInOrder", "Scope", "Transport", "cache"]

Scope = Literal["rank", "node", "job"]
Transport = Literal["auto", "messages", "get"]

FUNCTION = "Dataset.cache"


def cache(
    parent: Node, scope: Scope = "rank", *, transport: Transport = "auto", folder: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> Node:  # fmt: skip
    """Cache the elements in memory once they have been read (TF: tf.data.Dataset.cache); or the files on a disk.

    The cache has the elements of epoch 0: a shuffle or random map below keeps its order and values of that epoch. Shuffle
    after the cache, where any order is cheap. A dataset that reads in order is cached in its first complete epoch.

    Args:
        scope: the ranks that share a cache. "rank": each rank caches the rows it reads. "node": the ranks of a node share
            memory; one of them reads each chunk. "job": the ranks of all nodes together; each reads its share when the
            dataset is distributed, and later epochs read no files. `strategy.distribute_dataset` allocates the memory of
            "node" and "job", and is collective then; closing the strategy frees it. They need random access and rows of
            one shape, and the whole dataset must fit: nothing is evicted.
        transport: the transfer of rows between nodes for "job": "messages", which a thread of each rank answers; "get",
            MPI's one-sided Get; "auto" uses "get" if a probe at distribution shows that the network reads memory without
            its owner's help, else "messages".
        folder: for "node" right after a source of files: a folder on a disk of the node, into which the files are copied now,
            once for all ranks, as by `ms.data.download`; the result reads the copies. A job that starts again uses them.
        limit: the most bytes of all copies in the folder; None for what the disk has room for.

    Raises:
        ShardError: files cannot be copied.
        ValueError: for an endless dataset; for "node" and "job", one that reads in order.
        MemoryError: with the numbers, if memory is too small; at the first read or at distribution.

    Example:
        >>> dataset = ms.data.from_arrays(np.arange(4)).map(lambda x: x * x).cache()
        >>> [int(x) for x in dataset], sorted(int(x) for x in dataset.shuffle(seed=2))
        ([0, 1, 4, 9], [0, 1, 4, 9])
    """
    file: object = scope
    if file == "":  # TensorFlow's name for a cache in memory
        scope = "rank"
    elif isinstance(file, str) and ("/" in file or "." in file):
        remedy = "Write the rows with ms.data.write_shards, and read them with HDF5Dataset."
        expected = "none: caches are in memory"
        raise ValueError(explain(FUNCTION, "filename", expected=expected, got=repr(scope), remedy=remedy))
    if folder is not None or limit is not None:
        if folder is None or scope != "node" or parent.files is None:
            expected = 'folder= with cache("node"), right after a source of files, such as HDF5Dataset'
            got = f"cache({scope!r}, folder={folder!r}, limit={limit}) of {parent.describe()}"
            raise ValueError(explain(FUNCTION, "folder", expected=expected, got=got))
        return parent.files.copied(folder, limit)
    for argument, value, legal in (
        ("scope", scope, ("rank", "node", "job")),
        ("transport", transport, ("auto", "messages", "get")),
    ):
        if value not in legal:
            expected = ", ".join(map(repr, legal))
            raise ValueError(explain(FUNCTION, argument, expected=f"one of {expected}", got=repr(value)))
    require_end(FUNCTION, parent, "Call repeat after cache.")
    by_rows = parent.random_access
    if by_rows and parent.batching is not None:  # padded to the longest in the batch: rows differ in shape
        by_rows = not any(is_ragged(leaf) for leaf in nest.flatten(parent.row_spec))
    if by_rows:
        return Cached(parent, scope, transport)
    if scope != "rank":
        got = f"{parent.describe()}, which reads in order"
        remedy = "Use cache(), which each rank fills for itself, or call cache before it."
        expected = f"a dataset with random access for cache({scope!r})"
        raise ValueError(explain(FUNCTION, "", expected=expected, got=got, remedy=remedy))
    return CachedInOrder(parent)


class CacheMemory(Protocol):
    """The memory of cached rows."""

    def take(self, numbers: NDArray[np.int64]) -> Any:
        """Return copies of rows, stacked; read missing ones first."""

    def describe(self) -> str:
        """Return the size and place of the memory."""


@final
class Cached(Stage):
    """Rows with random access, cached as in epoch 0.

    Args:
        scope: the ranks that share the cache.
        transport: the transfer between the nodes of a job.
        group: the ranks that share memory, allocated at once, collectively; None allocates memory of this process at first use.
        sharers: the number of this node's ranks that cache equally much.
    """

    def __init__(
        self, parent: Node, scope: Scope, transport: Transport, group: ProcessGroup | None = None, sharers: int = 1
    ) -> None:
        super().__init__(parent)
        self._scope, self._transport, self._sharers = scope, transport, sharers
        self._shared = group is not None
        self._source: ParentRows | None = None
        self._lock = threading.Lock()
        self._bound: tuple[ProcessGroup, Cached] | None = None
        self._counters = StageStats()
        self._memory: CacheMemory | None = None if group is None else self._of_group(group)

    @property
    def counters(self) -> StageStats:
        return self._counters

    @property
    def traits(self) -> Traits:
        below = self._parent.traits
        return below if self._scope == "rank" else below._replace(shares_memory=True)

    def _rows(self) -> ParentRows:
        if self._source is None:
            self._source = ParentRows(self._parent)
        return self._source

    def _open(self) -> CacheMemory:
        memory = self._memory
        if memory is None:
            with self._lock:
                if self._memory is None:
                    self._memory = self._of_rank()
                memory = self._memory
        return memory

    def _of_rank(self) -> FilledMemory:
        source, sharers = self._rows(), self._sharers
        nbytes = RowMemory.nbytes(source.row_spec, source.count)
        what = f"{source.count} rows" + (f" in each of the node's {sharers} ranks" if sharers > 1 else "")
        remedy = 'Use cache("node") or cache("job") to share it, or leave cache out.'
        require_memory(FUNCTION, nbytes * sharers, available_memory(), what, remedy)
        chunks = RowChunks.of(source, 0)
        claims = Claims(np.zeros(chunks.count, np.int16))
        memory = RowMemory(source.row_spec, source.count)
        return FilledMemory(source, memory, chunks, claims, self._counters, f"{decimal_size(nbytes)} in memory")

    def locate(self, epoch: int, position: int) -> Addresses:
        numbers = self._rows().numbers(position)
        return np.full(numbers.size, epoch, np.int64), numbers

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        return []  # known at gathering only: any rank may read a missing row

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        return self._open().take(positions)

    def keep(self, rows: int) -> None:
        """Do nothing: chunks are read once, whole."""

    def bind(self, group: ProcessGroup) -> Node:
        """Allocate the memory that the ranks share. Collective, except for scope "rank"."""
        if self._shared:
            return self
        if self._bound is not None and self._bound[0] is group:
            return self._bound[1]
        parent = self._parent.bind(group)
        if self._scope != "rank":
            bound = Cached(parent, self._scope, self._transport, group)
        else:
            self._sharers = len(group.topology.ranks_of_node(group.topology.node_index))
            bound = self if parent is self._parent else Cached(parent, "rank", self._transport, sharers=self._sharers)
        self._bound = group, bound
        return bound

    def _of_group(self, group: ProcessGroup) -> CacheMemory:
        source = self._rows()
        for name, leaf in zip(nest.paths(source.row_spec), nest.flatten(source.row_spec), strict=True):
            if is_ragged(leaf) or leaf.dtype.hasobject:
                got = f"{leaf}{name and ' at ' + name}"
                remedy = "Use cache(), which each rank fills for itself."
                expected = f"rows of one shape, of numbers, for cache({self._scope!r})"
                raise ValueError(explain(FUNCTION, "", expected=expected, got=got, remedy=remedy))
        if self._scope == "node":
            return node_memory(source, group, self._counters)
        return job_memory(source, group, self._transport, self._counters)

    def rebuild(self, parents: Sequence[Node]) -> Node:
        if parents[0] is self._parent:
            return self
        if self._shared:
            got = "different rows, as under AutoShardPolicy.FILE and HINT"
            remedy = "Use AutoShardPolicy.DATA, or cache()."
            expected = f"the same rows below cache({self._scope!r}) on every rank"
            raise ValueError(explain("distribute_dataset", "dataset", expected=expected, got=got, remedy=remedy))
        return Cached(parents[0], self._scope, self._transport, sharers=self._sharers)

    def fingerprint(self) -> str:
        return f"{self._scope} {self._transport}"

    def describe(self) -> str:
        name = "cache()" if self._scope == "rank" else f'cache("{self._scope}")'
        if self._memory is not None:
            return f"{name}: {self._memory.describe()}"
        return f"{name}: nothing read yet" if self._scope == "rank" else f"{name}: not distributed yet"


@final
class CachedInOrder(Stage):
    """Elements of a dataset that reads in order, cached in the first complete epoch."""

    random_access = False

    def __init__(self, parent: Node) -> None:
        super().__init__(parent)
        self._kept: list[Any] | None = None
        self._counters = StageStats()

    @property
    def counters(self) -> StageStats:
        return self._counters

    def below(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> list[Below]:
        return []

    def _in_order(self, epoch: int, start: int) -> Iterator[Any]:
        kept = self._kept
        return self._first_epoch(start) if kept is None else (_copy(element) for element in kept[start:])

    def _first_epoch(self, start: int) -> Iterator[Any]:
        seen: list[Any] = []
        length = self._parent.cardinality()
        since_check, complete = 0, False
        try:
            for position, element in enumerate(self._parent.elements(0)):
                kept = _copy(element)
                seen.append(kept)
                self._counters.add(rows=1)
                since_check += _nbytes(kept)
                if since_check > _CHECK_BYTES:
                    since_check = 0
                    _check_memory(len(seen))
                if len(seen) == length:  # a reader that knows the length does not read on to the end
                    complete, self._kept = True, seen
                if position >= start:
                    yield element
            complete, self._kept = True, seen
        finally:
            if not complete and seen and self._kept is None:
                log.once(
                    logging.WARNING,
                    "cache(): an epoch ended before the dataset did; the cached elements are dropped, and the next epoch reads "
                    "them again. Use take after cache only once the whole dataset has been read",
                )

    def rebuild(self, parents: Sequence[Node]) -> Node:
        return self if parents[0] is self._parent else CachedInOrder(parents[0])

    def fingerprint(self) -> str:
        return "rank"

    def describe(self) -> str:
        if self._kept is None:
            return "cache(): no complete epoch yet"
        return f"cache(): {len(self._kept)} elements, {decimal_size(sum(map(_nbytes, self._kept)))} in memory"


_CHECK_BYTES = 64 << 20


def _check_memory(count: int) -> None:
    available = available_memory()
    remedy = "The cache of a dataset that reads in order grows with it; leave cache out."
    require_memory(FUNCTION, _CHECK_BYTES, available, f"the elements after the {count} cached ones", remedy)


def _copy(element: Any) -> Any:
    """Return a copy, so that a user's changes do not reach the cached element."""
    return nest.map_structure(lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf, element)


def _nbytes(element: Any) -> int:
    return sum(leaf.nbytes if isinstance(leaf, (np.ndarray, np.generic)) else 64 for leaf in nest.flatten(element))
