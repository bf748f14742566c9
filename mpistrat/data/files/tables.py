"""Rows of tables through pyarrow: Parquet, Arrow (Feather), CSV and JSON lines, in units read as a whole.

A unit is a row group of a Parquet file, a record batch of an Arrow file, or a whole text file, which is read once to
count its rows. pyarrow is imported when files are opened.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.errors import MpistratError, explain, shard_error
from ...base.lazy import load_optional
from ...base.text import counted, shortened
from ..buffers import LastRead, RowBuffers
from ..nodes.sources import short_digest
from ..nodes.stage import InputRows
from ..shards.files import PathLike
from ..spec import ArraySpec, row_nbytes
from ..stats import StageStats
from .columns import UnfitColumn, column_of, column_spec, kind_of, outer_column, to_numpy
from .handles import OpenFiles, ShardFile
from .inputs import Fields, InputFiles, input_files, left_out_words, names_in, structure_of
from .remote import RemotePath, StoredPath, opened_to_scan
from .units import empty_rows, place_rows, rows_of_units

__all__ = ["FORMATS", "TableRows", "table_paths"]

_KEPT = 1 << 26  # minimum cache of units, in bytes
_KEPT_OPEN = 8  # files kept open: pyarrow may keep what it last read of each
_SMALL = 1 << 16  # bytes of a block of a remote Arrow file, whose columns are divided by small headers
_TEXT_BLOCK = 1 << 26  # bytes of text that are parsed at once: the longest row
_ENDS = 1 << 16  # bytes at a file's end that ranks compare
_OTHER_ENDINGS = (".tsv", ".psv", ".orc", ".avro", ".arrows", ".xlsx", ".json.gz", ".json.zst")  # of other tables


def _pyarrow(module: str) -> Any:
    return load_optional(module, "from_tables", "pyarrow, which reads these files", 'pip install "mpistrat[tables]"')


def _source(path: StoredPath, whole: bool = False, mapped: bool = False) -> Any:
    """Return an open file for pyarrow.

    Args:
        path: the file.
        whole: it may be read as a whole.
        mapped: columns are views of a memory map, if it is on this machine. Else small parts of it are read alone.
    """
    pyarrow = _pyarrow("pyarrow")
    if isinstance(path, RemotePath):
        return pyarrow.PythonFile(opened_to_scan(path) if whole else path.open(block=_SMALL) if mapped else path.open())
    return pyarrow.memory_map(str(path)) if mapped else pyarrow.OSFile(str(path))


class _UnitReader(ABC):
    """An open file."""

    @abstractmethod
    def read(self, unit: int) -> Any:
        """Return the wanted columns of a unit, a pyarrow.Table or RecordBatch."""

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


class _UnitFile(ABC):
    """One file: its schema, the rows of its units, and their reader."""

    schema: Any
    rows: Sequence[int]

    @abstractmethod
    def open(self, names: Sequence[str]) -> _UnitReader:
        """Open it for reading some columns, or members of their structures."""


@final
class _Parquet(_UnitFile):
    def __init__(self, path: StoredPath) -> None:
        self._path = path
        with _source(path) as source:
            metadata = self._metadata = _pyarrow("pyarrow.parquet").read_metadata(source)
        self.schema = metadata.schema.to_arrow_schema()
        self.rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]

    def open(self, names: Sequence[str]) -> _UnitReader:
        return _ParquetReader(self._path, self._metadata, names)


@final
class _ParquetReader(_UnitReader):
    def __init__(self, path: StoredPath, metadata: Any, names: Sequence[str]) -> None:
        self._names = list(names)
        self._source = _source(path)
        # Of a remote file the parts of a row group that lie together are one request.
        options = {"metadata": metadata, "pre_buffer": isinstance(path, RemotePath)}
        self._file = _pyarrow("pyarrow.parquet").ParquetFile(self._source, **options)

    def read(self, unit: int) -> Any:
        # Without pyarrow's threads: each rank of a node would start as many as the node has cores.
        return self._file.read_row_group(unit, self._names, use_threads=False)

    def close(self) -> None:
        self._file.close()
        self._source.close()


@final
class _Arrow(_UnitFile):
    def __init__(self, path: StoredPath) -> None:
        self._path = path
        with _source(path, mapped=True) as source:
            self.schema = _pyarrow("pyarrow").ipc.open_file(source).schema
            # Of each unit only the narrowest column is read.
            columns = range(len(self.schema))
            narrowest = min(columns, key=lambda column: _bits(self.schema.field(column).type), default=0)
            reader = _opened_arrow(source, self.schema, {narrowest})
            self.rows = [reader.get_batch(unit).num_rows for unit in range(reader.num_record_batches)]

    def open(self, names: Sequence[str]) -> _UnitReader:
        columns = {self.schema.get_field_index(outer_column(self.schema, name)) for name in names}
        return _ArrowReader(self._path, self.schema, columns)


@final
class _ArrowReader(_UnitReader):
    def __init__(self, path: StoredPath, schema: Any, columns: set[int]) -> None:
        self._source = _source(path, mapped=True)
        self._reader = _opened_arrow(self._source, schema, columns)

    def read(self, unit: int) -> Any:
        return self._reader.get_batch(unit)

    def close(self) -> None:
        self._source.close()


def _opened_arrow(source: Any, schema: Any, columns: set[int]) -> Any:
    """Return pyarrow's reader of some columns; without a choice it reads several times as fast."""
    ipc, chosen = _pyarrow("pyarrow").ipc, sorted(columns) if len(columns) < len(schema) else None
    return ipc.open_file(source, options=ipc.IpcReadOptions(use_threads=False, included_fields=chosen))


def _bits(kind: Any) -> float:
    """Return the bits of a value of a pyarrow type; infinite if they vary."""
    try:
        return int(kind.bit_width)
    except ValueError:
        return float("inf")


@final
class _Text(_UnitFile, _UnitReader):
    """A text file, which pyarrow reads as a whole with inferred column types."""

    def __init__(self, path: StoredPath, module: str, function: str) -> None:
        self._path, self._module, self._function = path, module, function
        table = self._table()
        self.schema, self.rows = table.schema, [table.num_rows]
        self._columns = list(self.schema.names)

    def _table(self) -> Any:
        module = _pyarrow(self._module)
        packed = "gzip" if self._path.name.lower().endswith(".gz") else None
        reading = module.ReadOptions(use_threads=False, block_size=_TEXT_BLOCK)
        parsing = module.ParseOptions(newlines_in_values=True)
        with _source(self._path, whole=True) as source, _pyarrow("pyarrow").input_stream(source, packed) as text:
            return getattr(module, self._function)(text, read_options=reading, parse_options=parsing)

    def open(self, names: Sequence[str]) -> _UnitReader:
        self._columns = list(dict.fromkeys(outer_column(self.schema, name) for name in names))
        return self

    def read(self, unit: int) -> Any:
        return self._table().select(self._columns)

    def close(self) -> None:
        """The file is open only while it is read."""


FORMATS: dict[str, tuple[tuple[str, ...], Any]] = {
    "parquet": ((".parquet", ".pq"), _Parquet),
    "arrow": ((".arrow", ".feather", ".ipc"), _Arrow),
    "csv": ((".csv", ".csv.gz"), functools.partial(_Text, module="pyarrow.csv", function="read_csv")),
    "jsonl": (
        (".jsonl", ".ndjson", ".jsonl.gz"),
        functools.partial(_Text, module="pyarrow.json", function="read_json"),
    ),
}


_error = functools.partial(shard_error, function="from_tables")


def table_paths(
    files: PathLike | Sequence[PathLike], format: str | None, options: Mapping[str, Any] | None = None
) -> tuple[InputFiles, str]:
    """Return the files that a path, a directory, a pattern or a list of paths names, and their format.

    Raises:
        ShardError: no file exists, or a directory also has tables that are not read.
        ValueError: the file names do not show one format.
    """
    if format is not None and format not in FORMATS:
        expected = f"None or one of {', '.join(FORMATS)}"
        raise ValueError(explain("from_tables", "format", expected=expected, got=repr(format)))
    wanted = [format] if format is not None else list(FORMATS)
    endings = tuple(ending for name in wanted for ending in FORMATS[name][0])
    chosen = input_files("from_tables", files, endings, options, _OTHER_ENDINGS)
    paths = chosen.paths
    found = {format} if format is not None else {_format_of(path) for path in paths}
    (one,) = found if len(found) == 1 else (None,)
    if one is None:
        expected, got = (
            f"files of one format, whose names end in {', '.join(endings)}",
            shortened([str(path) for path in paths], 3),
        )
        raise ValueError(explain("from_tables", "files", expected=expected, got=got, remedy="Or pass format=."))
    return chosen, one


def _format_of(path: StoredPath) -> str | None:
    name = path.name.lower()
    return next((format for format, (endings, _) in FORMATS.items() if name.endswith(endings)), None)


class _OpenTables:
    """The opened files, checked against the first one."""

    def __init__(self, paths: Sequence[StoredPath], format: str, names: Sequence[str] | None) -> None:
        self.files: list[_UnitFile] = []
        self.status = [ShardFile.of(path, "from_tables") for path in paths]
        for path in paths:
            try:
                self.files.append(FORMATS[format][1](path))
            except MpistratError:
                raise
            except Exception as error:  # pyarrow raises many kinds for damaged files
                raise _error(path, f"a whole {format} file", f"{type(error).__name__}: {error}") from error
        self.specs, self.left_out = _specs(paths[0], self.files[0].schema, names)
        for path, file in zip(paths, self.files, strict=True):
            self._compare(path, file, paths[0])
        self.units = [(number, unit) for number, file in enumerate(self.files) for unit in range(len(file.rows))]
        rows = [self.files[number].rows[unit] for number, unit in self.units]
        self.starts = np.concatenate(([0], np.cumsum(rows, dtype=np.int64))).astype(np.int64)
        self._numbers = {status: number for number, status in enumerate(self.status)}
        self.readers = OpenFiles(self._open, _KEPT_OPEN)

    def _open(self, status: ShardFile) -> _UnitReader:
        try:
            return self.files[self._numbers[status]].open(list(self.specs))
        except OSError as error:
            raise _error(status.path, "a file that can be opened", str(error)) from error

    def _compare(self, path: StoredPath, file: _UnitFile, first: StoredPath) -> None:
        for name, spec in self.specs.items():
            try:
                kind = kind_of(file.schema, name)
                found: object = f"the columns {file.schema.names}" if kind is None else column_spec(kind, spec)
            except UnfitColumn as error:
                found = error
            if found != spec:
                remedy = "All files need the same types: write this one again, or name the columns that agree."
                raise _error(path, f"{name!r} as {spec}, like {first}", f"{found}", remedy)


def _specs(path: StoredPath, schema: Any, names: Sequence[str] | None) -> tuple[dict[str, ArraySpec], dict[str, str]]:
    """Return the specs of the wanted columns, and why others are left out."""
    specs: dict[str, ArraySpec] = {}
    left_out: dict[str, str] = {}
    for name in schema.names if names is None else names:
        try:
            kind = kind_of(schema, name)
            if kind is None:
                raise _error(path, f"a column {name!r}", f"columns {schema.names}")
            specs[name] = column_spec(kind)
        except UnfitColumn as error:
            if names is not None:
                raise _error(f"{path}: {name}", "numbers, times, text or lists of them", str(error)) from None
            left_out[name] = str(error)
    if not specs:
        raise _error(path, "a column of numbers, times, text or lists of them", left_out or "no columns")
    return specs, left_out


@final
class TableRows(InputRows):
    """The rows of tables, one file after the other; see `from_tables`."""

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        columns: Fields,
        format: str | None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._structure = structure_of("from_tables", "columns", columns)
        self._given, self._format = table_paths(files, format, options)
        self._lock = threading.Lock()
        self._kept = LastRead[dict[str, NDArray[Any]]](_KEPT)
        self._buffers = RowBuffers()
        self._counters = StageStats()

    @functools.cached_property
    def _tables(self) -> _OpenTables:
        names = None if self._structure is None else names_in(self._structure)
        return _OpenTables(self._given.paths, self._format, names)

    def _open(self) -> _OpenTables:
        with self._lock:
            return self._tables

    @property
    def counters(self) -> StageStats:
        return self._counters

    def _pack(self, columns: Mapping[str, Any]) -> Any:
        if self._structure is None:
            return dict(columns)
        return nest.map_structure(columns.__getitem__, self._structure)

    @property
    def row_spec(self) -> Any:
        return self._pack(self._open().specs)

    def cardinality(self) -> int:
        return int(self._open().starts[-1])

    @property
    def left_out(self) -> dict[str, str]:
        """The columns that cannot be read, if none were named, and why."""
        return self._open().left_out

    def check(self) -> None:
        for file in self._open().status:
            file.check()

    def gather(self, epochs: NDArray[np.int64], positions: NDArray[np.int64]) -> Any:
        opened, began = self._open(), time.perf_counter()
        if positions.size and not 0 <= positions.min() <= positions.max() < opened.starts[-1]:
            got = f"{positions.min()} to {positions.max()}"
            raise IndexError(explain("from_tables", "rows", expected=f"rows in [0, {opened.starts[-1]})", got=got))
        out = {name: empty_rows(self._buffers, name, spec, positions.size) for name, spec in opened.specs.items()}
        units = opened.starts.searchsorted(positions, "right") - 1
        for unit, places in rows_of_units(units):
            rows = positions[places] - opened.starts[unit]
            for name, column in self._unit(opened, unit).items():
                place_rows(column, rows, places, out[name])
        self._counters.add(rows=positions.size, seconds=time.perf_counter() - began)
        return self._pack(out)

    def _unit(self, opened: _OpenTables, unit: int) -> dict[str, NDArray[Any]]:
        columns = self._kept.get(unit)
        if columns is None:
            columns = self._read(opened, unit)
            self._kept.put(unit, columns, sum(column.nbytes for column in columns.values()))
        return columns

    def _read(self, opened: _OpenTables, unit: int) -> dict[str, NDArray[Any]]:
        number, within = opened.units[unit]
        where = f"{self._given.paths[number]}: unit {within}"
        rows = opened.files[number].rows[within]
        try:
            status = opened.status[number]
            if isinstance(status.path, Path):  # a remote one is compared when it is opened, by a request
                status.check()
            with opened.readers.lend(status) as reader:
                table = reader.read(within)
            columns = {name: to_numpy(column_of(table, name), spec) for name, spec in opened.specs.items()}
        except UnfitColumn as error:
            raise _error(where, "values without nulls, of one shape", str(error), error.remedy) from None
        except MpistratError:
            raise
        except Exception as error:  # pyarrow raises many kinds for damaged files
            raise _error(where, f"{rows} rows", f"{type(error).__name__}: {error}") from error
        if any(len(column) != rows for column in columns.values()):
            raise _error(where, f"{rows} rows", f"{[len(column) for column in columns.values()]}")
        self._counters.add(chunk_reads=1, bytes_read=int(table.nbytes))
        return columns

    def chunk_starts(self) -> NDArray[np.int64]:
        return np.unique(self._open().starts)

    def keep(self, rows: int) -> None:
        opened = self._open()
        largest = int(np.diff(opened.starts).max(initial=0))
        row_bytes = max(row_nbytes(opened.specs), 64)  # unknown for text
        self._kept.limit = max(self._kept.limit, (rows + 2 * largest) * row_bytes)

    def fingerprint(self) -> int:
        """Return a number below 2**63 that is equal for files with the same names, rows, types and ends.

        The end of a Parquet file has the sizes and statistics of its row groups.
        """
        opened = self._open()
        text = repr(
            ([path.name for path in self._given.paths], opened.starts.tolist(), sorted(opened.specs.items(), key=str))
        )
        hasher = hashlib.sha256(text.encode())
        for path in self._given.paths:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - _ENDS))
                hasher.update(file.read())
        return short_digest(hasher)

    def describe(self) -> str:
        opened = self._open()
        fields = ", ".join(f"{name} {spec}" for name, spec in opened.specs.items())
        others = [f"{name} ({why})" for name, why in opened.left_out.items()]
        where = self._given.words(f"{self._format} file")
        units = counted(len(opened.units), "unit")
        return f"from_tables: {where}, {opened.starts[-1]} rows in {units} of {fields}{left_out_words(others)}"
