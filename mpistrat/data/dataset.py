"""`Dataset`, the public class over a chain of nodes, from a source of rows to elements. Chains: nodes/node.py."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from ..base import nest
from ..base.arguments import check_range, integer, tensorflow_names
from ..base.conversion import converted
from ..base.errors import explain
from ..base.masks import plain_array
from .feed.feed import DatasetIterator
from .nodes import batch as batches
from .nodes import cast as casts
from .nodes import combine, conditions, endless, group, rebatch, resample, scan, sliding
from .nodes import flat_map as flat_maps
from .nodes import list_files as files
from .nodes import map as maps
from .nodes import shuffle as shuffles
from .nodes import window as windows
from .nodes.cache import cache as caches
from .nodes.calls import check_callable
from .nodes.combine import Joined, Zipped
from .nodes.map import Enumerated
from .nodes.node import INFINITE, Node
from .nodes.order import Configured, Prefetched, Reindexed, Repeat, ShardOrder, Skip, Take, options_of
from .nodes.sample import sampled
from .nodes.sources import array_rows, generated, plain_lists
from .nodes.stage import gather_rows
from .options import AUTOTUNE, SHARD_HINT, Options
from .spec import batch_spec

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Dataset"]


def _nodes(function: str, datasets: Iterable[Any]) -> list[Node]:
    datasets = list(datasets)
    for value in datasets:
        if not isinstance(value, Dataset):
            raise TypeError(explain(function, "datasets", expected="Datasets", got=type(value).__name__))
    if not datasets:
        raise ValueError(explain(function, "datasets", expected="at least one Dataset", got="none"))
    return [dataset.node for dataset in datasets]


P = ParamSpec("P")
M = TypeVar("M", bound=Callable[..., Any])


def _operator(
    function: Callable[Concatenate[Node, P], Node], **ours: str
) -> Callable[Concatenate[Dataset, P], Dataset]:
    """Return the `Dataset` method for a function from the node below to the node above; `ours` as in tensorflow_names."""

    def method(self: Dataset, /, *args: P.args, **kwargs: P.kwargs) -> Dataset:
        return Dataset(function(self.node, *args, **kwargs))

    return _as_method(method, function, 1, ours)


def _operator_with_datasets(
    function: Callable[Concatenate[Node, Callable[[Node], Any], P], Node],
) -> Callable[Concatenate[Dataset, P], Dataset]:
    """Like `_operator`, for a function that also gets the constructor of datasets."""

    def method(self: Dataset, /, *args: P.args, **kwargs: P.kwargs) -> Dataset:
        return Dataset(function(self.node, Dataset, *args, **kwargs))

    return _as_method(method, function, 2, {})


def _source(function: Callable[P, Node]) -> staticmethod[P, Dataset]:
    """Return a static method of `Dataset` for a source."""

    @tensorflow_names()
    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> Dataset:
        return Dataset(function(*args, **kwargs))

    return staticmethod(made)


def _as_method(method: M, function: Callable[..., Any], hidden: int, ours: dict[str, str]) -> M:
    """Give a method a function's documentation and parameters, without its first `hidden` ones."""
    wrapped = functools.update_wrapper(method, function)
    signature = inspect.signature(function)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *signature.parameters.values()]
    del parameters[1 : 1 + hidden]
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__qualname__ = f"Dataset.{function.__name__}"
    return tensorflow_names(**ours)(method)


class Dataset:
    """A sequence of elements: rows of a source or, after `batch`, batches of rows (TF: tf.data.Dataset).

    Datasets are immutable: each stage returns a new one. Starting an iteration is cheap; each `iter()` is the next epoch.
    An undistributed dataset yields whole global batches; `strategy.distribute_dataset` splits them over the replicas.

    Arguments are in tf.data's order and may have its names: `batch_size` for global_batch_size, `map_func` for function,
    `reshuffle_each_iteration` for reshuffle_each_epoch. `name` is accepted and ignored.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self._epoch = 0

    def rows(self, indices: ArrayLike, *, epoch: int = 0) -> Any:
        """Return the rows at given positions of an epoch's order, stacked along a first axis.

        Args:
            indices: integers in [0, len), in any order, repeated or not.
            epoch: the epoch; it matters after `shuffle` only.

        Raises:
            ValueError: after `batch`, where elements are not rows, and for a dataset that reads in order.
            IndexError: for an index out of range.
            ShardError: for files that have changed.
        """
        return gather_rows(self.node, indices, epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next `iter()`. Call it on every rank with the same value."""
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
            why = "is repeated without end" if length == INFINITE else "reads in order, to an unknown end"
            raise TypeError(f"Dataset: len: the dataset {why}, and has no length; call cardinality()")
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
        """Return one element of an epoch; iterators do not change.

        Raises:
            IndexError: there is no such element.
        """
        function, length = "Dataset.element", self.cardinality()
        epoch, position = integer(function, "epoch", epoch, 0), integer(function, "position", position, 0)
        self.node.check()
        there = not 0 <= length <= position
        if there and self.node.random_access:
            rows = self.node.gather(*self.node.locate(epoch, position))
            return rows if self.node.batching is not None else nest.map_structure(lambda leaf: leaf[0], rows)
        for element in self.node.elements(epoch, position) if there else ():
            return element
        expected = f"0 <= position < {length}" if length >= 0 else "the position of an element"
        raise IndexError(explain(function, "position", expected=expected, got=position))

    def options(self) -> Options:
        """Return the options set by `with_options` (TF: tf.data.Dataset.options)."""
        return options_of(self.node)

    def describe(self) -> str:
        """Return one line about the last operator, or the source."""
        return self.node.describe()

    def __str__(self) -> str:
        return str(self.node)

    def __repr__(self) -> str:
        return repr(self.node)

    # Operators.

    shuffle = _operator(shuffles.shuffle, reshuffle_each_iteration="reshuffle_each_epoch")

    batch = _operator(batches.batch, batch_size="global_batch_size")
    padded_batch = _operator(batches.padded_batch, batch_size="global_batch_size")
    ragged_batch = _operator(batches.ragged_batch, batch_size="global_batch_size")
    unbatch = _operator(batches.unbatch)
    rebatch = _operator(rebatch.rebatch, batch_size="global_batch_size")
    map = _operator(maps.map, map_func="function")
    filter = _operator(conditions.filter)
    take_while = _operator(conditions.take_while)
    unique = _operator(conditions.unique)
    ignore_errors = _operator(conditions.ignore_errors)
    rejection_resample = _operator(resample.rejection_resample)
    interleave = _operator(flat_maps.interleave)
    flat_map = _operator(flat_maps.flat_map)
    scan = _operator(scan.scan)
    sliding_window = _operator(sliding.sliding_window)
    window = _operator_with_datasets(windows.window)
    group_by_window = _operator_with_datasets(group.group_by_window)
    bucket_by_sequence_length = _operator(group.bucket_by_sequence_length)

    @tensorflow_names()
    def concatenate(self, *datasets: Dataset, dataset: Dataset | None = None) -> Dataset:
        """Append other datasets. Their elements must have the same structure, dtypes and shapes."""
        behind = datasets if dataset is None else [*datasets, dataset]
        return Dataset(Joined(_nodes("Dataset.concatenate", [self, *behind]), combine.Concatenate()))

    @tensorflow_names()
    def enumerate(self, start: int = 0) -> Dataset:
        """Prepend each row's position, plus start: elements are (int64 index, element).

        Directly after the source, the index identifies the sample in all later stages, as `ms.random.rng(sample=…)` needs.

        Raises:
            ValueError: for a batched dataset, and for an index that int64 cannot hold.
        """
        function = "Dataset.enumerate"
        if self.node.batching is not None:
            raise ValueError(f"{function}: expected a dataset of rows, got batches: enumerate before batch")
        first = integer(function, "start", start)
        last = first + max(self.node.cardinality(), 1) - 1
        if not -(2**63) <= first <= last < 2**63:
            got = f"indices from {first} to {last}"
            raise ValueError(explain(function, "start", expected="indices that int64 holds", got=got))
        return Dataset(Enumerated(self.node, first))

    @tensorflow_names()
    def take(self, count: int) -> Dataset:
        """Keep the first `count` elements; -1 for all."""
        number = integer("Dataset.take", "count", count, -1)
        return self.skip(0) if number < 0 else Dataset(Reindexed(self.node, Take(number)))

    @tensorflow_names()
    def skip(self, count: int) -> Dataset:
        """Skip the first `count` elements; -1 for all."""
        number = integer("Dataset.skip", "count", count, -1)
        return self.take(0) if number < 0 else Dataset(Reindexed(self.node, Skip(number)))

    @tensorflow_names()
    def repeat(self, count: int | None = None) -> Dataset:
        """Repeat the elements below for `count` epochs; None or -1 without end."""
        number = -1 if count is None else integer("Dataset.repeat", "count", count, -1)
        return Dataset(Reindexed(self.node, Repeat(None if number < 0 else number)))

    @tensorflow_names()
    def shard(self, num_shards: int, index: int) -> Dataset:
        """Keep every num_shards-th element, starting at `index`.

        With `ms.data.SHARD_HINT` for both numbers, `strategy.distribute_dataset` sets them (AutoShardPolicy.HINT).

        Raises:
            ValueError: for an index out of range.
        """
        if num_shards != SHARD_HINT or index != SHARD_HINT:
            num_shards = integer("Dataset.shard", "num_shards", num_shards, 1)
            index = integer("Dataset.shard", "index", index, 0)
            if index >= num_shards:
                raise ValueError(explain("Dataset.shard", "index", expected=f"0 <= index < {num_shards}", got=index))
        return Dataset(Reindexed(self.node, ShardOrder(num_shards, index)))

    @tensorflow_names()
    def prefetch(self, buffer_size: int | None) -> Dataset:
        """Read up to `buffer_size` elements ahead in a thread; 0 for none, AUTOTUNE and None for 2.

        The thread covers the whole chain, also later stages, and ends with its iterator. Without `prefetch` an
        undistributed dataset is read by the iterating thread, and a distributed one 2 steps ahead.
        """
        depth = 2 if buffer_size in (None, AUTOTUNE) else integer("Dataset.prefetch", "buffer_size", buffer_size, 0)
        return Dataset(Prefetched(self.node, depth))

    @tensorflow_names()
    def with_options(self, options: Options) -> Dataset:
        """Set options of the whole dataset. They override earlier ones.

        Example:
            >>> dataset = ms.data.from_arrays(np.arange(4))
            >>> dataset = dataset.with_options(ms.data.Options("off"))
            >>> dataset.options().auto_shard_policy.name
            'OFF'
        """
        given: object = options
        if not isinstance(given, Options):
            got = type(given).__name__
            raise TypeError(explain("Dataset.with_options", "options", expected="ms.data.Options", got=got))
        return Dataset(Configured(self.node, Options().merge(options)))

    cast = _operator(casts.cast)
    cache = _operator(caches.cache, filename="scope")

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return the result of a function of this dataset, which must be a dataset."""
        made: Any = transformation_func(self)
        if not isinstance(made, Dataset):
            expected, got = "a function that returns a Dataset", type(made).__name__
            raise TypeError(explain("Dataset.apply", "transformation_func", expected=expected, got=got))
        return made

    # Reading.

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Return `iter(self)`: elements are NumPy arrays."""
        return iter(self)

    @tensorflow_names()
    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Fold all elements of the next `iter()`'s epoch into a state.

        This rank reads the whole dataset in order, so all ranks get the same result.

        Args:
            initial_state: a nest of arrays or numbers: the result for an empty dataset.
            reduce_func: returns the new state, given a state and an element; a tuple is one argument. The state keeps its
                structure and dtypes.

        Raises:
            ValueError: for a dataset without an end, and for a state unlike the first.

        Example:
            >>> dataset = ms.data.Dataset.range(5)
            >>> int(dataset.reduce(np.int64(0), lambda state, x: state + x))
            10
        """
        check_callable("Dataset.reduce", "reduce_func", reduce_func)
        batches.require_end("Dataset.reduce", self.node, "Call take(n) before it.")
        state = scan.State("Dataset.reduce", initial_state)
        for element in self:
            state.set("reduce_func", reduce_func(state.value, element))
        return state.value

    def save(
        self, path: str | os.PathLike[str], compression: str | None = None, *, comm: MPI.Intracomm | None = None
    ) -> None:
        """Write the rows of the next `iter()`'s epoch as a set of HDF5 shards. Collective over `comm`.

        `Dataset.load` and `HDF5Dataset` read them in their order. With `comm` the ranks must have the same dataset and
        write it together: each writes a share if it has random access, else rank 0 writes all. Without `comm` this rank
        writes alone.

        Args:
            path: a directory, or a pattern like `data/train-*.h5`, as for `write_shards`. An older set of this name is replaced.
            compression: "GZIP"; None or "NONE" for rows read through a memory map (strings and rows of varying length are
                stored in chunks).
            comm: mpi4py's communicator of the ranks that write together, for instance `strategy.comm`.

        Raises:
            ValueError: for a batched or endless dataset, for elements other than arrays in tuples, lists (loaded as
                tuples) and dicts, and for an unknown compression.
            CollectiveMismatchError: when ranks pass different arguments or rows of different specs.
            ShardError: when another rank failed.
            OSError: when the files cannot be written.

        Example:
            >>> import tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     ms.data.Dataset.range(2).save(folder)
            ...     [int(x) for x in ms.data.Dataset.load(folder)]
            [0, 1]
        """
        from .shards.saved import save

        save(self.node, self._epoch, path, compression, comm)
        self._epoch += 1

    @tensorflow_names()
    def snapshot(self, path: str | os.PathLike[str], compression: str | None = "AUTO") -> Dataset:
        """Store the rows of epoch 0 in files, for this run and later ones; `cache` stores them in memory.

        If `path` (as in `save`) does not exist, it is written: in `distribute_dataset` by all ranks, into a folder that
        all see; else on the first read. Existing files are only checked for spec and row count: after a change of a
        function choose another path. `compression` is as in `save`; "AUTO" is none.

        Raises:
            ValueError: as `save`, and while reading for files of another dataset.
        """
        from .shards.saved import snapshot

        return Dataset(snapshot(self.node, path, compression))

    @staticmethod
    @tensorflow_names("compression")
    def load(path: str | os.PathLike[str], element_spec: Any = None) -> Dataset:
        """Make a dataset of the rows that `save` wrote, in their order; random access.

        Args:
            path: the path passed to `save`.
            element_spec: the expected spec of elements, a nest of `ArraySpec`; None for any.

        Raises:
            FileNotFoundError: if no saved set exists.
            ShardError: for a damaged set, on first use of the dataset.
            ValueError: for elements of another spec.
        """
        from .shards.saved import load

        return Dataset(load(path, element_spec))

    @tensorflow_names()
    def get_single_element(self) -> Any:
        """Return the only element.

        Raises:
            ValueError: for a dataset with no element, or more than one.

        Example:
            >>> ms.data.Dataset.range(3).batch(3).get_single_element()
            array([0, 1, 2])
        """
        elements = list(itertools.islice(self, 2))
        if len(elements) != 1:
            got = "several" if elements else "none"
            raise ValueError(explain("Dataset.get_single_element", "", expected="one element", got=got))
        return elements[0]

    def peek(self) -> Any:
        """Return the first element of the next `iter()`'s epoch without starting it.

        Raises:
            ValueError: for an empty dataset.
        """
        self.node.check()
        for element in self.node.elements(self._epoch):
            return element
        raise ValueError(explain("Dataset.peek", "", expected="a dataset with an element", got="an empty one"))

    # TensorFlow's names for functions of this package.

    @staticmethod
    @tensorflow_names()
    def from_tensor_slices(tensors: Any) -> Dataset:
        """Make a dataset as `ms.data.from_arrays`."""
        return Dataset(array_rows(tensors))

    @staticmethod
    @tensorflow_names()
    def from_tensors(tensors: Any) -> Dataset:
        """Make a dataset of one element, a nest of arrays."""
        one = nest.map_structure(lambda leaf: plain_array(leaf, "from_tensors")[np.newaxis], plain_lists(tensors))
        return Dataset(array_rows(one))

    @staticmethod
    @tensorflow_names(generator="function", output_signature="element_spec")
    def from_generator(
        function: Callable[..., Any], element_spec: Any = None, *, args: Sequence[Any] | None = None
    ) -> Dataset:
        """Make a dataset as `ms.data.from_generator`, of a function that gets `args` first."""
        return Dataset(generated(functools.partial(function, *args) if args else function, element_spec))

    counter = _source(endless.counter)
    random = _source(endless.random)
    list_files = _source(files.list_files)

    @staticmethod
    @tensorflow_names(output_type="dtype")
    def range(*args: int, dtype: Any = np.int64) -> Dataset:
        """Make a dataset of the integers of Python's `range`.

        Raises:
            TypeError: an argument is not an integer.
            OverflowError: an integer dtype cannot hold one of them.
            ValueError: another dtype cannot hold one of them; the step is 0.
        """
        given = [integer("Dataset.range", "", value) for value in args]
        if given[2:] == [0]:
            raise ValueError(explain("Dataset.range", "step", expected="an integer other than 0", got=0))
        whole = range(*given)
        check_range("Dataset.range", "dtype", np.array([*whole[:1], *whole[-1:]], object), np.dtype(dtype))
        wide = any(abs(number) >= 2**63 for number in given)
        numbers = np.array(whole, object) if wide else np.arange(*given, dtype=np.int64)
        return Dataset(array_rows(converted("Dataset.range", "dtype", numbers, np.dtype(dtype))))

    @staticmethod
    @tensorflow_names()
    def zip(*args: Any, datasets: Any = None) -> Dataset:
        """Make a dataset as `ms.data.zip`."""
        given = args if datasets is None else (datasets,)
        structure = given[0] if len(given) == 1 and not isinstance(given[0], Dataset) else given
        return Dataset(Zipped(nest.pack_like(structure, _nodes("zip", nest.flatten(structure)))))

    @staticmethod
    def sample_from_datasets(
        datasets: Sequence[Dataset], weights: Any = None, seed: int | None = None, stop_on_empty_dataset: bool = False,
    ) -> Dataset:  # fmt: skip
        """Make a dataset as `ms.data.sample_from_datasets`."""
        return Dataset(sampled(_nodes("sample_from_datasets", datasets), weights, seed, stop_on_empty_dataset))

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset], choice_dataset: Dataset, stop_on_empty_dataset: bool = True
    ) -> Dataset:
        """Take each element from the dataset that the next choice names (TF: tf.data.Dataset.choose_from_datasets).

        It reads in order, like `filter`.

        Args:
            datasets: the datasets; their elements must have one spec.
            choice_dataset: a dataset of integers, each an index into `datasets`.
            stop_on_empty_dataset: stop when the chosen dataset has no elements left; else skip the choice.

        Raises:
            TypeError: for arguments other than datasets, and while reading for choices other than integers.
            ValueError: for an empty list, and while reading for an index out of range.

        Example:
            >>> tens = ms.data.from_arrays(np.arange(10, 16))
            >>> ones = ms.data.from_arrays(np.arange(2))
            >>> choices = ms.data.from_arrays(np.array([0, 1, 0, 0, 1]))
            >>> chosen = ms.data.Dataset.choose_from_datasets([tens, ones], choices)
            >>> [int(x) for x in chosen]
            [10, 0, 11, 12, 1]
        """
        (choices,) = _nodes("choose_from_datasets", [choice_dataset])
        return Dataset(combine.choose(choices, _nodes("choose_from_datasets", datasets), bool(stop_on_empty_dataset)))
