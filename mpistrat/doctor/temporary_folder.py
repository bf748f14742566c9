"""The folder for temporary files: can every rank write there, and do the nodes share it?"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

from ..cluster.topology import Topology
from ..comm.agree import gather_text
from ..errors import by_rank
from .finding import Finding, ok, problem

__all__ = ["check_temporary_folder"]

_NAME = "temporary folder"


def check_temporary_folder(topology: Topology) -> Finding:
    """Return whether every rank can write temporary files, and which nodes see each other's. Collective."""
    comm = topology.comm
    made, failed = _make()
    try:
        told = [text.split("\n", 1) for text in gather_text(comm, f"{made or ''}\n{failed}")]
        failures = {rank: error for rank, (_, error) in enumerate(told) if error}
        if failures:
            return problem(
                _NAME, by_rank(failures)[:400], "export TMPDIR to a folder of the node that you may write to"
            )
        seen = [str(topology.node_of[rank]) for rank, (path, _) in enumerate(told) if os.path.exists(path)]
        nodes = [set(text.split()) for text in gather_text(comm, " ".join(seen))]
    finally:
        if made is not None:
            with contextlib.suppress(OSError):
                made.unlink()
    folder = tempfile.gettempdir()
    if topology.num_nodes == 1:
        return ok(_NAME, f"{folder}, writable for every rank")
    shared = any(len(found) > 1 for found in nodes)
    return ok(
        _NAME, f"{folder}, {'shared between nodes' if shared else 'each node has its own'}, writable for every rank"
    )


def _make() -> tuple[Path | None, str]:
    """Return a new file, or why there is none."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="mpistrat-doctor-")
        os.close(descriptor)
    except OSError as error:
        return None, str(error).replace("\n", " ")
    return Path(name), ""
