"""Arguments that sources of files share: which files they read, and the structure of the fields of an element."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...base import nest
from ...base.errors import ShardError, explain
from ...base.text import counted, shortened
from ..shards.files import PathLike, left_out_files, natural_key
from .remote import RemotePath, StoredPath, remote_files, stored_path

__all__ = ["Fields", "InputFiles", "input_files", "left_out_words", "names_in", "others_words", "structure_of"]

_NAMED = 5  # fields that are named in a text

Fields = str | Sequence[str] | Mapping[str, str] | None


class InputFiles(NamedTuple):
    """The files of a source, and the names of a directory's files that it does not read."""

    paths: list[StoredPath]
    left_out: tuple[str, ...]

    def words(self, kind: str) -> str:
        """Return their number, directory and the others in it, for a description; `kind` is a noun."""
        return f"{counted(len(self.paths), kind)} in {self.paths[0].parent}{others_words(self.left_out)}"


def input_files(
    function: str, files: PathLike | Sequence[PathLike], endings: tuple[str, ...], options: Mapping[str, Any] | None = None,
    others: tuple[str, ...] = (),
) -> InputFiles:  # fmt: skip
    """Return the files that a path, a directory, a pattern or a list of paths names; each may be a URL.

    Args:
        function: the name for errors.
        files: what the user passed.
        endings: of the files of a directory that are read, in small letters.
        options: arguments of fsspec's file system for URLs.
        others: of similar files, which a directory may not have, since their rows would be left out silently.

    Raises:
        ShardError: no file is there, or a directory has one of the other endings.
    """
    paths: list[StoredPath]
    found: list[StoredPath] = []  # in a directory
    if isinstance(files, (str, os.PathLike)):
        path = stored_path(function, files, options)

        def wanted(path: StoredPath) -> bool:
            found.append(path)
            return path.name.lower().endswith(endings) and not path.name.startswith(".")

        if isinstance(path, RemotePath):
            paths = sorted(remote_files(path, wanted), key=natural_key)
        elif path.is_dir():
            paths = sorted(filter(wanted, path.iterdir()), key=natural_key)
            found = [each for each in found if isinstance(each, Path) and each.is_file()]
        elif not path.exists() and glob.has_magic(str(path)):
            paths = sorted(map(Path, glob.glob(str(path))), key=natural_key)
        else:
            paths = [path]
    else:
        paths = [stored_path(function, one, options) for one in files]
    left_out = left_out_files(function, found, endings, others)
    if not paths:
        remedy = f"Look at the path; the working directory is {Path.cwd()}."
        raise ShardError(explain(function, str(files), expected="at least one file", got="none", remedy=remedy))
    for path in paths:
        if isinstance(path, RemotePath):
            path.stat()
        elif not path.is_file():
            raise ShardError(explain(function, str(path), expected="a file", got="no such file"))
    return InputFiles(paths, left_out)


def names_in(structure: Any) -> list[str]:
    """Return the names of a structure, each once."""
    return list(dict.fromkeys(nest.flatten(structure)))


def left_out_words(fields: Iterable[str]) -> str:
    """Return the end of a description, about the fields that are not read; "" without any."""
    names = list(fields)
    return f"; left out: {shortened(names, _NAMED)}" if names else ""


def others_words(names: Sequence[str]) -> str:
    """Return the end of a description of files, about the others in their directory; "" without any.

    Example:
        >>> others_words(["notes.txt"]), others_words([])
        (' (left out: notes.txt)', '')
    """
    return f" (left out: {shortened(names, _NAMED)})" if names else ""


def structure_of(function: str, argument: str, fields: Fields) -> Any:
    """Return the nest of names that elements have the structure of; None for a dict of all fields.

    Raises:
        ValueError: `fields` is no name, and no list, tuple or dict of names.
    """
    if fields is None:
        return None
    structure: Any = fields
    if isinstance(fields, Iterable) and not isinstance(fields, (str, tuple, Mapping)):
        structure = {name: name for name in fields}
    names = nest.flatten(structure)
    if not names or not all(isinstance(name, str) for name in names):
        expected = "None, a name, a list or tuple of names, or a dict of names"
        raise ValueError(explain(function, argument, expected=expected, got=repr(fields)))
    return structure
