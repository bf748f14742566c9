"""Sets of HDF5 files: written from other files, described, checked."""

from __future__ import annotations

import argparse
import glob
from pathlib import Path

from ...base.errors import explain
from ...data.files.remote import is_url
from ..command import Group

__all__ = ["COMMAND", "add_files", "given_files"]


def add_files(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a set of files."""
    parser.add_argument("files", metavar="FILES", nargs="+", help="a folder, a pattern, HDF5 files, or URLs of these")


def given_files(args: argparse.Namespace) -> str | list[str]:
    """Return the set that the command line names: one word may be a folder or a pattern.

    Raises:
        FileNotFoundError: a word is no pattern, and no such file exists.
    """
    words: list[str] = args.files
    for word in words:
        if not is_url(word) and not Path(word).exists() and not glob.has_magic(word):
            expected = "a folder, a pattern or an HDF5 file that exists"
            raise FileNotFoundError(explain("mpistrat shards", word, expected=expected, got="no such file"))
    return words[0] if len(words) == 1 else words


COMMAND = Group(
    "write, describe and check sets of HDF5 files",
    {
        "write": "shards.write:COMMAND",
        "info": "shards.info:COMMAND",
        "check": "shards.check:COMMAND",
    },
)
