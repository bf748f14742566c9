"""`write_shards`, which writes arrays, rows or a dataset as a set of shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...base import partition
from ...base.errors import explain
from ..dataset import INFINITE, Dataset
from ..spec import stack_rows
from .columns import columns_of, fields_of
from .files import PathLike
from .new_shard import ShardSettings, positive
from .writer import ShardWriter

if TYPE_CHECKING:
    from mpi4py import MPI
    from typing_extensions import Unpack

__all__ = ["write_shards"]

_NAME = "write_shards"
_DATA = (_NAME, "data")  # for errors
_ROWS = 64  # rows of a dataset written together


def write_shards(
    target: PathLike,
    data: Mapping[str, Any] | Dataset | Iterable[Any] | Callable[[int, int], Any],
    *,
    num_shards: int | None = None,
    batched: bool = False,
    comm: MPI.Intracomm | None = None,
    **settings: Unpack[ShardSettings],
) -> list[Path]:
    """Write data as HDF5 shards with a manifest, and return the shards' paths. Collective over `comm`, if given.

    Files are written to a temporary folder, flushed to disk and renamed, the manifest last. An older set of the same name
    is replaced. Uncompressed data is contiguous, for reading through a memory map. With `comm` every rank writes its
    data, and the set has it in rank order.

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
        bytes_per_shard: instead, approximate bytes before compression.
        num_shards: instead, for arrays only, the number of this rank's shards; their rows differ by at most one. Without
            any of the three, shards have about 1 GiB.
        batched: whether the items of an iterable are batches, not rows.
        layout, compression, shuffle, fletcher32, chunk_rows, attributes: as for `ShardWriter`.
        comm: mpi4py's communicator of the ranks that write together, for instance `strategy.comm`. Without it this rank
            writes its own set, and must be the only one of that name.

    Raises:
        ValueError: for arrays of different lengths, a dtype without an HDF5 form, and invalid arguments.
        ShardError: when an older set's manifest is damaged, or another rank failed.
        OSError: when the files cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     paths = write_shards(directory, {"x": np.arange(5)}, num_shards=2)
        ...     [path.name for path in paths]
        ...     rows = ({"x": i, "text": str(i)} for i in range(5))
        ...     len(write_shards(directory, rows, compression="gzip"))
        ['00000-of-00002.h5', '00001-of-00002.h5']
        1
    """
    with ShardWriter._of(_NAME, target, settings, comm) as writer:
        if callable(data) and not isinstance(data, (Dataset, Mapping)):
            data = data(writer.rank, writer.size)
        if isinstance(data, Mapping):
            _write_arrays(writer, data, num_shards, settings.get("rows_per_shard") or settings.get("bytes_per_shard"))
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


def _write_arrays(writer: ShardWriter, data: Mapping[str, Any], num_shards: int | None, each: int | None) -> None:
    columns = columns_of(_NAME, "data", data)
    fields = fields_of(_NAME, "data", columns)
    rows = len(next(iter(columns.values())))
    if num_shards is not None:
        if each is not None:
            got = f"both {num_shards} shards and {each} in each"
            raise ValueError(explain(_NAME, "", expected="one of num_shards, rows_per_shard, bytes_per_shard", got=got))
        bounds = partition.bounds(rows, positive(_NAME, "num_shards", num_shards))
    elif rows and (step := writer._form.rows_of_shard(fields)) is not None:
        bounds = partition.blocks([(0, rows)], step)
    else:
        writer._append(data, *_DATA)
        return
    writer._append_shards(columns, bounds, *_DATA)


def _write_dataset(writer: ShardWriter, dataset: Dataset) -> None:
    if dataset.cardinality() == INFINITE:
        remedy = "Write the dataset without repeat(), or with take()."
        raise ValueError(explain(_NAME, "data", expected="a dataset with an end", got="an endless one", remedy=remedy))
    if not isinstance(dataset.node.row_spec, Mapping):
        got, remedy = f"elements of {dataset.node.row_spec}", 'Name the arrays: .map(lambda x, y: {"x": x, "y": y}).'
        raise ValueError(explain(_NAME, "data", expected="a dataset of dicts", got=got, remedy=remedy))
    if dataset.node.batching is not None:
        for batch in dataset:
            writer._append(batch, *_DATA)
        return
    waiting: list[Any] = []
    for row in dataset:
        waiting.append(row)
        if len(waiting) == _ROWS:
            writer._append(stack_rows(waiting, dataset.node.row_spec), *_DATA)
            waiting = []
    if waiting or not dataset.cardinality():
        writer._append(stack_rows(waiting, dataset.node.row_spec), *_DATA)


def _write_items(writer: ShardWriter, items: Any, batched: bool) -> None:
    try:
        iterator = iter(items)
    except TypeError:
        expected = "a dict of arrays by name, a dataset, an iterable of rows, or a function of the rank"
        raise ValueError(explain(_NAME, "data", expected=expected, got=f"a {type(items).__name__}")) from None
    put = writer._append if batched else writer._append_row
    for number, item in enumerate(iterator):
        put(item, _NAME, f"data[{number}]")
