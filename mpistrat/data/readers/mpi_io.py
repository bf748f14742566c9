"""HDF5 files through MPI-IO: each rank opens them by itself, and they are closed before MPI ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...cluster.communicator import running_mpi
from ...errors import LayoutError, MissingDependencyError, ShardError, explain

__all__ = ["before_mpi_ends", "check_mpi_io", "mpi_io_options"]

_at_end: list[weakref.WeakMethod[Callable[[], None]]] = []


def check_mpi_io() -> None:
    """Raise where files cannot be read through MPI-IO.

    Raises:
        MissingDependencyError: h5py was built without MPI.
        LayoutError: MPI is not running, or was started for fewer threads than read.
    """
    import h5py

    if not h5py.get_config().mpi:
        got, expected = f"h5py {h5py.__version__} without MPI", "an h5py that was built with MPI"
        remedy = (
            "Build one against a parallel HDF5 (HDF5_MPI=ON CC=mpicc pip install --no-binary=h5py h5py), or leave"
            " driver out: the ranks then read the files independently of each other."
        )
        raise MissingDependencyError(explain("HDF5Dataset", "driver", expected=expected, got=got, remedy=remedy))
    mpi = running_mpi("HDF5Dataset")
    if mpi.Query_thread() < mpi.THREAD_MULTIPLE:  # files are read in threads, while others communicate
        expected, got = 'MPI_THREAD_MULTIPLE for "mpio"', "a lower one"
        remedy = "Let mpi4py start MPI, or ask for MPI_THREAD_MULTIPLE."
        raise LayoutError(explain("HDF5Dataset", "driver", expected=expected, got=got, remedy=remedy))


def mpi_io_options(path: Path) -> dict[str, Any]:
    """Return what h5py.File needs to open a file through MPI-IO, on this rank alone.

    Raises:
        ShardError: for a path that MPI-IO takes for something else.
    """
    if ":" in str(path):
        expected, remedy = "a path without a colon", "Rename it, or leave driver out."
        got = "one of which MPI-IO takes what stands before the colon for a file system"
        raise ShardError(explain("HDF5Dataset", str(path), expected=expected, got=got, remedy=remedy))
    return {"driver": "mpio", "comm": running_mpi("HDF5Dataset").COMM_SELF}


def before_mpi_ends(close: Callable[[], None]) -> None:
    """Call a method before MPI ends, if its object still lives: a file that is read or closed later ends the process."""
    if not _at_end:
        MPI = running_mpi("HDF5Dataset")
        # MPI.Finalize() begins by deleting the attributes of COMM_SELF.
        key = MPI.Comm.Create_keyval(delete_fn=lambda comm, key, value: _close_all())
        MPI.COMM_SELF.Set_attr(key, None)
    _at_end[:] = [method for method in _at_end if method() is not None]
    _at_end.append(weakref.WeakMethod(close))


def _close_all() -> None:
    for method in _at_end:
        close = method()
        if close is not None:
            close()
