"""The program of each rank: it runs one item, and ends itself when the item's time is over.

It is started as `rank.py MODULE SECONDS FOLDER`. A rank that hangs reports its current step and line. If the hanging call holds
Python's lock, a timer in C ends the process instead.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import socket
import sys
import threading
import time
from pathlib import Path

from ...base.text import error_text
from ...cluster.launcher_variables import launched_rank, launched_size
from ..probe import report
from .trial import Skipped, Trial

__all__ = ["main"]

_OURS = str(Path(__file__).resolve().parents[2])
_SHARE = 0.8  # of the time limit, for each collective: its error names late ranks
_OTHERS = 5.0  # seconds for the reports of other ranks, before the launcher ends them
_AFTER = 10.0  # seconds until the timer in C


def main(module: str, seconds: float, folder: str) -> None:
    """Run the item of a module on all ranks, and report its end. Collective."""
    begun = time.perf_counter()
    rank, (size, _) = launched_rank() or 0, launched_size() or (1, "")
    report(rank=rank, size=size, host=socket.gethostname(), part="start of MPI")
    faulthandler.dump_traceback_later(seconds + _AFTER, exit=True)
    timer = threading.Timer(seconds, _end_late, (rank, threading.get_ident()))
    timer.daemon = True
    timer.start()
    try:
        item = importlib.import_module(f"mpistrat.doctor.job.{module}")
        if hasattr(item, "prepare"):
            item.prepare(rank)
        else:  # an item with such a function checks the user's settings
            os.environ["MPISTRAT_ABORT_AFTER"] = str(_SHARE * seconds)
        from ...cluster.topology import Topology

        topology = Topology.create(devices=["cpu:0"])
        trial = Trial(topology, Path(folder), begun + _SHARE * seconds)
        item.run(trial)
        trial.part("end of MPI")
        topology.close()
    except Skipped as reason:
        report(rank=rank, skipped=str(reason))
    except BaseException as error:
        report(rank=rank, failed=error_text(error))
        sys.stderr.flush()
        os._exit(1)  # the launcher ends the other ranks, which may wait for this one
    timer.cancel()
    report(rank=rank, done=round(time.perf_counter() - begun, 3))
    faulthandler.dump_traceback_later(2 * _AFTER, exit=True)  # for MPI_Finalize


def _end_late(rank: int, thread: int) -> None:
    """Report the main thread's position, and end this process."""
    frame, where = sys._current_frames().get(thread), ""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_OURS):
            file = os.path.relpath(code.co_filename, os.path.dirname(_OURS))
            where = f"{file}:{frame.f_lineno}"
            break
        frame = frame.f_back
    report(rank=rank, stuck=where)
    time.sleep(_OTHERS)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3])
