"""The functions that make datasets of tar archives, TFRecord, Zarr, netCDF, sparse matrices and groups of HDF5 files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .copies import source_of
from .dataset import Dataset
from .files.groups import GroupSamples
from .files.inputs import Fields
from .files.netcdf import NetCDFFiles
from .files.sparse import SparseFile
from .files.tar import TarSamples
from .files.tfrecord import Features, RecordSamples
from .files.units import FieldRows
from .files.zarr import ZarrGroup
from .nodes.node import Node
from .nodes.samples import samples_of_files
from .shards.files import PathLike

__all__ = ["from_groups", "from_netcdf", "from_sparse", "from_tar", "from_tfrecord", "from_zarr"]


def from_groups(
    files: PathLike | Sequence[PathLike], fields: Fields = None, *, within: str | None = None, workers: int = 0,
    processes: bool = False, storage_options: Mapping[str, Any] | None = None,
) -> Dataset:  # fmt: skip
    """Make a dataset whose samples are groups of HDF5 files, or whole files.

    For files with one group per sample, such as the episodes "data/demo_0", "data/demo_1", … of robomimic (`within="data"`), and
    for one sample per file (`within=None`). The shapes of all samples are looked at when the dataset is made. Where they differ,
    use `padded_batch`, `ragged_batch` or `bucket_by_sequence_length`.

    Args:
        files: a file, a directory, a pattern like `data/*.hdf5`, or a list of files, read in its order; others are read in
            natural order (2 before 10).
        fields: names of datasets in the group, such as "obs/joints", or "@label" for an attribute of it. None for a dict of all
            datasets of the first sample; a list of names for a dict of these; a tuple of names for a tuple; a dict from new names
            to names in the group; one name for that array alone.
        within: the group whose groups are samples, in natural order: "data", or "/" for those at the top of the file. None:
            each file is one sample.
        workers: the number of samples that are read at the same time; 0 for one, by the thread that reads.
        processes: True for processes as workers instead of threads, as for `Dataset.map`.
        storage_options: arguments of fsspec's file system for URLs, such as `{"anon": True}` for public data on S3.

    Raises:
        ShardError: a file is missing or damaged, or a sample lacks a field or has one of another dtype.

    Example:
        >>> import h5py, pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "episodes.hdf5")
        ...     with h5py.File(path, "w") as file:
        ...         for number, steps in enumerate([2, 3]):
        ...             name = f"data/demo_{number}/actions"
        ...             file[name] = np.full((steps, 1), number)
        ...     episodes = from_groups(path, "actions", within="data")
        ...     episodes.padded_batch(2).peek().tolist()
        [[[0], [0], [0]], [[1], [1], [1]]]
    """

    def made(files: Any) -> Node:
        samples = GroupSamples(files, fields, within, storage_options)
        return samples_of_files(samples, workers, processes, samples.element_spec)

    return Dataset(source_of(made, files, storage_options))


def from_netcdf(
    files: PathLike | Sequence[PathLike], fields: Fields = None, *, dimension: str | None = None, decode_times: bool = True,
    valid_range: bool = False, storage_options: Mapping[str, Any] | None = None,
) -> Dataset:  # fmt: skip
    """Make a dataset of the variables of netCDF files along one dimension, such as time, decoded after the conventions of CF.

    Values are those of `xarray.open_dataset`: scale factors, offsets, `_Unsigned` and missing values (NaN) are applied, and
    times become `datetime64[ns]`. Several files are one series, in their order. Use `sliding_window` for windows over time.
    It needs xarray and h5netcdf, and SciPy for files of netCDF-3.

    Args:
        files: a file, a directory, a pattern like `data/*.nc`, or a list of files, read in its order; others are read in
            natural order (2 before 10).
        fields: names of variables, such as "t2m", or "forecast/t2m" for one in a group. None for a dict of all variables at the
            top of the first file that have the dimension; a list of names for a dict of these; a tuple of names for a tuple; a
            dict from new names to names in the files; one name for that array alone.
        dimension: the dimension that numbers the rows, which becomes the first axis. None for the unlimited one, or else that
            of a coordinate of time.
        decode_times: False for times as numbers, in the units of the file: for calendars that NumPy lacks, such as "noleap".
        valid_range: True for NaN in place of values outside of `valid_range`, `valid_min` or `valid_max`, as netCDF4-python masks
            them. Integers with such a limit become floats.
        storage_options: arguments of fsspec's file system for URLs, such as `{"anon": True}` for public data on S3.

    Raises:
        MissingDependencyError: without xarray or h5netcdf; for a file of netCDF-3 without SciPy.
        ShardError: a file is missing or damaged, a variable cannot be decoded, or differs between the files in shape, dtype or
            units; a time is not one of datetime64.
        ValueError: the dimension is not known.

    Example:
        >>> from_netcdf("no.nc", "t2m")
        Traceback (most recent call last):
            ...
        mpistrat.errors.ShardError: from_netcdf: ...no.nc: expected a file, got no such file
    """

    def made(files: Any) -> Node:
        return FieldRows(NetCDFFiles(files, fields, dimension, decode_times, valid_range, storage_options))

    return Dataset(source_of(made, files, storage_options))


def from_sparse(
    path: PathLike, fields: Fields = None, *, dense: bool = False, storage_options: Mapping[str, Any] | None = None
) -> Dataset:
    """Make a dataset of the rows of sparse matrices in an HDF5 file of anndata (.h5ad) or 10x Genomics.

    A row is a cell: {"indices": its column numbers, "data": their values}, two arrays as long as the row has elements. Use
    `ragged_batch` for batches of these, and `to_csr` for a SciPy matrix of a batch; or `dense=True` for rows with their zeros.
    Of a matrix with compressed rows (CSR; 10x: columns, which are cells) only the rows that are needed are read; one with
    compressed columns (CSC) is read as a whole and kept in memory.

    Args:
        path: the file.
        fields: the name of a group, such as "X" or "layers/counts"; a list of names for a dict; a tuple of names for a tuple; a
            dict from new names to names. Names of datasets with as many rows, such as "obs/label" or "obs/kind/codes", stand for
            these. None for "X", or else for the only sparse matrix at the top of the file.
        dense: True for rows with their zeros.
        storage_options: arguments of fsspec's file system for a URL, such as `{"anon": True}` for public data on S3.

    Raises:
        ShardError: the file is missing, damaged, or has no such matrix.

    Example:
        >>> from_sparse("no.h5ad")
        Traceback (most recent call last):
            ...
        mpistrat.errors.ShardError: from_sparse: ...no.h5ad: expected a file, got no such file
    """

    def made(path: Any) -> Node:
        return FieldRows(SparseFile(path, fields, dense, storage_options))

    return Dataset(source_of(made, path, storage_options))


def from_tar(
    files: PathLike | Sequence[PathLike], fields: Fields = None, *, decode: Mapping[str, Callable[[bytes], Any]] | None = None,
    workers: int = 0, processes: bool = False, element_spec: Any = None, storage_options: Mapping[str, Any] | None = None,
) -> Dataset:  # fmt: skip
    """Make a dataset of the samples of tar archives, such as WebDataset's.

    Members of one archive whose names are equal up to the first dot of the file's name are one sample: "cat/7.jpg" and
    "cat/7.cls" are the fields "jpg" and "cls" of the sample "cat/7". The headers of all archives are read once, when the dataset
    is made; after that each sample is read by its place. So each rank reads only its own samples, and shuffles are global.

    Args:
        files: a file, a directory, a pattern like `data/*.tar`, or a list of files, read in its order; others are read in
            natural order (2 before 10). Compressed archives have no random access. Each may be a URL.
        fields: None for a dict of the fields of the first sample; a list of names for a dict of these; a tuple of names for a
            tuple; a dict from new names to names in the archives; one name for that field alone. "__key__" is the name of the
            sample.
        decode: functions from the bytes of a member to its value, by extension; `bytes` leaves them undecoded. Without one,
            .txt is text, .cls and .id an integer, .json what it contains, .npy and .npz arrays, .jpg, .png, .webp, .bmp and .ppm
            uint8 pixels [height, width, 3] by Pillow, .gz what the extension before it says, and any other `bytes`.
        workers: the number of samples that are read and decoded at the same time; 0 for one, by the thread that reads, and
            AUTOTUNE for as many as this rank has cores, at most 8.
        processes: True for processes as workers instead of threads, as for `Dataset.map`.
        element_spec: a nest of `ArraySpec`, with None in a shape for a length that varies. Without it all samples must have the
            shapes of the first.
        storage_options: arguments of fsspec's file system for URLs, such as `{"anon": True}` for public data on S3.

    Raises:
        ShardError: an archive is missing, damaged, compressed or truncated, or a sample lacks a field.
        ValueError: while reading, for bytes that cannot be decoded, and for a sample that does not look like the first.
        MissingDependencyError: while reading, for images without Pillow.

    Example:
        >>> import io, pathlib, tarfile, tempfile
        >>> def add(archive, name, data):
        ...     header = tarfile.TarInfo(name)
        ...     header.size = len(data)
        ...     archive.addfile(header, io.BytesIO(data))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = pathlib.Path(folder, "words.tar")
        ...     with tarfile.open(path, "w") as archive:
        ...         for number, word in enumerate(["one", "two", "three"]):
        ...             add(archive, f"{number}.txt", word.encode())
        ...             add(archive, f"{number}.cls", str(len(word)).encode())
        ...     words = from_tar(path, ("txt", "cls"))
        ...     [(str(text), int(label)) for text, label in words]
        [('one', 3), ('two', 3), ('three', 5)]
    """

    def made(files: Any) -> Node:
        samples = TarSamples(files, fields, decode, storage_options)
        return samples_of_files(samples, workers, processes, element_spec)

    return Dataset(source_of(made, files, storage_options))


def from_tfrecord(
    files: PathLike | Sequence[PathLike], features: Features = None, *,
    decode: Mapping[str, Callable[[bytes], Any]] | None = None, workers: int = 0, processes: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Dataset:  # fmt: skip
    """Make a dataset of the tf.train.Example messages of TFRecord files. TensorFlow is not needed.

    The lengths of all records are read once, when the dataset is made; after that each record is read by its place, and its
    checksum is compared. So each rank reads only its own records, and shuffles are global.

    Args:
        files: a file, a directory, a pattern like `data/train-*`, or a list of files, read in its order; others are read in
            natural order (2 before 10). Of a directory, files that end in .tfrecord, .tfrecords or .tfrec. Compressed files
            have no random access.
        features: a dict from names to `ArraySpec` for a dict of these features in these shapes: None in a shape is a length
            that varies (TF: VarLenFeature, else FixedLenFeature). Or None for a dict of the features of the first record; a
            list of names for a dict of these; a tuple of names for a tuple; a dict from new names to names in the files; one
            name for that feature alone. Shapes are then those of the first record, where one value is a scalar.
        decode: functions from the bytes of a feature to its value, by feature. Without one, bytes are `bytes`.
        workers: the number of records that are read and decoded at the same time; 0 for one, by the thread that reads, and
            AUTOTUNE for as many as this rank has cores, at most 8.
        processes: True for processes as workers instead of threads, as for `Dataset.map`.
        storage_options: arguments of fsspec's file system for URLs, such as `{"anon": True}` for public data on S3.

    Raises:
        MissingDependencyError: without protobuf or google-crc32c.
        ShardError: a file is missing, damaged, compressed or truncated.
        ValueError: a feature has other values than its spec, several byte strings, or cannot be decoded.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile(suffix=".tfrecord") as file:
        ...     _ = file.write(b"no record")
        ...     file.flush()
        ...     features = {"label": ms.data.ArraySpec((), "int64")}
        ...     dataset = from_tfrecord(file.name, features)
        Traceback (most recent call last):
            ...
        mpistrat.errors.ShardError: from_tfrecord: ...: expected a record at byte 0, got 9 bytes, then the end. ...
    """

    def made(files: Any) -> Node:
        samples = RecordSamples(files, features, decode, storage_options)
        return samples_of_files(samples, workers, processes, samples.element_spec)

    return Dataset(source_of(made, files, storage_options))


def from_zarr(path: PathLike, fields: Fields = None, *, storage_options: Mapping[str, Any] | None = None) -> Dataset:
    """Make a dataset of the rows of the arrays of a Zarr group, of format 2 or 3. It needs zarr.

    Rows lie along the first axis. Chunks are read as a whole, so a shuffle without a mode is one in blocks of these. Scale
    factors, offsets and missing values in attributes are not applied.

    Args:
        path: the directory of a group or of one array, or a .zip file; or the URL of a directory, such as
            "gs://bucket/era5.zarr", whose chunks are read when they are needed. It needs fsspec then.
        fields: None for a dict of the arrays that have as many rows as the largest one, or for the one array; a list of names,
            such as "train/x", for a dict of these; a tuple of names for a tuple; a dict from new names to names in the group;
            one name for that array alone.
        storage_options: arguments of fsspec's file system for a URL, such as `{"anon": True}` for public data on S3.

    Raises:
        MissingDependencyError: without zarr; for a URL without fsspec or the package of the kind of URL.
        ShardError: there is no such group or array, the arrays differ in their rows; while reading, for damaged chunks and
            broken connections.

    Example:
        >>> from_zarr("no.zarr", "x")
        Traceback (most recent call last):
            ...
        mpistrat.errors.ShardError: from_zarr: ...no.zarr: expected a directory, got no such directory
    """

    def made(path: Any) -> Node:
        return FieldRows(ZarrGroup(path, fields, storage_options))

    return Dataset(source_of(made, path, storage_options))
