"""The files of a set of shards: their order, manifest entries and integrity."""

from __future__ import annotations

import glob
import logging
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Union

from ...base import log
from ...base.errors import ShardError, explain, shard_error
from ...base.files import algorithm_of, digest_of_ends, digest_of_file
from ...base.text import decimal_size
from ..files.handles import ShardFile
from ..files.remote import RemotePath, StoredPath, is_url, remote_files
from .manifest import Field, Manifest, ShardEntry, read_manifest

__all__ = [
    "OTHER_SUFFIXES",
    "SUFFIXES",
    "FileSet",
    "PathLike",
    "check_ends",
    "is_hdf5",
    "is_small",
    "left_out_files",
    "manifest_path",
    "natural_key",
    "remember_whole",
    "resolve",
    "set_pattern",
]

PathLike = Union[str, "os.PathLike[str]"]

MANIFEST = "manifest.json"
_FUNCTION = "HDF5Dataset"
SUFFIXES = (".h5", ".hdf5")
#: Endings of other HDF5 files, which a folder is not searched for.
OTHER_SUFFIXES = (".h5ad", ".h5mu", ".hdf", ".hd5", ".he5", ".loom", ".nc", ".nc4", ".cool", ".mcool")
_PACKED = ("", ".gz", ".gzip", ".zlib", ".bz2", ".xz", ".zst", ".lz4", ".zip")  # endings of compressed files


@dataclass(frozen=True)
class FileSet:
    """Files in order, each with its manifest entry if any, and the fields of the set's manifest.

    Attributes:
        left_out: the names of files of the folder that are not read.
    """

    paths: tuple[StoredPath, ...]
    entries: tuple[ShardEntry | None, ...]
    fields: dict[str, Field] | None
    left_out: tuple[str, ...] = ()

    def absolute(self) -> FileSet:
        """Return the same files with absolute paths, which stay valid if the program changes its directory."""
        return replace(self, paths=tuple(path.absolute() for path in self.paths))

    def check(self, numbers: Iterable[int], *, verify: bool) -> None:
        """Compare files with the manifest, without HDF5: existence, size and, with `verify`, digests.

        Raises:
            ShardError: naming the file.
        """
        for number in numbers:
            _check(self.paths[number], self.entries[number], verify=verify)


def _check(path: StoredPath, entry: ShardEntry | None, *, verify: bool) -> None:
    got, size = "", 0
    try:
        status = path.stat()
    except ShardError:
        raise
    except OSError as error:
        got = "no such file" if isinstance(error, FileNotFoundError) else str(error)
    else:
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            got = "a directory" if stat.S_ISDIR(status.st_mode) else "a special file"
    if not got and not size:
        got = "an empty file, of 0 bytes"
    if got:
        raise shard_error(path, "an HDF5 file", got, "Restore the file, or write the shards again.")
    if entry is not None and size != entry.bytes:
        got = f"{size} bytes: the file is {'truncated' if size < entry.bytes else 'another one'}"
        raise shard_error(path, f"{entry.bytes} bytes (manifest)", got, _REMEDY)
    if verify:
        _verify(path, entry)


_REMEDY = "Copy the file again, or write the shards again."


_whole: set[ShardFile] = set()  # files whose digests matched, with their identity at that time


def _verify(path: StoredPath, entry: ShardEntry | None) -> None:
    """Compare the digest of a file's bytes, unless this process has done so."""
    if entry is None:
        expected = "a digest in a manifest, which verify=True compares"
        raise shard_error(path, expected, "none", "Write the shards with ms.data.write_shards, or pass verify=False.")
    try:
        file = ShardFile.of(path)
        found = entry.digest if file in _whole else digest_of_file(path, algorithm_of(entry.digest))
    except (ValueError, ImportError) as error:
        expected = f"a digest that can be computed here, not {algorithm_of(entry.digest)!r}"
        raise shard_error(path, expected, str(error), "Install xxhash, or pass verify=False.") from error
    except OSError as error:
        raise shard_error(path, "a file that can be read", str(error)) from error
    if found != entry.digest:
        raise shard_error(path, f"digest {entry.digest} (manifest)", found, _REMEDY)
    _whole.add(file)


def remember_whole(files: Iterable[ShardFile]) -> None:
    """Record that another rank has verified these files."""
    _whole.update(files)


def check_ends(path: StoredPath, entry: ShardEntry | None) -> None:
    """Compare the digest of a file's ends with the manifest, if it has one that can be computed here.

    Raises:
        ShardError: the file is another one, for instance a renamed one of the same set.
    """
    if entry is None or not entry.ends:
        return
    try:
        found = digest_of_ends(path, algorithm_of(entry.ends))
    except (ValueError, ImportError):
        return
    if found != entry.ends:
        raise shard_error(path, f"digest {entry.ends} of the first and last 64 KiB (manifest)", found, _REMEDY)


def natural_key(path: StoredPath | str) -> tuple[object, ...]:
    """Return a sort key that puts part-2 before part-10."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", str(path)))


def is_hdf5(path: StoredPath) -> bool:
    """Return True if a file has the suffix of an HDF5 file, in any case."""
    return path.suffix.lower() in SUFFIXES


def manifest_path(pattern: Path) -> Path:
    """Return the path of the manifest of "train-*.h5": "train-manifest.json" in the same folder."""
    return pattern.with_name(pattern.name.partition("*")[0] + MANIFEST)


def set_pattern(function: str, target: PathLike) -> Path:
    """Return the path of a set's files, with one "*" in the name.

    Raises:
        ValueError: for a target other than a directory or such a pattern.
    """
    path = Path(target)
    if not os.fspath(target):
        raise ValueError(explain(function, "target", expected="a path", got="an empty one"))
    if (
        re.fullmatch(r"[^*]*\*\.[^*.]+", path.name)
        and is_hdf5(path)
        and not glob.has_magic(str(path).replace("*", "", 1))
    ):
        return path
    if glob.has_magic(str(path)) or is_hdf5(path):
        expected = 'a directory, or a pattern with one "*", right before ".h5", like "data/train-*.h5"'
        raise ValueError(explain(function, "target", expected=expected, got=repr(str(path))))
    return path / "*.h5"


def _from_manifest(path: StoredPath) -> FileSet:
    manifest = read_manifest(path)
    return FileSet(tuple(path.parent / shard.name for shard in manifest.shards), manifest.shards, manifest.fields)


def _directory(directory: Path) -> FileSet:
    found = [path for path in directory.iterdir() if not path.name.startswith(".")]
    paths = sorted((path for path in found if is_hdf5(path)), key=natural_key)
    manifests = sorted(path for path in found if path.name.endswith(MANIFEST))
    if found and not paths and not manifests:
        raise _without_hdf5(directory, found)
    return _listed_or_promised(directory, paths, manifests, [path for path in found if path.is_file()])


def left_out_files(
    function: str, found: Iterable[StoredPath], endings: tuple[str, ...], others: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the names of the files of a folder that are not read, without hidden ones and marks such as `_SUCCESS`.

    Args:
        function: the name for errors.
        found: the files of the folder.
        endings: those of the files that are read.
        others: those of similar files that are not read.

    Raises:
        ShardError: for a file with one of the other endings, or a compressed one: leaving it out would lose rows silently.
    """
    with_rows = tuple(ending + packed for ending in (*endings, *others) for packed in _PACKED)
    names = []
    for path in found:
        name = path.name.lower()
        if name.endswith(endings) or name.startswith((".", "_")):
            continue
        if name.endswith(with_rows):
            expected, got = "a file with an ending that is read from a folder", f"{path.name} next to such files"
            raise shard_error(path, expected, got, "Name the files that you mean, by a pattern or a list.", function)
        names.append(path.name)
    return tuple(sorted(names))


def _listed_or_promised(
    directory: StoredPath,
    paths: Sequence[StoredPath],
    manifests: Sequence[StoredPath],
    found: Sequence[StoredPath],
) -> FileSet:
    """Return the files of a directory, in the order of its manifest if it has one.

    Args:
        directory: for errors.
        paths: its HDF5 files.
        manifests: its manifests.
        found: all its files.
    """
    if len(manifests) > 1:
        names = ", ".join(path.name for path in manifests)
        remedy = f"Name one set, for instance {directory / (manifests[0].name[: -len(MANIFEST)] + '*.h5')}."
        raise shard_error(directory, "one set of shards", names, remedy)
    if not manifests:
        left_out = left_out_files(_FUNCTION, found, SUFFIXES, OTHER_SUFFIXES) if paths else ()
        return replace(_listed(paths, str(directory)), left_out=left_out)
    promised = _from_manifest(manifests[0])
    _refuse_others(paths, promised, manifests[0], str(directory))
    return promised


def _without_hdf5(directory: Path, found: Sequence[Path]) -> ShardError:
    suffixes = sorted({path.suffix for path in found if path.suffix and path.is_file()})
    got = f"files that end in {', '.join(suffixes[:5])}" if suffixes else "no such file"
    remedy = f"If they are HDF5 files, name them: {directory / ('*' + suffixes[0])}." if suffixes else ""
    return shard_error(directory, f"files that end in {' or '.join(SUFFIXES)}", got, remedy)


def _pattern(pattern: str) -> FileSet:
    paths = sorted((Path(match) for match in glob.glob(pattern)), key=natural_key)
    manifest = manifest_path(Path(pattern))
    if not manifest.is_file():
        return _listed(paths, pattern)
    promised = _from_manifest(manifest)
    _refuse_others(paths, promised, manifest, pattern)
    # The manifest's order and missing files count, unless the pattern selects some files of the set.
    whole = Path(pattern).name.count("*") == 1 and not set("?[") & set(Path(pattern).name)
    if whole:
        return promised
    chosen = {path.name for path in paths}
    pairs = [(p, e) for p, e in zip(promised.paths, promised.entries, strict=True) if p.name in chosen]
    return FileSet(tuple(p for p, _ in pairs), tuple(e for _, e in pairs), promised.fields)


def _refuse_others(paths: Sequence[StoredPath], promised: FileSet, manifest: StoredPath, asked: str) -> None:
    """Raise for a requested file that the manifest does not list: skipping it would lose rows silently."""
    known = {path.name for path in promised.paths}
    for path in paths:
        if path.name not in known:
            remedy = f"Name the files that you mean, remove this one, or {manifest} if it is out of date."
            expected = f"a shard in {asked} that {manifest.name} lists"
            raise shard_error(path, expected, "an unlisted file", remedy)


def _listed(paths: Sequence[StoredPath], asked: str) -> FileSet:
    """Return the listed files, with their entries in manifests of the same folders."""
    if not paths:
        remedy = f"Check the path; the working directory is {Path.cwd()}."
        raise shard_error(asked, "at least one HDF5 file", "no match", remedy)
    by_directory: dict[StoredPath, list[Manifest]] = {}
    for directory in {path.parent for path in paths if isinstance(path, Path)}:
        by_directory[directory] = [read_manifest(path) for path in sorted(directory.glob(f"*{MANIFEST}"))]
    entries: list[ShardEntry | None] = []
    for path in paths:
        shards = (shard for manifest in by_directory.get(path.parent, ()) for shard in manifest.shards)
        entries.append(next((shard for shard in shards if shard.name == path.name), None))
    return FileSet(tuple(paths), tuple(entries), None)


def resolve(files: PathLike | Sequence[PathLike], options: Mapping[str, Any] | None = None) -> FileSet:
    """Return the files that a path, a directory, a pattern or a list of paths names; each may be a URL.

    Args:
        options: arguments of fsspec's file system for URLs.

    Raises:
        TypeError: for anything else.
        ShardError: naming the argument, if no file exists.
    """
    if not isinstance(files, (str, os.PathLike)):
        return _listed(_paths(files, options), repr(files))
    if is_url(files):
        return _remote(RemotePath(_FUNCTION, os.fspath(files), options or {}))
    path = Path(files)
    try:
        mode = _mode(path)
        if mode is not None and stat.S_ISDIR(mode):
            return _directory(path)
        if mode is None and glob.has_magic(str(path)):
            return _pattern(str(path))
        return _listed([path], str(path))
    except PermissionError as error:
        expected, remedy = "files that this user may look at", "Change the permissions of its directories."
        raise shard_error(path, expected, str(error), remedy) from error


def _remote(url: RemotePath) -> FileSet:
    others: list[RemotePath] = []  # of a folder

    def wanted(path: RemotePath) -> bool:
        read = is_hdf5(path) or path.name.endswith(MANIFEST)
        if not read:
            others.append(path)
        return read

    found = sorted(remote_files(url, wanted), key=natural_key)
    manifests = [path for path in found if path.name.endswith(MANIFEST)]
    return _listed_or_promised(url, [path for path in found if path not in manifests], manifests, others)


def _mode(path: Path) -> int | None:
    """Return a file's mode, None if it does not exist. Raise for a forbidden one, unlike Path.is_dir of Python 3.14."""
    try:
        return path.stat().st_mode
    except PermissionError:
        raise
    except (OSError, ValueError):
        return None


def _paths(files: Any, options: Mapping[str, Any] | None) -> list[StoredPath]:
    expected = "a path, a directory, a pattern or a list of paths"
    if not isinstance(files, Iterable):
        raise TypeError(explain("HDF5Dataset", "files", expected=expected, got=repr(files)))
    paths: list[StoredPath] = []
    for number, path in enumerate(files):
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(explain(_FUNCTION, f"files[{number}]", expected="a path", got=repr(path)))
        paths.append(RemotePath(_FUNCTION, os.fspath(path), options or {}) if is_url(path) else Path(path))
    return paths


_SMALL = {"xxh3_128": 1 << 30, "sha256": 1 << 28}  # bytes of a set: less than half a second if in memory


def is_small(files: FileSet) -> bool:
    """Return True if a set has digests that are quickly compared. For a larger one, log how to compare them."""
    entries = [entry for entry in files.entries if entry is not None]
    if not entries or len(entries) < len(files.entries):
        return False  # foreign files have no digests
    if any(isinstance(path, RemotePath) for path in files.paths):
        return False
    size, algorithms = sum(entry.bytes for entry in entries), {algorithm_of(entry.digest) for entry in entries}
    if size <= min(_SMALL.get(algorithm, 0) for algorithm in algorithms):
        try:
            if "xxh3_128" in algorithms:
                import xxhash  # noqa: F401
        except ImportError:
            log.once(logging.INFO, "HDF5Dataset: digests are not compared, as xxhash is not installed")
            return False
        return True
    where = files.paths[0].parent
    how = "pass verify=True, or run: mpistrat shards check"
    log.once(
        logging.INFO, f"HDF5Dataset: the digests of {decimal_size(size)} in {where} are not compared; to do so, {how}"
    )
    return False
