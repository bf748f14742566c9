"""Start and end of Horovod's calls, the numbers of a rank, process sets, and the timeline."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import Any

import torch

from ...base.errors import ContextError, explain
from ...cluster.topology import running_mpi
from ...cluster.world import communicator_of
from ..engine import Engine
from ..process_sets import RankSet, global_process_set
from ..timeline import TensorTimeline

__all__ = [
    "add_process_set", "ccl_built", "cross_rank", "cross_size", "cuda_built", "ddl_built", "engine", "gloo_built",
    "gloo_enabled", "init", "is_homogeneous", "is_initialized", "local_rank", "local_size", "mpi_built", "mpi_enabled",
    "mpi_threads_supported", "nccl_built", "rank", "remove_process_set", "rocm_built", "shutdown", "size", "start_timeline",
    "stop_timeline",
]  # fmt: skip

_engine: Engine | None = None
_process: int | None = None


def engine(function: str) -> Engine:
    """Return the engine of this process.

    Raises:
        ValueError: Horovod was not initialized.
    """
    if _engine is None:
        raise ValueError(f"hvd.{function}: Horovod has not been initialized; call hvd.init() on all ranks")
    return _engine


def init(comm: Any = None, process_sets: Sequence[RankSet] | str | None = None) -> None:
    """Start Horovod's calls on all ranks. A second call has no effect. Collective over the ranks.

    Args:
        comm: an mpi4py communicator or a list of ranks; only its members call this. Default all ranks of the job.
        process_sets: process sets to register; "dynamic", as in Horovod, for none: sets can be added at any time.

    Raises:
        ClusterError: MPI does not allow calls of several threads at a time, or does not see the launcher's ranks.
        LayoutError: MPI is not running, or `comm` is not an intracommunicator.
        ValueError: two process sets have the same ranks, or one has all.

    Example:
        >>> init()
        >>> rank(), size()
        (0, 1)
        >>> shutdown()
    """
    global _engine, _process
    if is_initialized():
        return
    if _engine is not None:
        shutdown()
    made = None
    if isinstance(comm, (list, tuple)):
        mpi = running_mpi("hvd.init")
        if not comm or not all(isinstance(each, int) and 0 <= each < mpi.COMM_WORLD.size for each in comm):
            expected = f"an mpi4py communicator, or ranks with 0 <= rank < {mpi.COMM_WORLD.size}"
            raise ValueError(explain("hvd.init", "comm", expected=expected, got=repr(comm)))
        comm = made = communicator_of(mpi.COMM_WORLD, comm, "hvd.init")
    try:
        _engine, _process = Engine(comm), os.getpid()
    finally:
        if made is not None:
            made.Free()
    atexit.unregister(shutdown)
    atexit.register(shutdown)  # last, so that it is called before the groups leave
    path = os.environ.get("HOROVOD_TIMELINE", "")
    if path and path != "DYNAMIC":
        start_timeline(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES") == "1")
    for each in () if process_sets is None or isinstance(process_sets, str) else process_sets:
        add_process_set(each)


def shutdown() -> None:
    """End Horovod's calls on this rank. Other ranks' calls that wait for it raise HorovodInternalError. Local."""
    global _engine
    if _engine is not None and os.getpid() == _process:
        _engine.shut_down()
        _engine = None


def is_initialized() -> bool:
    """Return True between `init` and `shutdown`, also of another rank.

    Example:
        >>> is_initialized()
        False
    """
    return _engine is not None and not _engine.ended


def rank() -> int:
    """Return the number of this rank."""
    return engine("rank").rank


def size() -> int:
    """Return the number of ranks."""
    return engine("size").size


def local_rank() -> int:
    """Return the number of this rank among those of its node."""
    return engine("local_rank").local_rank


def local_size() -> int:
    """Return the number of ranks of this node."""
    return engine("local_size").local_size


def cross_rank() -> int:
    """Return the number of this rank among those with its local rank on all nodes."""
    return engine("cross_rank").cross_rank


def cross_size() -> int:
    """Return the number of ranks that have this rank's local rank, one on each node."""
    return engine("cross_size").cross_size


def is_homogeneous() -> bool:
    """Return True if all nodes have the same number of ranks."""
    return engine("is_homogeneous").homogeneous


def mpi_threads_supported() -> bool:
    """Return True: `init` needs an MPI that allows calls of several threads at a time."""
    engine("mpi_threads_supported")
    return True


def mpi_enabled() -> bool:
    """Return True: all calls use MPI."""
    return True


def mpi_built() -> bool:
    """Return True: all calls use MPI."""
    return True


def gloo_enabled() -> bool:
    """Return False: all calls use MPI."""
    return False


def gloo_built() -> bool:
    """Return False: all calls use MPI."""
    return False


def nccl_built() -> int:
    """Return 0, the version of Horovod's NCCL. Tensors on GPUs use PyTorch's if it can run."""
    return 0


def ddl_built() -> bool:
    """Return False: all calls use MPI."""
    return False


def ccl_built() -> bool:
    """Return False: all calls use MPI."""
    return False


def cuda_built() -> bool:
    """Return True if this PyTorch can use GPUs."""
    return bool(torch.cuda.is_available())


def rocm_built() -> bool:
    """Return False: all calls use MPI."""
    return False


def add_process_set(process_set: RankSet | Sequence[int]) -> RankSet:
    """Register a process set, and return it. Collective over all ranks.

    Args:
        process_set: the set or its ranks, the same on all ranks.

    Raises:
        ValueError: on every rank, if a process set has these ranks, or one of them does not exist.
        HorovodInternalError: on every rank, if they pass different ranks.

    Example:
        >>> init()
        >>> add_process_set([0])
        Traceback (most recent call last):
        ValueError: hvd.add_process_set: process_set: expected ranks of no process set, got [0], which are those of another one
        >>> shutdown()
    """
    running = engine("add_process_set")
    one = process_set if isinstance(process_set, RankSet) else RankSet(process_set)
    handle = running.ask(
        "addset",
        global_process_set,
        (),
        None,
        "add_process_set",
        lambda made: running.adopt(one, made),
        members=one.ranks,
    )
    found = running.wait(handle)
    assert isinstance(found, RankSet)
    return found


def remove_process_set(process_set: RankSet) -> bool:
    """Remove a process set. Return False for all ranks' and for one that is not registered. Collective over all ranks.

    Raises:
        HorovodInternalError: on every rank, if they pass different sets.
    """
    running, number = engine("remove_process_set"), process_set.process_set_id
    if not number:
        return False

    def finish(removed: Any) -> bool:
        process_set.forget()
        return bool(removed)

    return bool(
        running.wait(
            running.ask("removeset", global_process_set, (), None, "remove_process_set", finish, number=number)
        )
    )


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write the times of all later calls to a file of Chrome's trace format, on rank 0.

    Args:
        file_path: the file, which is replaced.
        mark_cycles: True to make each cycle of the negotiation an event, too.

    Raises:
        ContextError: the file cannot be written.
    """
    running = engine("start_timeline")
    stop_timeline()
    if running.rank == 0:
        try:
            running.timeline = TensorTimeline(file_path, mark_cycles)
        except OSError as error:
            text = explain("hvd.start_timeline", "file_path", expected="a file that can be written", got=str(error))
            raise ContextError(text) from None


def stop_timeline() -> None:
    """End the file of the timeline, if there is one."""
    running = engine("stop_timeline")
    timeline, running.timeline = running.timeline, None
    if timeline is not None:
        timeline.close()
