"""The contents of a set of files, for `shards info`, and checks of its files, for `shards check`."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...base.errors import ShardError, explain
from ..files.choice import choose_reader
from ..files.handles import DAMAGED, open_hdf5, open_hdf5_files
from ..files.remote import StoredPath
from ..spec import ArraySpec
from .files import FileSet, PathLike, resolve
from .look import join_shards, look, look_into

if TYPE_CHECKING:
    import h5py

__all__ = ["FieldSurvey", "SetSurvey", "check_file", "survey"]


@dataclass(frozen=True)
class FieldSurvey:
    """One field of a set, over all files.

    Attributes:
        name, dtype: the field's; dtype "str" for strings.
        shape: the shape of a row; None for a length that varies.
        layout: "contiguous", "chunked" and so on; several if files differ.
        filters: the filters of chunks, in the order of their application.
        chunk_rows: rows in a chunk; None without chunks.
        data_bytes: bytes of the rows; None if they vary in length.
        stored_bytes: bytes in the files.
        reader: the kind of the reader.
        reason: why no faster reader is used.
        attributes: HDF5 attributes in the first file.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    layout: str
    filters: tuple[str, ...]
    chunk_rows: int | None
    data_bytes: int | None
    stored_bytes: int
    reader: str
    reason: str
    attributes: dict[str, Any]


@dataclass(frozen=True)
class SetSurvey:
    """A set of files.

    Attributes:
        files: the files with their rows, bytes and digest (None without a manifest); None for the rows of a file that
            others' virtual datasets use, which has no rows of its own.
        manifest: whether a manifest lists them all.
        fields: their fields.
        left_out: their other objects, and why these are not read.
    """

    files: tuple[tuple[StoredPath, int | None, int, str | None], ...]
    manifest: bool
    fields: tuple[FieldSurvey, ...]
    left_out: tuple[str, ...]

    @property
    def rows(self) -> int:
        return sum(rows or 0 for _, rows, _, _ in self.files)

    @property
    def bytes(self) -> int:
        return sum(size for _, _, size, _ in self.files)


def survey(files: PathLike | Sequence[PathLike], names: Sequence[str] | None = None) -> SetSurvey:
    """Inspect files.

    Raises:
        ShardError: naming the file, for files that cannot be read as one set.
    """
    found = resolve(files)
    names = None if names is None else [name.strip("/") for name in names]
    opened = join_shards(found, look(found, range(len(found.paths)), names), names, "raise")
    stored: dict[str, list[_Stored]] = {name: [] for name in opened.fields}
    for shard in opened.shards:
        with open_hdf5(shard.path) as file:
            for name in stored:
                stored[name].append(_Stored.of(file[name]))
    lent = open_hdf5_files()
    fields = []
    for name, field in opened.fields.items():
        reader = choose_reader([shard.storages[name] for shard in opened.shards], "auto", lent)
        spec, own = ArraySpec(field.shape, field.dtype), stored[name]
        sizes = [one.data_bytes for one in own]
        fields.append(
            FieldSurvey(
                name,
                "str" if spec.dtype == object else str(spec.dtype),
                spec.shape,
                ", ".join(dict.fromkeys(one.layout for one in own)),
                own[0].filters,
                max((one.chunk_rows for one in own if one.chunk_rows is not None), default=None),
                None if None in sizes else sum(size or 0 for size in sizes),
                sum(one.bytes for one in own),
                reader.kind,
                reader.reason,
                own[0].attributes,
            )
        )
    rows = {shard.path: shard.rows for shard in opened.shards}
    listed = tuple(
        (path, rows.get(path), path.stat().st_size, None if entry is None else entry.digest)
        for path, entry in zip(found.paths, found.entries, strict=True)
    )
    left_out = tuple(dict.fromkeys(text for shard in opened.shards for text in shard.left_out))
    return SetSurvey(listed, all(entry is not None for entry in found.entries), tuple(fields), left_out)


@dataclass(frozen=True)
class _Stored:
    """The storage of a field in one file."""

    layout: str
    filters: tuple[str, ...]
    chunk_rows: int | None
    data_bytes: int | None
    bytes: int
    attributes: dict[str, Any]

    @staticmethod
    def of(dataset: h5py.Dataset) -> _Stored:
        compression = dataset.compression
        if compression == "gzip":
            compression = f"gzip {dataset.compression_opts}"
        plist = dataset.id.get_create_plist()
        names = {1: compression or "gzip", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
        codes = [plist.get_filter(index)[0] for index in range(plist.get_nfilters())]
        chunked = dataset.chunks is not None
        layout = "chunked" if chunked else "virtual" if dataset.is_virtual else "contiguous"
        if not chunked and not dataset.is_virtual and dataset.nbytes and not dataset.id.get_storage_size():
            layout = "not written"
        return _Stored(
            layout,
            tuple(names.get(code, f"filter {code}") for code in codes),
            int(dataset.chunks[0]) if chunked else None,
            None if dataset.dtype.hasobject else int(dataset.nbytes),
            int(dataset.id.get_storage_size()),
            {key: _plain(value) for key, value in dataset.attrs.items()},
        )


def _plain(value: Any) -> Any:
    """Return an attribute for JSON; numbers that JSON does not have, and references, as text."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if isinstance(value, (str, int, float)) and finite else str(value)


def check_file(files: FileSet, number: int, declared: Set[StoredPath], names: Sequence[str] | None = None) -> str:
    """Check one file of a set, and return the kind of the check.

    A file in a manifest is compared with its digest. Of another file, all chunks are read, which checks their checksums
    and decompresses them; data with neither cannot be checked.

    Args:
        names: the datasets to check of a file without a digest; None for all.

    Returns:
        "digest", "checksums", "partly" if only some of the data has checksums or compression, or "nothing".

    Raises:
        ShardError: when the file is damaged.
    """
    path, entry = files.paths[number], files.entries[number]
    files.check([number], verify=entry is not None)
    if entry is not None:
        return "digest"
    guarded = unguarded = 0
    with open_hdf5(path) as file:
        for name, storage in look_into(path, names, declared, together=False).storages.items():
            dataset = file[name]
            if dataset.id.get_create_plist().get_nfilters() and dataset.chunks is not None:
                _read(path, dataset, storage.block_rows)
                guarded += 1
            else:
                unguarded += 1
    return ("partly" if unguarded else "checksums") if guarded else "nothing"


def _read(path: StoredPath, dataset: h5py.Dataset, step: int) -> None:
    for start in range(0, len(dataset), step):
        try:
            dataset[start : start + step]
        except (OSError, RuntimeError) as error:
            where, expected = f"{path}: {dataset.name}", f"rows {start} to {start + step - 1} that can be read"
            text = explain("shards check", where, expected=expected, got=error, remedy=DAMAGED)
            raise ShardError(text) from error
