"""HDF5 files as a dataset of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ...base.text import printable
from ..copies import source_of
from ..dataset import Dataset
from ..shards.files import PathLike
from .hdf5 import Fields, HDF5Rows
from .remote import StoredPath

__all__ = ["HDF5Dataset"]


class HDF5Dataset(Dataset):
    """The rows of HDF5 files, one file after the other.

    The files may be shards written by `write_shards`, or others: any datasets with a common first axis, in any groups.
    Structures (compound types) become structured arrays, strings `str` in object arrays, numbers of varying length arrays
    in an object array. `print(dataset)` shows each field's reader, and why it is not a faster one. Files are opened on
    first use, by `distribute_dataset` on all ranks together, each file on one rank; they must not change while they are
    read.

    Virtual datasets may only use these files. A file from which another file's wanted fields take any rows is a source
    and yields no rows itself, since they would appear twice. `print` shows the number of sources.

    Args:
        files: a file; a directory; a pattern like `data/train-*.h5`; or a list of files, read in its order. Others are
            read in the manifest's order, else in natural order (2 before 10). URLs such as `s3://bucket/train/` are read
            in place, by fsspec: chunks of whole rows and blocks of 1 MiB are requests. Only a folder's manifest is used.
        fields: None for a dict of all datasets with rows (`print` names what is left out); a list of names for a dict of
            these; a tuple of names for a tuple; a dict from new names to names in the file; one name for that array
            alone. A name is like "x" or "group/x", or "x.a" for the member a of structures.
        verify: whether to compare the files' bytes with the manifest's digests. True: all bytes before HDF5 opens a file.
            False: none. "auto": the first and last 64 KiB of each file when it is opened, and all of a set of at most 1
            GiB (256 MiB without xxhash), once per job: in `distribute_dataset` by the ranks together, else at the first
            epoch.
        reader: the reader of contiguous uncompressed data: "auto" or "mmap" through a memory map, "pread" by reads, for
            file systems where a file may be truncated while it is read (under a map, that kills the process). These do
            not change how other data is read. "h5py": everything through h5py.
        on_error: "raise", or "skip" to skip files that cannot be opened or do not match the others; see `skipped`. Every
            rank must see the same files; compare `fingerprint`.
        driver: "mpio" to read everything through h5py and MPI-IO, each rank independently, with an h5py built with MPI.
            MPI must be running with MPI_THREAD_MULTIPLE; after its end nothing can be read. No virtual datasets.
        storage_options: arguments of fsspec's file system for URLs, such as `{"anon": True}` for public data on S3.

    Raises:
        ShardError: naming the file, for a missing, truncated or damaged one, one that does not match the others or the
            manifest, or has data in other files; on first use or distribution. Immediately for names without files, and
            for a single missing file.
        MissingDependencyError: for driver="mpio" with an h5py built without MPI.
        LayoutError: for driver="mpio" if MPI is not running, or with a lower thread level.

    Example:
        >>> import tempfile
        >>> from mpistrat.data import write_shards
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     rows = {"x": np.eye(4), "label": np.arange(4)}
        ...     paths = write_shards(directory, rows, num_shards=2)
        ...     dataset = HDF5Dataset(directory, fields=("x", "label"))
        ...     for x, label in dataset.batch(3):
        ...         print(x.shape, label)
        (3, 4) [0 1 2]
        (1, 4) [3]
    """

    node: HDF5Rows

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        fields: Fields = None,
        *,
        verify: bool | Literal["auto"] = "auto",
        reader: str = "auto",
        on_error: str = "raise",
        driver: str | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        def made(files: Any) -> HDF5Rows:
            return HDF5Rows(files, fields, verify, reader, on_error, driver, storage_options)

        super().__init__(source_of(made, files, storage_options))

    @property
    def skipped(self) -> tuple[tuple[StoredPath, str], ...]:
        """The skipped files (on_error="skip"), each with the reason."""
        return self.node.skipped

    def fingerprint(self) -> int:
        """Return a number below 2**63 that is equal wherever the same rows are read."""
        return self.node.fingerprint()

    def __repr__(self) -> str:
        return printable(f"<HDF5Dataset {self.describe()}>")
