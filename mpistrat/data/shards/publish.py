"""Finished files become a set: they get their names, and the manifest, in an order that survives a crash."""

from __future__ import annotations

import contextlib
import json
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ..._util.files import flush_folder
from ...comm.agree import Ranks
from ...errors import CollectiveMismatchError, explain
from .files import manifest_path
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

__all__ = ["publish"]


def publish(
    ranks: Ranks,
    function: str,
    pattern: Path,
    fields: dict[str, Field] | None,
    files: Sequence[tuple[Path, ShardEntry]],
    empty: tuple[Path, ShardEntry] | None,
) -> list[Path]:
    """Give the files of all ranks their names, in rank order, and write the manifest. Collective.

    A manifest that says "unfinished" stands in between, so that what a crash leaves behind is refused, not mixed.

    Args:
        ranks: who writes.
        function: what the user called, for errors.
        pattern: path of the files, with a "*" in the name.
        fields: what this rank's files hold; None if it has seen no rows.
        files: this rank's files where they lie now, flushed to the disk.
        empty: a file without rows, for the case that no rank has a file.

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
    told = [json.loads(text) for text in ranks.exchange(json.dumps(mine))]
    agreed = fields_from_json(_agreed(function, [one["fields"] for one in told]))
    if not any(one["shards"] for one in told):
        lender = next(rank for rank, one in enumerate(told) if one["empty"] is not None)
        told[lender]["shards"] = [told[lender]["empty"]]
        files = [empty] if ranks.rank == lender and empty is not None else []
    entries = [[ShardEntry(**shard) for shard in one["shards"]] for one in told]
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
