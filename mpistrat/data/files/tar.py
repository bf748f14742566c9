"""Samples in tar archives, as WebDataset writes them: one scan of the headers finds the bytes of every member."""

from __future__ import annotations

import functools
import hashlib
import re
import tarfile
from array import array
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any, final

import numpy as np

from ...base import nest
from ...base.errors import MpistratError, ShardError, explain, shard_error
from ...base.text import counted
from ..nodes.samples import FileSamples
from ..shards.files import PathLike
from .decoders import Decoder, check_used, checked_decoders, decoder_of, keys_of
from .handles import ShardFile
from .inputs import Fields, input_files, left_out_words, names_in, structure_of
from .remote import StoredPath, opened_to_scan
from .stored import StoredBytes

__all__ = ["TarSamples"]

_KEY = "__key__"
_COMPRESSED = (".tgz", ".tbz", ".tbz2", ".txz", ".tzst")
_BLOCK = 512
_SCANNED = 1 << 20  # bytes after the end of an archive that are read together
_META = re.compile(r"__[^/]*__($|/)")  # members about the archive, which WebDataset leaves out too
_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)

_Members = dict[
    str, tuple[int, int] | str
]  # of a sample: the first byte and the number of bytes of each field, or its link


_error = functools.partial(shard_error, function="from_tar")


def _headers(path: StoredPath) -> Iterator[tarfile.TarInfo]:
    """Return an iterator over the members of the archives of a file, one after the other, each of which must have its end."""
    remedy = "If it is compressed (.tar.gz), decompress it: only then has it random access. Else copy it again."
    with opened_to_scan(path) as file:
        start: int | None = 0
        while start is not None:
            try:
                place = yield from _archive(file, start)
                start = _next_archive(file, place)
            except ShardError:
                raise
            except (tarfile.TarError, OSError, ValueError) as error:
                expected = "a whole tar archive" if not start else f"a second archive at byte {start}, or the end"
                raise _error(path, expected, f"{type(error).__name__}: {error}", remedy) from error
            if start == place:  # tarfile ends there silently
                remedy = "Copy the file again."
                raise _error(path, f"a member or the end of the archive at byte {place}", "neither", remedy)


def _archive(file: Any, start: int) -> Generator[tarfile.TarInfo, None, int]:
    """Yield the members of the archive at a byte of a file, and return where they end."""
    file.seek(start)
    with tarfile.open(fileobj=file, mode="r:") as archive:
        empty = archive.firstmember is None  # type: ignore[attr-defined]  # then `next` raises an error in Python 3.10
        while not empty and (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # they would be kept
            yield member
        return archive.offset


def _next_archive(file: Any, place: int) -> int | None:
    """Return the first byte after the zeros that end an archive: of the next one (tar -A, cat); None at the end of the file."""
    file.seek(place)
    if not (zeros := file.read(_BLOCK)):
        return place
    while zeros:
        if any(zeros):
            return place + (len(zeros) - len(zeros.lstrip(b"\0"))) // _BLOCK * _BLOCK
        place += len(zeros)
        zeros = file.read(_SCANNED)
    return None


def _samples(path: StoredPath) -> Iterator[tuple[str, _Members]]:
    """Return an iterator over an archive's samples: successive members whose names are equal up to the first dot."""
    key, members = None, _Members()
    for member in _headers(path):
        match = _NAME.fullmatch(member.name)
        if match is None or _META.match(member.name):
            continue
        link = member.linkname if member.islnk() or member.issym() else None
        if not member.isreg() and link is None:
            continue
        if member.issparse():
            raise _error(f"{path}: {member.name}", "a member that is stored as a whole", "a sparse one")
        if match[1] != key:
            if key is not None:
                yield key, members
            key, members = match[1], {}
        field = match[2].lower()
        if field in members:
            raise _error(f"{path}: {key}", f"one member {field!r} of a sample", "two")
        members[field] = (member.offset_data, member.size) if link is None else link
    if key is not None:
        yield key, members


def _extension(name: str) -> str:
    """Return the name of a field as members have it."""
    return name.lower().removeprefix(".")


@final
class TarSamples(FileSamples):
    """The samples of archives, one archive after the other; see `from_tar`."""

    function = "from_tar"

    def __init__(
        self, files: PathLike | Sequence[PathLike], fields: Fields, decode: Mapping[str, Decoder] | None,
        options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._structure = structure_of("from_tar", "fields", fields)
        given = checked_decoders("from_tar", decode or {})
        chosen = {_extension(name): decoder for name, decoder in given.items()}
        self._given = input_files("from_tar", files, (".tar",), options, _COMPRESSED)
        self._bytes = StoredBytes("from_tar", [ShardFile.of(path, "from_tar") for path in self._given.paths])
        self._names: list[str] = []
        self._left_out: set[str] = set()
        if self._structure is not None:
            self._names = [name for name in names_in(self._structure) if name != _KEY]
        self._keys: list[str] = []
        self._files, self._places = array("q"), array("q")
        for number, path in enumerate(self._given.paths):
            for key, members in _samples(path):
                self._add(number, path, key, members)
        if self._structure is None:
            self._structure = {name: name for name in self._names}
        self._table = np.asarray(self._places, np.int64).reshape(len(self._keys), len(self._names), 2)
        extensions = {name: _extension(name) for name in self._names}
        self._decoders = {name: decoder_of(extension, chosen) for name, extension in extensions.items()}
        check_used("from_tar", chosen, set().union(*map(keys_of, extensions.values())), self._names)

    def _add(self, number: int, path: StoredPath, key: str, members: _Members) -> None:
        if self._structure is None and not self._keys:
            self._names = list(members)
        for name in self._names:
            place = members.get(_extension(name))
            if place is None:
                remedy = "Name the fields that all samples have with fields=."
                raise _error(f"{path}: {key}", f"a member {name!r}", f"members {list(members)}", remedy)
            if isinstance(place, str):
                remedy = "Write the archive with --dereference --hard-dereference, or name other fields with fields=."
                expected, got = "a member that is stored as a whole", f"a link to {place}"
                raise _error(f"{path}: {key}.{name}", expected, got, remedy)
            self._places.extend(place)
        self._left_out.update(members.keys() - set(map(_extension, self._names)))
        self._keys.append(key)
        self._files.append(number)

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, row: int) -> Any:
        key, number = self._keys[row], self._files[row]
        found: dict[str, Any] = {_KEY: key}
        for name, (position, count) in zip(self._names, self._table[row].tolist(), strict=True):
            data = self._bytes.read(number, position, count, f"{key}.{name}")
            try:
                found[name] = self._decoders[name](data)
            except (MpistratError, MemoryError):
                raise
            except Exception as error:
                where = f"{self._bytes.paths[number]}: {key}.{name}"
                got = f"{type(error).__name__}: {error}"
                raise ValueError(explain("from_tar", where, expected="bytes that can be decoded", got=got)) from error
        return nest.map_structure(found.__getitem__, self._structure)

    def check(self) -> None:
        self._bytes.check()

    def fingerprint(self) -> int:
        hasher = hashlib.sha256("\n".join([*self._names, *self._keys]).encode(errors="surrogateescape"))
        hasher.update(self._table.astype("<i8").tobytes())
        return self._bytes.fingerprint(hasher.digest())

    def describe(self) -> str:
        where = self._given.words("tar file")
        fields = f"{', '.join(self._names) or _KEY}{left_out_words(sorted(self._left_out))}"
        return f"from_tar: {where}, {counted(len(self), 'sample')} of {fields}"
