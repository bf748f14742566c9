"""`mpistrat shards check`: is every file of a set whole?"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from ...base.agree import Ranks
from ...base.errors import ShardError
from ...base.text import counted, decimal_size
from ...data.files.remote import StoredPath
from ...data.shards.files import FileSet, resolve
from ...data.shards.survey import check_file
from ..command import DONE, PROBLEM, Command
from ..terminal import Meter, names
from . import add_files, given_files

__all__ = ["COMMAND"]

_WORDS = {
    "digest": "compared with the manifest's digest",
    "checksums": "read chunk by chunk, as there is no digest",
    "partly": "read chunk by chunk where there are chunks with filters; the rest cannot be checked",
    "nothing": "cannot be checked: neither a digest nor chunks with filters",
}


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_files(parser)
    parser.add_argument(
        "--fields", metavar="NAME,…", type=names, help="the datasets to check, of files without a manifest"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    started = time.perf_counter()
    with ranks.together():
        files = resolve(given_files(args))
    with ranks.together():
        mine = _check(files, ranks, args.fields)
    told: list[dict[str, Any]] = [one for text in ranks.exchange(json.dumps(mine)) for one in json.loads(text)]
    told.sort(key=lambda one: one["place"])
    bad = [one for one in told if one["problem"]]
    if ranks.rank == 0:
        if args.json:
            print(json.dumps(_document(told), indent=1))
        else:
            _print(told, time.perf_counter() - started)
    return PROBLEM if bad else DONE


def _check(files: FileSet, ranks: Ranks, fields: list[str] | None) -> list[dict[str, Any]]:
    """Return this rank's files: every n-th of n ranks, so that ranks that read in order read distant files."""
    places = range(ranks.rank, len(files.paths), ranks.size)
    sizes = {place: _size(files.paths[place]) for place in places}
    declared = {path.resolve() for path in files.paths}
    found = []
    what = "checking" if ranks.size == 1 else "checking (rank 0)"
    with Meter(what, sum(sizes.values()), "bytes", silent=ranks.rank > 0) as meter:
        for place, size in sizes.items():
            by, problem = "", ""
            try:
                by = check_file(files, place, declared, fields)
            except ShardError as error:
                problem = str(error)
            path = str(files.paths[place])
            found.append({"place": place, "path": path, "bytes": size, "by": by, "problem": problem})
            meter.advance(size)
    return found


def _size(path: StoredPath) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _document(told: list[dict[str, Any]]) -> dict[str, Any]:
    files = [{key: one[key] or None for key in ("path", "bytes", "by", "problem")} for one in told]
    return {"files": files, "bad": [one["path"] for one in told if one["problem"]]}


def _print(told: list[dict[str, Any]], seconds: float) -> None:
    size = decimal_size(sum(one["bytes"] for one in told))
    print(f"{counted(len(told), 'file')}, {size}, {seconds:.1f} s")
    for by, words in _WORDS.items():
        number = sum(one["by"] == by for one in told)
        if number:
            print(f"  {number} {words}")
    bad = [one for one in told if one["problem"]]
    if bad:
        print(f"  {len(bad)} BAD:")
    for one in bad:
        print(f"    {one['problem']}")
    if not bad:
        all_of_it = all(one["by"] in ("digest", "checksums") for one in told)
        print("no damage found" if all_of_it else "no damage found in what can be checked")


COMMAND = Command(
    "verify every file of a set",
    "Compare every file with the size and the digest in the manifest. Files without a manifest are read where they have\n"
    "chunks with checksums or compression. Under mpiexec the ranks divide the files among them.",
    (
        "mpistrat shards check data/train",
        'mpiexec -n 8 mpistrat shards check "data/train-*.h5" --json',
    ),
    _arguments,
    _run,
)
