"""`mpistrat shards info`: what a set of HDF5 files holds."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ...base.agree import Ranks
from ...base.text import counted, decimal_size, printable
from ...data.shards.survey import FieldSurvey, SetSurvey, survey
from ..command import DONE, Command
from ..terminal import console, names
from . import add_files, given_files

__all__ = ["COMMAND"]

_FILES = 20  # shown at most


def _arguments(parser: argparse.ArgumentParser) -> None:
    add_files(parser)
    parser.add_argument(
        "--fields", metavar="NAME,…", type=names, help="the datasets wanted, where not all belong together"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    with ranks.together():
        if ranks.rank == 0:
            found = survey(given_files(args), args.fields)
            if args.json:
                print(json.dumps(_document(found), indent=1))
            else:
                _print(found, plain=ranks.size > 1)
    return DONE


def _document(found: SetSurvey) -> dict[str, Any]:
    return {
        "rows": found.rows,
        "bytes": found.bytes,
        "manifest": found.manifest,
        "fields": [vars(field) for field in found.fields],
        "left_out": list(found.left_out),
        "files": [
            {"path": str(path), "rows": rows, "bytes": size, "digest": digest}
            for path, rows, size, digest in found.files
        ],
    }


def _print(found: SetSurvey, *, plain: bool) -> None:
    from rich.table import Table

    out = console(plain=plain)
    count = len(found.files)
    where = printable(found.files[0][0].parent)
    out.print(f"{counted(count, 'file')} in {where}: {found.rows} rows, {decimal_size(found.bytes)}")
    guard = "every file has a digest (shards check compares them)"
    out.print(f"manifest: {guard if found.manifest else 'none'}\n")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, side in (
        ("field", "left"), ("dtype", "left"), ("row shape", "left"), ("layout", "left"), ("chunk rows", "right"),
        ("size", "right"), ("ratio", "right"), ("reader", "left"),
    ):  # fmt: skip
        table.add_column(title, justify=side, overflow="fold")  # type: ignore[arg-type]
    for field in found.fields:
        table.add_row(*_cells(field))
    out.print(table)
    for text in found.left_out:
        out.print(printable(f"left out: {text}"))
    for field in found.fields:
        for key, value in field.attributes.items():
            text = str(value)
            out.print(printable(f"{field.name}.{key}: {text if len(text) < 200 else text[:200] + ' …'}"))
    out.print()
    files = Table(box=None, pad_edge=False, header_style="bold")
    files.add_column("file", overflow="fold")
    for title in ("rows", "size"):
        files.add_column(title, justify="right")
    files.add_column("digest", overflow="fold")
    for path, rows, size, digest in found.files[:_FILES]:
        files.add_row(
            printable(path.name), "source" if rows is None else str(rows), decimal_size(size), printable(_short(digest))
        )
    out.print(files)
    if any(rows is None for _, rows, _, _ in found.files):
        out.print("source: virtual datasets of other files draw from this one; it has no rows of its own")
    if count > _FILES:
        out.print(f"… and {count - _FILES} more; --json lists all of them")


def _cells(field: FieldSurvey) -> list[str]:
    layout = " + ".join([field.layout, *field.filters])
    shape = "×".join("?" if length is None else str(length) for length in field.shape) or "()"
    ratio = "" if not field.data_bytes or not field.stored_bytes else f"{field.data_bytes / field.stored_bytes:.2f}"
    reader = f"{field.reader}: {field.reason}" if field.reason else field.reader
    chunk = "" if field.chunk_rows is None else str(field.chunk_rows)
    cells = [field.name, field.dtype, shape, layout, chunk, decimal_size(field.stored_bytes), ratio, reader]
    return [printable(cell) for cell in cells]


def _short(digest: str | None) -> str:
    if digest is None:
        return "-"
    algorithm, _, value = digest.partition(":")
    return f"{algorithm} {value[:8]}…"


COMMAND = Command(
    "describe a set of HDF5 files",
    "Describe HDF5 files, ours and others: rows, fields, how they are stored, and how they will be read.\n"
    "The ratio is that of the rows' bytes to the bytes in the files.",
    (
        "mpistrat shards info data/train",
        'mpistrat shards info "data/train-*.h5" --json',
        "mpistrat shards info somebody_elses.h5 --fields images,labels",
    ),
    _arguments,
    _run,
)
