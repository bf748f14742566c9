"""Functions that make datasets: from arrays, a generator, files, several datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .copies import source_of
from .dataset import Dataset
from .files.inputs import Fields
from .files.tables import TableRows
from .nodes.node import Node
from .nodes.samples import samples_of
from .nodes.sources import array_rows
from .shards.files import PathLike

__all__ = ["from_arrays", "from_generator", "from_map_style", "from_tables", "sample_from_datasets", "zip"]


def from_arrays(arrays: Any, *, copy: bool = False) -> Dataset:
    """Make a dataset of the rows of arrays in memory (TF: tf.data.Dataset.from_tensor_slices).

    Arrays are not copied: batches contain the rows' values at reading time. If the program changes the arrays later, for
    example a buffer that a loop reuses, epochs differ, and ranks may get inconsistent batches. Pass `copy=True` then.

    Args:
        arrays: a nest of arrays with the same length along their first axis; elements have its structure. A list of
            numbers or strings, or of such lists, is one array. Rows of different shapes are a 1-D object array of arrays,
            strings one of `str`.
        copy: whether to copy the arrays now, so that later changes have no effect.

    Raises:
        TypeError: for masked numbers, whose mask would be lost.
        ValueError: for a scalar, different lengths, rows of different dtypes, and an empty nest.

    Example:
        >>> rows = {"x": np.arange(6.0).reshape(3, 2), "y": np.array([7, 8, 9])}
        >>> dataset = from_arrays(rows).batch(2)
        >>> [batch["y"].tolist() for batch in dataset]
        [[7, 8], [9]]
    """
    return Dataset(array_rows(arrays, copy))


def from_generator(function: Callable[..., Iterable[Any]], element_spec: Any = None) -> Dataset:
    """Make a dataset from a function that returns an iterator (TF: tf.data.Dataset.from_generator).

    It reads in order: every rank runs the whole iterator, which must yield the same elements on all ranks. A restored
    iterator over the dataset runs it again up to its position.

    Args:
        function: returns a fresh iterator at every call, for one epoch. It gets the epoch if it requires one argument or
            has a parameter of that name.
        element_spec: a nest of `ArraySpec`, with None in a shape for a length that varies. If None, the first element
            defines it; if needed before reading, the iterator is started once more.

    Raises:
        TypeError: for a function that is not callable, or a spec that is not a nest of ArraySpec; while reading, for
            masked numbers.
        ValueError: while reading, for an element unlike the spec, naming its position. Lists are structures here: convert
            lists of numbers to arrays.

    Example:
        >>> dataset = from_generator(lambda epoch: (10 * epoch + i for i in range(3)))
        >>> [int(x) for x in dataset], [int(x) for x in dataset]
        ([0, 1, 2], [10, 11, 12])
    """
    return Dataset.from_generator(function, element_spec)


def from_map_style(samples: Any, *, workers: int = 0, processes: bool = False, element_spec: Any = None) -> Dataset:
    """Make a dataset of the samples of an object with `__len__` and `__getitem__`.

    Such objects are PyTorch's map-style datasets, those of Hugging Face's `datasets`, Grain's data sources, lists (of
    files, for instance) and your own classes. The dataset has random access: each rank reads its own rows only. Shuffles,
    `batch`, caches and iterator positions work as with files; you need no sampler or DataLoader.

    Args:
        samples: `samples[row]` returns a nest of arrays, tensors, images, numbers, strings or lists of numbers, for each
            row from 0 to `len(samples) - 1`. `__getitems__`, if present, is called for several rows at once. A sample
            should depend on its row only: random values are not repeated when a job resumes.
        workers: the number of samples read in parallel; 0 for one, by the reading thread; AUTOTUNE for this rank's number
            of cores, at most 8.
        processes: whether the workers are processes instead of threads, as for `Dataset.map`: the object must be
            picklable, and the main program needs `if __name__ == "__main__":`.
        element_spec: a nest of `ArraySpec`, with None in a shape for a length that varies; None for the first sample's spec.

    Raises:
        TypeError: for an object without a length or without items by row number, or that cannot be sent to a process.
        ValueError: while reading, for a sample unlike the first, and if the object's length has changed.
        RuntimeError: while reading, when a process has died.

    Example:
        >>> class Squares:
        ...     def __len__(self):
        ...         return 5
        ...
        ...     def __getitem__(self, row):
        ...         return {"x": np.float32(row), "y": row**2}
        >>> dataset = from_map_style(Squares())
        >>> [batch["y"].tolist() for batch in dataset.batch(2)]
        [[0, 1], [4, 9], [16]]
        >>> sorted(int(row["y"]) for row in dataset.shuffle(seed=1))
        [0, 1, 4, 9, 16]
    """
    return Dataset(samples_of(samples, workers, processes, element_spec))


def from_tables(
    files: PathLike | Sequence[PathLike], columns: Fields = None, *, format: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:  # fmt: skip
    """Make a dataset of the rows of Parquet, Arrow, CSV or JSON-lines files; not collective. It needs pyarrow.

    It has random access in units that are read as a whole: row groups of Parquet, record batches of Arrow (Feather),
    whole text files. So a shuffle without a mode shuffles these units as blocks. Files are opened on first use of the
    dataset, and must not change while they are read.

    Args:
        files: a file, a directory, a pattern like `data/*.parquet`, or a list of files, read in its order; others are
            read in natural order (2 before 10).
        columns: None for a dict of all readable columns; a list of names for a dict of these; a tuple of names for a
            tuple; a dict from new names to names in the files; one name for that array alone. "pose.x" is the member x of a
            column of structures.
        format: "parquet", "arrow", "csv" or "jsonl"; None for the format of the file names' suffix.
        storage_options: arguments of fsspec's file system for URLs, such as `{"anon": True}` for public data on S3.

    Raises:
        MissingDependencyError: without pyarrow, on first use of the dataset.
        ValueError: the file names do not show one format.
        ShardError: a file is missing or damaged, or its columns differ from the first file's; while reading, for nulls
            among integers, text or lists.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dataset = from_tables(pathlib.Path(__file__))
        Traceback (most recent call last):
            ...
        ValueError: from_tables: files: expected files of one format, ...
    """

    def made(files: Any) -> Node:
        return TableRows(files, columns, format, storage_options)

    return Dataset(source_of(made, files, storage_options))


def zip(*datasets: Any) -> Dataset:
    """Combine datasets element by element (TF: tf.data.Dataset.zip).

    The result is as long as the shortest dataset.

    Args:
        datasets: datasets, for tuples; or one nest of datasets, whose structure the elements have.

    Raises:
        ValueError: for a mix of rows and batches, and while reading for batches of different lengths.

    Example:
        >>> numbers = ms.data.from_arrays(np.arange(3))
        >>> [int(a + b) for a, b in ms.data.zip(numbers, numbers.skip(1))]
        [1, 3]
    """
    return Dataset.zip(*datasets)


def sample_from_datasets(
    datasets: Sequence[Dataset], weights: Sequence[float] | None = None, seed: int | None = None,
    stop_on_empty_dataset: bool = False,
) -> Dataset:  # fmt: skip
    """Draw each element from one of several datasets (TF: tf.data.Dataset.sample_from_datasets).

    Draws match the weights exactly: after any multiple of 256 draws each dataset's count is off by less than one draw per
    dataset. The sequence depends on the seed and the epoch only. Each dataset's elements keep their order.

    Args:
        datasets: the datasets; their elements must have one spec.
        weights: one for each dataset, finite, at least 0 and not all 0; None for equal ones. A dataset of weight 0 is
            never drawn from.
        seed: any integer, the same on every rank. None is 0, in every run.
        stop_on_empty_dataset: stop before drawing from an exhausted dataset; else continue with the others until all are
            exhausted.

    Raises:
        ValueError: for invalid weights.

    Example:
        >>> tens = ms.data.from_arrays(np.arange(10, 16))
        >>> ones = ms.data.from_arrays(np.arange(2))
        >>> both = sample_from_datasets([tens, ones], [0.75, 0.25], seed=1)
        >>> sorted(int(x) for x in both)
        [0, 1, 10, 11, 12, 13, 14, 15]
    """
    return Dataset.sample_from_datasets(datasets, weights, seed, stop_on_empty_dataset)
