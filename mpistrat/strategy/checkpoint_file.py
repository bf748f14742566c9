"""The file format of checkpoints: layout, writing, and reading that verifies everything.

    /                 attributes format="mpistrat checkpoint", version=1; digest, that of the dataset digests
    /variables/NAME   one dataset each; the attribute dtype where HDF5 has no such type (bfloat16 as uint16)
    /optimizers/0     attributes name, iterations, and made, its number in the scope of the program or, with parameter
                      servers, in the program; slots/NAME/SLOT one dataset each
    /extra            what the program gave beside, in JSON
    /digests          JSON: the digests of all rows of these datasets, in the slices in which they were written, and what
                      the attributes of the optimizers are

A ShardedVariable is one dataset too, and so are its slots: a program that restores it may have other shards, or none.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, final

import numpy as np

from .._util import log
from .._util.files import algorithm_of, digest_of_array, digest_of_bytes, replacing
from ..data.shards.objects import Refused, check_storage, find, find_group
from ..variables.values import parse_dtype

__all__ = ["CheckpointFile", "DamagedError", "DatasetSlice", "Form", "write_checkpoint"]

FORMAT, VERSION = "mpistrat checkpoint", 1

Form = tuple[tuple[int, ...], str]  # shape and dtype

_LARGEST = 1 << 62  # above any number of steps
_REMEDY = "Restore an older file, or another copy of it"


class DamagedError(Exception):
    """The file is not what was saved."""


class DatasetSlice(NamedTuple):
    """Rows of a dataset."""

    key: str
    shape: tuple[int, ...]  # of the whole dataset
    start: int
    array: np.ndarray | None  # None on ranks that do not write
    fill: float = 0  # what rows are that never come


def write_checkpoint(
    path: Path, slices: Iterable[DatasetSlice], optimizers: Sequence[Mapping[str, Any]], extra: str | None
) -> None:
    """Write a checkpoint; `path` is whole, or as it was.

    Raises:
        OSError, RuntimeError, ValueError: what h5py and the system raise.
    """
    import h5py

    # The temporary file has `replacing`'s lock already.
    with replacing(path) as beside, h5py.File(beside, "w", locking=False) as file:
        file.attrs["format"], file.attrs["version"] = FORMAT, VERSION
        file.create_group("variables")
        for index, about in enumerate(optimizers):
            file.create_group(f"optimizers/{index}").attrs.update(about)
        datasets: dict[str, _Written] = {}
        for part in slices:
            array = np.asarray(part.array)
            if part.key not in datasets:
                datasets[part.key] = _Written(file, part, array.dtype)
            datasets[part.key].add(part.start, array)
        if extra is not None:
            text = np.frombuffer(extra.encode(), np.uint8)
            datasets["extra"] = _Written(file, DatasetSlice("extra", text.shape, 0, text), text.dtype)
            datasets["extra"].add(0, text)
        arrays = {key: written.digests() for key, written in datasets.items()}
        table = json.dumps({"arrays": arrays, "optimizers": list(optimizers)}, sort_keys=True).encode()
        file.create_dataset("digests", data=np.frombuffer(table, np.uint8))
        file.attrs["digest"] = digest_of_bytes(table)


@final
class _Written:
    """A dataset that is being written, and the digests of its slices."""

    def __init__(self, file: Any, part: DatasetSlice, dtype: np.dtype) -> None:
        self._key, self._shape, self._dtype = part.key, part.shape, dtype
        self._as_bits = dtype.name == "bfloat16"
        stored = np.dtype(np.uint16) if self._as_bits else dtype
        self._fill = dtype.type(part.fill)
        self._dataset = file.create_dataset(part.key, part.shape, stored, fillvalue=stored.type(part.fill))
        if self._as_bits:
            self._dataset.attrs["dtype"] = "bfloat16"
        self._digests: list[tuple[int, int, str]] = []

    def add(self, start: int, array: np.ndarray) -> None:
        rows = slice(start, start + len(array)) if array.ndim else ()
        self._dataset[rows] = array.view(np.uint16) if self._as_bits else array
        self._note(start, array)

    def _note(self, start: int, array: np.ndarray) -> None:
        stop = start + (len(array) if array.ndim else 1)
        self._digests.append((start, stop, digest_of_array(array, _about(self._key, self._shape, start))))

    def digests(self) -> list[tuple[int, int, str]]:
        """Start, stop and digest of the slices in order, and between them of those that never came."""
        end = 0
        for start, stop, _ in [*sorted(self._digests), (self._shape[0] if self._shape else 1, 0, "")]:
            if start > end:
                self._note(end, np.full((start - end, *self._shape[1:]), self._fill, self._dtype))
            end = stop
        return sorted(self._digests)


def _about(key: str, shape: tuple[int, ...], start: int) -> str:
    return f"{key} {tuple(map(int, shape))} {start}"


@final
class CheckpointFile:
    """A checkpoint that is being read. Only what is asked for is read, and only where it lies in this file.

    Attributes:
        optimizers: name, iterations and made (or None) of each.

    Raises:
        DamagedError: for what is no checkpoint, or not as it was saved.
        OSError: the file is not there or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        import h5py

        self._path = path
        if path.exists() and not path.is_file():
            raise OSError("expected a file, got a directory or a device")
        self._file = h5py.File(path, "r")
        try:
            attributes = self._file.attrs
            if attributes.get("format") != FORMAT or attributes.get("version") != VERSION:
                raise DamagedError(f"expected a {FORMAT}, version {VERSION}, got another file")
            self._digests: dict[str, list[tuple[int, int, str]]] | None = None
            self.optimizers = self._optimizers()
            self._read_digests()
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
        """Return shape and dtype of the variables of these names, where they are there, and of their slots; no values."""
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
            kept = {
                key
                for key in self._digests
                if (key.startswith("variables/") and key.split("/")[1] in wanted)
                or (key.startswith("optimizers/") and key.split("/")[3] in wanted)
            }
            for key in sorted(kept ^ forms.keys()):
                _damaged(key, "was saved, but is not there" if key in kept else "is there, but was not saved")
        return forms

    def read(self, key: str, form: Form) -> np.ndarray:
        """Return the values of a dataset, after a comparison with their digests."""
        with _named(key):
            dataset = find(self._file, key)
            if dataset is None or self._form(dataset) != form:
                _damaged(key, "changes while it is read")
            array = np.asarray(dataset[()])
            if not array.dtype.isnative:
                array = array.astype(array.dtype.newbyteorder("="))
            if form[1] == "bfloat16":
                array = array.view(parse_dtype("bfloat16"))
        if self._digests is not None:
            self._compare(key, form[0], array)
        return array

    def extra(self) -> Any:
        """Return what the program gave beside; None where it gave nothing."""
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
        """The form of a dataset whose values lie in this file, and were written."""
        if dataset.is_virtual:
            raise Refused("a virtual dataset, which may draw from other files")
        check_storage(dataset, self._path, {self._path.resolve()})
        if dataset.shape is None:
            raise Refused("a dataset without a value")
        if dataset.nbytes and not dataset.id.get_storage_size():
            raise Refused("a dataset that was never written")
        dtype = dataset.dtype
        as_bits = dtype == np.uint16 and dataset.attrs.get("dtype") == "bfloat16"
        return tuple(map(int, dataset.shape)), "bfloat16" if as_bits else dtype.name

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
                    raise Refused(f"{count} entries, among which {index} is none")
                found.append(_optimizer(own.attrs))
        return found

    def _read_digests(self) -> None:
        with _named("digests"):
            digest = self._file.attrs.get("digest")
            if digest is None and find(self._file, "digests") is None:
                text = f"{self._path} was saved without digests: whether its values are as they were cannot be told"
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
            kept = [{"made": None, **about} for about in document["optimizers"]]
            for index in range(max(len(kept), len(self.optimizers))):
                if kept[index : index + 1] != self.optimizers[index : index + 1]:
                    _damaged(f"optimizers/{index}", "is not as it was saved")
            self._digests = document["arrays"]

    def _compare(self, key: str, shape: tuple[int, ...], array: np.ndarray) -> None:
        assert self._digests is not None
        end = 0
        with _named(key):
            for start, stop, digest in self._digests[key]:
                rows = array[start:stop] if array.ndim else array
                if start != end or digest_of_array(rows, _about(key, shape, start), algorithm_of(digest)) != digest:
                    _damaged(key, "is not as it was saved")
                end = stop
            if end != (shape[0] if shape else 1):
                _damaged(key, "is not as it was saved")


def _optimizer(attributes: Any) -> dict[str, Any]:
    name = attributes["name"]
    if not isinstance(name, str):
        raise Refused(f"a name that is a {type(name).__name__}")
    found: dict[str, Any] = {"name": name, "made": None}
    for number in ("iterations", "made"):
        if number in attributes:
            found[number] = int(attributes[number])
            if not 0 <= found[number] < _LARGEST:
                raise Refused(f"{number} is {found[number]}")
    if "iterations" not in found:
        raise Refused("an optimizer without iterations")
    return found


@contextlib.contextmanager
def _named(key: str) -> Iterator[None]:
    """Raise errors as DamagedError with the name of what was read."""
    try:
        yield
    except DamagedError:
        raise
    except Exception as error:  # h5py raises many kinds for what is damaged
        text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
        raise DamagedError(f"{key}: {text}. {_REMEDY}") from error


def _damaged(key: str, how: str) -> NoReturn:
    raise DamagedError(f"{key} {how}: the file is damaged. {_REMEDY}")
