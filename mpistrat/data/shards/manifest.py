"""The manifest of a set of shards: its fields, and for every file its rows, bytes and digest. JSON, never pickle."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ShardError, explain

__all__ = ["Field", "Manifest", "ShardEntry", "digest_of", "fsync_directory", "read_manifest", "write_manifest"]

_FORMAT, _VERSION = "mpistrat.shards", 1
_PIECE = 1 << 22


@dataclass(frozen=True)
class Field:
    """What every shard holds under one name: rows of a dtype and a shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} rows of shape {self.shape}"


@dataclass(frozen=True)
class ShardEntry:
    """One file of the set."""

    name: str
    rows: int
    bytes: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """A set of shards as it was written."""

    fields: dict[str, Field]
    shards: tuple[ShardEntry, ...]


def _hasher(algorithm: str) -> Any:
    if algorithm == "sha256":
        return hashlib.sha256()
    if algorithm == "xxh3_128":
        import xxhash

        return xxhash.xxh3_128()
    raise ValueError(f"unknown digest algorithm {algorithm!r}")


def default_algorithm() -> str:
    """Return xxh3_128 where xxhash is installed (ten times faster), else sha256."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return "sha256"
    return "xxh3_128"


def digest_of(path: Path, algorithm: str | None = None) -> str:
    """Return "algorithm:hex" of a file's bytes.

    Raises:
        ImportError: when the algorithm needs a library that is not installed.
        ValueError: for an unknown algorithm.
    """
    algorithm = algorithm or default_algorithm()
    hasher = _hasher(algorithm)
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            hasher.update(piece)
    return f"{algorithm}:{hasher.hexdigest()}"


def fsync_directory(directory: Path) -> None:
    """Make renames in a directory survive a crash."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write aside, fsync and rename."""
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "rows": sum(shard.rows for shard in manifest.shards),
        "fields": {name: {"dtype": f.dtype.str, "shape": list(f.shape)} for name, f in manifest.fields.items()},
        "shards": [vars(shard) for shard in manifest.shards],
    }
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with aside.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    fsync_directory(path.parent)


def _parse(document: Any) -> Manifest:
    if document["format"] != _FORMAT or document["version"] != _VERSION:
        raise ValueError(f"format {document['format']!r}, version {document['version']!r}")
    fields = {
        str(name): Field(np.dtype(str(entry["dtype"])), tuple(int(length) for length in entry["shape"]))
        for name, entry in document["fields"].items()
    }
    shards = tuple(
        ShardEntry(str(entry["name"]), int(entry["rows"]), int(entry["bytes"]), str(entry["digest"]))
        for entry in document["shards"]
    )
    for shard in shards:
        if Path(shard.name).name != shard.name or shard.rows < 0:
            raise ValueError(f"shard {shard.name!r} with {shard.rows} rows")
    if not fields or not shards:
        raise ValueError("no field or no shard")
    return Manifest(fields, shards)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        ShardError: when it is damaged or of another version.
    """
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        expected = f"a manifest of format {_FORMAT!r}, version {_VERSION}"
        raise ShardError(explain("HDF5Dataset", str(path), expected=expected, got=f"{error!r}")) from error
