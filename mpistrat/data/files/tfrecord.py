"""Records of TFRecord files as tf.train.Example: one scan of the lengths finds each record, and reading checks its checksum."""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast, final

import numpy as np

from ...base import nest
from ...base.errors import MpistratError, explain, shard_error
from ...base.text import counted
from ..nodes.samples import FileSamples
from ..shards.files import PathLike
from ..spec import ArraySpec, spec_of_element
from .decoders import Decoder, check_used, checked_decoders
from .examples import features_of, required
from .handles import ShardFile
from .inputs import Fields, input_files, left_out_words, names_in, structure_of
from .remote import StoredPath, opened_to_scan
from .stored import StoredBytes

__all__ = ["Features", "RecordSamples"]

Features = Fields | Mapping[str, ArraySpec]

_ENDINGS = (".tfrecord", ".tfrecords", ".tfrec")
_HEADER, _CHECKSUM = (
    struct.Struct("<QI"),
    struct.Struct("<I"),
)  # length and its checksum; after the record, its checksum
_MASK_DELTA = 0xA282EAD8
_VARYING = 'features={"x": ms.data.ArraySpec((None,), "int64")}'


class _Unfit(Exception):
    """The values of a feature do not fit its spec."""


_error = functools.partial(shard_error, function="from_tfrecord")


def _checksum(data: bytes) -> int:
    """Return the masked CRC-32C of some bytes, as TensorFlow stores it."""
    crc = required("google_crc32c").value(data)
    return (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _places(path: StoredPath) -> Iterator[tuple[int, int]]:
    """Return an iterator over the first byte and the number of bytes of each record."""
    position, size = 0, path.stat().st_size
    with opened_to_scan(path) as file:
        while position < size:
            file.seek(position)
            header = file.read(_HEADER.size)
            remedy = "Copy the file again. A compressed file has no random access: decompress it (gunzip)."
            if len(header) < _HEADER.size:
                raise _error(path, f"a record at byte {position}", f"{len(header)} bytes, then the end", remedy)
            count, checksum = _HEADER.unpack(header)
            if checksum != _checksum(header[:8]):
                raise _error(path, f"the length of a record at byte {position}", "another checksum", remedy)
            first, position = position + _HEADER.size, position + _HEADER.size + count + _CHECKSUM.size
            if position > size:
                raise _error(path, f"a record of {count} bytes at byte {first}", f"a file of {size} bytes", remedy)
            yield first, count


@final
class RecordSamples(FileSamples):
    """The records of files, one file after the other; see `from_tfrecord`.

    Attributes:
        element_spec: of the features, as the user gave it, or as the first record has it; None without records.
    """

    function = "from_tfrecord"
    without_samples = f"Give specs of the features: {_VARYING}"

    def __init__(
        self, files: PathLike | Sequence[PathLike], features: Features, decode: Mapping[str, Decoder] | None,
        options: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self._decoders = checked_decoders("from_tfrecord", decode or {})
        self._specs, names = _specs_and_names(features)
        self._given = input_files("from_tfrecord", files, _ENDINGS, options)
        self._bytes = StoredBytes("from_tfrecord", [ShardFile.of(path, "from_tfrecord") for path in self._given.paths])
        self._files, self._places = array("q"), array("q")
        for number, path in enumerate(self._given.paths):
            for place in _places(path):
                self._files.append(number)
                self._places.extend(place)
        self._left_out: list[str] = []
        self._structure = structure_of("from_tfrecord", "features", names)
        self._learn()

    def _learn(self) -> None:
        """Look at the first record: which features there are, and what those look like of which that is not known."""
        first = self._features(0) if len(self) else {}
        if self._structure is None:
            self._structure = {name: name for name in sorted(first)}
        self._names = names_in(self._structure)
        self._left_out = sorted(first.keys() - self._names)
        check_used("from_tfrecord", self._decoders, self._names, self._names)
        if len(self):
            for name in self._names:
                if name not in self._specs:
                    self._specs[name] = spec_of_element(self._value(name, first.get(name), 0))
        known = all(name in self._specs for name in self._names)
        self.element_spec = (
            nest.map_structure(self._specs.__getitem__, self._structure) if self._names and known else None
        )

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, row: int) -> Any:
        features = self._features(row)
        found = {name: self._value(name, features.get(name), row) for name in self._names}
        return nest.map_structure(found.__getitem__, self._structure)

    def _features(self, row: int) -> dict[str, Any]:
        position, count = self._places[2 * row : 2 * row + 2]
        data = self._bytes.read(self._files[row], position, count + _CHECKSUM.size, f"record at byte {position}")
        record, (checksum,) = data[:count], _CHECKSUM.unpack(data[count:])
        if checksum != _checksum(record):
            raise _error(
                self._where(row), "the checksum of its bytes", "another", "The file is damaged: copy it again."
            )
        try:
            return features_of(record)
        except ValueError as error:
            raise ValueError(f"from_tfrecord: {self._where(row)}: {error}") from error

    def _where(self, row: int) -> str:
        return f"{self._bytes.paths[self._files[row]]}: record at byte {self._places[2 * row]}"

    def _value(self, name: str, values: Any, row: int) -> Any:
        """Return the value of a feature, in the shape of its spec if that is known."""
        try:
            return self._fitted(name, values)
        except (MpistratError, MemoryError):
            raise
        except _Unfit as unfit:
            raise ValueError(f"from_tfrecord: {self._where(row)}: {name}: {unfit}") from None
        except Exception as error:  # of the user's decoder
            got, where = f"{type(error).__name__}: {error}", f"{self._where(row)}: {name}"
            raise ValueError(explain("from_tfrecord", where, expected="bytes that can be decoded", got=got)) from error

    def _fitted(self, name: str, values: Any) -> Any:
        spec = self._specs.get(name)
        if isinstance(values, list):
            if len(values) > 1:
                raise _Unfit(f"expected one byte string, got {len(values)}")
            return self._decoders.get(name, bytes)(values[0])
        if values is None:
            if spec is None or None not in spec.shape:
                raise _Unfit(f"expected values, got none. Where they may be missing, their length varies: {_VARYING}.")
            return np.empty([length or 0 for length in spec.shape], spec.dtype)
        if name in self._decoders:
            raise _Unfit(f"expected bytes, which its decoder gets, got {values.dtype}. Leave it out of decode")
        if spec is None:
            return values[0] if values.size == 1 else values
        return _shaped(values, spec)

    def check(self) -> None:
        self._bytes.check()

    def fingerprint(self) -> int:
        hasher = hashlib.sha256(repr(self.element_spec).encode())
        hasher.update(np.asarray(self._places, "<i8").tobytes())
        return self._bytes.fingerprint(hasher.digest())

    def describe(self) -> str:
        fields = [f"{name} {self._specs.get(name, '')}".strip() for name in self._names]
        where = self._given.words("TFRecord file")
        return f"from_tfrecord: {where}, {counted(len(self), 'record')} of {', '.join(fields)}{left_out_words(self._left_out)}"


def _specs_and_names(features: Features) -> tuple[dict[str, Any], Fields]:
    """Return the specs that the user gave, by feature, and the names of the features in the structure of an element."""
    if isinstance(features, Mapping) and any(isinstance(each, ArraySpec) for each in features.values()):
        for name, spec in features.items():
            if not isinstance(spec, ArraySpec):
                expected = "an ArraySpec, as other features have"
                raise ValueError(explain("from_tfrecord", f"features[{name!r}]", expected=expected, got=repr(spec)))
        return dict(features), {name: name for name in features}
    return {}, cast(Fields, features)


def _shaped(values: np.ndarray[Any, Any], spec: ArraySpec) -> Any:
    lengths = [length for length in spec.shape if length is not None]
    varying, size = len(spec.shape) - len(lengths), math.prod(lengths)
    fits = values.size % max(size, 1) == 0 if varying == 1 else varying == 0 and values.size == size
    if values.dtype != spec.dtype or not fits:
        remedy = f"Where lengths vary, say so: {_VARYING}; then use padded_batch."
        raise _Unfit(f"expected values for {spec}, got {values.size} of {values.dtype}. {remedy}")
    return values.reshape([-1 if length is None else length for length in spec.shape])[()]
