"""When nobody asks for it, the digests of a set that is not large are compared all the same: once a job, by one rank a node."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..._util import log
from ..._util.files import algorithm_of
from ...errors import ShardError
from ..files.handles import ShardFile
from ..memory_limit import in_words
from .files import FileSet

if TYPE_CHECKING:
    from ...comm.process_group import ProcessGroup

__all__ = ["is_small", "verify_alone", "verify_together"]

_SMALL = {"xxh3_128": 1 << 30, "sha256": 1 << 28}  # bytes of a set: less than half a second where they are in memory

_whole: set[ShardFile] = set()  # files that were found whole, as they were then


def verify_alone(files: FileSet) -> None:
    """Compare the files of a set that is not large, unless this process has.

    Raises:
        ShardError: naming the file.
    """
    if is_small(files):
        _verify(files, range(len(files.paths)))


def verify_together(files: FileSet | None, group: ProcessGroup) -> None:
    """Do so on every node, each rank some of the files; None where this rank need not. Collective.

    Raises:
        ShardError: on every rank, naming the file.
    """
    problem, topology = None, group.topology
    here = topology.ranks_of_node(topology.node_index)
    if files is not None and not is_small(files):
        files = None
    try:
        if files is not None:
            _verify(files, range(here.index(topology.rank), len(files.paths), len(here)))
    except ShardError as error:
        problem = error
    with group.collective("verify", detail="shards"):
        told = group.all_gather_text("" if problem is None else str(problem))
    if problem is not None:
        raise problem
    for rank, text in enumerate(told):
        if text:
            raise ShardError(f"rank {rank}: {text}")
    if files is not None:
        with contextlib.suppress(OSError):
            _whole.update(map(ShardFile.of, files.paths))


def is_small(files: FileSet) -> bool:
    """Return whether a set has digests that are quickly compared. Of a larger one the log says how it is done."""
    entries = [entry for entry in files.entries if entry is not None]
    if not entries or len(entries) < len(files.entries):
        return False  # files that others wrote: there is nothing to compare with
    size, algorithms = sum(entry.bytes for entry in entries), {algorithm_of(entry.digest) for entry in entries}
    if size <= min(_SMALL.get(algorithm, 0) for algorithm in algorithms):
        try:
            if "xxh3_128" in algorithms:
                import xxhash  # noqa: F401
        except ImportError:
            log.once(logging.INFO, "HDF5Dataset: digests are not compared, as xxhash is not installed")
            return False
        return True
    where = files.paths[0].parent
    how = "pass verify=True, or run: mpistrat shards check"
    log.once(logging.INFO, f"HDF5Dataset: the digests of {in_words(size)} in {where} are not compared; to do so, {how}")
    return False


def _verify(files: FileSet, places: Iterable[int]) -> None:
    for place in places:
        path, entry = files.paths[place], files.entries[place]
        try:
            file = ShardFile.of(path)
        except OSError:
            file = None  # which is told below
        if file is None or file not in _whole:
            FileSet((path,), (entry,), files.fields).check(verify=True)
            if file is not None:
                _whole.add(file)
