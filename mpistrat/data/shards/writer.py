"""ShardWriter, which writes a set of shards some rows at a time, and write_shards, which writes arrays, rows or a dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from ...base import partition
from ...base.errors import explain
from ..dataset import INFINITE, Dataset
from ..spec import stack_rows
from .columns import columns_of, fields_of
from .files import PathLike
from .set_writer import SetWriter
from .settings import Compression, Layout, ShardSettings, positive

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["ShardWriter", "write_shards"]


@final
class ShardWriter:
    """Writes rows as a set of HDF5 shards with a manifest, some at a time, alone or on all ranks. Collective over `comm`.

    Use it as a context manager. The set appears when the context ends: files are written aside, flushed to the disk and
    renamed, and an older set of the same name is replaced. If an exception ends the context, on any rank, nothing new
    is left, an older set stays as it was, and every rank gets an exception.

    With `comm` each rank writes the rows that it is given into shards of its own; `write` needs no other rank. In the
    set the ranks' shards come in rank order. Only making a writer and leaving its context are collective.

    Memory: about 1 MiB of small writes, and 4 MiB on the way to HDF5, whatever is written. Contiguous data must
    know its length in advance, so of each rank the last shard, if it is not full, is written twice.

    Args:
        target: a directory, whose shards become 00000-of-00004.h5 and so on with manifest.json; or a pattern like
            `data/train-*.h5`: then they are data/train-00000-of-00004.h5 and so on with data/train-manifest.json.
        rows_per_shard: rows in every shard but a rank's last.
        bytes_per_shard: instead, about so many bytes before compression; by default 1 GiB.
        layout: "contiguous", which is read by memory map and is the default, or "chunked".
        compression: "gzip", "lzf", or gzip's level 0 to 9; means layout="chunked".
        shuffle: put bytes of equal weight together before compressing; default where there is a compression.
        fletcher32: a checksum for every chunk; default for chunked data. Contiguous data cannot have it.
        chunk_rows: rows in a chunk; by default about 256 KiB of each field.
        attributes: HDF5 attributes of the fields, {"label": {"classes": ["cat", "dog"]}}; equal on every rank.
        comm: mpi4py's communicator of the ranks that write the set together, for instance `strategy.comm`.

    Raises:
        ValueError: for arguments that do not exist or do not go together, and a wrong target.
        CollectiveMismatchError: when ranks pass different arguments or rows of different kinds.
        ShardError: when another rank failed, naming it, and when an older set's manifest is damaged.
        OSError: when the disk does not take the files.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with ms.data.ShardWriter(directory, rows_per_shard=4) as writer:
        ...         writer.write({"x": np.arange(5), "y": np.zeros((5, 3))})
        ...         writer.write_row({"x": 5, "y": np.ones(3)})
        ...     len(ms.data.HDF5Dataset(directory)), [path.name for path in writer.paths]
        (6, ['00000-of-00002.h5', '00001-of-00002.h5'])
    """

    def __init__(
        self,
        target: PathLike,
        *,
        rows_per_shard: int | None = None,
        bytes_per_shard: int | None = None,
        layout: Layout | None = None,
        compression: Compression | None = None,
        shuffle: bool | None = None,
        fletcher32: bool | None = None,
        chunk_rows: int | None = None,
        attributes: Mapping[str, Mapping[str, Any]] | None = None,
        comm: MPI.Intracomm | None = None,
    ) -> None:
        settings = ShardSettings(
            rows_per_shard=rows_per_shard, bytes_per_shard=bytes_per_shard, layout=layout, compression=compression,
            shuffle=shuffle, fletcher32=fletcher32, chunk_rows=chunk_rows, attributes=attributes,
        )  # fmt: skip
        self._set = SetWriter("ShardWriter", target, settings, comm)

    @property
    def paths(self) -> list[Path]:
        """Paths of the set's files, of all ranks, once the writer is closed; the same on every rank."""
        return list(self._set.paths)

    @property
    def rank(self) -> int:
        """This rank's number among those that write the set."""
        return self._set.ranks.rank

    @property
    def size(self) -> int:
        """How many ranks write the set."""
        return self._set.ranks.size

    def write(self, rows: Any) -> None:
        """Append rows.

        Args:
            rows: a dict of arrays whose first axis counts the rows. Dicts in it become groups, whose fields are called
                "group/x". All rows, on all ranks, have the same names, dtypes and row shapes. Arrays hold numbers,
                booleans, bytes, or structures of these. Layout "chunked" also takes strings (dtype <U, or object with a
                str in each place) and rows that differ in length (a 1-D array of dtype object that holds a 1-D array
                for each row).

        Raises:
            ValueError: for rows that have no form in HDF5, or are not like those before.
            ClosedError: after the context.
        """
        self._set.write(rows, "ShardWriter.write", "rows")

    def write_row(self, row: Any) -> None:
        """Append one row.

        Args:
            row: a dict of arrays, numbers and strings; arrays without an axis that counts rows. The first row decides
                on dtypes and shapes.

        Raises:
            ValueError: for a row that has no form in HDF5, or is not like those before.
            ClosedError: after the context.
        """
        self._set.write_row(row, "ShardWriter.write_row", "row")

    def close(self) -> None:
        """Finish the set: what leaving the context does. Collective.

        Raises:
            ValueError: when no rank has written anything, not even an array of no rows.
            CollectiveMismatchError, ShardError, OSError: as the class says; nothing new is left then.
        """
        self._set.close()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._set.__exit__(kind, error, trace)


_NAME = "write_shards"
_DATA = (_NAME, "data")  # for errors
_ROWS = 64  # of a dataset, written together


def write_shards(
    target: PathLike,
    data: Mapping[str, Any] | Dataset | Iterable[Any] | Callable[[int, int], Any],
    *,
    rows_per_shard: int | None = None,
    bytes_per_shard: int | None = None,
    num_shards: int | None = None,
    batched: bool = False,
    layout: Layout | None = None,
    compression: Compression | None = None,
    shuffle: bool | None = None,
    fletcher32: bool | None = None,
    chunk_rows: int | None = None,
    attributes: Mapping[str, Mapping[str, Any]] | None = None,
    comm: MPI.Intracomm | None = None,
) -> list[Path]:
    """Write data as HDF5 shards with a manifest, and return the shards' paths. Collective over `comm`, if there is one.

    Files are written aside, flushed to disk and renamed, the manifest last. An older set of the same name is replaced.
    Uncompressed data is stored contiguously, so that it can be read through a memory map. With `comm` every rank writes
    the data that it passes, and the set has it in rank order.

    Args:
        target: a directory, whose shards become 00000-of-00004.h5 and so on with manifest.json; or a pattern like
            `data/train-*.h5`: then they are data/train-00000-of-00004.h5 and so on with data/train-manifest.json.
        data: one of
            a dict of arrays of equal length along their first axis (memory maps stay on the disk);
            an iterable of rows, each a dict of arrays, numbers and strings;
            with `batched`, an iterable of batches, each a dict of arrays whose first axis counts rows;
            a dataset whose elements are dicts, of which one epoch is written;
            a function of (rank, number of ranks) that returns one of these.
        rows_per_shard: rows in every shard but the last.
        bytes_per_shard: instead, about so many bytes before compression.
        num_shards: instead, for arrays only, how many shards (of this rank); their rows differ by at most one. With
            none of the three, shards have about 1 GiB.
        batched: whether the items of an iterable are batches, not rows.
        layout, compression, shuffle, fletcher32, chunk_rows, attributes: as `ShardWriter` says.
        comm: mpi4py's communicator of the ranks that write together, for instance `strategy.comm`. Without it this
            rank writes a set of its own, and must be the only one of that name.

    Raises:
        ValueError: for arrays of different lengths, of a dtype that has no HDF5 form, for wrong arguments.
        ShardError: when an older set's manifest is damaged, or another rank failed.
        OSError: when the disk does not take it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     [path.name for path in write_shards(directory, {"x": np.arange(5)}, num_shards=2)]
        ...     len(write_shards(directory, ({"x": i, "text": str(i)} for i in range(5)), compression="gzip"))
        ['00000-of-00002.h5', '00001-of-00002.h5']
        1
    """
    settings = ShardSettings(
        rows_per_shard=rows_per_shard, bytes_per_shard=bytes_per_shard, layout=layout, compression=compression,
        shuffle=shuffle, fletcher32=fletcher32, chunk_rows=chunk_rows, attributes=attributes,
    )  # fmt: skip
    with SetWriter(_NAME, target, settings, comm) as writer:
        if callable(data) and not isinstance(data, (Dataset, Mapping)):
            data = data(writer.ranks.rank, writer.ranks.size)
        if isinstance(data, Mapping):
            _write_arrays(writer, data, num_shards, rows_per_shard or bytes_per_shard)
        else:
            if num_shards is not None:
                remedy = "Pass rows_per_shard or bytes_per_shard."
                expected = "none, as the number of rows is known for a dict of arrays only"
                raise ValueError(explain(_NAME, "num_shards", expected=expected, got=num_shards, remedy=remedy))
            if isinstance(data, Dataset):
                _write_dataset(writer, data)
            else:
                _write_items(writer, data, batched)
    return writer.paths


def _write_arrays(writer: SetWriter, data: Mapping[str, Any], num_shards: int | None, each: int | None) -> None:
    columns = columns_of(_NAME, "data", data)
    fields = fields_of(_NAME, "data", columns)
    rows = len(next(iter(columns.values())))
    if num_shards is not None:
        if each is not None:
            got = f"both {num_shards} shards and {each} in each"
            raise ValueError(explain(_NAME, "", expected="one of num_shards, rows_per_shard, bytes_per_shard", got=got))
        bounds = partition.bounds(rows, positive(_NAME, "num_shards", num_shards))
    elif rows and (step := writer.settings.rows_of_shard(fields)) is not None:
        bounds = partition.blocks([(0, rows)], step)
    else:
        writer.write(data, *_DATA)
        return
    writer.write_shards(columns, bounds, *_DATA)


def _write_dataset(writer: SetWriter, dataset: Dataset) -> None:
    if dataset.cardinality() == INFINITE:
        remedy = "Write the dataset without repeat(), or take() what is wanted."
        raise ValueError(explain(_NAME, "data", expected="a dataset with an end", got="one without", remedy=remedy))
    if not isinstance(dataset.node.row_spec, Mapping):
        got, remedy = f"elements of {dataset.node.row_spec}", 'Name the arrays: .map(lambda x, y: {"x": x, "y": y}).'
        raise ValueError(explain(_NAME, "data", expected="a dataset of dicts", got=got, remedy=remedy))
    if dataset.node.batching is not None:
        for batch in dataset:
            writer.write(batch, *_DATA)
        return
    waiting: list[Any] = []
    for row in dataset:
        waiting.append(row)
        if len(waiting) == _ROWS:
            writer.write(stack_rows(waiting, dataset.node.row_spec), *_DATA)
            waiting = []
    if waiting or not dataset.cardinality():
        writer.write(stack_rows(waiting, dataset.node.row_spec), *_DATA)


def _write_items(writer: SetWriter, items: Any, batched: bool) -> None:
    try:
        iterator = iter(items)
    except TypeError:
        expected = "a dict of arrays by name, a dataset, an iterable of rows, or a function of the rank"
        raise ValueError(explain(_NAME, "data", expected=expected, got=f"a {type(items).__name__}")) from None
    put = writer.write if batched else writer.write_row
    for number, item in enumerate(iterator):
        put(item, _NAME, f"data[{number}]")
