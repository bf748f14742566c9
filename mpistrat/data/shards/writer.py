"""ShardWriter: what users write sets of shards with, piece by piece."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

from .files import PathLike
from .set_writer import SetWriter
from .settings import Compression, Layout, ShardSettings

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["ShardWriter"]


@final
class ShardWriter:
    """Writes rows as a set of HDF5 shards with a manifest, piece by piece, alone or on all ranks. Collective over `comm`.

    Use it as a context manager. The set appears when the context ends: files are written aside, flushed to the disk and
    renamed, and an older set of the same name is replaced. If an exception ends the context, on any rank, nothing new
    is left, an older set stays as it was, and every rank gets an exception.

    With `comm` each rank writes the rows that it is given into shards of its own; `write` needs no other rank. In the
    set the ranks' shards come in rank order. Only making a writer and leaving its context are collective.

    Memory: about 1 MiB of small pieces, and 4 MiB on the way to HDF5, whatever is written. Contiguous data must
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
            rows_per_shard, bytes_per_shard, layout, compression, shuffle, fletcher32, chunk_rows, attributes
        )
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
                "group/x". All pieces, on all ranks, have the same names, dtypes and row shapes. Arrays hold numbers,
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
