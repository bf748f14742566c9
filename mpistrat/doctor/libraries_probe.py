"""A watched program that imports h5py and CuPy, and says what they can do."""

from __future__ import annotations

from .watched import say, step

__all__ = ["main"]


def main() -> None:
    """Import the libraries, say what they are. MPI is not started."""
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    step("import h5py")
    import h5py

    versions = h5py.version
    say(h5py=[versions.version, versions.hdf5_version, bool(h5py.get_config().mpi)], libmpi=_mpi_files())
    step("asking CuPy for GPUs")
    from ..cluster.devices import gpu_identities

    gpus, reason = gpu_identities()
    say(gpus=[list(gpu) for gpu in gpus], no_gpu=reason)
    step("asking CuPy for NCCL")
    from ..comm.gpu import nccl_available

    say(no_nccl=nccl_available())


def _mpi_files() -> list[str]:
    """The files of MPI libraries that this process has loaded."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps}
    except OSError:
        return []
    return sorted(path for path in paths if path.rpartition("/")[2].startswith("libmpi.so"))


if __name__ == "__main__":
    main()
