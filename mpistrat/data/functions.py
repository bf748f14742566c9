"""The functions that make datasets: of arrays, of a generator, of several datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .dataset import Dataset
from .files.tables import Columns, TableRows
from .nodes.samples import samples_of
from .nodes.sources import array_rows
from .shards.files import PathLike

__all__ = ["from_arrays", "from_generator", "from_map_style", "from_tables", "sample_from_datasets", "zip"]


def from_arrays(arrays: Any, *, copy: bool = False) -> Dataset:
    """Make a dataset of the rows of arrays in memory (TF: tf.data.Dataset.from_tensor_slices).

    The arrays are not copied: batches are copies of the rows as they are when the dataset is read. If the program changes the
    arrays later, for example in a loop that fills one buffer again and again, epochs differ; on some ranks only, batches do not
    fit together. Pass `copy=True` then.

    Args:
        arrays: a nest of arrays with the same length along their first axis; elements have its structure. A list of
            numbers or strings, or of such lists, is one array. Rows of different shapes are a 1-D object array of arrays,
            strings one of `str`.
        copy: whether to copy the arrays now, so that later changes of them have no effect.

    Raises:
        TypeError: for masked numbers, whose mask would be lost.
        ValueError: for a scalar, for different lengths, for rows of different dtypes and for an empty nest.

    Example:
        >>> dataset = from_arrays({"x": np.arange(6.0).reshape(3, 2), "y": np.array([7, 8, 9])}).batch(2)
        >>> [batch["y"].tolist() for batch in dataset]
        [[7, 8], [9]]
    """
    return Dataset(array_rows(arrays, copy))


def from_generator(function: Callable[..., Iterable[Any]], element_spec: Any = None) -> Dataset:
    """Make a dataset of what a function's iterator gives (TF: tf.data.Dataset.from_generator).

    It reads in order: every rank runs the whole iterator, which must give the same elements everywhere, and an iterator
    over the dataset that is restored runs it again up to its position.

    Args:
        function: returns a fresh iterator at every call, for one epoch. Called with the epoch if it must have an
            argument or has one of that name.
        element_spec: a nest of `ArraySpec`, with None in a shape for a length that varies. Without it the first element
            says what all look like, and the iterator is begun once more for it where that is asked before reading.

    Raises:
        TypeError: for what is no function, or no nest of ArraySpec; while reading, for masked numbers.
        ValueError: while reading, for an element that does not fit, naming its position. Lists are structures here:
            make arrays of those that are not.

    Example:
        >>> dataset = from_generator(lambda epoch: (10 * epoch + i for i in range(3)))
        >>> [int(x) for x in dataset], [int(x) for x in dataset]
        ([0, 1, 2], [10, 11, 12])
    """
    return Dataset.from_generator(function, element_spec)


def from_map_style(samples: Any, *, workers: int = 0, processes: bool = False, element_spec: Any = None) -> Dataset:
    """Make a dataset of the samples of an object with `__len__` and `__getitem__`; not collective.

    Such objects are PyTorch's map-style datasets, those of Hugging Face's `datasets`, Grain's data sources, lists (of files, for
    instance) and objects of your own classes. It has random access: each rank reads its own rows only. Shuffles, `batch`, caches
    and the position of an iterator work as with files, so no sampler or DataLoader is needed.

    Args:
        samples: `samples[row]` returns a nest of arrays, tensors, images, numbers, strings or lists of numbers, for each row
            from 0 to `len(samples) - 1`. An object with `__getitems__` is asked for several rows at once. A sample should depend
            on its row only: what it draws at random is not repeated when a job resumes.
        workers: the number of samples that are read at the same time; 0 for one, by the thread that reads, and AUTOTUNE for as
            many as this rank has cores, at most 8.
        processes: whether the workers are processes instead of threads, as for `Dataset.map`: the object must be one that can
            be pickled, and the main program needs `if __name__ == "__main__":`.
        element_spec: a nest of `ArraySpec`, with None in a shape for a length that varies. Without it the first sample says what
            all look like.

    Raises:
        TypeError: for an object without a length or without items by row number, and for one that cannot be sent to a process.
        ValueError: while reading, for a sample that does not look like the first, and for an object whose length has changed.
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


def from_tables(files: PathLike | Sequence[PathLike], columns: Columns = None, *, format: str | None = None) -> Dataset:
    """Make a dataset of the rows of Parquet, Arrow, CSV or JSON-lines files; not collective. It needs pyarrow.

    It has random access in units that are read as a whole: row groups of Parquet, record batches of Arrow (Feather), whole
    files of text. So a shuffle without a mode is one in blocks of these. Files are looked at when something is first asked of
    the dataset, and must not change while they are read.

    Args:
        files: a file, a directory, a pattern like `data/*.parquet`, or a list of files, read in its order; others are read in
            natural order (2 before 10).
        columns: None for a dict of all columns that can be read; a list of names for a dict of these; a tuple of names for a
            tuple; a dict from new names to names in the files; one name for that array alone.
        format: "parquet", "arrow", "csv" or "jsonl"; None for what the files' names end in.

    Raises:
        MissingDependencyError: without pyarrow, when something is first asked of the dataset.
        ValueError: the names of the files do not show one format.
        ShardError: a file is missing or damaged, or its columns are not those of the first; while reading, for nulls among
            integers, text or lists.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     dataset = from_tables(pathlib.Path(__file__))
        Traceback (most recent call last):
            ...
        ValueError: from_tables: files: expected files of one format, ...
    """
    return Dataset(TableRows(files, columns, format))


def zip(*datasets: Any) -> Dataset:
    """Put datasets side by side: an element is made of one element of each (TF: tf.data.Dataset.zip).

    There are as many elements as the shortest dataset has.

    Args:
        datasets: datasets, for tuples; or one nest of datasets, whose structure the elements have.

    Raises:
        ValueError: for rows beside batches, and while reading for batches of different lengths.

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

    The proportions are those of the weights, exactly: after any multiple of 256 draws each dataset is off by less than
    one draw for each dataset. Which draw is whose depends on the seed and the epoch only. A dataset's own elements stay
    in their order.

    Args:
        datasets: their elements must look alike.
        weights: one for each dataset, finite, at least 0 and not all 0; None for equal ones. A dataset of weight 0 is
            never drawn from.
        seed: any integer, the same on every rank. None is 0, in every run.
        stop_on_empty_dataset: end before a dataset would be drawn from that has no element left; else go on with the
            others, so that all elements come.

    Raises:
        ValueError: for impossible weights.

    Example:
        >>> tens, ones = ms.data.from_arrays(np.arange(10, 16)), ms.data.from_arrays(np.arange(2))
        >>> both = sample_from_datasets([tens, ones], [0.75, 0.25], seed=1)
        >>> sorted(int(x) for x in both)
        [0, 1, 10, 11, 12, 13, 14, 15]
    """
    return Dataset.sample_from_datasets(datasets, weights, seed, stop_on_empty_dataset)
