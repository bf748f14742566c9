"""Conversion of other file kinds to shards, by one rank or by all ranks of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...base import partition
from ...base.agree import Ranks
from ...base.conversion import converted
from ...base.errors import explain
from ..files.handles import open_hdf5
from ..files.hdf5_dataset import HDF5Dataset
from ..files.netcdf import NetCDFFiles
from ..files.tables import TableRows
from ..files.tar import TarSamples
from ..files.tfrecord import RecordSamples
from ..files.units import FieldRows
from ..files.zarr import ZarrGroup
from ..nodes.node import Node
from ..nodes.samples import samples_of_files
from .columns import Columns
from .converters.converter import Converter, PresumptionError, bad_input
from .converters.image_folder import ImageFolder
from .converters.numpy_files import NpyFiles, NpzFile
from .converters.several import Several
from .converters.source_file import SourceFile
from .converters.table import Table
from .files import PathLike
from .new_shard import ShardSettings
from .writer import ShardWriter

__all__ = ["Conversion", "convert", "open_converter"]


@dataclass(frozen=True)
class Conversion:
    """The settings of a conversion; those that do not apply to a file kind must keep their defaults.

    Attributes:
        path: a .npy, .npz, .csv, .parquet, .arrow or .jsonl file, or a folder of images; None if there are only `fields`.
        fields: .npy files by field.
        select: the wanted arrays or columns; None for all.
        dtypes: dtypes that fields are converted to.
        array: see `Table`.
        delimiter: the delimiter of a CSV file.
        header: "yes" or "no"; see `Table`.
        color, resize: see `ImageFolder`.
    """

    paths: Sequence[Path]
    fields: Mapping[str, Path] = field(default_factory=dict)
    select: Sequence[str] | None = None
    dtypes: Mapping[str, np.dtype[Any]] = field(default_factory=dict)
    array: str | None = None
    delimiter: str | None = None
    header: str | None = None
    color: str | None = None
    resize: tuple[int, int] | None = None

    @property
    def text(self) -> set[str]:
        """The fields to convert to text."""
        return {name for name, dtype in self.dtypes.items() if dtype.kind == "O"}


def _table(path: Path, asked: Conversion, delimiter: str) -> Table:
    header = None if asked.header is None else asked.header == "yes"
    return Table(path, asked.select, asked.delimiter or delimiter, asked.array, asked.text, header)


def _tables(path: Path, asked: Conversion) -> SourceFile:
    rows = TableRows(path, asked.select, None)
    return SourceFile(path, rows, rows.left_out)


def _source(rows: Callable[[Path, Sequence[str] | None], Node]) -> Callable[[Path, Conversion], Converter]:
    return lambda path, asked: SourceFile(path, rows(path, asked.select), {})


def _hdf5(path: Path, asked: Conversion) -> SourceFile:
    converter = SourceFile(path, HDF5Dataset(path, asked.select).node, {})
    with open_hdf5(path) as file:
        for name in converter.specs:
            found = {key: np.asarray(file[name].attrs[key]).tolist() for key in _MEANINGS if key in file[name].attrs}
            if found:
                converter.attributes[name] = found
    return converter


def _netcdf(path: Path, asked: Conversion) -> SourceFile:
    files = NetCDFFiles(path, asked.select, None, decode_times=True, valid_range=False)
    return SourceFile(path, FieldRows(files), files.left_out)


def _records(path: Path, select: Sequence[str] | None) -> Node:
    samples = RecordSamples(path, select, None)
    return samples_of_files(samples, 0, False, samples.element_spec)


# Suffix (of a folder: "/") -> the arguments of this kind, and the function that opens it.
_KINDS: dict[str, tuple[set[str], Callable[[Path, Conversion], Converter]]] = {
    ".npy": (set(), lambda path, _: NpyFiles({path.stem: path})),
    ".npz": ({"select"}, lambda path, asked: NpzFile(path, asked.select)),
    ".csv": ({"select", "array", "delimiter", "header"}, lambda path, asked: _table(path, asked, ",")),
    ".tsv": ({"select", "array", "delimiter", "header"}, lambda path, asked: _table(path, asked, "\t")),
    **dict.fromkeys(
        (".parquet", ".pq", ".arrow", ".feather", ".ipc", ".jsonl", ".ndjson"),
        ({"select"}, _tables),
    ),
    **dict.fromkeys((".h5", ".hdf5"), ({"select"}, _hdf5)),
    ".tar": (
        {"select"},
        _source(lambda path, select: samples_of_files(TarSamples(path, select, None), 0, False, None)),
    ),
    **dict.fromkeys((".tfrecord", ".tfrecords", ".tfrec"), ({"select"}, _source(_records))),
    **dict.fromkeys((".nc", ".nc4"), ({"select"}, _netcdf)),
    ".zarr": ({"select"}, _source(lambda path, select: FieldRows(ZarrGroup(path, select)))),
    "/": ({"color", "resize"}, lambda path, asked: ImageFolder(path, asked.color or "rgb", asked.resize)),
}
_MEANINGS = ("classes", "columns")  # attributes that this package writes, without which numbers mean nothing
_OPTIONS = ("select", "array", "delimiter", "header", "color", "resize")


def open_converter(asked: Conversion) -> Converter:
    """Return the converter of some files.

    Raises:
        ValueError: for an unknown kind of file, and arguments that do not apply to the kind.
        ShardError: for a file whose content does not match its name.
        MissingDependencyError: for images without Pillow, for .parquet, .arrow and .jsonl without pyarrow.
    """
    if (not asked.paths) == (not asked.fields):
        expected = "files or folders, or fields by name (--field x=x.npy)"
        raise ValueError(explain("shards write", "", expected=expected, got="both" if asked.paths else "none"))
    found = {_kind(path) for path in asked.paths} or {".npy"}
    if len(found) > 1:
        got = ", ".join(map(str, asked.paths))
        raise ValueError(explain("shards write", "INPUT", expected="inputs of one kind", got=got))
    (kind,) = found
    if kind not in _KINDS:
        files = "a .npy, .npz, .csv, .tsv, .parquet, .arrow, .jsonl, .h5, .nc, .tar or .tfrecord file"
        expected = f"{files}, a .zarr folder, or a folder with a sub-folder of images for each class"
        raise ValueError(
            explain("shards write", str(asked.paths[0]), expected=expected, got=f"a {kind or 'nameless'} file")
        )
    known, opener = _KINDS[kind]
    for option in _OPTIONS:
        if getattr(asked, option) is not None and option not in known:
            kinds = [name for name, (others, _) in _KINDS.items() if option in others]
            expected = f"none; it is for {' and '.join(kinds)}".replace("/", "folders of images")
            raise ValueError(explain("shards write", f"--{option}", expected=expected, got=getattr(asked, option)))
    paths = list(asked.paths) or list(asked.fields.values())
    for path in paths:
        if not path.exists():
            raise bad_input(path, "a file or a folder", "no such file")
        if not path.is_file() and not path.is_dir():  # opening a pipe would wait
            raise bad_input(path, "a file or a folder", "a pipe, a device or a socket")
    if not asked.paths:
        return NpyFiles(asked.fields)
    inputs = [opener(path, asked) for path in paths]
    return inputs[0] if len(inputs) == 1 else Several(paths, inputs)


def _kind(path: Path) -> str:
    suffix = path.suffix.lower()
    return "/" if path.is_dir() and suffix != ".zarr" else suffix


def convert(
    converter: Converter,
    target: PathLike,
    settings: ShardSettings,
    dtypes: Mapping[str, np.dtype[Any]],
    ranks: Ranks,
    progress: Callable[[int], None],
) -> list[Path]:
    """Write a converter's rows, each rank a contiguous block of them, and return the shards' paths. Collective.

    If rows are not of the presumed kind, all files are checked and written again.

    Raises:
        ValueError: for values that a dtype cannot hold, and for unsupported text.
        ShardError: when the files are damaged, or another rank failed.
    """
    while True:
        first, stop = partition.block(converter.rows, ranks.size, ranks.rank)
        settings = {**settings, "attributes": converter.attributes}
        writer = ShardWriter._of("shards write", target, settings, ranks.comm, rows=stop - first)
        before = done = 0
        try:
            with writer:
                batches = _in_dtypes(converter.batches(first, stop), dtypes)
                for done in _write_rows(batches, converter, writer):
                    progress(done - before)
                    before = done
            return writer.paths
        except BaseException as error:  # raised on every rank by leaving the writer
            if not converter.presumed or not any(ranks.exchange("late" * isinstance(error, PresumptionError))):
                raise
        progress(-done)
        with ranks.together():
            converter.settle()


def _write_rows(batches: Iterator[Columns], converter: Converter, writer: ShardWriter) -> Iterator[int]:
    """Write batches of rows, and yield the number of written rows after each."""
    rows = 0
    for batch in batches:
        found = [name for name, array in batch.items() if array.dtype.kind in "UO"]
        if found and not writer._form.chunked:
            where = [f"; {name!r}: {why}" for name in found if (why := converter.why_text(name))]
            remedy = "Add --layout chunked, which is not read by memory map; or leave text out with --select."
            got = f"text in {found}{''.join(where)}"
            raise ValueError(explain("shards write", "--layout", expected="chunked for text", got=got, remedy=remedy))
        writer._append(batch, "shards write", "INPUT")
        rows += len(next(iter(batch.values())))
        yield rows


def _in_dtypes(batches: Iterator[Columns], dtypes: Mapping[str, np.dtype[Any]]) -> Iterator[Columns]:
    for batch in batches:
        unknown = sorted(set(dtypes) - set(batch))
        if unknown:
            expected = f"fields among {sorted(batch)}"
            raise ValueError(explain("shards write", "--dtype", expected=expected, got=f"{unknown}"))
        yield {
            name: converted("shards write", f"--dtype {name}", array, dtypes[name]) if name in dtypes else array
            for name, array in batch.items()
        }
