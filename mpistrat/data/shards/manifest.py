"""The manifest of a set of shards: its fields, and each file's rows, bytes and digests. JSON, never pickle."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.errors import ShardError, shard_error
from ...base.files import read_whole, replacing

if TYPE_CHECKING:
    from ..files.remote import StoredPath

__all__ = [
    "Field",
    "Manifest",
    "ShardEntry",
    "dtype_from_json",
    "dtype_to_json",
    "fields_from_json",
    "fields_to_json",
    "listed_names",
    "read_manifest",
    "write_manifest",
    "write_unfinished",
]

_FORMAT, _VERSION = "mpistrat.shards", 1
_MOST = 1 << 28  # most bytes of a manifest
_SHORT_NAME = re.compile(r"[<>|=]?[A-Za-z?][0-9]*(\[[0-9]*[A-Za-z]+\])?")


@dataclass(frozen=True)
class Field:
    """The rows of one name in every shard: a dtype and a shape, with None for a length that varies."""

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]

    def __str__(self) -> str:
        return f"{self.dtype} rows of shape {self.shape}"


@dataclass(frozen=True)
class ShardEntry:
    """One file of the set; `ends` is the digest of its first and last bytes, "" if the manifest lacks it."""

    name: str
    rows: int
    bytes: int
    digest: str
    ends: str = ""


@dataclass(frozen=True)
class Manifest:
    """A complete set of shards."""

    fields: dict[str, Field]
    shards: tuple[ShardEntry, ...]


def fields_to_json(fields: dict[str, Field]) -> dict[str, dict[str, Any]]:
    """Return fields for JSON: dtypes by NumPy's short names, None for a length that varies.

    A structure is its members' names, dtypes and offsets, and its total bytes; an array member is its element dtype and shape.
    """
    return {name: {"dtype": dtype_to_json(field.dtype), "shape": list(field.shape)} for name, field in fields.items()}


def dtype_to_json(dtype: np.dtype[Any]) -> str | dict[str, Any]:
    """Return a dtype for JSON; see `fields_to_json`."""
    if dtype.subdtype is not None:
        element, shape = dtype.subdtype
        return {"dtype": dtype_to_json(element), "shape": list(shape)}
    if dtype.fields is None:
        return dtype.str
    members = [dtype.fields[name] for name in dtype.names or ()]
    return {
        "names": list(dtype.names or ()),
        "dtypes": [dtype_to_json(member[0]) for member in members],
        "offsets": [member[1] for member in members],
        "bytes": dtype.itemsize,
    }


def dtype_from_json(document: Any) -> np.dtype[Any]:
    """Invert `dtype_to_json`.

    Raises:
        ValueError: for an invalid dtype.
    """
    if isinstance(document, str):
        if not _SHORT_NAME.fullmatch(document):
            raise ValueError(f"dtype {document!r}")
        return np.dtype(document)
    if "shape" in document:
        return np.dtype((dtype_from_json(document["dtype"]), tuple(map(int, document["shape"]))))
    return np.dtype(
        {
            "names": list(map(str, document["names"])),
            "formats": list(map(dtype_from_json, document["dtypes"])),
            "offsets": list(map(int, document["offsets"])),
            "itemsize": int(document["bytes"]),
        }
    )


def fields_from_json(document: dict[str, dict[str, Any]]) -> dict[str, Field]:
    """Invert `fields_to_json`."""

    def length(value: Any) -> int | None:
        return None if value is None else int(value)

    return {
        str(name): Field(dtype_from_json(entry["dtype"]), tuple(map(length, entry["shape"])))
        for name, entry in document.items()
    }


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest to a temporary file, flush it to disk and rename it."""
    document = {
        "rows": sum(shard.rows for shard in manifest.shards),
        "fields": fields_to_json(manifest.fields),
        "shards": [vars(shard) for shard in manifest.shards],
    }
    _write(path, document)


def write_unfinished(path: Path, names: Sequence[str]) -> None:
    """Write a manifest that `read_manifest` refuses, with all files that may exist while a set is published."""
    _write(path, {"unfinished": list(names)})


def _write(path: Path, document: dict[str, Any]) -> None:
    with replacing(path) as beside:
        beside.write_text(json.dumps({"format": _FORMAT, "version": _VERSION, **document}, indent=1), encoding="utf-8")


def _parse(document: Any) -> Manifest:
    if document["format"] != _FORMAT or document["version"] != _VERSION:
        raise ValueError(f"format {document['format']!r}, version {document['version']!r}")
    fields = fields_from_json(document["fields"])
    shards = tuple(
        ShardEntry(
            *(str(entry["name"]), int(entry["rows"]), int(entry["bytes"])),
            *(str(entry["digest"]), str(entry.get("ends", ""))),
        )
        for entry in document["shards"]
    )
    for shard in shards:
        if Path(shard.name).name != shard.name or shard.rows < 0:
            raise ValueError(f"shard {shard.name!r} with {shard.rows} rows")
    if not fields or not shards:
        raise ValueError("no field or no shard")
    return Manifest(fields, shards)


def read_manifest(path: StoredPath) -> Manifest:
    """Read a manifest.

    Raises:
        ShardError: when it is damaged, of another version, or of an unfinished set.
    """
    document = _load(path)
    if "unfinished" in document:
        expected, got = "a finished set of shards", "one whose writing was interrupted or is in progress"
        raise shard_error(path, expected, got, "Write the shards again.")
    try:
        return _parse(document)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _damaged(path, error) from error


def listed_names(path: Path) -> list[str]:
    """Return the names of the files of a set, finished or not.

    Raises:
        ShardError: when the manifest is damaged.
    """
    names = _load(path).get("unfinished")
    if names is None:
        return [shard.name for shard in read_manifest(path).shards]
    return [str(name) for name in names if Path(str(name)).name == str(name)]


def _load(path: StoredPath) -> dict[str, Any]:
    try:
        document = json.loads(read_whole(path, _MOST) if isinstance(path, Path) else path.open().read())
        if not isinstance(document, dict):
            raise ValueError(f"{type(document).__name__}")
    except (ValueError, RecursionError) as error:
        raise _damaged(path, error) from error
    return document


def _damaged(path: StoredPath, error: Exception) -> ShardError:
    return shard_error(path, f"a manifest of format {_FORMAT!r}, version {_VERSION}", f"{error!r}")
