"""Python objects of the ranks of a group, which mpi4py pickles."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..base.agree import as_told, together
from ..base.errors import explain
from ..comm.process_group import ProcessGroup

__all__ = ["all_gather_object", "broadcast_object", "check_root"]


def broadcast_object(group: ProcessGroup, obj: Any, root: int) -> Any:
    """Return the object of one rank of a group on all. Collective. See `Strategy.broadcast_object`."""
    function = "Strategy.broadcast_object"
    check_root(function, group, root)
    if group.topology.size == 1:
        return obj
    here = group.topology.rank == root
    with group.collective("broadcast_object", detail=f"root {root}"):
        with together(group.all_gather_text, as_told):
            data = _pickled(group, obj, function) if here else b""
        length = np.array([len(data)], np.int64)
        group.broadcast(length, root)
        buffer = np.frombuffer(data, np.uint8).copy() if here else np.empty(int(length[0]), np.uint8)
        group.broadcast(buffer, root)
    return obj if here else _loads(buffer)


def check_root(function: str, group: ProcessGroup, root: Any) -> None:
    """Raise ValueError unless it is the number of a rank of a group."""
    size = group.topology.size
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < size:
        raise ValueError(explain(function, "root", expected=f"0 <= root < {size}", got=repr(root)))


def all_gather_object(group: ProcessGroup, obj: Any) -> list[Any]:
    """Return the objects of all ranks of a group. Collective. See `Strategy.all_gather_object`."""
    if group.topology.size == 1:
        return [obj]
    with group.collective("all_gather_object"):
        with together(group.all_gather_text, as_told):
            data = _pickled(group, obj, "Strategy.all_gather_object")
        pickles = group.all_gather_bytes(data)
    mine = group.topology.rank
    return [obj if rank == mine else _loads(np.frombuffer(one, np.uint8)) for rank, one in enumerate(pickles)]


def _pickled(group: ProcessGroup, obj: Any, function: str) -> bytes:
    from mpi4py import MPI

    try:
        return bytes(MPI.pickle.dumps(obj))
    except Exception as error:
        got = f"on rank {group.topology.rank}: {type(error).__name__}: {error}"
        raise TypeError(explain(function, "obj", expected="an object that can be pickled", got=got)) from None


def _loads(buffer: np.ndarray) -> Any:
    from mpi4py import MPI

    return MPI.pickle.loads(buffer)
