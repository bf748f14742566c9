"""Dataset: what users hold of a chain of nodes, from a source of rows to elements. How chains work: nodes/node.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from .._util import nest
from .._util.arguments import integer, tensorflow_names
from ..errors import explain
from .feed.feed import DatasetIterator
from .nodes.batch import Batched, Padded, Padding, Unbatched
from .nodes.cache.cache import cache
from .nodes.calls import Calls
from .nodes.combine import Concatenate, Interleaved, Joined, Zipped
from .nodes.map import Enumerated, Filtered, Mapped
from .nodes.node import INFINITE, Batching, Node
from .nodes.order import Configured, Prefetched, Reindexed, Repeat, Shard, Skip, Take, options_of
from .nodes.sample import sampled
from .nodes.shuffle import shuffled
from .nodes.sources import array_rows, generated, plain_lists
from .nodes.stage import gather_rows
from .options import AUTOTUNE, SHARD_HINT, Options, number_of_calls
from .spec import batch_spec

__all__ = ["Dataset"]


def _callable(function: str, argument: str, value: Any) -> None:
    if not callable(value):
        raise TypeError(explain(function, argument, expected="a callable", got=repr(value)))


def _nodes(function: str, datasets: Sequence[Any]) -> list[Node]:
    for value in datasets:
        if not isinstance(value, Dataset):
            raise TypeError(explain(function, "datasets", expected="Datasets", got=type(value).__name__))
    if not datasets:
        raise ValueError(explain(function, "datasets", expected="at least one Dataset", got="none"))
    return [dataset.node for dataset in datasets]


class Dataset:
    """A sequence of elements: rows of a source or, after `batch`, batches of rows (TF: tf.data.Dataset).

    Datasets are immutable: each stage returns a new one. Iterating is cheap to begin; each `iter()` is the next epoch.
    An undistributed dataset gives whole global batches; `strategy.distribute_dataset` splits them over the replicas.

    Arguments stand in tf.data's order, and may carry its names: `batch_size` for global_batch_size, `map_func` for
    function, `reshuffle_each_iteration` for reshuffle_each_epoch. `name` is taken and not used.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self._epoch = 0

    def rows(self, indices: ArrayLike, *, epoch: int = 0) -> Any:
        """Return the rows at some positions of an epoch's order, stacked along a first axis.

        Args:
            indices: integers in [0, len), in any order, repeated or not.
            epoch: matters after `shuffle` only.

        Raises:
            ValueError: after `batch`, where elements are no rows, and for a dataset that reads in order.
            IndexError: for an index out of range.
            ShardError: for files that have changed.
        """
        return gather_rows(self.node, indices, epoch)

    def set_epoch(self, epoch: int) -> None:
        """Make the next `iter()` of this dataset begin that epoch. Do it on every rank alike."""
        self._epoch = integer("Dataset.set_epoch", "epoch", epoch, 0)

    def __iter__(self) -> DatasetIterator:
        self.node.check()
        depth = self.node.prefetch_depth or 0
        iterator = DatasetIterator(
            self.node.elements, self.cardinality(), self._epoch, depth, supplier=self.node, set_epoch=self.set_epoch
        )
        self._epoch += 1
        return iterator

    def __len__(self) -> int:
        length = self.cardinality()
        if length < 0:
            why = "is repeated without end" if length == INFINITE else "reads in order, to an end that is not known"
            raise TypeError(f"Dataset: len: the dataset {why}, and has no length: ask cardinality()")
        return length

    def __bool__(self) -> bool:
        return True  # else an endless dataset has no truth value

    def cardinality(self) -> int:
        """Return the number of elements of one epoch; `INFINITE` without an end, or `UNKNOWN`."""
        return self.node.cardinality()

    @property
    def element_spec(self) -> Any:
        """The elements' structure with an `ArraySpec` for every array."""
        spec, batching = self.node.row_spec, self.node.batching
        return spec if batching is None else batch_spec(spec, batching.size if batching.drop_remainder else None)

    def element(self, epoch: int, position: int) -> Any:
        """Return one element of an epoch, wherever iteration stands."""
        self.node.check()
        if not self.node.random_access:
            return next(self.node.elements(epoch, position))
        rows = self.node.gather(*self.node.locate(epoch, position))
        return rows if self.node.batching is not None else nest.map_structure(lambda leaf: leaf[0], rows)

    def options(self) -> Options:
        """Return what `with_options` has said about this dataset (TF: tf.data.Dataset.options)."""
        return options_of(self.node)

    def describe(self) -> str:
        """Return one line about the last operator, or the source."""
        return self.node.describe()

    def __str__(self) -> str:
        return str(self.node)

    def __repr__(self) -> str:
        return repr(self.node)

    # The operators.

    @tensorflow_names(reshuffle_each_iteration="reshuffle_each_epoch")
    def shuffle(
        self, buffer_size: int | None = None, seed: int | None = None, reshuffle_each_epoch: bool = True, *,
        mode: str = "auto", window_bytes: int | None = None,
    ) -> Dataset:  # fmt: skip
        """Put all elements into a random order that depends on the seed and the epoch only.

        No table of elements is held, and the same seed gives the same order on any number of ranks. A full shuffle may
        put every element anywhere. A block shuffle puts the chunks of the data (64 elements where it has none) into a
        random order, and the elements into a random order inside windows of successive chunks: each chunk is read
        once, and two windows are held. A dataset that reads in order is mixed as far as a buffer reaches, as TF does.

        Args:
            buffer_size: elements in a window, or in the buffer; a full shuffle needs none.
            seed: any integer, the same on every rank. None is 0, in every run: all ranks agree on it, and a job that goes
                on after an interruption finds the order it had. (TensorFlow draws another one for each run.)
            reshuffle_each_epoch: whether every epoch has an order of its own.
            mode: "full", "block", or "auto": full where single rows are cheap to read, else (compressed data) block.
            window_bytes: the size of a window in bytes, instead of `buffer_size`; 64 MiB where neither is given.

        Raises:
            ValueError: for a dataset that is repeated without end, for one that reads in order without a buffer_size,
                and for a window where mode="full" has none.

        Example:
            >>> rows = ms.data.from_arrays(np.arange(6)).shuffle(seed=1)
            >>> sorted(int(row) for row in rows)
            [0, 1, 2, 3, 4, 5]
        """
        return Dataset(shuffled(self.node, buffer_size, seed, bool(reshuffle_each_epoch), mode, window_bytes))

    @tensorflow_names(batch_size="global_batch_size")
    def batch(
        self, global_batch_size: int, drop_remainder: bool = False, num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:  # fmt: skip
        """Put successive rows into batches, the batches of all replicas together.

        Args:
            global_batch_size: rows in a batch; the last batch may have fewer.
            drop_remainder: leave a smaller last batch out.
            num_parallel_calls, deterministic: taken as tf.data does, without effect: batches come in order, and their
                rows are read together.

        Raises:
            ValueError: for a size below 1, and for a dataset that is batched already.
        """
        self._refuse_batches("batch")
        number_of_calls("Dataset.batch", num_parallel_calls)
        size = integer("Dataset.batch", "global_batch_size", global_batch_size, 1)
        return Dataset(Batched(self.node, Batching(size, bool(drop_remainder))))

    @tensorflow_names(batch_size="global_batch_size")
    def padded_batch(
        self, global_batch_size: int, padded_shapes: Any = None, padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Dataset:  # fmt: skip
        """Put successive rows that differ in shape into batches, padded to one shape.

        Where the longest row of the batch decides on a shape, every rank reads the whole batch to make its part of it:
        under several ranks whole `padded_shapes` are quicker.

        Args:
            global_batch_size: rows in a batch; the last batch may have fewer.
            padded_shapes: a nest of shapes, one an array; None (or -1) for the longest of the batch.
            padding_values: a nest of values, or one for all arrays; None for 0 and "".
            drop_remainder: leave a smaller last batch out.

        Raises:
            ValueError: for shapes and values that do not fit the rows, then and when a row turns out to be longer.

        Example:
            >>> spec = ms.data.ArraySpec((None,), np.int64)
            >>> words = ms.data.from_generator(lambda: iter([np.array([1, 2]), np.array([3])]), spec)
            >>> next(iter(words.padded_batch(2))).tolist()
            [[1, 2], [3, 0]]
        """
        self._refuse_batches("padded_batch")
        size = integer("Dataset.padded_batch", "global_batch_size", global_batch_size, 1)
        batching, padding = Batching(size, bool(drop_remainder)), Padding(padded_shapes, padding_values)
        return Dataset(Padded(self.node, batching, padding))

    @tensorflow_names()
    def unbatch(self) -> Dataset:
        """Take batches apart into rows; arrays that are no batches along their first axis.

        Right after `batch` it keeps random access; else the rows are read in order, and an iterator that is restored
        makes those before its position again.
        """
        return Dataset(Unbatched(self.node))

    @tensorflow_names(map_func="function")
    def map(
        self, function: Callable[..., Any], num_parallel_calls: int | None = None, deterministic: bool | None = None, *,
        processes: bool = False, element_spec: Any = None,
    ) -> Dataset:  # fmt: skip
        """Apply a function to every element; a tuple is passed as several arguments.

        Before `batch` it is called once a row, with arrays as the row has them; after `batch` once a batch, which is
        much quicker. Under a distributed dataset a "batch" is what this rank has of it, so there the function must
        treat each row by itself and keep their number.

        An error that the function raises arrives with its traceback and a note of the element's position, after the
        elements in front of it, for which the function may have been called twice then.

        Args:
            function: returns the new element, a nest of arrays, numbers or strings. It is also called once on the first
                row, to learn the element's spec, and never on zero rows unless the dataset is empty.
            num_parallel_calls: None calls it in the thread that reads. A number gives it a pool of that many threads,
                which rows of a batch, or batches that are read in order, are spread over; AUTOTUNE as many as this rank has
                cores, at most 8.
            deterministic: False lets elements that are read in order come as they are ready; an iterator's state is
                then not exact, and ranks would not agree on the order, so such a dataset cannot be distributed.
            processes: make the calls in that many processes (None: one) instead of threads. They start once a dataset,
                end with it, and are kept away from MPI. The function must be one that can be pickled, and the main
                program needs `if __name__ == "__main__":`.
            element_spec: the spec of one row of the result, a nest of `ArraySpec`, if the first row does not tell it:
                None in a shape for a length that varies (see `padded_batch`).

        Raises:
            TypeError: for what cannot be called, or cannot be sent to a process.
            RuntimeError: while reading, when a process has died; its number, pid and exit code are named.
        """
        _callable("Dataset.map", "function", function)
        parallel = number_of_calls("Dataset.map", num_parallel_calls)
        ordered = deterministic is None or bool(deterministic)
        return Dataset(Mapped(self.node, Calls(function, parallel, ordered, bool(processes)), element_spec))

    @tensorflow_names()
    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Keep the elements for which a function returns True; a tuple is passed as several arguments.

        From here on elements are read in order: every rank reads all of them, and an iterator that is restored makes
        those before its position again.
        """
        _callable("Dataset.filter", "predicate", predicate)
        return Dataset(Filtered(self.node, predicate))

    @tensorflow_names()
    def interleave(
        self, map_func: Callable[..., Dataset], cycle_length: int | None = None, block_length: int | None = None,
        num_parallel_calls: int | None = None, deterministic: bool | None = None,
    ) -> Dataset:  # fmt: skip
        """Make a dataset of every element, and take blocks of elements from several of them in turn.

        It reads in order, like `filter`.

        Args:
            map_func: returns a dataset; a tuple is passed as several arguments.
            cycle_length: how many datasets are open at a time; None and AUTOTUNE are 2.
            block_length: how many elements are taken from one before it is the next one's turn; None is 1.
            num_parallel_calls, deterministic: taken as tf.data does, without effect: elements come in order.

        Example:
            >>> rows = ms.data.from_arrays(np.arange(3)).interleave(lambda n: ms.data.from_arrays(np.full(2, n)))
            >>> [int(row) for row in rows]
            [0, 1, 0, 1, 2, 2]
        """
        _callable("Dataset.interleave", "map_func", map_func)
        number_of_calls("Dataset.interleave", num_parallel_calls)
        if cycle_length is None or cycle_length == AUTOTUNE:
            cycle_length = 2
        cycle = integer("Dataset.interleave", "cycle_length", cycle_length, 1)
        block = 1 if block_length is None else integer("Dataset.interleave", "block_length", block_length, 1)
        return Dataset(Interleaved(self.node, map_func, cycle, block))

    @tensorflow_names()
    def flat_map(self, map_func: Callable[..., Dataset]) -> Dataset:
        """Make a dataset of every element, and put them one behind the other; reads in order."""
        return self.interleave(map_func, cycle_length=1)

    @tensorflow_names()
    def concatenate(self, *datasets: Dataset, dataset: Dataset | None = None) -> Dataset:
        """Put other datasets behind this one. Their elements must look alike."""
        behind = datasets if dataset is None else [*datasets, dataset]
        return Dataset(Joined(_nodes("Dataset.concatenate", [self, *behind]), Concatenate()))

    @tensorflow_names()
    def enumerate(self, start: int = 0) -> Dataset:
        """Put each row's position, plus start, in front: elements are (int64 index, element).

        Right after the source, the index names the sample whatever comes later, as `ms.random.rng(sample=…)` needs.

        Raises:
            ValueError: for a dataset that is batched already.
        """
        if self.node.batching is not None:
            raise ValueError("Dataset.enumerate: expected a dataset of rows, got batches: enumerate before batch")
        return Dataset(Enumerated(self.node, integer("Dataset.enumerate", "start", start)))

    @tensorflow_names()
    def take(self, count: int) -> Dataset:
        """Keep the first `count` elements; -1 for all."""
        number = integer("Dataset.take", "count", count, -1)
        return self.skip(0) if number < 0 else Dataset(Reindexed(self.node, Take(number)))

    @tensorflow_names()
    def skip(self, count: int) -> Dataset:
        """Leave out the first `count` elements; -1 for all."""
        number = integer("Dataset.skip", "count", count, -1)
        return self.take(0) if number < 0 else Dataset(Reindexed(self.node, Skip(number)))

    @tensorflow_names()
    def repeat(self, count: int | None = None) -> Dataset:
        """Give the elements of `count` epochs of what is below; None or -1 for ever."""
        number = -1 if count is None else integer("Dataset.repeat", "count", count, -1)
        return Dataset(Reindexed(self.node, Repeat(None if number < 0 else number)))

    @tensorflow_names()
    def shard(self, num_shards: int, index: int) -> Dataset:
        """Keep every num_shards-th element, from the one at `index` on.

        `ms.data.SHARD_HINT` for both numbers leaves them to `strategy.distribute_dataset` with AutoShardPolicy.HINT.

        Raises:
            ValueError: for an index out of range.
        """
        if num_shards != SHARD_HINT or index != SHARD_HINT:
            num_shards = integer("Dataset.shard", "num_shards", num_shards, 1)
            index = integer("Dataset.shard", "index", index, 0)
            if index >= num_shards:
                raise ValueError(explain("Dataset.shard", "index", expected=f"0 <= index < {num_shards}", got=index))
        return Dataset(Reindexed(self.node, Shard(num_shards, index)))

    @tensorflow_names()
    def prefetch(self, buffer_size: int) -> Dataset:
        """Read elements ahead in a thread, at most so many; 0 for none, AUTOTUNE for 2.

        The thread reads what stands here and what comes later in the chain, and ends with its iterator. Without it an
        undistributed dataset is read by who iterates, and a distributed one is read 2 steps ahead.
        """
        depth = 2 if buffer_size == AUTOTUNE else integer("Dataset.prefetch", "buffer_size", buffer_size, 0)
        return Dataset(Prefetched(self.node, depth))

    @tensorflow_names()
    def with_options(self, options: Options) -> Dataset:
        """Set what holds for the whole dataset, over what was said before.

        Example:
            >>> ms.data.from_arrays(np.arange(4)).with_options(ms.data.Options("off")).options().auto_shard_policy.name
            'OFF'
        """
        given: object = options
        if not isinstance(given, Options):
            got = type(given).__name__
            raise TypeError(explain("Dataset.with_options", "options", expected="ms.data.Options", got=got))
        return Dataset(Configured(self.node, Options().merge(options)))

    @tensorflow_names(filename="scope")
    def cache(
        self,
        scope: Literal["rank", "node", "job"] = "rank",
        *,
        transport: Literal["auto", "messages", "get"] = "auto",
    ) -> Dataset:
        """Keep the elements in memory once they have been read (TF: tf.data.Dataset.cache).

        What is kept is epoch 0: a shuffle or a random map below keeps the order and values it has there. Shuffle after
        the cache: any order is cheap then. A dataset that reads in order is kept in its first complete epoch.

        Args:
            scope: who keeps them. "rank": each rank for itself, what it reads. "node": the ranks of a node together, in
                shared memory; each chunk is read by one of them. "job": the ranks of all nodes together; each reads its
                part when the dataset is distributed, and later epochs touch no disk. "node" and "job" begin with
                `strategy.distribute_dataset`, which makes their memory and is collective then; the memory is free again
                when the strategy is closed. They need random access and rows of one shape, and the whole dataset must
                fit: nothing is ever thrown out.
            transport: how "job" gets rows from other nodes: "messages", which a thread of each rank answers; "get",
                MPI's one-sided Get; "auto" takes "get" where a probe finds, when the dataset is distributed,
                that the network reads memory without its owner's help, else "messages".

        Raises:
            ValueError: for a dataset repeated for ever; for "node" and "job", one that reads in order.
            MemoryError: where memory is too small, naming the numbers; when it is first read, or distributed.

        Example:
            >>> dataset = ms.data.from_arrays(np.arange(4)).map(lambda x: x * x).cache()
            >>> [int(x) for x in dataset], sorted(int(x) for x in dataset.shuffle(seed=2))
            ([0, 1, 4, 9], [0, 1, 4, 9])
        """
        return Dataset(cache(self.node, scope, transport))

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return what a function makes of this dataset."""
        return transformation_func(self)

    def as_numpy_iterator(self) -> Iterator[Any]:
        """The same as `iter`: elements are NumPy arrays."""
        return iter(self)

    def peek(self) -> Any:
        """Return the first element of the epoch that the next `iter()` begins, without beginning it.

        Raises:
            ValueError: for an empty dataset.
        """
        self.node.check()
        for element in self.node.elements(self._epoch):
            return element
        raise ValueError(explain("Dataset.peek", "", expected="a dataset with an element", got="an empty one"))

    def _refuse_batches(self, method: str) -> None:
        if self.node.batching is not None:
            expected, got = "a dataset of rows", "one that is batched already"
            raise ValueError(explain(f"Dataset.{method}", "", expected=expected, got=got))

    # TensorFlow's names for functions of this package.

    @staticmethod
    @tensorflow_names()
    def from_tensor_slices(tensors: Any) -> Dataset:
        """The same as `ms.data.from_arrays`."""
        return Dataset(array_rows(tensors))

    @staticmethod
    @tensorflow_names()
    def from_tensors(tensors: Any) -> Dataset:
        """A dataset of one element, a nest of arrays."""
        one = nest.map_structure(lambda leaf: np.asarray(leaf)[np.newaxis], plain_lists(tensors))
        return Dataset(array_rows(one))

    @staticmethod
    @tensorflow_names(generator="function", output_signature="element_spec")
    def from_generator(
        function: Callable[..., Any], element_spec: Any = None, *, args: Sequence[Any] | None = None
    ) -> Dataset:
        """The same as `ms.data.from_generator`, of a function that gets `args` first."""
        return Dataset(generated(functools.partial(function, *args) if args else function, element_spec))

    @staticmethod
    @tensorflow_names(output_type="dtype")
    def range(*args: int, dtype: Any = np.int64) -> Dataset:
        """A dataset of the integers of Python's `range`."""
        return Dataset(array_rows(np.arange(*args, dtype=dtype)))

    @staticmethod
    @tensorflow_names()
    def zip(*args: Any, datasets: Any = None) -> Dataset:
        """The same as `ms.data.zip`."""
        given = args if datasets is None else (datasets,)
        structure = given[0] if len(given) == 1 and not isinstance(given[0], Dataset) else given
        return Dataset(Zipped(nest.pack_like(structure, _nodes("zip", nest.flatten(structure)))))

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset], weights: Any = None, seed: int | None = None, stop_on_empty_dataset: bool = False,
    ) -> Dataset:  # fmt: skip
        """The same as `ms.data.sample_from_datasets`."""
        return Dataset(sampled(_nodes("sample_from_datasets", datasets), weights, seed, stop_on_empty_dataset))
