"""An inspection of a dataset's files by all ranks together: each file is opened by one rank, which shares its findings.

It happens in `distribute_dataset`; until then a dataset only knows its files' names. Nodes that see other files under
these names, such as copies on local disks, inspect their own.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.agree import gather_bytes, together
from ..nodes.node import Node
from ..shards.look import from_bytes, to_bytes
from .hdf5 import HDF5Rows

if TYPE_CHECKING:
    from ...comm.process_group import ProcessGroup

__all__ = ["look_together"]

_A_RANK = 16  # fewest files of a rank: inspecting one takes milliseconds
_COMPARED = 3  # files that nodes compare to detect whether they see the same ones


def look_together(node: Node | None, group: ProcessGroup, function: str) -> None:
    """Inspect the files of a chain's HDF5 datasets, unless all ranks have done so. Collective.

    Ranks with the same file names and settings share the work: all ranks, or those of a node if nodes see different
    files. If these differ too, each rank inspects for itself, later. Errors about files are raised here, equal on all
    ranks.

    Args:
        node: the chain; None on a rank without one, which a later check reports.
        group: the ranks.
        function: the user's call, for errors.
    """
    topology = group.topology
    if topology.size == 1:
        return
    sources = list(dict.fromkeys(_hdf5(node))) if node is not None else []
    with group.collective(function, detail="files"):
        asked = hashlib.sha256(repr([source.asked() for source in sources]).encode()).hexdigest()[:16]
        if topology.num_nodes > 1:
            asked += f" {_seen(sources, topology):x}"
        told = group.all_gather_text(f"{int(not all(source.looked for source in sources))} {asked}")
    if all(text.startswith("0") for text in told):
        return
    here = topology.ranks_of_node(topology.node_index)
    alike = [len({told[rank][1:] for rank in ranks}) == 1 for ranks in (range(topology.size), here)]
    ranks: Sequence[int] = range(topology.size) if alike[0] else here if alike[1] else ()
    with together(functools.partial(group.exchange, function, detail="looked")):
        mine = [to_bytes(source.look_for_all(_share(source, ranks, topology.rank))) for source in sources if ranks]
    with group.collective(function, detail="found"):
        for number, source in enumerate(sources if ranks else ()):
            all_told = group.all_gather_bytes(mine[number]) if alike[0] else gather_bytes(topology.intra, mine[number])
            found: dict[int, Any] = {}
            for data in dict.fromkeys(all_told):
                found.update(from_bytes(data, source.paths))
            source.take([found[place] for place in range(len(source.paths))])


def _hdf5(node: Node) -> Iterator[HDF5Rows]:
    for parent in node.parents:
        yield from _hdf5(parent)
    if isinstance(node, HDF5Rows):
        yield node


def _seen(sources: Sequence[HDF5Rows], topology: Any) -> int:
    """Return a number for the files that this node's first rank sees: equal files have equal inodes, sizes and times.

    Copies may share the first three, but not an inode's change time, which no program can set. Collective on the node.
    """
    seen = np.zeros(1, np.int64)
    if topology.local_rank == 0:
        status = [_status(source, place) for source in sources for place in _places(len(source.paths))]
        seen[0] = int.from_bytes(hashlib.sha256(repr(status).encode()).digest()[:7], "big")
    topology.intra.Bcast(seen, 0)
    return int(seen[0])


def _places(count: int) -> list[int]:
    return np.unique(np.linspace(0, count - 1, _COMPARED, dtype=np.int64)).tolist()


def _status(source: HDF5Rows, place: int) -> tuple[int, int, int, int] | None:
    try:
        status = source.paths[place].stat()
    except OSError:
        return None  # reported by the rank that inspects it
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _share(source: HDF5Rows, ranks: Sequence[int], rank: int) -> range:
    """Return the files for a rank to inspect: spread over distant ranks, so on different nodes."""
    count = len(source.paths)
    lookers = min(len(ranks), count if source.reads_whole_files else -(-count // _A_RANK))
    stride = len(ranks) // lookers
    number, rest = divmod(ranks.index(rank), stride)
    return range(number, count, lookers) if not rest and number < lookers else range(0)
