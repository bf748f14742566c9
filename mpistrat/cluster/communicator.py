"""The communicator that a user passes: checked before anything is done with it."""

from __future__ import annotations

from typing import Any

from ..errors import ClusterError, LayoutError, explain
from .launcher_variables import check_launcher, check_size
from .start import import_mpi

__all__ = ["check_comm", "given_comm", "running_mpi"]


def running_mpi(function: str) -> Any:
    """Return the module mpi4py.MPI, importing it, which starts MPI unless the program has or forbids it.

    Raises:
        LayoutError: MPI is not running and will not be started, or has ended.
        ClusterError: mpi4py finds no MPI library, or another than the launcher's.
    """
    check_launcher(function)
    try:
        MPI = import_mpi()
    except (ImportError, RuntimeError) as error:
        remedy = (
            "Load your site's MPI module, or add the folder of its libmpi to LD_LIBRARY_PATH, "
            "or install a wheel: pip install mpich"
        )
        raise ClusterError(explain(function, "", expected="an MPI library", got=str(error), remedy=remedy)) from error

    if MPI.Is_finalized():
        raise LayoutError(explain(function, "comm", expected="a running MPI", got="one that was finalised"))
    if not MPI.Is_initialized():
        remedy = "mpi4py.rc.initialize is False: call MPI.Init_thread() first, or leave it True"
        raise LayoutError(explain(function, "comm", expected="a running MPI", got="none", remedy=remedy))
    return MPI


def check_comm(mpi: Any, comm: Any, function: str) -> Any:
    """Return the communicator to work on, COMM_WORLD for None.

    Raises:
        LayoutError: `comm` is no intracommunicator, or is null.
        ClusterError: it is COMM_WORLD with one rank, and the launcher started several.
    """
    expected = "an intracommunicator of mpi4py"
    if comm is None:
        comm = mpi.COMM_WORLD
    if not isinstance(comm, mpi.Comm):
        raise LayoutError(explain(function, "comm", expected=expected, got=f"a {type(comm).__name__}"))
    if comm == mpi.COMM_NULL:
        remedy = "It was freed, or this rank is not a member: only the members of a communicator call this"
        raise LayoutError(explain(function, "comm", expected=expected, got="COMM_NULL", remedy=remedy))
    if comm.Is_inter():
        remedy = "Merge its two groups first: comm.Merge()"
        raise LayoutError(explain(function, "comm", expected=expected, got="an intercommunicator", remedy=remedy))
    if comm == mpi.COMM_WORLD:
        check_size(comm.size)
    return comm


def given_comm(comm: Any, function: str) -> Any:
    """Return the communicator that a user gives to what can do without: None for None, and then MPI is not started.

    Raises:
        LayoutError, ClusterError: as `check_comm`.
    """
    return None if comm is None else check_comm(running_mpi(function), comm, function)
