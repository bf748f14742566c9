"""Monitored communicator for user programs: mpi4py's, whose blocking calls are registered with the watchdog.

The watchdog then warns about long calls, and ends the job where a call waits for a rank that has left the program.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

from .watch import Watch

__all__ = ["watched"]

_BLOCKING = [
    "Barrier", "Bcast", "Gather", "Gatherv", "Scatter", "Scatterv", "Allgather", "Allgatherv", "Alltoall",
    "Alltoallv", "Alltoallw", "Reduce", "Allreduce", "Reduce_scatter", "Reduce_scatter_block", "Scan", "Exscan",
    "Send", "Ssend", "Recv", "Sendrecv", "Sendrecv_replace", "Probe", "Mprobe", "barrier", "bcast", "gather",
    "scatter", "allgather", "alltoall", "reduce", "allreduce", "scan", "exscan", "send", "ssend", "recv",
    "sendrecv", "probe", "mprobe",
]  # fmt: skip


def watched(comm: Any, watch: Watch) -> Any:
    """Return the same communicator, as an Intracomm whose blocking calls are noted in `watch`."""
    own = _watched_class()(comm)
    own.watch = watch
    return own


@functools.cache
def _watched_class() -> type[Any]:
    from mpi4py import MPI

    names = {name: _noted(getattr(MPI.Intracomm, name)) for name in _BLOCKING if hasattr(MPI.Intracomm, name)}
    return type("Intracomm", (MPI.Intracomm,), {**names, "watch": None, "__module__": __name__})


def _noted(plain: Callable[..., Any]) -> Callable[..., Any]:
    name = plain.__name__

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        watch = self.watch
        if watch is None or watch.thread != threading.get_ident():
            return plain(self, *args, **kwargs)
        watch.raw = monotonic(), name
        try:
            return plain(self, *args, **kwargs)
        finally:
            watch.raw = None

    return method
