"""Variables of netCDF files along one dimension, decoded by xarray after the conventions of CF."""

from __future__ import annotations

import errno
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ...base.errors import MpistratError, ShardError, explain, shard_error
from ...base.lazy import load_optional
from ...base.text import counted
from ..nodes.sources import row_content, short_digest
from ..shards.files import PathLike
from ..shards.objects import Refused, check_storage, find
from ..spec import ArraySpec, stacked_nbytes
from .handles import DAMAGED, ShardFile, open_hdf5
from .inputs import Fields, input_files, left_out_words, names_in, others_words, structure_of
from .remote import RemotePath, StoredPath, refuse_url
from .units import FieldFiles, StoredField

__all__ = ["NetCDFFiles"]

_FUNCTION = "from_netcdf"
_ENDINGS = (".nc", ".nc4", ".cdf")
_OTHER_ENDINGS = (".h5", ".hdf5", ".hdf", ".he5", ".nc3", ".netcdf", ".cdf5", ".grib", ".grb", ".grib2")
_INSTALL = 'pip install "mpistrat[netcdf]"'
_UNIT_BYTES = 1 << 20  # that are read at once
_TEXT_BYTES = 1 << 10  # that a row of text, whose length is not known, is taken for
_CLASSIC = (b"CDF\x01", b"CDF\x02")  # how files of netCDF-3 begin
_FIVE = b"CDF\x05"  # and those of CDF-5, which SciPy does not read
_CONVERT = "convert the file: nccopy -k nc4 old.nc new.nc"
_LIMITS = ("valid_min", "valid_max")


@contextmanager
def _reading(where: object) -> Iterator[None]:
    """Turn the errors of the packages that read into a `ShardError` that names what is read."""
    try:
        yield
    except Refused as refused:
        raise shard_error(where, "data that can be read", refused, refused.remedy, _FUNCTION) from None
    except (MpistratError, MemoryError):
        raise
    except Exception as error:  # each package raises its own kinds
        too_many = getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE)
        remedy = "Raise the number of files that a process may open (ulimit -n)." if too_many else DAMAGED
        got = f"{type(error).__name__}: {error}"
        raise shard_error(where, "data that can be read", got, remedy, _FUNCTION) from error


@final
class _NetCDFFile:
    """An open file. Variables are xarray's, which read when they are indexed, under locks of xarray.

    Attributes:
        status: the file as it was opened.
    """

    def __init__(self, path: StoredPath, decode_times: bool) -> None:
        self.status = ShardFile.of(path, _FUNCTION)
        self._decode_times = decode_times
        self._groups: dict[str, _FileGroup] = {}
        with path.open("rb") as file:
            magic = file.read(len(_FIVE))
        self._classic = magic in _CLASSIC
        if magic == _FIVE:
            expected = "a file of netCDF-4 or of the classic formats CDF-1 and CDF-2"
            raise shard_error(path, expected, "one of CDF-5", _CONVERT.capitalize(), _FUNCTION)
        if self._classic:
            refuse_url(_FUNCTION, path, "of netCDF-3, which SciPy reads as a whole")
            use = "SciPy, which reads files of netCDF-3"
            load_optional("scipy.io", _FUNCTION, use, f"pip install scipy; or {_CONVERT}")
        else:
            open_hdf5(path, function=_FUNCTION).close()  # its errors have remedies

    def group(self, name: str) -> _FileGroup:
        """Return a group of the file; "" for its top."""
        if name not in self._groups:
            if name and self._classic:
                raise shard_error(
                    self.status.path, f"a group {name!r}", "a netCDF-3 file, without groups", "", _FUNCTION
                )
            where = f"{self.status.path}: {name}" if name else self.status.path
            with _reading(where), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of attributes that xarray does not use
                try:
                    self._groups[name] = _FileGroup(self.status.path, self._classic, name, self._decode_times)
                except MemoryError as error:
                    raise Refused("a header of more bytes than there is memory", DAMAGED) from error
        return self._groups[name]

    def variable(self, name: str) -> _StoredVariable | str:
        """Return a variable by its name, or the reason why it cannot be read."""
        group, _, own = name.rpartition("/")
        found = self.group(group).variable(own)
        if isinstance(found, str) or self._classic:
            return found
        with open_hdf5(self.status.path, function=_FUNCTION) as file, _reading(f"{self.status.path}: {name}"):
            dataset = find(file, name)
            if dataset is not None:
                check_storage(dataset, self.status.path, [self.status.path.resolve()])
        return found


@final
class _FileGroup:
    """The variables of a group, as stored and decoded."""

    def __init__(self, path: StoredPath, classic: bool, name: str, decode_times: bool) -> None:
        xarray = load_optional("xarray", _FUNCTION, "xarray, which decodes these files", _INSTALL)
        store = _store(xarray, path, classic, name)
        self.raw, attributes = store.load()
        self.unlimited: set[str] = set(store.get_encoding().get("unlimited_dims", ()))
        self.groups = [] if classic else sorted(f"{name}/{each}".strip("/") for each in store.ds.groups)
        self._left_out: dict[str, str] = {}

        def decoded(variables: Mapping[str, Any]) -> Any:
            return xarray.conventions.decode_cf_variables(
                variables, attributes, decode_times=decode_times, decode_timedelta=False
            )[0]

        try:
            self.decoded = decoded(self.raw)
        except Exception:  # of one variable, whichever it is
            for own, variable in self.raw.items():
                try:
                    decoded({own: variable})
                except Exception as error:
                    self._left_out[own] = f"{type(error).__name__}: {error}".splitlines()[0]
            self.decoded = decoded({own: each for own, each in self.raw.items() if own not in self._left_out})

    @property
    def names(self) -> list[str]:
        return list(self.raw)

    def variable(self, name: str) -> _StoredVariable | str:
        if name in self._left_out:
            return self._left_out[name]
        if name not in self.decoded:
            return "no such variable"
        return _StoredVariable(self.raw[name], self.decoded[name])


def _store(xarray: Any, path: StoredPath, classic: bool, group: str) -> Any:
    """Return xarray's store of a file's group."""
    if classic:
        return xarray.backends.ScipyDataStore(str(path), mode="r")
    load_optional("h5netcdf", _FUNCTION, "h5netcdf, which reads these files", _INSTALL)
    file = path.open_for_h5py() if isinstance(path, RemotePath) else str(path)
    return xarray.backends.H5NetCDFStore.open(file, mode="r", group=group or None)


@final
class _StoredVariable:
    """A variable of one file."""

    def __init__(self, raw: Any, decoded: Any) -> None:
        self._raw, self._decoded = raw, decoded
        self.dimensions: tuple[str, ...] = tuple(map(str, decoded.dims))
        self.units = (decoded.attrs.get("units"), decoded.attrs.get("calendar"))
        self.is_time = " since " in str(raw.attrs.get("units", "")) or raw.attrs.get("axis") == "T"

    def rows(self, dimension: str) -> int:
        return int(self._decoded.sizes[dimension])

    def unit_rows(self, dimension: str, row_bytes: int) -> int:
        """Return the rows to read at once: whole chunks, of 1 MiB if one is smaller."""
        chunks = self._decoded.encoding.get("chunksizes") or self._raw.encoding.get("chunksizes")
        chunk = int(chunks[self.dimensions.index(dimension)]) if chunks and len(chunks) == self._raw.ndim else 1
        return chunk * max(1, _UNIT_BYTES // max(1, chunk * row_bytes))

    def spec(self, dimension: str, valid_range: bool) -> ArraySpec:
        """Return the spec of a row.

        Raises:
            Refused: NumPy has no values of the variable's type.
        """
        shape = tuple(length for name, length in self._decoded.sizes.items() if name != dimension)
        dtype = self._decoded.dtype
        if dtype.kind in "OTU":
            self._check_text(dimension)
            return ArraySpec(shape, object)
        if dtype.kind not in "biufcSmM":
            raise Refused(f"values of type {dtype}")
        if valid_range and dtype.kind in "iu" and self._limits() is not None:
            dtype = np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)  # as xarray's where a value is missing
        return ArraySpec(shape, dtype.newbyteorder("="))

    def _check_text(self, dimension: str) -> None:
        first = self._decoded[dict.fromkeys(self.dimensions, slice(0, 1))].values
        for value in first.flat:
            if not isinstance(value, str):
                calendar = self._raw.attrs.get("calendar", "standard")
                if self.is_time:
                    remedy = "Pass decode_times=False for the numbers as stored, whose units are in the file."
                    raise Refused(
                        f"times of the calendar {calendar!r} that datetime64[ns] lacks, cftime's {type(value).__name__}",
                        remedy,
                    )
                raise Refused(f"values of the type {type(value).__name__}")

    def _limits(self) -> tuple[Any, Any] | None:
        """Return the least and the largest valid stored value, None where there is none; None without both."""
        attributes = self._raw.attrs
        limits = attributes.get("valid_range", tuple(attributes.get(name) for name in _LIMITS))
        if len(limits) != 2 or self._raw.dtype.kind not in "iuf":
            return None
        stored = [None if limit is None else self._as_stored(np.asarray(limit)) for limit in limits]
        return None if stored == [None, None] else (stored[0], stored[1])

    def _as_stored(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return stored values with the sign that `_Unsigned` gives them."""
        unsigned = str(self._raw.attrs.get("_Unsigned", "")).lower()
        kinds = {"true": ("i", "u"), "false": ("u", "i")}.get(unsigned)
        if kinds is None or values.dtype.kind != kinds[0]:
            return values
        return values.view(f"{kinds[1]}{values.dtype.itemsize}")

    def read(self, dimension: str, start: int, stop: int, spec: ArraySpec, valid_range: bool) -> NDArray[Any]:
        """Return successive rows."""
        rows = self._part(self._decoded, dimension, start, stop)
        if spec.dtype.kind == "M" and rows.dtype.kind == "O":
            raise Refused("times that datetime64[ns] lacks", "Pass decode_times=False for the numbers as stored.")
        rows = rows.astype(spec.dtype, copy=False)
        limits = self._limits() if valid_range and spec.dtype.kind == "f" else None
        if limits is not None:
            stored = self._as_stored(self._part(self._raw, dimension, start, stop))
            low, high = limits
            invalid = np.zeros(stored.shape, bool)
            if low is not None:
                invalid |= stored < low
            if high is not None:
                invalid |= stored > high
            rows = np.where(invalid, np.array(np.nan, spec.dtype), rows)
        if rows.shape != (stop - start, *spec.shape):
            raise Refused(f"an array of shape {rows.shape} instead of {(stop - start, *spec.shape)}", DAMAGED)
        return np.ascontiguousarray(rows)

    @staticmethod
    def _part(variable: Any, dimension: str, start: int, stop: int) -> NDArray[Any]:
        found: NDArray[Any] = variable[{dimension: slice(start, stop)}].transpose(dimension, ...).values
        return found


@final
class _VariableRows(StoredField):
    """The rows of one variable, of one file after the other."""

    def __init__(self, name: str, files: Sequence[_NetCDFFile], dimension: str, valid_range: bool) -> None:
        self._name, self._files, self._dimension, self._valid_range = name, files, dimension, valid_range
        self._variables = [self._opened(file) for file in files]
        first = self._variables[0]
        self.spec = self._spec(files[0], first)
        for file, variable in zip(files[1:], self._variables[1:], strict=True):
            for found, expected in ((self._spec(file, variable), self.spec), (variable.units, first.units)):
                if found != expected:
                    raise self._error(file, f"{expected}, as in {files[0].status.path.name}", found)
        self.starts = np.cumsum([0, *(variable.rows(dimension) for variable in self._variables)])
        row_bytes = _TEXT_BYTES if self.spec.dtype.hasobject else stacked_nbytes(self.spec)
        unit = max(variable.unit_rows(dimension, row_bytes) for variable in self._variables)
        self.unit_rows = max(1, min(unit, int(self.starts[-1])))

    def _error(self, file: _NetCDFFile, expected: str, got: object, remedy: str = "") -> ShardError:
        return shard_error(f"{file.status.path}: {self._name}", expected, got, remedy, _FUNCTION)

    def _opened(self, file: _NetCDFFile) -> _StoredVariable:
        variable = file.variable(self._name)
        if isinstance(variable, str):
            raise self._error(file, "a variable that can be read", variable)
        if self._dimension not in variable.dimensions:
            got = f"the dimensions {list(variable.dimensions)}"
            raise self._error(file, f"rows along {self._dimension!r}", got, "Read it with xarray.open_dataset.")
        return variable

    def _spec(self, file: _NetCDFFile, variable: _StoredVariable) -> ArraySpec:
        with _reading(f"{file.status.path}: {self._name}"):
            return variable.spec(self._dimension, self._valid_range)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def read(self, start: int, stop: int) -> NDArray[Any]:
        parts = []
        for number in np.unique(np.searchsorted(self.starts, np.arange(start, stop), "right") - 1).tolist():
            low, high = self.starts[number : number + 2]
            first, last = max(start, low) - low, min(stop, high) - low
            with _reading(f"{self._files[number].status.path}: {self._name}: rows {first} to {last}"):
                variable = self._variables[number]
                parts.append(variable.read(self._dimension, int(first), int(last), self.spec, self._valid_range))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


@final
class NetCDFFiles(FieldFiles):
    """Files of netCDF; see `from_netcdf`."""

    function = _FUNCTION

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        fields: Fields,
        dimension: str | None,
        decode_times: bool,
        valid_range: bool,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.structure = structure_of(_FUNCTION, "fields", fields)
        paths, self._other_files = input_files(_FUNCTION, files, _ENDINGS, options, _OTHER_ENDINGS)
        self._files = [_NetCDFFile(path, decode_times) for path in paths]
        names = None if self.structure is None else [name.strip("/") for name in names_in(self.structure)]
        self._dimension = self._sample_dimension(names) if dimension is None else dimension
        self.left_out: dict[str, str] = {}
        if self.structure is None:
            names = self._along_dimension(valid_range)
            self.structure = {name: name for name in names}
        self.fields: dict[str, _VariableRows] = {
            name: _VariableRows(name.strip("/"), self._files, self._dimension, valid_range)
            for name in names_in(self.structure)
        }
        rows = {name: len(field) for name, field in self.fields.items()}
        if len(set(rows.values())) > 1:
            raise shard_error(paths[0], "variables with equally many rows", rows, function=_FUNCTION)

    def _sample_dimension(self, names: list[str] | None) -> str:
        """Return the unlimited dimension of the first file, or else that of time, of the variables with those names."""
        file = self._files[0]
        groups = {""} if names is None else {name.rpartition("/")[0] for name in names}
        groups |= {"/".join(group.split("/")[:depth]) for group in groups for depth in range(len(group.split("/")))}
        opened = [file.group(group) for group in sorted(groups)]
        found = {each for group in opened for each in group.unlimited}
        if len(found) != 1:
            times = {
                variable.dimensions[0]
                for group in opened
                for variable in map(group.variable, group.names)
                if not isinstance(variable, str) and variable.is_time and len(variable.dimensions) == 1
            }
            found = (found & times or found) if found else times
        if len(found) == 1:
            return found.pop()
        known = {name: size for group in opened for each in group.raw.values() for name, size in each.sizes.items()}
        expected, remedy = (
            "one unlimited dimension or one of time",
            "Pass dimension=, the one that numbers the samples.",
        )
        if opened[0].groups and not opened[0].names:
            remedy = f"Name fields, such as {opened[0].groups[0] + '/x'!r}: the file has the groups {opened[0].groups}."
        raise ValueError(
            explain(
                _FUNCTION,
                f"{file.status.path}: dimension",
                expected=expected,
                got=f"the dimensions {known}",
                remedy=remedy,
            )
        )

    def _along_dimension(self, valid_range: bool) -> list[str]:
        """Return the names of the variables with the sample dimension; note why others are left out."""
        file, names = self._files[0], []
        for name in file.group("").names:
            variable: _StoredVariable | str | None = None
            try:
                variable = file.variable(name)
                if isinstance(variable, str):
                    self.left_out[name] = variable
                elif self._dimension not in variable.dimensions:
                    self.left_out[name] = f"no dimension {self._dimension!r}"
                else:
                    variable.spec(self._dimension, valid_range)
                    names.append(name)
            except (Refused, ShardError) as error:
                self.left_out[name] = str(error)
        self.left_out.update((group, "a group") for group in file.group("").groups)
        if not names:
            remedy = "Pass dimension=, or the names of fields."
            raise shard_error(
                file.status.path, f"variables along {self._dimension!r}", self.left_out, remedy, _FUNCTION
            )
        return names

    def check(self) -> None:
        for file in self._files:
            file.status.check()

    def fingerprint(self) -> int:
        """Return a number that differs if names, sizes or ends of the files do, or the specs of fields."""
        sizes = [(file.status.path.name, file.status.bytes) for file in self._files]
        hasher = hashlib.sha256(repr((sizes, self._dimension)).encode(errors="surrogateescape"))
        for name, field in self.fields.items():
            hasher.update(f"{name} {field.starts.tolist()} {field.spec}".encode())
            for start in {0, len(field) - 1} if len(field) else ():
                hasher.update(row_content(field.read(start, start + 1)[0]))
        return short_digest(hasher)

    def describe(self) -> str:
        paths = [file.status.path for file in self._files]
        where = str(paths[0]) if len(paths) == 1 else f"{counted(len(paths), 'file')} in {paths[0].parent}"
        where += others_words(self._other_files)
        fields = ", ".join(f"{name} {field.spec}" for name, field in self.fields.items())
        rows = len(next(iter(self.fields.values())))
        others = left_out_words(f"{name} ({why})" for name, why in self.left_out.items())
        return f"{_FUNCTION}: {where}, {rows} rows along {self._dimension!r} of {fields}{others}"
