"""Horovod's calls on the ranks of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def initialized() -> Iterator[None]:
    """Start Horovod's calls for a `with` block. Its ranks end together: the first shutdown ends the calls of all."""
    from mpi4py import MPI

    import mpistrat.horovod.torch as hvd

    hvd.init()
    yield
    MPI.COMM_WORLD.Barrier()
    hvd.shutdown()
