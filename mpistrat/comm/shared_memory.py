"""Node-shared memory: one segment for each rank, in one MPI window.

Memory is reserved: before a window is created the node's leader checks the free space, and `populate` makes the system
allocate the pages of a range, so that a full /dev/shm is an error here and not a SIGBUS later.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import gc
import mmap
import os
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from .._util.text import binary_size
from ..errors import SharedMemoryError
from .agree import as_told, gather_text, together

__all__ = ["ENLARGE", "SharedBlock", "allocate_private", "allocate_shared", "free_space"]

SHARED_FOLDER = Path("/dev/shm")
ENLARGE = (
    "docker run --shm-size=8g …, or mount -o remount,size=8g /dev/shm; or set MPISTRAT_SHARED_MEMORY=0 to keep a "
    "private copy in every rank"
)
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_MARGIN = 1 << 16  # what MPI itself takes beside each segment, generously


@final
class SharedBlock:
    """One segment of bytes for each rank of a node, readable and writable by all of them.

    A NumPy view of a segment stays valid memory after `close()`, for as long as the view lives.

    Attributes:
        segments: for each rank of the node a uint8 array, page-aligned; zeros at first.
        nbytes: their sizes.
        what: what it is for, in words.
        window: the MPI window that holds the memory; None where it is private, and after `close()`.
        comm: the communicator of the node's ranks; None where `window` is.
    """

    def __init__(self, segments: list[np.ndarray], what: str, window: Any = None, comm: Any = None) -> None:
        self.segments, self.what = segments, what
        self.nbytes = [segment.nbytes for segment in segments]
        self.window, self.comm = window, comm

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return not self.segments

    def populate(self, index: int, low: int, high: int) -> bool:
        """Make the system find memory for bytes [low, high) of a segment.

        Returns False where there is none left; bytes that are there keep their value. Where the system cannot report
        it (Linux before 5.14), the answer is whether the free space would do.
        """
        if self.window is None or high <= low:
            return True
        result = _populate(self.segments[index].ctypes.data + low, high - low)
        if result == errno.EINVAL:
            free = free_space()
            return free is None or free >= high - low
        return result == 0

    def close(self) -> None:
        """Free the memory, or leave it to the end of the process if a view of it lives on any rank. Collective on the node."""
        close_blocks([self])


def close_blocks(blocks: Sequence[SharedBlock]) -> None:
    """Close blocks of one node: free the memory of those of which no view lives on any rank. Collective on the node."""
    shared = [block for block in blocks if block.window is not None and not block.closed]
    roots = [[weakref.ref(segment) for segment in block.segments] for block in shared]
    for block in blocks:
        block.segments = []
    if not shared:
        return

    def alive() -> np.ndarray:
        return np.array([any(root() is not None for root in of_block) for of_block in roots], np.int32)

    if alive().any():
        gc.collect()  # views in reference cycles, as tracebacks make them; with a large library loaded this takes long
    anywhere = np.empty(len(shared), np.int32)
    shared[0].comm.Allreduce(alive(), anywhere)
    for block, used in zip(shared, anywhere, strict=True):
        if not used:
            block.window.Free()
        block.window = block.comm = None


def allocate_private(nbytes: int, what: str) -> SharedBlock:
    """Return plain zeroed memory in the form of a block of one segment, which begins at a page as a shared one does."""
    memory = np.zeros(nbytes + mmap.PAGESIZE, np.uint8)
    start = -memory.ctypes.data % mmap.PAGESIZE
    return SharedBlock([memory[start : start + nbytes]], what)


def allocate_shared(node: Any, world: Any, nbytes: Sequence[int], what: str) -> SharedBlock:
    """Make a block, with a segment of `nbytes[i]` bytes for rank i of the node. Collective over `world`: every node makes one.

    `what` names the use of the memory in errors.

    Raises:
        SharedMemoryError: on every rank, where the memory of any node is too small.
    """
    check_space(world, node.rank == 0, sum(-(-n // mmap.PAGESIZE) * mmap.PAGESIZE + _MARGIN for n in nbytes), what)
    with together(partial(gather_text, world), as_told):
        window = _window(node, world, nbytes[node.rank], what)
    segments = []
    for rank, size in enumerate(nbytes):
        memory: Any = window.Shared_query(rank)[0]
        segments.append(np.frombuffer(memory, np.uint8, size) if size else np.empty(0, np.uint8))
    return SharedBlock(segments, what, window, node)


def check_others(world: Any, what: str) -> None:
    """Take part in `allocate_shared` of the other nodes without memory of this rank's own. Collective over `world`.

    Raises:
        SharedMemoryError: as there.
    """
    check_space(world, True, 0, what)
    with together(partial(gather_text, world), as_told):
        pass


def _window(node: Any, world: Any, nbytes: int, what: str) -> Any:
    from mpi4py import MPI

    try:
        return _allocate(node, nbytes)
    except MPI.Exception as error:
        text = " ".join(f"{error}".split())[:300] or "an error without a text"
        raise SharedMemoryError(
            f"MPI cannot share memory for {what} on the node of rank {world.rank}: {text}. Look whether"
            f" {SHARED_FOLDER} is full (df {SHARED_FOLDER}), or something removes files there. To enlarge it: {ENLARGE}"
        ) from None


def _allocate(node: Any, nbytes: int) -> Any:
    from mpi4py import MPI

    info = MPI.Info.Create({"alloc_shared_noncontig": "true"})
    try:
        return MPI.Win.Allocate_shared(nbytes, 1, info=info, comm=node)
    finally:
        info.Free()


def check_space(world: Any, leader: bool, nbytes: int, what: str) -> None:
    """Check that each node, of which the leader looks, has room for so many bytes. Collective over `world`.

    Raises:
        SharedMemoryError: on every rank, with the numbers of the first node that cannot.
    """
    free = free_space() if leader else None
    mine = np.array([nbytes, -1 if free is None else free], np.int64)
    table = np.empty((world.size, 2), np.int64)
    world.Allgather(mine, table)
    for rank, (needed, available) in enumerate(table.tolist()):
        if 0 <= available < needed:
            raise out_of_memory(what, rank, f"{binary_size(needed)} are needed, {binary_size(available)} are free")


def out_of_memory(what: str, rank: int, numbers: str) -> SharedMemoryError:
    """Return the error about a node whose shared memory is too small."""
    return SharedMemoryError(
        f"the shared memory of the node of rank {rank} is too small for {what}: {numbers} in {SHARED_FOLDER}. Enlarge it: "
        f"{ENLARGE}"
    )


def free_space() -> int | None:
    """Return the bytes that shared memory has left on this node, None where the system does not report it."""
    try:
        found = os.statvfs(SHARED_FOLDER)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


@functools.cache
def _madvise() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    call = getattr(library, "madvise", None)
    if call is not None:
        call.argtypes, call.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return call


def _populate(address: int, nbytes: int) -> int:
    """Ask the system for the pages of a range; return 0 or its error number."""
    call = _madvise()
    if call is None:
        return errno.EINVAL
    start = address - address % mmap.PAGESIZE
    while call(start, address + nbytes - start, POPULATE_WRITE):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            return number
    return 0
