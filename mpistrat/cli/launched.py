"""What a rank of `ms.launch` runs: it calls the function in a folder, and leaves there what it returns."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

__all__: list[str] = []


def main(folder: Path) -> None:
    """Call the function. An error goes on, so that it ends the job."""
    import cloudpickle
    from mpi4py import MPI

    rank = MPI.COMM_WORLD.rank
    try:
        f, args, kwargs = cloudpickle.loads((folder / "call").read_bytes())
        result = f(*args, **kwargs)
        data = cloudpickle.dumps(result)
    except BaseException:
        beside = folder / f".failure-{rank}"
        beside.write_text(traceback.format_exc())
        beside.rename(folder / f"failure-{rank}")
        raise
    (folder / f"result-{rank}").write_bytes(data)
    if rank == 0:
        (folder / "size").write_text(str(MPI.COMM_WORLD.size))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
