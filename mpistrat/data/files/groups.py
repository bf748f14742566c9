"""Samples that are groups of HDF5 files, or whole files: their datasets may differ in shape."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from ...base import nest
from ...base.text import counted
from ..nodes.samples import FileSamples
from ..nodes.sources import short_digest
from ..shards.files import OTHER_SUFFIXES, SUFFIXES, PathLike, natural_key
from ..shards.objects import Refused, Unreadable, check_filters, field_of, find, find_group
from ..spec import ArraySpec
from .handles import open_hdf5_files
from .inputs import Fields, input_files, left_out_words, names_in, structure_of
from .stored import StoredHDF5

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
        shared = open_hdf5_files()
        self._files = [StoredHDF5("from_groups", path, shared) for path in self._given.paths]
        self._samples: list[tuple[int, str]] = []  # the file and the name of each group
        self._names = names_in(self._structure) if self._structure is not None else []
        self._left_out: dict[str, str] = {}
        self._specs: dict[str, ArraySpec] = {}
        for number, file in enumerate(self._files):
            with file.open(within or "") as opened:
                for name, group in _groups(opened, within):
                    self._add(number, name, group)
        if self._structure is None:
            self._structure = {name: name for name in self._names}
        self.element_spec = nest.map_structure(self._specs.__getitem__, self._structure) if self._samples else None

    def _add(self, number: int, name: str, group: h5py.Group) -> None:
        if not self._names:
            self._names = list(self._all_fields(group))
        for field in self._names:
            try:
                spec = _spec(group, field)
            except Refused as refused:
                raise type(refused)(f"{name}/{field}: {refused}", refused.remedy) from None
            self._specs[field] = _merged(f"{name}/{field}", self._specs.get(field, spec), spec)
        self._samples.append((number, name))

    def _all_fields(self, group: h5py.Group) -> Iterator[str]:
        """Return an iterator over the names of the datasets of a sample; note why others are left out."""
        found: list[str] = []
        group.visit(found.append)
        for name in sorted(found, key=natural_key):
            if find(group, name) is None:
                continue
            try:
                _spec(group, name)
            except Unreadable as refused:
                self._left_out[name] = str(refused)
            else:
                yield name

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, row: int) -> Any:
        number, name = self._samples[row]
        with self._files[number].open(name) as opened:
            found = {field: _value(opened, name, field, self._specs[field]) for field in self._names}
        return nest.map_structure(found.__getitem__, self._structure)

    def check(self) -> None:
        for file in self._files:
            file.check()

    def fingerprint(self) -> int:
        names = [file.path.name for file in self._files]
        hasher = hashlib.sha256(repr((names, self._samples, self._structure, self._specs)).encode())
        return short_digest(hasher)

    def describe(self) -> str:
        fields = ", ".join(f"{name} {spec}" for name, spec in self._specs.items())
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


def _spec(group: h5py.Group, field: str) -> ArraySpec:
    if field.startswith(_ATTRIBUTE):
        value = group.attrs.get(field.removeprefix(_ATTRIBUTE))
        if value is None:
            raise Refused(f"no such attribute among {sorted(group.attrs)}")
        array = np.asarray(value)
        return ArraySpec(array.shape, object if array.dtype.kind in "OSU" else array.dtype)
    dataset = find(group, field)
    shape = None if dataset is None else dataset.shape
    if dataset is None or shape is None:
        raise Refused("no such dataset")
    check_filters(dataset)
    if shape:
        found = field_of(dataset)
        if None in found.shape or (found.dtype == object):
            raise Unreadable("text, or rows of varying length, in one sample")
        return ArraySpec((shape[0], *found.shape), found.dtype.newbyteorder("="))
    dtype, more = dataset.dtype.subdtype or (dataset.dtype, ())  # an array in the one element
    return ArraySpec(more, object if dtype.kind == "O" else dtype.newbyteorder("="))


def _merged(where: str, known: ArraySpec, spec: ArraySpec) -> ArraySpec:
    """Return the spec of samples of both specs."""
    if known == spec:
        return known
    if known.dtype != spec.dtype or len(known.shape) != len(spec.shape):
        raise Refused(f"{where} of {spec}, unlike {known} of the samples before it")
    same = [one if one == other else None for one, other in zip(known.shape, spec.shape, strict=True)]
    return ArraySpec(tuple(same), spec.dtype)


def _value(file: h5py.File, sample: str, field: str, spec: ArraySpec) -> Any:
    """Return a field of a sample, whose links were checked when the file was opened first."""
    import h5py

    if field.startswith(_ATTRIBUTE):
        value = file[sample].attrs[field.removeprefix(_ATTRIBUTE)]
        return value.decode() if isinstance(value, bytes) else value
    dataset = h5py.h5o.open(file.id, f"{sample}/{field}".encode(errors="surrogateescape"))
    if spec.dtype == object:
        return h5py.Dataset(dataset, readonly=True).asstr()[()]
    dtype = dataset.dtype
    values = np.zeros(dataset.shape, dtype)
    # As h5py's Dataset reads, without its checks, which take as long.
    dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values, h5py.h5t.py_create(dtype))
    return values[()].astype(spec.dtype, copy=False)
