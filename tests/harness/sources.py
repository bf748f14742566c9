"""One small dataset as every source with random access reads it. A new source adds one entry to SOURCES."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import pytest

import mpistrat as ms
from tests.harness.examples import example

__all__ = ["ROWS", "SOURCES", "WITH_FILES", "Source", "V", "X", "written"]

ROWS = 23
X = np.arange(ROWS, dtype=np.int64) * 3
V = np.stack([X, X + 0.5, -X], axis=1).astype(np.float32)


@dataclass(frozen=True)
class Source:
    """How the files of a source are written into a folder, and opened; where it has none, `opened` ignores the folder.

    Attributes:
        watched: the last part of the names of the files whose changes are seen.
        marked_end: False if a file that ends between two rows, or an empty one, cannot be told from a whole one.
    """

    opened: Callable[[Path], ms.data.Dataset]
    write: Callable[[Path, np.ndarray, np.ndarray], None] | None = None
    watched: str = ""
    marked_end: bool = True


def arrays(folder: Path) -> ms.data.Dataset:
    return ms.data.from_arrays({"x": X, "v": V})


def map_style(folder: Path) -> ms.data.Dataset:
    return ms.data.from_map_style([{"x": x, "v": v} for x, v in zip(X, V, strict=True)])


def write_hdf5(layout: str) -> Callable[[Path, np.ndarray, np.ndarray], None]:
    def write(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
        chunk_rows = 4 if layout == "chunked" else None
        ms.data.write_shards(folder, {"x": x, "v": v}, rows_per_shard=9, layout=layout, chunk_rows=chunk_rows)

    return write


def write_tables(kind: str) -> Callable[[Path, np.ndarray, np.ndarray], None]:
    def write(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        lists = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(v.reshape(-1)), 3)
        table = pyarrow.table({"x": x, "v": lists})
        for number, part in enumerate((table[:10], table[10:])):
            path = str(folder / f"part-{number}.{kind}")
            if kind == "parquet":
                parquet.write_table(part, path, row_group_size=4)
            else:
                with pyarrow.OSFile(path, "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
                    writer.write_table(part, max_chunksize=4)

    return write


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def write_tar(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
    for number, (first, stop) in enumerate(((0, 10), (10, len(x)))):
        with tarfile.open(folder / f"part-{number}.tar", "w") as archive:
            for row in range(first, stop):
                for name, data in (("x.cls", str(x[row]).encode()), ("v.npy", npy(v[row]))):
                    header = tarfile.TarInfo(f"sample/{row:04}.{name}")
                    header.size = len(data)
                    archive.addfile(header, io.BytesIO(data))


def write_tfrecord(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
    """By the writer of tensorboardX."""
    pytest.importorskip("google_crc32c")
    writers = pytest.importorskip("tensorboardX.record_writer")
    for number, (first, stop) in enumerate(((0, 10), (10, len(x)))):
        writer = writers.RecordWriter(str(folder / f"part-{number}.tfrecord"))
        for row in range(first, stop):
            writer.write(example({"x": [int(x[row])], "v": v[row].tolist()}))
        writer.close()


def write_zarr(zarr_format: int) -> Callable[[Path, np.ndarray, np.ndarray], None]:
    def write(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
        group = pytest.importorskip("zarr").open_group(folder, mode="w", zarr_format=zarr_format)
        # Not Blosc, the default of format 2: of small chunks it decodes truncated ones, too.
        codec = pytest.importorskip("numcodecs").Zstd() if zarr_format == 2 else "auto"
        group.create_array("x", data=x, chunks=(7,), compressors=codec)
        group.create_array("v", data=v, chunks=(4, 2), compressors=codec)

    return write


def write_netcdf(writer: str) -> Callable[[Path, np.ndarray, np.ndarray], None]:
    """By h5netcdf or netCDF4-python, with packed values."""

    def write(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
        pytest.importorskip("xarray")
        pytest.importorskip("h5netcdf")
        library = pytest.importorskip(writer)
        for number, part in enumerate((slice(0, 10), slice(10, None))):
            with library.Dataset(str(folder / f"part-{number}.nc"), "w") as file:
                file.createDimension("time", None)
                file.createDimension("place", 3)
                file.createVariable("x", "i8", ("time",))[: len(x[part])] = x[part]
                packed = file.createVariable("v", "i2", ("time", "place"))
                packed[: len(v[part])] = (v[part] * 2).astype(np.int16)
                packed.setncattr("scale_factor", np.float32(0.5))

    return write


def from_netcdf(folder: Path) -> ms.data.Dataset:
    return ms.data.from_netcdf(folder, ["x", "v"])


def from_zarr_url(folder: Path) -> ms.data.Dataset:
    pytest.importorskip("fsspec")
    return ms.data.from_zarr(f"file://{folder}")


def write_sparse(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
    with h5py.File(folder / "a.h5ad", "w") as file:
        file["obs/x"] = x
        group = file.create_group("X")
        group.attrs.update({"encoding-type": "csr_matrix", "shape": v.shape})
        rows, group["indices"] = np.nonzero(v)
        group["data"] = v[np.nonzero(v)]
        group["indptr"] = np.searchsorted(rows, np.arange(len(v) + 1))


def from_sparse(folder: Path) -> ms.data.Dataset:
    return ms.data.from_sparse(f"{str(folder).rstrip('/')}/a.h5ad", {"x": "obs/x", "v": "X"}, dense=True)


def write_groups(folder: Path, x: np.ndarray, v: np.ndarray) -> None:
    for number, (first, stop) in enumerate(((0, 10), (10, len(x)))):
        with h5py.File(folder / f"part-{number}.h5", "w") as file:
            for row in range(first, stop):
                group = file.create_group(f"data/demo_{row}")
                group.attrs["x"], group["obs/v"] = x[row], v[row]


def from_groups(folder: Path) -> ms.data.Dataset:
    return ms.data.from_groups(folder, {"x": "@x", "v": "obs/v"}, within="data")


SOURCES = {
    "arrays": Source(arrays),
    "map_style": Source(map_style),
    "hdf5": Source(ms.data.HDF5Dataset, write_hdf5("contiguous")),
    "hdf5_chunked": Source(ms.data.HDF5Dataset, write_hdf5("chunked")),
    "parquet": Source(ms.data.from_tables, write_tables("parquet")),
    "arrow": Source(ms.data.from_tables, write_tables("arrow")),
    "tar": Source(lambda folder: ms.data.from_tar(folder, {"x": "x.cls", "v": "v.npy"}), write_tar),
    "tfrecord": Source(ms.data.from_tfrecord, write_tfrecord, marked_end=False),
    "groups": Source(from_groups, write_groups),
    "sparse": Source(from_sparse, write_sparse),
    "netcdf": Source(from_netcdf, write_netcdf("netCDF4")),
    "netcdf_by_h5netcdf": Source(from_netcdf, write_netcdf("h5netcdf.legacyapi")),
    "zarr_2": Source(ms.data.from_zarr, write_zarr(2), watched=".zarray"),
    "zarr_3": Source(ms.data.from_zarr, write_zarr(3), watched="zarr.json"),
    "zarr_url": Source(from_zarr_url, write_zarr(3), watched="zarr.json"),
}
WITH_FILES = [name for name, source in SOURCES.items() if source.write]


def written(name: str, folder: Path, x: np.ndarray = X, v: np.ndarray = V) -> ms.data.Dataset:
    """Return the dataset of a source whose files are written into a folder."""
    source = SOURCES[name]
    folder.mkdir()
    if source.write is not None:
        source.write(folder, x, v)
    return source.opened(folder)
