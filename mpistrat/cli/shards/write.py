"""`mpistrat shards write`: other files become shards."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from ...base.agree import Ranks
from ...base.errors import explain
from ...base.partition import block
from ...base.text import counted, decimal_size, printable
from ...data.shards.convert import Conversion, convert, open_converter
from ...data.shards.files import manifest_path, set_pattern
from ...data.shards.new_shard import ShardSettings
from ..command import DONE, Command
from ..terminal import Meter, names, whole

__all__ = ["COMMAND"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([kmgt]?)b?", text.strip().lower())
    if match is None or not int(match[1]):
        raise argparse.ArgumentTypeError(f"expected a size like 500M or 2G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def _resize(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected HEIGHTxWIDTH like 224x224, got {text!r}")
    return int(match[1]), int(match[2])


def _named(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _named_dtype(text: str) -> tuple[str, np.dtype[Any]]:
    name, value = _named(text)
    try:
        return name, np.dtype(object) if value == "str" else np.dtype(value)
    except TypeError:
        raise argparse.ArgumentTypeError(f"expected NAME=DTYPE like x=float32, got {text!r}") from None


def _compression(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def _delimiter(text: str) -> str:
    text = "\t" if text == "tab" else text
    if len(text) != 1:
        raise argparse.ArgumentTypeError(f"expected one character, or tab, got {text!r}")
    return text


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help='a folder, or a pattern like "data/train-*.h5"')
    parser.add_argument(
        "input",
        metavar="INPUT",
        nargs="*",
        type=Path,
        help="files of one kind: .npy, .npz, .csv, .tsv, .parquet, .arrow, .jsonl, .h5, .nc, .tar, .tfrecord, .zarr; or folders "
        "of images",
    )
    parser.add_argument(
        "--field", metavar="NAME=FILE.npy", type=_named, action="append", default=[],
        help="instead of INPUT: the array of a field; may be given several times",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a set that is there")
    shards = parser.add_argument_group("shards")
    shards.add_argument("--rows-per-shard", metavar="N", type=whole(1), help="rows in every shard but the last")
    shards.add_argument("--bytes-per-shard", metavar="SIZE", type=_size, help="like 500M or 2G (default: 1 GiB)")
    shards.add_argument(
        "--layout", choices=["contiguous", "chunked"],
        help="contiguous is read by memory map (default without --compression)",
    )  # fmt: skip
    shards.add_argument("--compression", metavar="HOW", type=_compression, help="gzip, lzf, or gzip's level 0 to 9")
    shards.add_argument("--chunk-rows", metavar="N", type=whole(1), help="rows in a chunk (default: some 256 KiB)")
    fields = parser.add_argument_group("fields")
    fields.add_argument("--select", metavar="NAME,…", type=names, help="the arrays of .npz, or columns, wanted")
    fields.add_argument(
        "--dtype", metavar="NAME=DTYPE", type=_named_dtype, action="append", default=[],
        help="convert a field, for instance x=float32 or id=str; may be given several times",
    )  # fmt: skip
    table = parser.add_argument_group("tables (.csv, .tsv)")
    table.add_argument("--array", metavar="NAME", help="put all columns of numbers into one array of this name")
    table.add_argument(
        "--delimiter", metavar="CHAR", type=_delimiter, help='between cells, "tab" too (default: comma; .tsv: tab)'
    )
    table.add_argument(
        "--header", choices=["yes", "no"],
        help="whether the first line names the columns (default: yes, but it is an error if numbers are in it); without, they "
        "are column_0, column_1, …",
    )  # fmt: skip
    images = parser.add_argument_group("images (need Pillow)")
    images.add_argument("--resize", metavar="HEIGHTxWIDTH", type=_resize, help="bring all images to one size")
    images.add_argument("--color", choices=["rgb", "gray"], help="convert all images to this (default: rgb)")


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    started = time.perf_counter()
    asked = Conversion(
        args.input, {name: Path(file) for name, file in args.field}, args.select, dict(args.dtype), args.array,
        args.delimiter, args.header, args.color, args.resize,
    )  # fmt: skip
    with ranks.together():
        pattern = set_pattern("shards write", args.target)
        if manifest_path(pattern).exists() and not args.overwrite:
            remedy = "Add --overwrite to replace it."
            got = f"one, {manifest_path(pattern)}"
            raise ValueError(explain("shards write", "TARGET", expected="no set there", got=got, remedy=remedy))
        converter = open_converter(asked)
    first, stop = block(converter.rows, ranks.size, ranks.rank)
    settings: Any = {name: getattr(args, name, None) for name in ShardSettings.__annotations__}
    what = "writing" if ranks.size == 1 else "writing (rank 0)"
    with Meter(what, stop - first, "rows", silent=ranks.rank > 0) as meter:
        paths = convert(converter, args.target, settings, asked.dtypes, ranks, meter.advance)
    if ranks.rank == 0:
        size, seconds = sum(path.stat().st_size for path in paths), time.perf_counter() - started
        count = counted(len(paths), "shard")
        written = f"{count}, {converter.rows} rows, {decimal_size(size)}"
        print(f"{printable(pattern)}: {written}, written in {seconds:.1f} s ({converter.rows / seconds:.0f} rows/s)")
        for note in converter.notes:
            print(f"note: {printable(note)}")
    return DONE


COMMAND = Command(
    "convert .npy, .npz, CSV, Parquet, tar, TFRecord, Zarr, HDF5 or a folder of images into shards",
    "Convert other files into a set of HDF5 shards with a manifest. The set appears when all of it is written.\n"
    "Under mpiexec each rank converts its part of the rows; the order of the rows is that of the input.\n\n"
    "A .npy file becomes a field of its name, a .npz file a field for each array. A CSV file's first line names the\n"
    "columns, unless --header says no: numbers become int64 or float64 (empty cells NaN), anything else text, which\n"
    "needs --layout chunked. A folder of images has a sub-folder for each class: the fields are image (uint8; gray images\n"
    "of more bits, or of floats, keep their values) and label (int64). Several inputs of one kind are read one after the\n"
    "other.",
    (
        "mpistrat shards write data/train train.npz --rows-per-shard 100000",
        'mpistrat shards write "data/train-*.h5" --field x=x.npy --field y=y.npy',
        "mpistrat shards write data/table measured.csv --array x --dtype x=float32",
        "mpistrat shards write data/merged old/*.h5 --compression gzip",
        "mpiexec -n 8 mpistrat shards write data/photos photos/ --resize 224x224 --compression gzip",
    ),
    _arguments,
    _run,
)
