"""Dataset: what users hold of a chain of nodes, from a source of rows to elements. How chains work: nodes/node.py."""

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
from .nodes import combine, conditions, endless, group, rebatch, resample, scan
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
    """The method that an operator is: a function of the node below that returns the node above; `ours` as in tensorflow_names."""

    def method(self: Dataset, /, *args: P.args, **kwargs: P.kwargs) -> Dataset:
        return Dataset(function(self.node, *args, **kwargs))

    return _as_method(method, function, 1, ours)


def _operator_with_datasets(
    function: Callable[Concatenate[Node, Callable[[Node], Any], P], Node],
) -> Callable[Concatenate[Dataset, P], Dataset]:
    """The same of a function that also gets what makes a dataset of a node."""

    def method(self: Dataset, /, *args: P.args, **kwargs: P.kwargs) -> Dataset:
        return Dataset(function(self.node, Dataset, *args, **kwargs))

    return _as_method(method, function, 2, {})


def _source(function: Callable[P, Node]) -> staticmethod[P, Dataset]:
    """The static method that makes a dataset of the node that a function returns."""

    @tensorflow_names()
    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> Dataset:
        return Dataset(function(*args, **kwargs))

    return staticmethod(made)


def _as_method(method: M, function: Callable[..., Any], hidden: int, ours: dict[str, str]) -> M:
    """A method with the documentation of a function, and its parameters but for the first ones."""
    wrapped = functools.update_wrapper(method, function)
    signature = inspect.signature(function)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD), *signature.parameters.values()]
    del parameters[1 : 1 + hidden]
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    wrapped.__qualname__ = f"Dataset.{function.__name__}"
    return tensorflow_names(**ours)(method)


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
    window = _operator_with_datasets(windows.window)
    group_by_window = _operator_with_datasets(group.group_by_window)
    bucket_by_sequence_length = _operator(group.bucket_by_sequence_length)

    @tensorflow_names()
    def concatenate(self, *datasets: Dataset, dataset: Dataset | None = None) -> Dataset:
        """Put other datasets behind this one. Their elements must look alike."""
        behind = datasets if dataset is None else [*datasets, dataset]
        return Dataset(Joined(_nodes("Dataset.concatenate", [self, *behind]), combine.Concatenate()))

    @tensorflow_names()
    def enumerate(self, start: int = 0) -> Dataset:
        """Put each row's position, plus start, in front: elements are (int64 index, element).

        Right after the source, the index names the sample whatever comes later, as `ms.random.rng(sample=…)` needs.

        Raises:
            ValueError: for a dataset that is batched already; an index that int64 cannot hold.
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
        return Dataset(Reindexed(self.node, ShardOrder(num_shards, index)))

    @tensorflow_names()
    def prefetch(self, buffer_size: int | None) -> Dataset:
        """Read elements ahead in a thread, at most so many; 0 for none, AUTOTUNE and None for 2.

        The thread reads what stands here and what comes later in the chain, and ends with its iterator. Without it an
        undistributed dataset is read by who iterates, and a distributed one is read 2 steps ahead.
        """
        depth = 2 if buffer_size in (None, AUTOTUNE) else integer("Dataset.prefetch", "buffer_size", buffer_size, 0)
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

    cache = _operator(caches.cache, filename="scope")

    def apply(self, transformation_func: Callable[[Dataset], Dataset]) -> Dataset:
        """Return the dataset that a function makes of this one."""
        made: Any = transformation_func(self)
        if not isinstance(made, Dataset):
            expected, got = "a function that returns a Dataset", type(made).__name__
            raise TypeError(explain("Dataset.apply", "transformation_func", expected=expected, got=got))
        return made

    # What is read.

    def as_numpy_iterator(self) -> Iterator[Any]:
        """The same as `iter`: elements are NumPy arrays."""
        return iter(self)

    @tensorflow_names()
    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return what is left of all elements of an epoch, the one that the next `iter()` would begin, by a function.

        It is the whole dataset that this rank reads here, in order: nothing is sent, and ranks have the same result.

        Args:
            initial_state: a nest of arrays or numbers: the result for an empty dataset.
            reduce_func: returns the new state of a state and an element; a tuple is one argument. The state keeps its
                structure and dtypes.

        Raises:
            ValueError: for a dataset without an end, and for a state that does not look like the first.

        Example:
            >>> int(ms.data.Dataset.range(5).reduce(np.int64(0), lambda state, x: state + x))
            10
        """
        check_callable("Dataset.reduce", "reduce_func", reduce_func)
        batches.require_end("Dataset.reduce", self.node, "Put take(n) in front.")
        state = scan.State("Dataset.reduce", initial_state)
        for element in self:
            state.set("reduce_func", reduce_func(state.value, element))
        return state.value

    def save(
        self, path: str | os.PathLike[str], compression: str | None = None, *, comm: MPI.Intracomm | None = None
    ) -> None:
        """Write the rows of the epoch that the next `iter()` would begin as a set of HDF5 shards. Collective over `comm`.

        `Dataset.load` reads them in their order, `HDF5Dataset` too. With `comm` the ranks write the rows together: with random
        access each a part, else rank 0 all. They must have the same dataset. Without `comm` this rank writes alone.

        Args:
            path: a directory, or a pattern like `data/train-*.h5`, as for `write_shards`. An older set of this name is replaced.
            compression: "GZIP"; None or "NONE" for rows that are read through a memory map (strings, and rows that differ in
                length, are stored in chunks).
            comm: mpi4py's communicator of the ranks that write together, for instance `strategy.comm`.

        Raises:
            ValueError: for a dataset that is batched or has no end, for elements that are no nests of arrays in tuples, lists
                (which come back as tuples) and dicts, and for another compression.
            CollectiveMismatchError: when ranks pass different arguments or rows of different kinds.
            ShardError: when another rank failed.
            OSError: when the disk does not take the files.

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
        """Keep the rows of epoch 0 in files, for this run and later ones; `cache` keeps them in memory.

        Where `path`, as `save` has it, is not there, it is written: in `distribute_dataset` by all ranks together, into a
        folder that all see; else when something is first read. Files of other rows than these are told by spec and number
        only: after a change of a function take another path. `compression` is as in `save`; "AUTO" is none.

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
            path: as `save` was given it.
            element_spec: what elements must look like, a nest of `ArraySpec`; None for whatever was saved.

        Raises:
            FileNotFoundError: where nothing was saved.
            ShardError: for a damaged set; files are looked at when something is first asked of them.
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
        """Return the first element of the epoch that the next `iter()` begins, without beginning it.

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
        """The same as `ms.data.from_arrays`."""
        return Dataset(array_rows(tensors))

    @staticmethod
    @tensorflow_names()
    def from_tensors(tensors: Any) -> Dataset:
        """A dataset of one element, a nest of arrays."""
        one = nest.map_structure(lambda leaf: plain_array(leaf, "from_tensors")[np.newaxis], plain_lists(tensors))
        return Dataset(array_rows(one))

    @staticmethod
    @tensorflow_names(generator="function", output_signature="element_spec")
    def from_generator(
        function: Callable[..., Any], element_spec: Any = None, *, args: Sequence[Any] | None = None
    ) -> Dataset:
        """The same as `ms.data.from_generator`, of a function that gets `args` first."""
        return Dataset(generated(functools.partial(function, *args) if args else function, element_spec))

    counter = _source(endless.counter)
    random = _source(endless.random)
    list_files = _source(files.list_files)

    @staticmethod
    @tensorflow_names(output_type="dtype")
    def range(*args: int, dtype: Any = np.int64) -> Dataset:
        """A dataset of the integers of Python's `range`.

        Raises:
            TypeError: an argument is no integer.
            OverflowError: the dtype is one of integers, and does not hold one of them.
            ValueError: another dtype does not hold one of them; the step is 0.
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

    @staticmethod
    def choose_from_datasets(
        datasets: Sequence[Dataset], choice_dataset: Dataset, stop_on_empty_dataset: bool = True
    ) -> Dataset:
        """Take each element from the dataset whose number comes next (TF: tf.data.Dataset.choose_from_datasets).

        It reads in order, like `filter`.

        Args:
            datasets: their elements must look alike.
            choice_dataset: a dataset of integers, each the place of a dataset among them.
            stop_on_empty_dataset: end before an element would be taken from a dataset that has none left; else leave the
                choice out.

        Raises:
            TypeError: for what are no datasets, and while reading for choices that are no integers.
            ValueError: for no datasets, and while reading for a number out of range.

        Example:
            >>> tens, ones = ms.data.from_arrays(np.arange(10, 16)), ms.data.from_arrays(np.arange(2))
            >>> choices = ms.data.from_arrays(np.array([0, 1, 0, 0, 1]))
            >>> [int(x) for x in ms.data.Dataset.choose_from_datasets([tens, ones], choices)]
            [10, 0, 11, 12, 1]
        """
        (choices,) = _nodes("choose_from_datasets", [choice_dataset])
        return Dataset(combine.choose(choices, _nodes("choose_from_datasets", datasets), bool(stop_on_empty_dataset)))
