"""The writer of a set of shards: all ranks of a job append rows; one complete set of HDF5 shards appears, or none."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import stat
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ...base.agree import Ranks, tell
from ...base.errors import ClosedError, CollectiveMismatchError, ShardError, explain
from ...base.files import flush_folder
from ...cluster.topology import given_comm
from ..spec import conform, spec_of_element, stack_rows
from .columns import Columns, columns_of, content_bytes, fields_of, fit, named, spec_of_fields
from .files import PathLike, manifest_path, set_pattern
from .manifest import (
    Field,
    Manifest,
    ShardEntry,
    fields_from_json,
    fields_to_json,
    listed_names,
    write_manifest,
    write_unfinished,
)
from .new_shard import NewShard, ShardFormat, ShardSettings

if TYPE_CHECKING:
    from mpi4py import MPI
    from typing_extensions import Unpack

__all__ = ["ShardWriter"]

_PENDING_BYTES = 1 << 20  # small writes are collected up to this number of bytes
_PENDING_ROWS = 1 << 12  # or rows


@final
class ShardWriter:
    """A writer of rows as a set of HDF5 shards with a manifest, alone or on all ranks. Collective over `comm`.

    Use it as a context manager. The set appears when the context ends: files are written to a temporary folder, flushed
    to disk and renamed, and an older set of the same name is replaced. If an exception ends the context on any rank, no
    new file remains, an older set is unchanged, and every rank gets an exception.

    With `comm` each rank writes its rows into its own shards, and `write` is not collective. The set has the ranks'
    shards in rank order. Only creating a writer and leaving its context are collective.

    Memory: about 1 MiB of small writes, plus 4 MiB of buffers for HDF5. Contiguous data needs a known length, so each
    rank's last shard is written twice if it is not full.

    Args:
        target: a directory, whose shards become 00000-of-00004.h5 and so on with manifest.json; or a pattern like
            `data/train-*.h5`: then they are data/train-00000-of-00004.h5 and so on with data/train-manifest.json.
        rows_per_shard: rows in every shard but a rank's last.
        bytes_per_shard: instead, approximate bytes before compression; by default 1 GiB.
        layout: "contiguous" (default), which is read by memory map, or "chunked".
        compression: "gzip", "lzf", or gzip's level 0 to 9; implies layout="chunked".
        shuffle: group bytes of equal significance before compressing; default with compression.
        fletcher32: a checksum per chunk; default for chunked data. Not for contiguous data.
        chunk_rows: rows in a chunk; by default about 256 KiB of each field.
        attributes: HDF5 attributes of the fields, {"label": {"classes": ["cat", "dog"]}}; equal on every rank.
        comm: mpi4py's communicator of the ranks that write the set together, for instance `strategy.comm`.

    Raises:
        ValueError: for unknown or incompatible arguments, and an invalid target.
        CollectiveMismatchError: when ranks pass different arguments or rows of different fields.
        ShardError: when another rank failed, naming it, and when an older set's manifest is damaged.
        OSError: when the files cannot be written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     with ms.data.ShardWriter(directory, rows_per_shard=4) as writer:
        ...         writer.write({"x": np.arange(5), "y": np.zeros((5, 3))})
        ...         writer.write_row({"x": 5, "y": np.ones(3)})
        ...     rows = ms.data.HDF5Dataset(directory)
        ...     len(rows), [path.name for path in writer.paths]
        (6, ['00000-of-00002.h5', '00001-of-00002.h5'])
    """

    def __init__(
        self, target: PathLike, *, comm: MPI.Intracomm | None = None, **settings: Unpack[ShardSettings]
    ) -> None:
        self._open("ShardWriter", target, settings, comm)

    @classmethod
    def _of(
        cls,
        function: str,
        target: PathLike,
        settings: ShardSettings,
        comm: MPI.Intracomm | None,
        rows: int | None = None,
    ) -> ShardWriter:
        """Return the writer for another function of the user, which errors name. Collective over `comm`.

        A rank that knows its number of `rows` writes its last shard once.
        """
        writer = cls.__new__(cls)
        writer._open(function, target, settings, comm, rows)
        return writer

    def _open(
        self,
        function: str,
        target: PathLike,
        settings: ShardSettings,
        comm: MPI.Intracomm | None,
        rows: int | None = None,
    ) -> None:
        self._function = function
        self._ranks = Ranks(given_comm(comm, function), function)
        with self._ranks.together():
            self._pattern = set_pattern(function, target)
            self._form = ShardFormat(function, settings)
        self._ranks.agree(f"{function} {str(self._pattern)!r} {self._form}")
        self._given, self._pattern = self._pattern, self._pattern.absolute()
        self._fields: dict[str, Field] | None = None
        self._spec: dict[str, Any] = {}
        self._pending: list[Columns] = []  # small writes not stored yet
        self._pending_rows: list[dict[str, Any]] = []  # single rows after them
        self._pending_bytes = 0
        self._rows_to_come = rows
        self._aside: Path | None = None
        self._shard: NewShard | None = None
        self._files: list[tuple[Path, ShardEntry]] = []
        self._failed = False
        self._closed = False
        self._paths: list[Path] = []

    @property
    def paths(self) -> list[Path]:
        """The paths of the set's files, of all ranks, once the writer is closed; equal on every rank."""
        return list(self._paths)

    @property
    def rank(self) -> int:
        """The number of this rank among the writing ones."""
        return self._ranks.rank

    @property
    def size(self) -> int:
        """The number of ranks that write the set."""
        return self._ranks.size

    def write(self, rows: Any) -> None:
        """Append rows.

        Args:
            rows: a dict of arrays whose first axis counts the rows. Nested dicts become groups with fields "group/x". All
                rows, on all ranks, have the same names, dtypes and row shapes. Arrays contain numbers, booleans, bytes,
                or structures of these. Layout "chunked" also takes strings (dtype <U, or object with a str per element)
                and rows of varying length (a 1-D array of dtype object with a 1-D array per row).

        Raises:
            ValueError: for rows without an HDF5 form, or unlike earlier ones.
            ClosedError: after the context.
        """
        self._append(rows, "ShardWriter.write", "rows")

    def write_row(self, row: Any) -> None:
        """Append one row.

        Args:
            row: a dict of arrays, numbers and strings, without an axis for rows. The first row defines dtypes and shapes.

        Raises:
            ValueError: for a row without an HDF5 form, or unlike earlier ones.
            ClosedError: after the context.
        """
        self._append_row(row, "ShardWriter.write_row", "row")

    def close(self) -> None:
        """Finish the set, like leaving the context. Collective.

        Raises:
            ValueError: when no rank has written rows, not even an array of no rows.
            CollectiveMismatchError, ShardError, OSError: as for the class; no new file remains.
        """
        if self._closed:
            return
        self._closed = True
        try:
            with self._ranks.together():
                empty = self._finish()
                self._make_folder()
            written = self._publish(empty)
            self._paths = [self._given.with_name(path.name) for path in written]
        finally:
            self._discard()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            try:
                tell(self._ranks.exchange, error)  # the others wait in `close`
            finally:
                self._discard()

    # Rows of any function of the user; errors name it and its argument.

    def _append(self, rows: Any, where: str, argument: str) -> None:
        self._require_open(where)
        columns = columns_of(where, argument, rows)
        if self._fields is None:
            self._begin(where, argument, fields_of(where, argument, columns))
        else:
            fit(where, argument, columns, self._fields)
        self._flush_rows()
        self._take(columns)

    def _append_row(self, row: Any, where: str, argument: str) -> None:
        self._require_open(where)
        values = named(where, argument, row, "a dict of arrays, numbers and strings by name")
        if self._fields is None:
            try:
                spec = spec_of_element(values)
                rows = stack_rows([conform(values, spec)], spec)
            except TypeError as error:
                raise TypeError(f"{where}: {argument}: {error}") from None
            except ValueError as error:
                raise ValueError(f"{where}: {argument}: {error}") from None
            self._begin(where, argument, fields_of(where, argument, rows))
        try:
            values = conform(values, self._spec)
        except TypeError as error:
            raise TypeError(f"{where}: {argument}: {error}") from None
        except ValueError as error:
            remedy = "Rows that differ in length are written many at a time, or from ms.data.from_generator."
            text = f"{where}: {argument}: {error}" + (f". {remedy}" if "got " in str(error) else "")
            raise ValueError(text) from None
        values = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in values.items()}
        self._pending_rows.append(values)
        self._pending_bytes += sum(value.nbytes if isinstance(value, np.ndarray) else 8 for value in values.values())
        if self._pending_bytes >= _PENDING_BYTES or len(self._pending_rows) >= _PENDING_ROWS:
            self._flush()

    def _append_shards(self, columns: Columns, bounds: Iterable[tuple[int, int]], where: str, argument: str) -> None:
        """Append rows as shards with these bounds, even if empty."""
        self._require_open(where)
        if self._fields is None:
            self._begin(where, argument, fields_of(where, argument, columns))
        self._flush()
        self._finish_shard()
        for start, stop in bounds:
            self._shard = self._open_shard(stop - start)
            self._store(columns, start, stop)
            self._finish_shard()

    def _make_folder(self) -> None:
        try:
            self._pattern.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            expected, got = f"a folder {self._pattern.parent}", str(error.strerror)
            raise type(error)(explain(self._function, "target", expected=expected, got=got)) from None

    def _require_open(self, where: str) -> None:
        if self._closed:
            raise ClosedError(explain(where, "", expected="an open writer", got="one that was closed"))

    def _begin(self, where: str, argument: str, fields: dict[str, Field]) -> None:
        self._form.check(where, argument, fields)
        self._fields, self._spec = fields, spec_of_fields(fields)

    # Small writes are collected and written to HDF5 together.

    def _take(self, columns: Columns) -> None:
        size, rows = sum(map(content_bytes, columns.values())), _rows(columns)
        if size >= _PENDING_BYTES or rows >= _PENDING_ROWS:
            self._flush()
            self._store(columns, 0, rows)
        elif rows:
            self._pending.append({name: array.copy() for name, array in columns.items()})  # the caller may reuse them
            self._pending_bytes += size
            if self._pending_bytes >= _PENDING_BYTES or sum(map(_rows, self._pending)) >= _PENDING_ROWS:
                self._flush()

    def _flush_rows(self) -> None:
        if self._pending_rows:
            self._pending.append(stack_rows(self._pending_rows, self._spec))
            self._pending_rows = []

    def _collected(self) -> Columns | None:
        self._flush_rows()
        waiting, self._pending, self._pending_bytes = self._pending, [], 0
        if len(waiting) < 2:
            return waiting[0] if waiting else None
        return {name: np.concatenate([columns[name] for columns in waiting]) for name in waiting[0]}

    def _flush(self) -> None:
        columns = self._collected()
        if columns is not None:
            self._store(columns, 0, _rows(columns))

    # Shards.

    def _store(self, columns: Columns, start: int, stop: int) -> None:
        self._failed = True  # until it is done: a set with missing rows must not be published
        while start < stop:
            if self._shard is None:
                self._shard = self._open_shard(self._expected_rows())
            start = self._shard.append(columns, start, stop, self._limit())
            if self._shard.full or self._shard.bytes >= (self._limit() or np.inf):
                self._finish_shard()
        self._failed = False

    def _capacity(self) -> int | None:
        """Return the most rows of a shard, if known."""
        assert self._fields is not None
        return self._form.rows_of_shard(self._fields)

    def _expected_rows(self) -> int | None:
        """Return the most rows of the next shard, if known."""
        capacity, rows = self._capacity(), self._rows_to_come
        if capacity is None or rows is None:
            return capacity
        return min(capacity, max(1, rows - sum(entry.rows for _, entry in self._files)))

    def _limit(self) -> int | None:
        """Return the bytes of a full shard, if the bytes of a row are unknown."""
        return self._form.bytes_per_shard if self._capacity() is None else None

    def _open_shard(self, capacity: int | None) -> NewShard:
        assert self._fields is not None
        if self._aside is None:
            self._make_folder()
            self._aside = Path(tempfile.mkdtemp(prefix=".shards-", suffix=".tmp", dir=self._pattern.parent))
            # For a writer that is not closed: removes files without communication.
            weakref.finalize(self, shutil.rmtree, self._aside, ignore_errors=True)
        path = self._aside / f"{len(self._files):05d}.h5"
        return NewShard(path, self._fields, self._form, capacity)

    def _finish_shard(self) -> None:
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self._files.append((shard.path, shard.finish(shard.path.name)))

    def _finish(self) -> tuple[Path, ShardEntry] | None:
        """Write pending rows. Return a file without rows if this rank has no other."""
        if self._failed:
            raise ShardError(explain(self._function, "", expected="rows that were written", got="a write that failed"))
        columns = self._collected()
        if columns is not None:
            if self._shard is None:  # few rows of known number are written once
                self._shard = self._open_shard(min(self._capacity() or _rows(columns), _rows(columns)))
            self._store(columns, 0, _rows(columns))
        self._finish_shard()
        if self._files or self._fields is None:
            return None
        empty = self._open_shard(0)
        return empty.path, empty.finish(empty.path.name)

    def _discard(self) -> None:
        self._pending, self._pending_rows = [], []
        if self._shard is not None:
            with contextlib.suppress(OSError):  # the file is removed anyway
                self._shard.close()
            self._shard = None
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)

    def _publish(self, empty: tuple[Path, ShardEntry] | None) -> list[Path]:
        """Rename the files of all ranks, in rank order, and write the manifest. Collective.

        Meanwhile a manifest is marked "unfinished", so that the remains of a crash are refused, not mixed. `empty` is a
        file without rows, for the case that no rank has another.

        Raises:
            ValueError: when no rank has seen rows.
            CollectiveMismatchError: when the ranks' fields differ.
            ShardError: when another rank failed.
        """
        mine = {
            "fields": None if self._fields is None else fields_to_json(self._fields),
            "shards": [vars(entry) for _, entry in self._files],
            "empty": None if empty is None else vars(empty[1]),
        }
        files, directory = self._files, self._pattern.parent
        all_ranks = [json.loads(text) for text in self._ranks.exchange(json.dumps(mine))]
        agreed = fields_from_json(_agreed(self._function, [one["fields"] for one in all_ranks]))
        if not any(one["shards"] for one in all_ranks):
            owner = next(rank for rank, one in enumerate(all_ranks) if one["empty"] is not None)
            all_ranks[owner]["shards"] = [all_ranks[owner]["empty"]]
            files = [empty] if self._ranks.rank == owner and empty is not None else []
        entries = [[ShardEntry(**shard) for shard in one["shards"]] for one in all_ranks]
        count = sum(map(len, entries))
        numbered = iter(range(count))
        entries = [
            [replace(e, name=self._pattern.name.replace("*", f"{next(numbered):05d}-of-{count:05d}")) for e in own]
            for own in entries
        ]
        shards = tuple(entry for own in entries for entry in own)
        names, manifest = {shard.name for shard in shards}, manifest_path(self._pattern)
        old: set[str] = set()
        with self._ranks.together():
            if self._ranks.rank == 0:
                old = set(_replaced(self._pattern, listed_names(manifest))) if manifest.exists() else set()
                write_unfinished(manifest, sorted(old | names))
        with self._ranks.together():
            for (path, _), entry in zip(files, entries[self._ranks.rank], strict=True):
                path.replace(directory / entry.name)
            flush_folder(directory)
        with self._ranks.together():
            if self._ranks.rank == 0:
                for name in old - names:
                    (directory / name).unlink(missing_ok=True)
                write_manifest(manifest, Manifest(agreed, shards))
        return [directory / shard.name for shard in shards]


def _rows(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def _replaced(pattern: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield the names in an older manifest that are shards of this pattern; no other files are removed."""
    shard = re.compile(re.escape(pattern.name).replace(r"\*", "[0-9]+-of-[0-9]+"))
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if shard.fullmatch(name) and stat.S_ISREG((pattern.parent / name).lstat().st_mode):
                yield name


def _agreed(function: str, fields: list[dict[str, dict[str, object]] | None]) -> dict[str, dict[str, object]]:
    known = {rank: one for rank, one in enumerate(fields) if one is not None}
    if not known:
        remedy = "Write an array of no rows to make an empty set."
        raise ValueError(explain(function, "", expected="rows to write", got="none", remedy=remedy))
    first, agreed = next(iter(known.items()))
    for rank, one in known.items():
        if one != agreed:
            got = f"{one} on rank {rank}"
            remedy = "All shards of a set need the same names, dtypes and row shapes."
            expected = f"the fields {agreed}, as on rank {first}"
            raise CollectiveMismatchError(explain(function, "", expected=expected, got=got, remedy=remedy))
    return agreed
