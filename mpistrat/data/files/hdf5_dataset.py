"""HDF5 files as a dataset of rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ...base.text import printable
from ..dataset import Dataset
from ..shards.files import PathLike
from .hdf5 import Fields, HDF5Rows

__all__ = ["HDF5Dataset"]


class HDF5Dataset(Dataset):
    """The rows of HDF5 files, one file after the other.

    The files may be shards that `write_shards` wrote, or others: any datasets with a common first axis, in any groups.
    Structures (compound types) come as structured arrays, strings as `str` in object arrays, numbers of varying length
    as arrays in an object array. `print(dataset)` names how each field is read, and why not in a quicker way. Files are
    looked at when something is first asked of them, by `distribute_dataset` on all ranks together, each file on one; they
    must not change while they are read.

    Virtual datasets may draw from these files only. A file that the wanted fields of another one draw from, be it a few
    of its rows, is a source and gives no rows of its own: they would come twice. `print` says how many such files are.

    Args:
        files: a file; a directory; a pattern like `data/train-*.h5`; or a list of files, read in the list's order.
            Others are read in the manifest's order, else in natural order (2 before 10).
        fields: None for a dict of all datasets that have rows (`print` names what else there is); a list of names for a
            dict of these; a tuple of names for a tuple; a dict from new names to names in the file; one name for that
            array alone. A name is like "x" or "group/x".
        verify: whether to compare the files' bytes with the digests in the manifest. True: all of them before HDF5 opens a file.
            False: none. "auto": the first and last 64 KiB of every file as it is opened, and all of a set of at most 1 GiB
            (256 MiB without xxhash), once a job: in `distribute_dataset` by the ranks together, else as the first epoch begins.
        reader: how contiguous uncompressed data is read: "auto" or "mmap" through a memory map, "pread" by reads, for
            file systems where a file may be cut while it is read (under a map, that kills the process). What is stored
            otherwise is read in the same way under all of these. "h5py": everything through h5py.
        on_error: "raise", or "skip" to leave out files that cannot be opened or do not match the others; `skipped`
            names them. Every rank must see the same files: `fingerprint` tells whether two ranks do.
        driver: "mpio" to read everything through h5py and MPI-IO, each rank by itself, where h5py was built with MPI.
            MPI must be running, with MPI_THREAD_MULTIPLE; nothing is read after its end. No virtual datasets.

    Raises:
        ShardError: for a missing, truncated or damaged file, for one that does not match the others or the manifest,
            and for data that lies in other files; naming the file, what was expected and what came; when something is first
            asked of the dataset, or it is distributed. At once for names that lead to no files, and for one file that is missing.
        MissingDependencyError: for driver="mpio" where h5py was built without MPI.
        LayoutError: for driver="mpio" where MPI is not running, or was started for fewer threads.

    Example:
        >>> import tempfile
        >>> from mpistrat.data import write_shards
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     paths = write_shards(directory, {"x": np.eye(4), "label": np.arange(4)}, num_shards=2)
        ...     dataset = HDF5Dataset(directory, fields=("x", "label"))
        ...     for x, label in dataset.batch(3):
        ...         print(x.shape, label)
        (3, 4) [0 1 2]
        (1, 4) [3]
    """

    def __init__(
        self,
        files: PathLike | Sequence[PathLike],
        fields: Fields = None,
        *,
        verify: bool | Literal["auto"] = "auto",
        reader: str = "auto",
        on_error: str = "raise",
        driver: str | None = None,
    ) -> None:
        self._rows = HDF5Rows(files, fields, verify, reader, on_error, driver)
        super().__init__(self._rows)

    @property
    def skipped(self) -> tuple[tuple[Path, str], ...]:
        """The files that on_error="skip" left out, each with the reason."""
        return self._rows.skipped

    def fingerprint(self) -> int:
        """Return a number below 2**63 that is the same wherever the same rows are read."""
        return self._rows.fingerprint()

    def __repr__(self) -> str:
        return printable(f"<HDF5Dataset {self.describe()}>")
