"""The files of a set, as they were found: compared with each other and with the manifest."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from ...base import log
from ...base.errors import ShardError
from ..files.handles import ShardFile, shard_error
from .files import FileSet
from .look import Found, Shard, Unfit, wanted_names
from .manifest import Field, ShardEntry, fields_to_json

__all__ = ["ShardSet", "join_shards"]


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


def join_shards(files: FileSet, found: Sequence[Found], names: Sequence[str] | None, on_error: str) -> ShardSet:
    """Return the set that files make, of each of which it is known what was found in it.

    Without a manifest, files are compared with what most of them hold. A file from which a virtual dataset of another
    one draws, be it in part, is that one's source, and has no rows of its own: they would come twice.

    Raises:
        ShardError: naming the file that is bad.
    """
    names = wanted_names(files, names)
    skipped: list[tuple[Path, str]] = []
    shards: list[Shard] = []
    bad: list[tuple[Path, ShardError]] = []
    missing: set[Path] = set()
    for path, entry, one in zip(files.paths, files.entries, found, strict=True):
        try:
            if isinstance(one, Unfit):
                raise ShardError(one.text)
            _check_rows(one, entry)
            shards.append(one)
        except ShardError as error:
            if isinstance(one, Unfit) and one.unopened:
                _skip(path, error, on_error, skipped)
                missing.add(path)
            else:
                bad.append((path, error))
    sources = set().union(*(shard.sources for shard in shards))
    if sources:
        shards, sources = _without_missing(shards, {path.resolve() for path in missing}, bad)
    for path, problem in bad:
        # Of a source what is drawn from it was checked: it need not have more.
        if not sources or path.resolve() not in sources:
            _skip(path, problem, on_error, skipped)
    if sources:
        shards = _without_sources(shards, sources)
    if files.fields is not None:
        fields, reference = files.fields, "the manifest"
    elif shards:
        fields, reference = _usual(shards)
    good = []
    for shard in shards:
        try:
            _compare(shard, fields, reference, check_extra=names is None)
            if shard.problem:
                raise ShardError(shard.problem)
            good.append(shard)
        except ShardError as error:
            _skip(shard.path, error, on_error, skipped)
    if skipped:
        _report(skipped, len(good))
    for shard in good:
        for note in shard.notes:
            log.once(logging.WARNING, f"HDF5Dataset: {note}")
    lent = tuple(ShardFile.of(path) for path in files.paths if path.resolve() in sources) if sources else ()
    return ShardSet(tuple(good), lent, good[0].fields, tuple(skipped))


def _without_missing(
    shards: list[Shard], missing: Set[Path], bad: list[tuple[Path, ShardError]]
) -> tuple[list[Shard], set[Path]]:
    """The files that draw from none that was skipped, and what they draw from; the others are bad."""
    kept = []
    for shard in shards:
        lost = sorted(shard.sources & missing)
        if lost:
            got = f"one that draws from {lost[0]}, which was skipped"
            bad.append((shard.path, shard_error(shard.path, "virtual datasets over files that can be read", got)))
        else:
            kept.append(shard)
    return kept, set().union(*(shard.sources for shard in kept))


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
        raise shard_error(path, expected, got, "Write the virtual datasets into a file of their own.")
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
        raise shard_error(path, "a set with a good file", text, remedy)
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
        raise shard_error(shard.path, f"{entry.rows} rows (manifest)", got, remedy)


def _compare(shard: Shard, fields: dict[str, Field], reference: str, *, check_extra: bool) -> None:
    """Raise unless a shard holds the same fields as the reference."""
    missing = [] if not check_extra else sorted(set(fields) ^ set(shard.fields))
    if missing:
        raise shard_error(shard.path, f"datasets {sorted(fields)}, as {reference} has", f"{sorted(shard.fields)}")
    for name, field in shard.fields.items():
        if name not in fields:
            raise shard_error(shard.path, f"datasets {sorted(fields)}, as {reference} says", f"{name!r}")
        if field != fields[name]:
            expected = f"{name!r} as {fields[name]}, like {reference}"
            remedy = "All shards of a set need the same dtype and row shape: write this one again."
            raise shard_error(shard.path, expected, str(field), remedy)
