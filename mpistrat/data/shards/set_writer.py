"""The writer of a set: rows go in, some at a time, on every rank of a job; one set of HDF5 shards comes out, or none."""

from __future__ import annotations

import contextlib
import glob
import json
import os
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
from .files import PathLike, is_hdf5, manifest_path
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
from .new_shard import NewShard
from .settings import ShardSettings

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["SetWriter", "publish", "set_pattern"]

_PENDING_BYTES = 1 << 20  # small writes are collected up to so many bytes
_PENDING_ROWS = 1 << 12  # and rows


def set_pattern(function: str, target: PathLike) -> Path:
    """Return the path of a set's files, with one "*" in the name.

    Raises:
        ValueError: for what is neither a directory nor such a pattern.
    """
    path = Path(target)
    if not os.fspath(target):
        raise ValueError(explain(function, "target", expected="a path", got="an empty one"))
    if (
        re.fullmatch(r"[^*]*\*\.[^*.]+", path.name)
        and is_hdf5(path)
        and not glob.has_magic(str(path).replace("*", "", 1))
    ):
        return path
    if glob.has_magic(str(path)) or is_hdf5(path):
        expected = 'a directory, or a pattern with one "*", right before ".h5", like "data/train-*.h5"'
        raise ValueError(explain(function, "target", expected=expected, got=repr(str(path))))
    return path / "*.h5"


@final
class SetWriter:
    """Writes a set; see `ShardWriter`. A rank that knows how many `rows` come writes its last shard once. Collective."""

    def __init__(
        self,
        function: str,
        target: PathLike,
        settings: ShardSettings,
        comm: MPI.Intracomm | None,
        rows: int | None = None,
    ) -> None:
        self._function = function
        self.ranks = Ranks(given_comm(comm, function), function)
        with self.ranks.together():
            self._pattern = set_pattern(function, target)
            self.settings = settings.checked(function)
        self.ranks.agree(f"{function} {str(self._pattern)!r} {self.settings}")
        self._given, self._pattern = self._pattern, self._pattern.absolute()
        self._fields: dict[str, Field] | None = None
        self._spec: dict[str, Any] = {}
        self._pending: list[Columns] = []  # that wait for more
        self._pending_rows: list[dict[str, Any]] = []  # single rows that came behind them
        self._pending_bytes = 0
        self._rows_to_come = rows
        self._aside: Path | None = None
        self._shard: NewShard | None = None
        self._files: list[tuple[Path, ShardEntry]] = []
        self._failed = False
        self._closed = False
        self.paths: list[Path] = []

    def write(self, rows: Any, where: str, argument: str) -> None:
        """Append rows."""
        self._require_open(where)
        columns = columns_of(where, argument, rows)
        if self._fields is None:
            self._begin(where, argument, fields_of(where, argument, columns))
        else:
            fit(where, argument, columns, self._fields)
        self._flush_rows()
        self._take(columns)

    def write_row(self, row: Any, where: str, argument: str) -> None:
        """Append one row."""
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

    def write_shards(self, columns: Columns, bounds: Iterable[tuple[int, int]], where: str, argument: str) -> None:
        """Append rows as shards from and to these rows, of exactly so many, even if that is none."""
        self._require_open(where)
        if self._fields is None:
            self._begin(where, argument, fields_of(where, argument, columns))
        self._flush()
        self._finish_shard()
        for start, stop in bounds:
            self._shard = self._open_shard(stop - start)
            self._store(columns, start, stop)
            self._finish_shard()

    def close(self) -> None:
        """See `ShardWriter.close`. Collective."""
        if self._closed:
            return
        self._closed = True
        try:
            with self.ranks.together():
                empty = self._finish()
                self._make_folder()
            written = publish(self.ranks, self._function, self._pattern, self._fields, self._files, empty)
            self.paths = [self._given.with_name(path.name) for path in written]
        finally:
            self._discard()

    def __enter__(self) -> SetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            try:
                tell(self.ranks.exchange, error)  # the others wait in `close`
            finally:
                self._discard()

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
        """Take the fields of the first rows for those of all."""
        self.settings.check(where, argument, fields)
        self._fields, self._spec = fields, spec_of_fields(fields)

    # Small writes are collected, and go to HDF5 together.

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
        self._failed = True  # until it is done: a set with rows missing must not come out
        while start < stop:
            if self._shard is None:
                self._shard = self._open_shard(self._expected_rows())
            start = self._shard.append(columns, start, stop, self._limit())
            if self._shard.full or self._shard.bytes >= (self._limit() or np.inf):
                self._finish_shard()
        self._failed = False

    def _capacity(self) -> int | None:
        """The most rows of a shard, where that is known."""
        assert self._fields is not None
        return self.settings.rows_of_shard(self._fields)

    def _expected_rows(self) -> int | None:
        """The most rows of the next shard, where that is known."""
        capacity, rows = self._capacity(), self._rows_to_come
        if capacity is None or rows is None:
            return capacity
        return min(capacity, max(1, rows - sum(entry.rows for _, entry in self._files)))

    def _limit(self) -> int | None:
        """The bytes at which a shard is full, where the bytes of a row are not known."""
        return self.settings.bytes_per_shard if self._capacity() is None else None

    def _open_shard(self, capacity: int | None) -> NewShard:
        assert self._fields is not None
        if self._aside is None:
            self._make_folder()
            self._aside = Path(tempfile.mkdtemp(prefix=".shards-", suffix=".tmp", dir=self._pattern.parent))
            # For a writer that is not closed: only files, no communication.
            weakref.finalize(self, shutil.rmtree, self._aside, ignore_errors=True)
        path = self._aside / f"{len(self._files):05d}.h5"
        return NewShard(path, self._fields, self.settings, capacity)

    def _finish_shard(self) -> None:
        if self._shard is not None:
            shard, self._shard = self._shard, None
            self._files.append((shard.path, shard.finish(shard.path.name)))

    def _finish(self) -> tuple[Path, ShardEntry] | None:
        """Write what waits. Return a file without rows if this rank has no other."""
        if self._failed:
            raise ShardError(explain(self._function, "", expected="rows that were written", got="a write that failed"))
        columns = self._collected()
        if columns is not None:
            if self._shard is None:  # few rows, all of them known: no need to write them twice
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
            with contextlib.suppress(OSError):  # of a file that is removed
                self._shard.close()
            self._shard = None
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)


def _rows(columns: Columns) -> int:
    return len(next(iter(columns.values())))


def publish(
    ranks: Ranks,
    function: str,
    pattern: Path,
    fields: dict[str, Field] | None,
    files: Sequence[tuple[Path, ShardEntry]],
    empty: tuple[Path, ShardEntry] | None,
) -> list[Path]:
    """Give the files of all ranks their names, in rank order, and write the manifest. Collective.

    Meanwhile there is a manifest marked "unfinished", so that what a crash leaves behind is refused, not mixed. `empty` is a
    file without rows, for the case that no rank has another.

    Raises:
        ValueError: when no rank has seen rows.
        CollectiveMismatchError: when the ranks' fields differ.
        ShardError: when another rank failed.
    """
    mine = {
        "fields": None if fields is None else fields_to_json(fields),
        "shards": [vars(entry) for _, entry in files],
        "empty": None if empty is None else vars(empty[1]),
    }
    all_ranks = [json.loads(text) for text in ranks.exchange(json.dumps(mine))]
    agreed = fields_from_json(_agreed(function, [one["fields"] for one in all_ranks]))
    if not any(one["shards"] for one in all_ranks):
        owner = next(rank for rank, one in enumerate(all_ranks) if one["empty"] is not None)
        all_ranks[owner]["shards"] = [all_ranks[owner]["empty"]]
        files = [empty] if ranks.rank == owner and empty is not None else []
    entries = [[ShardEntry(**shard) for shard in one["shards"]] for one in all_ranks]
    count = sum(map(len, entries))
    numbered = iter(range(count))
    entries = [
        [replace(e, name=pattern.name.replace("*", f"{next(numbered):05d}-of-{count:05d}")) for e in own]
        for own in entries
    ]
    shards = tuple(entry for own in entries for entry in own)
    names, directory, manifest = {shard.name for shard in shards}, pattern.parent, manifest_path(pattern)
    old: set[str] = set()
    with ranks.together():
        if ranks.rank == 0:
            old = set(_replaced(pattern, listed_names(manifest))) if manifest.exists() else set()
            write_unfinished(manifest, sorted(old | names))
    with ranks.together():
        for (path, _), entry in zip(files, entries[ranks.rank], strict=True):
            path.replace(directory / entry.name)
        flush_folder(directory)
    with ranks.together():
        if ranks.rank == 0:
            for name in old - names:
                (directory / name).unlink(missing_ok=True)
            write_manifest(manifest, Manifest(agreed, shards))
    return [directory / shard.name for shard in shards]


def _replaced(pattern: Path, names: Sequence[str]) -> Iterator[str]:
    """Yield those of the names in an older manifest that are shards of this pattern: nothing else is removed for it."""
    shard = re.compile(re.escape(pattern.name).replace(r"\*", "[0-9]+-of-[0-9]+"))
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            if shard.fullmatch(name) and stat.S_ISREG((pattern.parent / name).lstat().st_mode):
                yield name


def _agreed(function: str, fields: list[dict[str, dict[str, object]] | None]) -> dict[str, dict[str, object]]:
    """The fields that all ranks have seen."""
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
