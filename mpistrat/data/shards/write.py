"""Write arrays as a set of HDF5 shards with a manifest."""

from __future__ import annotations

import contextlib
import glob
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ... import partition
from ...errors import explain
from .files import PathLike, manifest_path
from .manifest import Field, Manifest, ShardEntry, digest_of, fsync_directory, read_manifest, write_manifest

__all__ = ["write_shards"]

_SHARD_BYTES = 1 << 30  # few, large shards: rows gathered over many files are slow
_CHUNK_BYTES = 1 << 18  # where decompressing was measured to be quickest
_KINDS = "biufcS"


def _checked(arrays: Mapping[str, ArrayLike]) -> dict[str, NDArray[Any]]:
    if not isinstance(arrays, Mapping) or not arrays:
        raise ValueError(explain("write_shards", "arrays", expected="a dict of arrays by name", got=repr(arrays)[:80]))
    checked: dict[str, NDArray[Any]] = {}
    for name, value in arrays.items():
        array = np.asarray(value)
        where = f"arrays[{name!r}]"
        if not isinstance(name, str) or not name or name.startswith("/") or name in (".", ".."):
            raise ValueError(explain("write_shards", where, expected="a name without a leading slash", got=repr(name)))
        if array.ndim == 0:
            raise ValueError(explain("write_shards", where, expected="rows along a first axis", got="a scalar"))
        if array.dtype.kind not in _KINDS:
            expected = "numbers, booleans or fixed-length bytes; one array for each field of a structure"
            raise ValueError(explain("write_shards", where, expected=expected, got=f"dtype {array.dtype}"))
        checked[name] = array
    first, rows = next((name, len(array)) for name, array in checked.items())
    for name, array in checked.items():
        if len(array) != rows:
            expected = f"{rows} rows, as arrays[{first!r}] has"
            raise ValueError(explain("write_shards", f"arrays[{name!r}]", expected=expected, got=f"{len(array)} rows"))
    return checked


def _bounds(
    arrays: dict[str, NDArray[Any]], rows_per_shard: int | None, num_shards: int | None
) -> list[tuple[int, int]]:
    rows = len(next(iter(arrays.values())))
    if rows_per_shard is not None and num_shards is not None:
        raise ValueError("write_shards: expected rows_per_shard or num_shards, got both")
    if num_shards is not None:
        if operator.index(num_shards) < 1:
            raise ValueError(explain("write_shards", "num_shards", expected="at least 1", got=num_shards))
        return partition.bounds(rows, operator.index(num_shards))
    if rows_per_shard is None:
        row_bytes = sum(array.nbytes // max(1, rows) for array in arrays.values())
        rows_per_shard = max(1, _SHARD_BYTES // max(1, row_bytes))
    elif operator.index(rows_per_shard) < 1:
        raise ValueError(explain("write_shards", "rows_per_shard", expected="at least 1", got=rows_per_shard))
    return [(start, min(start + rows_per_shard, rows)) for start in range(0, max(rows, 1), rows_per_shard)]


def _layout(array: NDArray[Any], rows: int, compression: str | int | None) -> dict[str, Any]:
    """How one dataset is stored: contiguous, which can be memory-mapped, or in checked chunks of whole rows."""
    if compression is None or rows == 0 or array.nbytes == 0:
        return {}
    row_bytes = max(1, array.nbytes // len(array))
    chunk_rows = min(rows, max(1, _CHUNK_BYTES // row_bytes))
    return {
        "chunks": (chunk_rows, *array.shape[1:]),
        "compression": compression,
        "shuffle": array.dtype.itemsize > 1,
        "fletcher32": True,
    }


def _write_shard(
    path: Path, arrays: dict[str, NDArray[Any]], start: int, stop: int, compression: str | int | None
) -> None:
    import h5py

    with h5py.File(path, "x", libver="latest") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array[start:stop], **_layout(array, stop - start, compression))
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _pattern(target: PathLike) -> Path:
    path = Path(target)
    if path.name.count("*") == 1 and not glob.has_magic(str(path).replace("*", "", 1)):
        return path
    if glob.has_magic(str(path)) or path.suffix in (".h5", ".hdf5"):
        expected = 'a directory, or a pattern with one "*" in the file name, like "data/train-*.h5"'
        raise ValueError(explain("write_shards", "target", expected=expected, got=repr(str(path))))
    return path / "*.h5"


def write_shards(
    target: PathLike,
    arrays: Mapping[str, ArrayLike],
    *,
    rows_per_shard: int | None = None,
    num_shards: int | None = None,
    compression: str | int | None = None,
) -> list[Path]:
    """Write arrays as HDF5 shards with a manifest, and return the shards' paths. Not collective: call it on one rank.

    Files are written aside, flushed to disk and renamed, the manifest last. An older set of the same name is replaced.
    Uncompressed data is stored contiguously, so that it can be read through a memory map.

    Args:
        target: a directory, whose shards become 00000-of-00004.h5 and so on with manifest.json; or a pattern like
            "data/train-*.h5": then they are data/train-00000-of-00004.h5 and so on with data/train-manifest.json.
        arrays: arrays by name, of equal length along their first axis.
        rows_per_shard: rows in every shard but the last.
        num_shards: instead, how many shards; their rows differ by at most one. With neither, shards have about 1 GiB.
        compression: None, or what h5py takes: "gzip", "lzf" or gzip's level; chunks then carry checksums (fletcher32).

    Raises:
        ValueError: for arrays of different lengths, of a dtype that has no HDF5 form, and for a wrong target.
        ShardError: when an older set's manifest is damaged.
        OSError: when the disk does not take it.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     [path.name for path in write_shards(directory, {"x": np.arange(5)}, num_shards=2)]
        ['00000-of-00002.h5', '00001-of-00002.h5']
    """
    checked = _checked(arrays)
    bounds = _bounds(checked, rows_per_shard, num_shards)
    pattern = _pattern(target)
    directory = pattern.parent
    directory.mkdir(parents=True, exist_ok=True)
    names = [pattern.name.replace("*", f"{index:05d}-of-{len(bounds):05d}") for index in range(len(bounds))]
    aside = [directory / f".{name}.{os.getpid()}.tmp" for name in names]
    manifest = manifest_path(pattern)
    old = [shard.name for shard in read_manifest(manifest).shards] if manifest.exists() else []
    entries = []
    try:
        for name, path, (start, stop) in zip(names, aside, bounds, strict=True):
            _write_shard(path, checked, start, stop, compression)
            entries.append(ShardEntry(name, stop - start, path.stat().st_size, digest_of(path)))
        manifest.unlink(missing_ok=True)  # from here to the end the set has no manifest, rather than a wrong one
        for path, name in zip(aside, names, strict=True):
            path.replace(directory / name)
        for name in set(old) - set(names):
            (directory / name).unlink(missing_ok=True)
    finally:
        for path in aside:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
    fsync_directory(directory)
    fields = {name: Field(array.dtype, array.shape[1:]) for name, array in checked.items()}
    write_manifest(manifest, Manifest(fields, tuple(entries)))
    return [directory / name for name in names]
