"""The files of a set, opened and compared with each other and with the manifest."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from ..._util import log
from ...errors import ShardError, explain
from ..files.handles import ShardFile
from .files import FileSet, check_ends
from .manifest import Field, ShardEntry, fields_to_json
from .shard import Shard

__all__ = ["ShardSet", "open_shards"]


@dataclass(frozen=True)
class ShardSet:
    """Files that belong together.

    Attributes:
        shards: the files that have rows, in order.
        sources: files without rows of their own, as virtual datasets of the others draw from them.
        fields: what each file with rows has.
        skipped: files that were left out, and why.
    """

    shards: tuple[Shard, ...]
    sources: tuple[ShardFile, ...]
    fields: dict[str, Field]
    skipped: tuple[tuple[Path, str], ...]


def open_shards(
    files: FileSet, names: list[str] | None, *, driver: str | None, on_error: str, ends: bool = False
) -> ShardSet:
    """Look into all files.

    Without a manifest, files are compared with what most of them hold. A file from which a virtual dataset of another
    one draws, be it in part, is that one's source, and has no rows of its own: they would come twice.

    Args:
        files: which files.
        names: the datasets wanted; None for all.
        driver: h5py's driver; None for its default.
        on_error: "raise", or "skip" to leave bad files out.
        ends: whether to compare the digests of the files' ends with the manifest.

    Raises:
        ShardError: naming the file that is bad.
    """
    if names is None and files.fields is not None:
        names = list(files.fields)
    skipped = list(files.skipped)
    declared = {path.resolve(): path for path in files.paths}
    shards: list[Shard] = []
    bad: list[tuple[Path, ShardError]] = []
    for path, entry in zip(files.paths, files.entries, strict=True):
        try:
            shard = Shard(path, names, declared.keys(), driver)
            _check_rows(shard, entry)
            shards.append(shard)
        except ShardError as error:
            bad.append((path, error))
    sources = set().union(*(shard.sources for shard in shards))
    for path, problem in bad:
        if path.resolve() not in sources:  # else what is drawn from it was checked, and it need not have more
            _skip(path, problem, on_error, skipped)
    shards = _without_sources(shards, sources)
    if files.fields is not None:
        fields, reference = files.fields, "the manifest"
    elif shards:
        fields, reference = _usual(shards)
    good, entries = [], dict(zip(files.paths, files.entries, strict=True))
    for shard in shards:
        try:
            _compare(shard, fields, reference, check_extra=names is None)
            if ends:
                check_ends(shard.path, entries[shard.path])
            good.append(shard)
        except ShardError as error:
            _skip(shard.path, error, on_error, skipped)
    if skipped:
        _report(skipped, len(good))
    lent = tuple(ShardFile.of(path) for resolved, path in declared.items() if resolved in sources)
    return ShardSet(tuple(good), lent, good[0].fields, tuple(skipped))


def _without_sources(shards: list[Shard], sources: Set[Path]) -> list[Shard]:
    """The files that no other one draws from. Raise if the rows of a file would be lost that way."""
    kept = [shard for shard in shards if shard.path.resolve() not in sources]
    by_path = {shard.path.resolve(): shard for shard in shards}
    drawn: set[Path] = set()
    new = set().union(*(shard.sources for shard in kept))
    while new:
        drawn |= new
        new = set().union(*(by_path[path].sources for path in new if path in by_path)) - drawn
    for path in sorted(sources - drawn):
        expected, got = "virtual datasets over files that do not draw back", "files that draw from each other"
        remedy = "Write the virtual datasets into a file of their own."
        raise ShardError(explain("HDF5Dataset", str(path), expected=expected, got=got, remedy=remedy))
    return kept


def _skip(path: Path, error: ShardError, on_error: str, skipped: list[tuple[Path, str]]) -> None:
    if on_error != "skip":
        raise error
    skipped.append((path, str(error)))


def _report(skipped: list[tuple[Path, str]], good: int) -> None:
    first = skipped[0][1]
    text = f"{len(skipped)} of {len(skipped) + good} files skipped; the first: {first}"
    if not good:
        path, remedy = str(skipped[0][0]), "With on_error='skip', one file at least must be good."
        raise ShardError(explain("HDF5Dataset", path, expected="a set with a good file", got=text, remedy=remedy))
    log.once(logging.WARNING, f"HDF5Dataset: {text}")


def _usual(shards: list[Shard]) -> tuple[dict[str, Field], str]:
    """The fields that most files have, and the first file that has them."""

    def key(shard: Shard) -> str:
        return json.dumps(fields_to_json(shard.fields), sort_keys=True)

    most = Counter(map(key, shards)).most_common(1)[0][0]
    shard = next(shard for shard in shards if key(shard) == most)
    return shard.fields, str(shard.path)


def _check_rows(shard: Shard, entry: ShardEntry | None) -> None:
    if entry is not None and shard.rows != entry.rows:
        got, remedy = f"{shard.rows} rows", "The file is not the one that was written with the manifest."
        expected = f"{entry.rows} rows (manifest)"
        raise ShardError(explain("HDF5Dataset", str(shard.path), expected=expected, got=got, remedy=remedy))


def _compare(shard: Shard, fields: dict[str, Field], reference: str, *, check_extra: bool) -> None:
    """Raise unless a shard holds the same fields as the reference."""
    missing = [] if not check_extra else sorted(set(fields) ^ set(shard.fields))
    if missing:
        expected, got = f"datasets {sorted(fields)}, as {reference} has", f"{sorted(shard.fields)}"
        raise ShardError(explain("HDF5Dataset", str(shard.path), expected=expected, got=got))
    for name, field in shard.fields.items():
        if name not in fields:
            expected = f"datasets {sorted(fields)}, as {reference} says"
            raise ShardError(explain("HDF5Dataset", str(shard.path), expected=expected, got=f"{name!r}"))
        if field != fields[name]:
            expected = f"{name!r} as {fields[name]}, like {reference}"
            remedy = "All shards of a set need the same dtype and row shape: write this one again."
            raise ShardError(explain("HDF5Dataset", str(shard.path), expected=expected, got=str(field), remedy=remedy))
