"""The program of each rank of `ms.MultiProcessRunner`: it calls the function in a folder and writes the result there."""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

from ..base.text import encoded
from .end_with_parent import end_with_parent

__all__ = ["STACKS"]

STACKS = signal.SIGUSR2  # a rank prints its stack on this signal


def main(folder: Path) -> None:
    """Call the function. An error propagates and so ends the job."""
    faulthandler.register(STACKS)
    end_with_parent(signal.SIGKILL)  # Open MPI's launcher leaves ranks running if its last output is not read
    import cloudpickle
    from mpi4py import MPI

    path, call = cloudpickle.loads((folder / "call").read_bytes())
    sys.path += [place for place in path if place not in sys.path]
    rank = MPI.COMM_WORLD.rank
    for kind in ("failure", "result"):  # of an earlier generation
        (folder / f"{kind}-{rank}").unlink(missing_ok=True)
    _write(folder, f"process-{rank}", f"{socket.gethostname()} {os.getpid()}".encode())
    try:
        f, args, kwargs = cloudpickle.loads(call)
        result = f(*args, **kwargs)
        data = cloudpickle.dumps(result)
    except BaseException:
        _write(folder, f"failure-{rank}", encoded(traceback.format_exc()))
        raise
    _write(folder, f"result-{rank}", data)


def _write(folder: Path, name: str, data: bytes) -> None:
    """Write a file atomically."""
    beside = folder / f".{name}"
    beside.write_bytes(data)
    beside.rename(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
