"""Rows kept once on each node, in shared memory: every piece is read from disk by one rank of the node."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ...comm import shared_memory
from ...comm.shared_memory import SharedBlock
from ..memory_limit import available_memory, in_words, require_memory
from ..stats import StageStats
from .cached_rows import Pieces, RowMemory, SourceRows
from .claims import Claims
from .filled_memory import FilledMemory

if TYPE_CHECKING:
    from ...comm.process_group import ProcessGroup

__all__ = ["agree_memory", "node_memory", "provider"]

PIECE_BYTES = 256 << 10  # read as a whole where the source has no pieces of its own


def node_memory(source: SourceRows, group: ProcessGroup, counters: StageStats) -> FilledMemory:
    """Make the memory of this node, and of every other one. Collective.

    Raises:
        SharedMemoryError: on every rank, where /dev/shm of any node is too small.
        MemoryError: on every rank, where any node has too little memory.
        CollectiveMismatchError: the ranks have different rows.
    """
    pieces = Pieces.of(source, PIECE_BYTES)
    rows_bytes = RowMemory.nbytes(source.row_spec, source.count)
    total = rows_bytes + max(64, 2 * pieces.count)
    node = group.node
    what = f'cache("node") of {source.count} rows'
    with group.collective(
        "cache", "node", detail=f"{source.count} rows of {source.row_spec!r} in {pieces.count} pieces"
    ):
        agree_memory(group, total if node.rank == 0 else 0, what)
        block = node.allocate([total if rank == 0 else 0 for rank in range(node.size)], what)
        file = _open_lock_file(group) if node.shared else None
    segment = block.segments[0]
    state = segment[rows_bytes : rows_bytes + 2 * pieces.count].view(np.int16)
    rank = group.topology.rank
    claims = Claims(state, rank, file, node.sync, group.environment.abort_after if node.shared else None)
    where = f"shared memory of {group.num_nodes} node{'s' * (group.num_nodes > 1)}" if node.shared else "memory"
    memory = FilledMemory(
        source,
        RowMemory(source.row_spec, source.count, segment),
        pieces,
        claims,
        counters,
        f"{in_words(rows_bytes)} in {where}",
        provider(block, rank),
    )
    group.attach(memory)
    return memory


def provider(block: SharedBlock, rank: int) -> Callable[[int, int], None]:
    """What makes the system find memory for bytes of a block's first segment, before they are written."""

    def provide(low: int, high: int) -> None:
        if not block.populate(0, low, high):
            free = shared_memory.free_space() or 0
            raise shared_memory.out_of_memory(block.what, rank, f"{shared_memory.mebibytes(free)} are free")

    return provide


def agree_memory(group: ProcessGroup, needed: int, what: str) -> None:
    """Check that every node has the memory that its ranks need together. Collective, inside `collective()`.

    Raises:
        MemoryError: on every rank.
    """
    available = available_memory()
    table = group.all_gather_int([needed, -1 if available is None else available])
    remedy = 'Use cache("job") over more nodes, or leave cache out.'
    for index in range(group.topology.num_nodes):
        ranks = group.topology.ranks_of_node(index)
        together = sum(int(table[rank, 0]) for rank in ranks)
        least = min(int(table[rank, 1]) for rank in ranks)
        require_memory(
            "Dataset.cache", together, None if least < 0 else least, f"{what} on the node of rank {ranks[0]}", remedy
        )


def _open_lock_file(group: ProcessGroup) -> int:
    """Open one file without a name in all ranks of the node. Collective, inside `collective()`."""
    path, file = "", -1
    if group.node.rank == 0:
        folder = shared_memory.SHARED_FOLDER
        with contextlib.suppress(OSError):
            file, path = tempfile.mkstemp(prefix="mpistrat_", dir=folder if folder.is_dir() else None)
    path = group.all_gather_text(path)[group.node.ranks[0]]
    if group.node.rank and path:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    missing = group.agree(file, "min") < 0
    if group.node.rank == 0 and path:
        os.unlink(path)
    if missing:
        raise OSError(f"cache: the ranks of a node could not open one file in {shared_memory.SHARED_FOLDER}")
    return file
