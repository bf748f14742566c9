"""The file format of checkpoints: layout, writing, and reading that verifies everything.

    /                 attributes format="mpistrat checkpoint", version=2; digest, that of the dataset digests
    /variables/NAME   one dataset each, contiguous, from a page's start; the attribute dtype where HDF5 has no such
                      type (bfloat16 as uint16)
    /optimizers/0     attributes name; iterations; made, its number in the scope or, with parameter servers, in the
                      program; settings, JSON: a dict for each group; slots/NAME/SLOT one dataset each
    /extra            the program's `extra`, in JSON
    /digests          JSON: the digests of all elements of these datasets, in the pieces in which they were written, and
                      the attributes of the optimizers

A ShardedVariable is one dataset, and so are its slots: the program that restores it may have other shards, or none.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, final

import numpy as np

from ..arena.values import parse_dtype
from ..base import log
from ..base.agree import as_told, together
from ..base.files import algorithm_of, digest_of_array, digest_of_bytes
from ..base.text import printable
from ..comm.process_group import ProcessGroup
from ..data.shards.objects import Refused, check_storage, find, find_group
from ..data.shards.unfailing_file import unfailing
from .list import Form, link_of

__all__ = [
    "CheckpointFile",
    "DamagedError",
    "Digests",
    "about_slice",
    "check_digests",
    "complete_file",
    "from_rank_0",
    "on_all",
    "stored",
]

FORMAT, VERSION = "mpistrat checkpoint", 2

Digests = dict[str, list[tuple[int, int, str]]]  # of each array's elements [start, stop), in order

_LARGEST = 1 << 62  # above any number of steps
_REMEDY = "Restore an older file, or another copy of it"


class DamagedError(Exception):
    """The error of a file that differs from what was saved."""


def stored(dtype: np.dtype) -> np.dtype:
    """Return the dtype in HDF5: uint16 for the bits of bfloat16, else the same."""
    return np.dtype(np.uint16) if dtype.name == "bfloat16" else dtype


def complete_file(path: Path, digests: Digests, optimizers: Sequence[Mapping[str, Any]], extra: str | None) -> None:
    """Complete a checkpoint whose arrays are written: add everything else.

    Raises:
        OSError, RuntimeError, ValueError: from h5py and the system.
    """
    with unfailing(path, "r+") as (file, check):
        plain, settings = [], []
        for index, about in enumerate(optimizers):
            group, own = file.require_group(f"optimizers/{index}"), dict(about)
            settings.append(json.dumps(own.pop("settings", None)))
            group.attrs.update({**own, "settings": settings[-1]})
            plain.append(own)
            check()
        if extra is not None:
            text = np.frombuffer(extra.encode(), np.uint8)
            file.create_dataset("extra", data=text)
            head = about_slice("extra", text.shape, 0)
            digests = {**digests, "extra": [(0, text.size, digest_of_array(text, head))]}
        table = json.dumps({"arrays": digests, "optimizers": plain, "settings": settings}, sort_keys=True).encode()
        file.create_dataset("digests", data=np.frombuffer(table, np.uint8))
        file.attrs["digest"] = digest_of_bytes(table)
        file.attrs["format"], file.attrs["version"] = FORMAT, VERSION


def about_slice(key: str, shape: Sequence[int], start: int) -> str:
    """Return the text about a slice that its digest includes."""
    return f"{key} {tuple(map(int, shape))} {start}"


def from_rank_0(
    group: ProcessGroup, function: str, path: str | os.PathLike[str], call: Callable[[], dict[str, Any]], root: int = 0
) -> dict[str, Any]:
    """Return on every rank the result of a call on the root. Collective.

    Raises:
        OSError: on every rank: the call failed.
    """
    own: dict[str, Any] = {}

    def act() -> None:
        own.update(call())

    on_all(group, function, path, act if group.topology.rank == root else None)
    found: dict[str, Any] = json.loads(group.exchange(function, json.dumps(own), os.fspath(path))[root])
    return found


def on_all(group: ProcessGroup, function: str, path: str | os.PathLike[str], call: Callable[[], None] | None) -> None:
    """Make a call on each rank that has one. Collective.

    Raises:
        OSError: on every rank: a call failed.
    """
    with together(partial(group.exchange, function, detail=os.fspath(path)), as_told):
        try:
            if call is not None:
                call()
        except Exception as error:
            raise OSError(printable(f"Strategy.{function}: {os.fspath(path)}: {_reason(function, error)}")) from None


def _reason(function: str, error: Exception) -> str:
    if function == "restore" and isinstance(error, FileNotFoundError):
        return f"no such file; the working directory is {os.getcwd()}"
    return str(error) if isinstance(error, DamagedError) else f"{type(error).__name__}: {error}"


@final
class CheckpointFile:
    """A checkpoint open for reading. Only requested data are read, and only data stored in this file.

    Attributes:
        optimizers: name, iterations, made and settings of each; None for values that the file lacks.
        weights_only: whether files of this kind have no optimizers.

    Raises:
        DamagedError: it is not a checkpoint, or differs from what was saved.
        OSError: the file does not exist or cannot be read.
    """

    weights_only = False

    def __init__(self, path: Path) -> None:
        import h5py

        self._path = path
        if path.exists() and not path.is_file():
            raise OSError("expected a file, got a directory or a device")
        try:
            self._file = h5py.File(path, "r")
        except BlockingIOError:  # a file of this name is complete; its writer's lock may last a little longer
            self._file = h5py.File(path, "r", locking=False)
        try:
            attributes = self._file.attrs
            if attributes.get("format") != FORMAT or attributes.get("version") != VERSION:
                raise DamagedError(f"not a {FORMAT} of version {VERSION}")
            self._digests: Digests | None = None
            self.optimizers = self._optimizers()
            self._read_digests()
            for about in self.optimizers:
                about["settings"] = _parsed(about["settings"])
            if self.optimizers and all(about["settings"] is None for about in self.optimizers):
                text = f"{path} has no learning rates and other settings of optimizers: the program's settings are used"
                log.once(logging.WARNING, f"Strategy.restore: {text}")
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> CheckpointFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def forms(self, names: Iterable[str]) -> dict[str, Form]:
        """Return shape and dtype of the existing variables of these names, and of their slots; no values."""
        forms: dict[str, Form] = {}
        prefixes = [f"optimizers/{index}/slots/" for index in range(len(self.optimizers))]
        wanted = set(names)
        for name in wanted:
            keys = [f"variables/{name}"]
            for prefix in prefixes:
                with _named(prefix + name):
                    keys += [f"{prefix}{name}/{slot}" for slot in find_group(self._file, prefix + name) or ()]
            for key in keys:
                with _named(key):
                    dataset = find(self._file, key)
                    if dataset is not None:
                        forms[key] = self._form(dataset)
        if self._digests is not None:
            kept = {key for key in self._digests if key != "extra" and link_of(key) in wanted}
            for key in sorted(kept ^ forms.keys()):
                _damaged(key, "was saved, but is not there" if key in kept else "is there, but was not saved")
        return forms

    def names(self) -> list[str]:
        """Return the links of all variables."""
        with _named("variables"):
            return list(find_group(self._file, "variables") or ())

    def read_array(self, key: str, form: Form) -> np.ndarray:
        """Return the values of a dataset, after comparing them with their digests."""
        with _named(key):
            dataset = find(self._file, key)
            if dataset is None or self._form(dataset) != form:
                _damaged(key, "changes while it is read")
            array = np.asarray(dataset[()])
            if not array.dtype.isnative:
                array = array.astype(array.dtype.newbyteorder("="))
            if form.dtype == "bfloat16":
                array = array.view(parse_dtype("bfloat16"))
        if self._digests is not None:
            self._compare(key, form.shape, array)
        return array

    def places(self, keys: Iterable[str]) -> dict[str, Any] | None:
        """Return the offsets of arrays in the file, for `FileSlices`; None if only HDF5 can find them."""
        dataset, digest = find(self._file, "digests"), self._file.attrs.get("digest")
        if self._digests is None or dataset is None or dataset.id.get_offset() is None:
            return None
        offsets: dict[str, int | None] = {}
        for key in keys:
            array = find(self._file, key)
            if array is None or not array.dtype.isnative or (array.size and array.id.get_offset() is None):
                return None
            offsets[key] = array.id.get_offset()
        return {"offsets": offsets, "table": [dataset.id.get_offset(), int(dataset.size)], "digest": digest}

    def extra(self) -> Any:
        """Return the program's `extra`; None if there is none."""
        kept = None if self._digests is None else self._digests.get("extra")
        if find(self._file, "extra") is None:
            return None if kept is None else _damaged("extra", "was saved, but is not there")
        text = self._bytes("extra")
        if self._digests is not None:
            if kept is None:
                _damaged("extra", "is there, but was not saved")
            self._compare("extra", text.shape, text)
        with _named("extra"):
            return json.loads(text.tobytes())

    def _form(self, dataset: Any) -> Form:
        """Return the form of a dataset; raise Refused unless its values were written, and in this file."""
        if dataset.is_virtual:
            raise Refused("a virtual dataset, which may draw from other files")
        check_storage(dataset, self._path, {self._path.resolve()})
        if dataset.shape is None:
            raise Refused("a dataset without a value")
        if dataset.nbytes and not dataset.id.get_storage_size():
            raise Refused("a dataset that was never written")
        dtype = dataset.dtype
        as_bits = dtype == np.uint16 and dataset.attrs.get("dtype") == "bfloat16"
        return Form(tuple(map(int, dataset.shape)), "bfloat16" if as_bits else dtype.name)

    def _bytes(self, key: str) -> np.ndarray:
        with _named(key):
            dataset = find(self._file, key)
            if dataset is None:
                _damaged(key, "is not there")
            shape, dtype = self._form(dataset)
            if dtype != "uint8" or len(shape) != 1 or shape[0] > self._path.stat().st_size:
                raise Refused(f"{dtype} {shape} instead of bytes")
            return np.asarray(dataset[()])

    def _optimizers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        with _named("optimizers"):
            group = find_group(self._file, "optimizers")
            count = 0 if group is None else len(group)
            for index in range(count):
                own = find_group(self._file, f"optimizers/{index}")
                if own is None:
                    raise Refused(f"{count} entries, but no entry {index}")
                found.append(_optimizer(own.attrs))
        return found

    def _read_digests(self) -> None:
        with _named("digests"):
            digest = self._file.attrs.get("digest")
            if digest is None and find(self._file, "digests") is None:
                text = f"{self._path} was saved without digests: its values cannot be verified"
                log.once(logging.WARNING, f"Strategy.restore: {text}")
                return
            if not isinstance(digest, str):
                raise Refused("the digest of the digests is not there")
        table = self._bytes("digests").tobytes()
        with _named("digests"):
            try:
                same = digest_of_bytes(table, algorithm_of(digest)) == digest
            except ImportError:
                remedy = f"install xxhash: {self._path} has its digests, which else cannot be compared"
                log.once(logging.WARNING, f"Strategy.restore: {remedy}")
                return
            if not same:
                _damaged("digests", "is not as it was saved")
            document = json.loads(table)
            texts = document.get("settings", itertools.repeat(None))  # separate, for readers without settings
            kept = [
                {"made": None, **about, "settings": s} for about, s in zip(document["optimizers"], texts, strict=False)
            ]
            for index in range(max(len(kept), len(self.optimizers))):
                if kept[index : index + 1] != self.optimizers[index : index + 1]:
                    _damaged(f"optimizers/{index}", "is not as it was saved")
            self._digests = document["arrays"]

    def _compare(self, key: str, shape: tuple[int, ...], array: np.ndarray) -> None:
        assert self._digests is not None
        flat, kept = array.reshape(-1), self._digests.get(key, [])
        check_digests(key, Form(shape, array.dtype.name), kept, lambda start, stop: flat[start:stop], range(len(kept)))


def check_digests(
    key: str,
    form: Form,
    kept: Sequence[tuple[int, int, str]],
    read: Callable[[int, int], np.ndarray],
    numbers: Container[int],
) -> None:
    """Compare an array with some of its digests, and check that the digests cover all elements.

    Raises:
        DamagedError: it differs from what was saved.
    """
    end = 0
    with _named(key):
        for number, (start, stop, digest) in enumerate(kept):
            if start != end or not start <= stop <= form.size:
                _damaged(key, "is not as it was saved")
            end = stop
            if number in numbers:
                about = about_slice(key, form.shape, start)
                if digest_of_array(read(start, stop), about, algorithm_of(digest)) != digest:
                    _damaged(key, "is not as it was saved")
        if end != form.size:
            _damaged(key, "is not as it was saved")


def _optimizer(attributes: Any) -> dict[str, Any]:
    name = attributes["name"]
    if not isinstance(name, str):
        raise Refused(f"a name that is a {type(name).__name__}")
    settings = attributes.get("settings")
    if settings is not None and not isinstance(settings, str):
        raise Refused(f"settings that are a {type(settings).__name__}")
    found: dict[str, Any] = {"name": name, "made": None, "settings": settings}
    for number in ("iterations", "made"):
        if number in attributes:
            found[number] = int(attributes[number])
            if not 0 <= found[number] < _LARGEST:
                raise Refused(f"{number} is {found[number]}")
    if "iterations" not in found:
        raise Refused("an optimizer without iterations")
    return found


def _parsed(settings: str | None) -> list[dict[str, Any]] | None:
    with _named("settings"):
        found = None if settings is None else json.loads(settings)
        if found is not None and (not isinstance(found, list) or not all(isinstance(group, dict) for group in found)):
            raise Refused("settings that are not a list of dicts")
        return found


@contextlib.contextmanager
def _named(key: str) -> Iterator[None]:
    """Raise errors as DamagedError with the name of the data."""
    try:
        yield
    except DamagedError:
        raise
    except Exception as error:  # h5py raises many kinds of errors for damaged files
        text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        raise DamagedError(f"{key}: {text}. {_REMEDY}") from error


def _damaged(key: str, how: str) -> NoReturn:
    raise DamagedError(f"{key} {how}: the file is damaged. {_REMEDY}")
