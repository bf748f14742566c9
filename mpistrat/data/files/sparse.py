"""Rows of sparse matrices in HDF5 files, as anndata (.h5ad) and 10x Genomics write them, and datasets of their rows."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from ...base import nest
from ...base.arguments import integer
from ...base.errors import shard_error
from ...base.lazy import load_optional
from ..nodes.sources import row_content, short_digest
from ..shards.belonging import sparse_format
from ..shards.files import PathLike
from ..shards.objects import Refused, check_storage, field_of, find, find_group
from ..spec import ArraySpec, stacked_nbytes
from .handles import DAMAGED
from .inputs import Fields, structure_of
from .remote import RemotePath, stored_path
from .stored import StoredHDF5
from .units import FieldFiles, StoredField

if TYPE_CHECKING:
    import h5py

__all__ = ["SparseFile", "to_csr"]

_UNIT_BYTES = 1 << 20  # that are read at once
_TEXT_ROWS = 1024  # of a unit of text, whose length is not known


@final
class _Matrix:
    """A sparse matrix whose rows are compressed: row i has the elements from `indptr[i]` to `indptr[i + 1]`.

    One with compressed columns is read as a whole and kept in memory, as one with compressed rows.
    """

    def __init__(self, file: StoredHDF5, name: str) -> None:
        self._file, self._name = file, name
        self._held: dict[str, NDArray[Any]] = {}
        with file.open(name) as opened:
            group = find_group(opened, name)
            if group is None:
                raise Refused("no such group")
            format, shape = _format_and_shape(group)
            datasets = {part: group.get(part) for part in ("data", "indices", "indptr")}
            for part, dataset in datasets.items():
                if dataset is None or dataset.ndim != 1 or dataset.dtype.kind not in "biufc":
                    raise Refused(f"no {part} along one axis")
                if part != "data" and dataset.dtype.kind not in "iu":
                    raise Refused(f"{part} of {dataset.dtype}, which are not integers")
                check_storage(dataset, file.path, [file.path.resolve()])
            self.dtypes = {part: dataset.dtype.newbyteorder("=") for part, dataset in datasets.items()}
            indptr = datasets["indptr"][...].astype(np.int64)
            self._check(indptr, [len(datasets["data"]), len(datasets["indices"])], shape[format == "csc"])
            if format == "csc":
                indptr = self._transposed(indptr, datasets, shape)
        self.indptr, self.rows, self.columns = indptr, shape[0], shape[1]

    @staticmethod
    def _check(indptr: NDArray[np.int64], elements: list[int], compressed: int) -> None:
        whole = len(indptr) == compressed + 1 and indptr[0] == 0 and (np.diff(indptr) >= 0).all()
        if not whole or elements != [indptr[-1]] * 2:
            raise Refused(f"indptr does not fit {compressed} rows or columns of {elements} elements", DAMAGED)

    def _transposed(
        self, indptr: NDArray[np.int64], datasets: Mapping[str, Any], shape: tuple[int, int]
    ) -> NDArray[np.int64]:
        """Keep the elements in the order of rows, and return where each row begins."""
        rows = datasets["indices"][...]
        _check_indices(rows, shape[0])
        if shape[1] > np.iinfo(self.dtypes["indices"]).max:  # the file has row numbers in it
            self.dtypes["indices"] = np.dtype(np.int64)
        order = np.argsort(rows, kind="stable")
        columns = np.repeat(np.arange(shape[1]), np.diff(indptr))
        self._held = {
            "indices": columns[order].astype(self.dtypes["indices"]),
            "data": datasets["data"][...][order].astype(self.dtypes["data"]),
        }
        return np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=shape[0])))).astype(np.int64)

    @property
    def unit_rows(self) -> int:
        row_bytes = (
            self.indptr[-1] * sum(self.dtypes[part].itemsize for part in ("data", "indices")) / max(1, self.rows)
        )
        return max(1, min(self.rows, int(_UNIT_BYTES / max(1, row_bytes))))

    def elements(self, part: str, start: int, stop: int) -> NDArray[Any]:
        """Return the data or the column numbers of successive rows, one after the other."""
        first, last = self.indptr[start], self.indptr[stop]
        if self._held:
            return self._held[part][first:last]
        with self._file.open(f"{self._name}: rows {start} to {stop}") as file:
            found: NDArray[Any] = file[f"{self._name}/{part}"][first:last].astype(self.dtypes[part], copy=False)
            if part == "indices":
                _check_indices(found, self.columns)
        return found


def _check_indices(indices: NDArray[Any], count: int) -> None:
    if indices.size and not 0 <= indices.min() <= indices.max() < count:
        raise Refused(f"indices from {indices.min()} to {indices.max()} of {count}", DAMAGED)


def _format_and_shape(group: h5py.Group) -> tuple[str, tuple[int, int]]:
    """Return how a group is compressed, with rows as samples, and its rows and columns."""
    format = sparse_format(group)
    if format is not None:
        shape = group.attrs.get("shape", group.attrs.get("h5sparse_shape"))
    elif all(part in group for part in ("data", "indices", "indptr", "shape")):
        format = "csr"  # of 10x: a column is a cell
        shape = group["shape"][...][::-1]
    else:
        raise Refused(f"neither a sparse matrix of anndata nor one of 10x: {sorted(group)}")
    if np.shape(shape) != (2,):
        raise Refused("no shape of rows and columns", DAMAGED)
    return format, (int(shape[0]), int(shape[1]))


@final
class _Ragged(StoredField):
    """The data, or the column numbers, of rows: arrays of other lengths."""

    def __init__(self, matrix: _Matrix, part: str) -> None:
        self._matrix, self._part = matrix, part
        self.spec = ArraySpec((None,), matrix.dtypes[part])
        self.unit_rows = matrix.unit_rows

    def __len__(self) -> int:
        return self._matrix.rows

    def read(self, start: int, stop: int) -> NDArray[Any]:
        elements = self._matrix.elements(self._part, start, stop)
        elements.flags.writeable = False  # rows are views of a unit that is cached
        ends = self._matrix.indptr[start : stop + 1] - self._matrix.indptr[start]
        rows = np.empty(stop - start, object)
        for row in range(stop - start):
            rows[row] = elements[ends[row] : ends[row + 1]]
        return rows


@final
class _Dense(StoredField):
    """Rows with their zeros."""

    def __init__(self, matrix: _Matrix) -> None:
        self._matrix = matrix
        self.spec = ArraySpec((matrix.columns,), matrix.dtypes["data"])
        row_bytes = max(1, stacked_nbytes(self.spec))
        self.unit_rows = max(1, min(matrix.unit_rows, _UNIT_BYTES // row_bytes))

    def __len__(self) -> int:
        return self._matrix.rows

    def read(self, start: int, stop: int) -> NDArray[Any]:
        matrix = self._matrix
        rows = np.zeros((stop - start, matrix.columns), self.spec.dtype)
        numbers = np.repeat(np.arange(stop - start), np.diff(matrix.indptr[start : stop + 1]))
        columns = matrix.elements("indices", start, stop)
        np.add.at(rows, (numbers, columns), matrix.elements("data", start, stop))  # of equal places, the sum
        return rows


@final
class _Column(StoredField):
    """A dataset with as many rows."""

    def __init__(self, file: StoredHDF5, name: str) -> None:
        self._file, self._name = file, name
        with file.open(name) as opened:
            dataset = find(opened, name)
            if dataset is None or not dataset.shape:
                raise Refused("no such dataset with rows")
            check_storage(dataset, file.path, [file.path.resolve()])
            field = field_of(dataset)
            if None in field.shape:
                raise Refused("rows of varying length")
            self.spec = ArraySpec(field.shape, field.dtype.newbyteorder("="))
            self._rows = len(dataset)
        row_bytes = max(1, stacked_nbytes(self.spec))
        unit_rows = _TEXT_ROWS if field.dtype.hasobject else _UNIT_BYTES // row_bytes
        self.unit_rows = max(1, min(self._rows, unit_rows))

    def __len__(self) -> int:
        return self._rows

    def read(self, start: int, stop: int) -> NDArray[Any]:
        with self._file.open(f"{self._name}: rows {start} to {stop}") as file:
            dataset = file[self._name]
            rows: NDArray[Any] = (dataset.asstr() if self.spec.dtype == object else dataset)[start:stop]
            return rows.astype(self.spec.dtype, copy=False)


@final
class SparseFile(FieldFiles):
    """A file with sparse matrices; see `from_sparse`."""

    function = "from_sparse"

    def __init__(self, path: PathLike, fields: Fields, dense: bool, options: Mapping[str, Any] | None = None) -> None:
        names = structure_of("from_sparse", "fields", fields)
        stored = stored_path("from_sparse", path, options)
        if not isinstance(stored, RemotePath) and not stored.is_file():
            raise shard_error(stored, "a file", "no such file", function="from_sparse")
        self._file = StoredHDF5("from_sparse", stored)
        if names is None:
            names = self._only_matrix()
        self.fields: dict[str, StoredField] = {}
        self.structure = nest.map_structure(lambda name: self._added(name.strip("/"), dense), names)
        rows = {name: len(field) for name, field in self.fields.items()}
        if len(set(rows.values())) > 1:
            raise shard_error(stored, "fields with equally many rows", rows, function="from_sparse")

    def _only_matrix(self) -> str:
        with self._file.open("") as file:
            if "X" in file:
                return "X"
            found = []
            for name in file:
                with contextlib.suppress(Refused):
                    if (group := find_group(file, name)) is not None:
                        _format_and_shape(group)
                        found.append(name)
            if len(found) != 1:
                raise Refused(f"the sparse matrices {found}", "Name one of the file's groups with fields=.")
            return str(found[0])

    def _added(self, name: str, dense: bool) -> Any:
        """Add the fields of a name, and return their names in the structure of an element."""
        with self._file.open(name) as file:
            is_column = find(file, name) is not None
        if is_column:
            self.fields[name] = _Column(self._file, name)
            return name
        matrix = _Matrix(self._file, name)
        if dense:
            self.fields[name] = _Dense(matrix)
            return name
        parts = {part: f"{name}/{part}" for part in ("indices", "data")}
        self.fields.update({key: _Ragged(matrix, part) for part, key in parts.items()})
        return parts

    def check(self) -> None:
        self._file.check()

    def fingerprint(self) -> int:
        hasher = hashlib.sha256(f"{self._file.path.name} {self.structure}".encode(errors="surrogateescape"))
        for name, field in self.fields.items():
            hasher.update(f"{name} {len(field)} {field.spec}".encode())
            for start in {0, len(field) - 1} if len(field) else ():
                hasher.update(row_content(field.read(start, start + 1)[0]))
        return short_digest(hasher)

    def describe(self) -> str:
        fields = ", ".join(f"{name} {field.spec}" for name, field in self.fields.items())
        return f"from_sparse: {self._file.path}, {len(next(iter(self.fields.values())))} rows of {fields}"


def to_csr(rows: Mapping[str, Any], columns: int) -> Any:
    """Return a batch of rows of a sparse matrix as a scipy.sparse.csr_matrix.

    Args:
        rows: the column numbers and the values of each row, as `from_sparse` gives them: a dict of `indices` and `data`.
        columns: the number of columns of the matrix.

    Raises:
        MissingDependencyError: without SciPy.

    Example:
        >>> to_csr({"indices": [], "data": []}, "three")
        Traceback (most recent call last):
            ...
        TypeError: to_csr: columns: expected an integer, got 'three'
    """
    columns = integer("to_csr", "columns", columns, 0)
    csr_matrix = load_optional(
        "scipy.sparse", "to_csr", "SciPy, which has sparse matrices", "pip install scipy"
    ).csr_matrix
    indptr = np.concatenate(([0], np.cumsum([len(row) for row in rows["indices"]])))
    if len(indptr) == 1:
        return csr_matrix((0, columns))
    flat = [np.concatenate(list(rows[part])) for part in ("data", "indices")]
    return csr_matrix((flat[0], flat[1], indptr), shape=(len(indptr) - 1, columns))
