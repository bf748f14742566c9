"""Node-shared memory: a file that the ranks of a node map, one segment for each, and whose name is removed immediately.

Mapped memory has no name: nothing is left when ranks are killed, and removing files of /dev/shm does not affect it. Memory is
reserved: before a file is created the node's leader checks the free space, and `populate` makes the system allocate the pages of
a range, so that a full /dev/shm is an error here and not a SIGBUS later.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import resource
import secrets
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

import numpy as np

from ..base.agree import as_told, first_rank, gather_text, together
from ..base.errors import SharedMemoryError
from ..base.text import binary_size
from .monitor.leftovers import open_own

__all__ = ["ENLARGE", "SharedBlock", "allocate_private", "allocate_shared", "free_space", "map_file"]

SHARED_FOLDER = Path("/dev/shm")
ENLARGE = (
    "docker run --shm-size=8g ..., or mount -o remount,size=8g /dev/shm; or set MPISTRAT_SHARED_MEMORY=0 for a "
    "private copy in every rank"
)
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14
_NAME = 4096  # bytes of a path, at most
_OWN_MAPPING = 32 << 20  # bytes; the C library allocates smaller arrays on the heap
_FEW_FILES = 4  # with only these left, MPI cannot share memory


@final
class SharedBlock:
    """One segment of bytes for each rank of a node, readable and writable by all of them.

    A NumPy view of a segment stays valid after `close()`, for as long as the view lives; then the system frees it.

    Attributes:
        memory: the segments one after the other, each page-aligned.
        segments: for each rank of the node a uint8 array, page-aligned; zeros at first.
        nbytes: their sizes.
        what: its use, in words.
        shared: True if other ranks map the same memory.
    """

    def __init__(self, memory: np.ndarray, segments: list[np.ndarray], what: str, shared: bool = False) -> None:
        self.memory, self.segments, self.what, self.shared = memory, segments, what, shared
        self.nbytes = [segment.nbytes for segment in segments]

    @property
    def closed(self) -> bool:
        """True after `close()`."""
        return not self.segments

    def populate(self, index: int, low: int, high: int) -> bool:
        """Make the system allocate memory for bytes [low, high) of a segment.

        Returns False if there is none left; existing bytes keep their values. If the system cannot report it (Linux before 5.14),
        the result depends on the free space.
        """
        return not self.shared or populate(self.segments[index], low, high)

    def close(self) -> None:
        """Free the memory, once no view of it lives. Local."""
        self.memory, self.segments = np.empty(0, np.uint8), []


def allocate_private(nbytes: int, what: str) -> SharedBlock:
    """Return plain zeroed memory in the form of a block of one segment, page-aligned like a shared one.

    Linux merges adjacent large blocks, and does not let a process fork with one larger than the machine's memory, touched or not.
    A page of another kind before each keeps them separate.
    """
    memory = np.zeros(nbytes + 2 * mmap.PAGESIZE, np.uint8)
    start = mmap.PAGESIZE + -memory.ctypes.data % mmap.PAGESIZE
    if nbytes >= _OWN_MAPPING and hasattr(mmap, "MADV_NOHUGEPAGE") and (call := _madvise()) is not None:
        call(memory.ctypes.data + start - mmap.PAGESIZE, mmap.PAGESIZE, mmap.MADV_NOHUGEPAGE)
    segment = memory[start : start + nbytes]
    return SharedBlock(segment, [segment], what)


def allocate_shared(node: Any, world: Any, nbytes: Sequence[int], what: str) -> SharedBlock:
    """Allocate a block on every node, with `nbytes[i]` bytes for rank i of the node. Collective over `world`.

    `what` names the use of the memory in errors.

    Raises:
        SharedMemoryError: on every rank, if the memory of any node is too small.
    """
    pages = [-(-n // mmap.PAGESIZE) * mmap.PAGESIZE for n in nbytes]
    check_space(world, node.rank == 0, sum(pages), what)
    name = np.zeros(_NAME, np.uint8)
    memory: Any = b""
    with together(partial(gather_text, world), as_told):
        path, problem = "", None
        if node.rank == 0:
            try:
                path, memory = _make(sum(pages))
            except OSError as error:
                problem = error
            name[: len(os.fsencode(path))] = np.frombuffer(os.fsencode(path), np.uint8)
        node.Bcast(name, 0)
        path = os.fsdecode(name.tobytes().rstrip(b"\0"))
        try:
            if problem is not None:
                raise problem
            if node.rank and path:
                memory = map_file(Path(path))
        except OSError as error:
            raise SharedMemoryError(
                f"no memory can be shared for {what} on the node of rank {world.rank}: {error}. {remedy(sum(pages))}"
            ) from None
        finally:
            node.Barrier()  # all have opened it, or will not
            if node.rank == 0 and path:
                os.unlink(path)
    segments, low = [], 0
    for size, room in zip(nbytes, pages, strict=True):
        segments.append(np.frombuffer(memory, np.uint8, size, low) if size else np.empty(0, np.uint8))
        low += room
    return SharedBlock(np.frombuffer(memory, np.uint8), segments, what, shared=True)


def _make(nbytes: int) -> tuple[str, Any]:
    """Create a file of zeros and map it; return its path and the memory."""
    folder = SHARED_FOLDER if SHARED_FOLDER.is_dir() else Path(tempfile.gettempdir())
    path = str(folder / f"mpistrat-{os.getuid()}-{secrets.token_hex(8)}")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.truncate(file, max(nbytes, 1))
        return path, mmap.mmap(file, max(nbytes, 1))
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(file)


def map_file(path: Path) -> mmap.mmap:
    """Map a file of this user.

    Raises:
        OSError: as `open_own`.
        ValueError: it is empty.
    """
    file = open_own(path, os.O_RDWR)
    try:
        return mmap.mmap(file, os.fstat(file).st_size)
    finally:
        os.close(file)


def check_others(world: Any, what: str) -> None:
    """Take part in `allocate_shared` of the other nodes without allocating memory on this rank. Collective over `world`.

    Raises:
        SharedMemoryError: as there.
    """
    check_space(world, True, 0, what)
    with together(partial(gather_text, world), as_told):
        pass


def check_space(world: Any, leader: bool, nbytes: int, what: str) -> None:
    """Raise unless each node has room for `nbytes` bytes; the node's leader checks. Collective over `world`.

    Raises:
        SharedMemoryError: on every rank, with the numbers of the first node without room.
    """
    free = free_space() if leader else None
    rank = first_rank(world, free is not None and free < nbytes)
    if rank is not None:
        numbers = np.array([nbytes, free or 0], np.int64)
        world.Bcast(numbers, rank)
        needed, available = map(binary_size, numbers.tolist())
        raise out_of_memory(what, rank, f"{needed} are needed, {available} are free")


def out_of_memory(what: str, rank: int, numbers: str) -> SharedMemoryError:
    """Return the error about a node whose shared memory is too small."""
    return SharedMemoryError(
        f"the shared memory of the node of rank {rank} is too small for {what}: {numbers} in {SHARED_FOLDER}. Enlarge it: "
        f"{ENLARGE}"
    )


def remedy(nbytes: int) -> str:
    """Return what to do if this process could not share `nbytes` bytes: about an exceeded limit, else about the folder."""
    names = resource.RLIMIT_NOFILE, resource.RLIMIT_AS, resource.RLIMIT_FSIZE
    files, addresses, size = (resource.getrlimit(name)[0] for name in names)  # -1 for no limit
    try:
        opened = len(os.listdir("/proc/self/fd"))
        needed = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE + nbytes
    except OSError as error:  # the check itself needs a file
        opened, needed = files if error.errno == errno.EMFILE else 0, 0
    if 0 <= files <= opened + _FEW_FILES:
        met = f"may have {files} files open (ulimit -n), and has about {opened}. Raise it: ulimit -n {max(4096, 2 * files)}"
    elif 0 <= addresses < needed:
        limit = binary_size(addresses)
        met = (
            f"may use {limit} of addresses (ulimit -v), and needs {binary_size(needed)}. Raise it: ulimit -v unlimited"
        )
    elif 0 <= size < nbytes:
        met = f"may write files of {binary_size(size)} (ulimit -f). Raise it: ulimit -f unlimited"
    else:
        folder = SHARED_FOLDER
        return f"Check if {folder} is full (df {folder}), or if another program removes files there. To enlarge it: {ENLARGE}"
    return f"The process {met} before you start"


def free_space() -> int | None:
    """Return the free bytes of shared memory on this node, None if the system does not report it."""
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


def populate(segment: np.ndarray, low: int, high: int) -> bool:
    """Make the system allocate memory for bytes [low, high) of shared memory; see `SharedBlock.populate`."""
    if high <= low:
        return True
    result = _populate(segment.ctypes.data + low, high - low)
    if result == errno.EINVAL:
        free = free_space()
        return free is None or free >= high - low
    return result == 0


def _populate(address: int, nbytes: int) -> int:
    """Request the pages of a range from the system; return 0 or its error number."""
    call = _madvise()
    if call is None:
        return errno.EINVAL
    start = address - address % mmap.PAGESIZE
    while call(start, address + nbytes - start, POPULATE_WRITE):
        number = ctypes.get_errno()
        if number != errno.EINTR:
            return number
    return 0
