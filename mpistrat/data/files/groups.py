"""Samples that are groups of HDF5 files, or whole files: their datasets may differ in shape."""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.text import counted
from ..nodes.samples import FileSamples
from ..nodes.sources import short_digest
from ..shards.files import OTHER_SUFFIXES, SUFFIXES, PathLike, natural_key
from ..shards.objects import Refused, Unreadable, check_storage, field_of, find_group, find_id, never_written
from ..spec import ArraySpec, stacked_nbytes
from .handles import open_hdf5_files
from .inputs import Fields, input_files, left_out_words, names_in, structure_of
from .stored import StoredBytes, StoredHDF5

if TYPE_CHECKING:
    import h5py

__all__ = ["GroupSamples"]

_ATTRIBUTE = "@"  # in front of the name of an attribute of a sample


@final
class GroupSamples(FileSamples):
    """The groups of files, one file after the other; see `from_groups`.

    Attributes:
        element_spec: with None where shapes differ between samples; None without samples.
    """

    function = "from_groups"
    without_samples = "Look at the files, and pass the group that has the samples (within=)"

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        fields: Fields,
        within: str | None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._structure = structure_of("from_groups", "fields", fields)
        self._given = input_files("from_groups", files, SUFFIXES, options, OTHER_SUFFIXES)
        shared, paths = open_hdf5_files(), self._given.paths
        self._files = [StoredHDF5("from_groups", path, shared) for path in paths]
        self._bytes = StoredBytes("from_groups", [file.status for file in self._files])
        self._samples: list[tuple[int, str]] = []  # the file and the name of each group
        names = [] if self._structure is None else names_in(self._structure)
        self._fields = {name: _Field(name) for name in names}
        self._left_out: dict[str, str] = {}
        kinds: dict[str, Any] = {}
        declared = {path.resolve() for path in paths}
        for number, file in enumerate(self._files):
            check = functools.partial(check_storage, path=file.path, declared=declared)
            with file.open(within or "") as opened:
                for name, group in _groups(opened, within):
                    self._fields = self._fields or self._all_fields(group, check)
                    self._add(name, group, check, kinds)
                    self._samples.append((number, name))
        if self._structure is None:
            self._structure = {name: name for name in self._fields}
        specs = {name: field.spec for name, field in self._fields.items()}
        self.element_spec = nest.map_structure(specs.__getitem__, self._structure) if self._samples else None

    def _add(self, name: str, group: h5py.Group, check: _Check, kinds: dict[str, Any]) -> None:
        for field in self._fields.values():
            where = f"{name}/{field.name}"
            try:
                spec, offset = field.found(group, check, kinds)
            except Refused as refused:
                raise type(refused)(f"{where}: {refused}", refused.remedy) from None
            field.add(where, spec, offset)

    def _all_fields(self, group: h5py.Group, check: _Check) -> dict[str, _Field]:
        """Return the datasets of a sample; note why others are left out."""
        found: list[str] = []
        group.visit(found.append)
        fields = {}
        for name in sorted(found, key=natural_key):
            if find_id(group, name) is None:
                continue
            field = _Field(name)
            try:
                field.found(group, check, {})
            except Unreadable as refused:
                self._left_out[name] = str(refused)
            else:
                fields[name] = field
        return fields

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, row: int) -> Any:
        number, name = self._samples[row]
        found: dict[str, Any] = {}
        by_hdf5 = []
        for field in self._fields.values():
            offset, values = field.place(row)
            if values is None:
                by_hdf5.append(field)
                continue
            self._bytes.read_into(values.reshape(-1).view(np.uint8).data, number, offset, f"{name}/{field.name}")
            found[field.name] = values[()].astype(field.spec.dtype, copy=False)
        if by_hdf5:
            with self._files[number].open(name) as opened:
                found.update({field.name: field.read(opened, name) for field in by_hdf5})
        return nest.map_structure(found.__getitem__, self._structure)

    def check(self) -> None:
        for file in self._files:
            file.check()

    def fingerprint(self) -> int:
        names = [file.path.name for file in self._files]
        specs = {name: field.spec for name, field in self._fields.items()}
        hasher = hashlib.sha256(repr((names, self._samples, self._structure, specs)).encode())
        return short_digest(hasher)

    def describe(self) -> str:
        fields = ", ".join(f"{name} {field.spec}" for name, field in self._fields.items())
        others = [f"{name} ({why})" for name, why in self._left_out.items()]
        where = self._given.words("file")
        return f"from_groups: {where}, {counted(len(self), 'sample')} of {fields}{left_out_words(others)}"


def _groups(file: h5py.File, within: str | None) -> Iterator[tuple[str, h5py.Group]]:
    """Yield the names and the groups that are samples, in natural order; the whole file for None."""
    if within is None:
        yield "/", file
        return
    group = find_group(file, within)
    if group is None:
        raise Refused("no such group")
    prefix = group.name.rstrip("/")
    for name in sorted(group, key=natural_key):
        if (found := find_group(group, name)) is not None:
            yield f"{prefix}/{name}", found


_Check = Callable[..., object]  # of a dataset: raises Refused unless its data lies in the files


@final
class _Field:
    """A dataset, or an attribute, of all samples.

    Attributes:
        name: in a sample.
        spec: with None where shapes differ; None before the first sample.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: Any = None
        self._stored: ArraySpec | None = None  # an element as its bytes are in the files
        self._places = array("q")  # for each sample: its first byte in the file, -1 if HDF5 reads it; its shape

    def found(self, group: h5py.Group, check: _Check, kinds: dict[str, Any]) -> tuple[ArraySpec, int]:
        """Return the spec in one sample, and the first byte in the file; -1 if HDF5 reads it.

        Args:
            group: the sample.
            check: refuses datasets whose data lies elsewhere.
            kinds: by field, the HDF5 type that the bytes of a sample before had: this one's has it most often, too.
        """
        import h5py

        if self.name.startswith(_ATTRIBUTE):
            return _attribute_spec(group, self.name.removeprefix(_ATTRIBUTE)), -1
        item = find_id(group, self.name)
        shape, offset = (None, None) if item is None else (item.shape, item.get_offset())
        if item is None or shape is None:
            raise Refused("no such dataset")
        if offset is not None and self._stored is not None and item.get_type() == kinds.get(self.name):
            spec = ArraySpec((*shape, *self._stored.shape), self.spec.dtype)
            if item.get_storage_size() == stacked_nbytes(spec):
                return spec, offset
        dataset = h5py.Dataset(item, readonly=True)
        check(dataset)
        never_written(dataset)
        stored = field_of(dataset)
        if None in stored.shape or (shape and stored.dtype == object):
            raise Unreadable("text, or rows of varying length, in one sample")
        dtype, more = dataset.dtype.subdtype or (dataset.dtype, ())  # an array in each element
        if not dtype.hasobject and item.get_type() == h5py.h5t.py_create(dataset.dtype, logical=True):
            kinds.setdefault(self.name, item.get_type())
            self._stored = self._stored or ArraySpec(more, dtype)
        return ArraySpec((*shape, *more), object if dtype.kind == "O" else dtype.newbyteorder("=")), -1

    def add(self, where: str, spec: ArraySpec, offset: int) -> None:
        """Add a sample."""
        self.spec = _merged(where, self.spec or spec, spec)
        self._places.append(offset)
        self._places.extend(length or 0 for length in spec.shape)

    def place(self, row: int) -> tuple[int, NDArray[Any] | None]:
        """Return where the bytes of a sample begin in the file, and an array for them; None if HDF5 reads it."""
        width = 1 + len(self.spec.shape)
        offset, *shape = self._places[row * width : (row + 1) * width]
        return offset, None if self._stored is None or offset < 0 else np.empty(shape, self._stored.dtype)

    def read(self, file: h5py.File, sample: str) -> Any:
        """Return the value of a sample, whose links were checked when the file was opened first."""
        import h5py

        if self.name.startswith(_ATTRIBUTE):
            value = file[sample].attrs[self.name.removeprefix(_ATTRIBUTE)]
            return value.decode() if isinstance(value, bytes) else value
        dataset = h5py.h5o.open(file.id, f"{sample}/{self.name}".encode(errors="surrogateescape"))
        if self.spec.dtype == object:
            return h5py.Dataset(dataset, readonly=True).asstr()[()]
        values = np.zeros(dataset.shape, dataset.dtype)
        # As h5py's Dataset reads, without its checks, which take as long.
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values, h5py.h5t.py_create(dataset.dtype))
        return values[()].astype(self.spec.dtype, copy=False)


def _attribute_spec(group: h5py.Group, name: str) -> ArraySpec:
    value = group.attrs.get(name)
    if value is None:
        raise Refused(f"no such attribute among {sorted(group.attrs)}")
    array = np.asarray(value)
    return ArraySpec(array.shape, object if array.dtype.kind in "OSU" else array.dtype)


def _merged(where: str, known: ArraySpec, spec: ArraySpec) -> ArraySpec:
    """Return the spec of samples of both specs."""
    if known == spec:
        return known
    text = known.dtype.kind == spec.dtype.kind == "S"  # of fixed lengths, which may differ
    if (known.dtype != spec.dtype and not text) or len(known.shape) != len(spec.shape):
        raise Refused(f"{where} of {spec}, unlike {known} of the samples before it")
    same = [one if one == other else None for one, other in zip(known.shape, spec.shape, strict=True)]
    return ArraySpec(tuple(same), max(known.dtype, spec.dtype, key=lambda dtype: dtype.itemsize))
