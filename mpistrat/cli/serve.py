"""`mpistrat serve`: the ranks of a job wait for a client outside of it, and run the functions that it sends."""

from __future__ import annotations

import argparse
import socket
from pathlib import Path

from ..base.agree import Ranks
from ..base.errors import PeerExitError, explain
from ..base.text import named
from ..cluster.launcher_variables import launched_rank, launched_size
from .command import DONE, WRONG_USE, Command
from .terminal import complain, whole

__all__ = ["COMMAND"]


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="where the address and the keys are written, for you alone"
    )
    parser.add_argument(
        "--ps", type=whole(1), default=1, metavar="N", help="the number of parameter servers; default 1"
    )
    parser.add_argument(
        "--host",
        nargs="?",
        default="127.0.0.1",
        const=socket.gethostname(),
        metavar="ADDRESS",
        help="the address of rank 0's node at which clients come; default 127.0.0.1, without ADDRESS that of the node's name",
    )


def _run(args: argparse.Namespace, ranks: Ranks) -> int:
    launched = launched_size()
    least = args.ps + 2
    if launched is None or launched[0] < least:
        if launched_rank() in (None, 0):
            got = "this process alone" if launched is None else f"{launched[0]}"
            remedy = f"mpiexec -n {least} mpistrat serve {args.file}"
            expected = f"at least {least} ranks: a chief, a worker, and {args.ps} for variables"
            complain(explain("mpistrat serve", "", expected=expected, got=got, remedy=remedy))
        return WRONG_USE
    from ..launcher.survive import Job, survive
    from ..parameter_server.strategy import ParameterServerStrategy
    from ..remote.coordinator import ClusterCoordinator
    from ..remote.output import forward_output
    from ..remote.service import serve
    from ..remote.zmq import ServerSocket

    forward_output()

    def work(job: Job) -> int:
        if job.lost:
            died = f"{named('rank', job.lost)} died"
            raise PeerExitError(f"mpistrat serve: {died}, and the job cannot continue without")
        with ParameterServerStrategy(num_ps=args.ps) as strategy, ClusterCoordinator(strategy) as coordinator:
            if coordinator.is_chief:
                door = ServerSocket(args.file, args.host)
                try:
                    print(
                        f"mpistrat serve: {coordinator.num_workers} workers; ms.connect({str(args.file)!r})", flush=True
                    )
                    serve(coordinator, door)
                finally:
                    door.close()
        return DONE

    return survive(work)


COMMAND = Command(
    summary="have the ranks of a job run what a notebook sends",
    text="""\
Keep the ranks of a job ready for a client outside of the job: a notebook, or a program on the login node, which calls
`ms.connect(FILE)` and schedules functions, or runs a program on all ranks. Rank 0 is the chief, the last ranks are parameter
servers, all others are workers. One client is served at a time. The job continues after it leaves, until a client calls
shutdown() or the time limit. Under Open MPI, started by `mpistrat run --survive -m mpistrat serve FILE`, it also continues when
workers die.

The connection is encrypted, and only who can read FILE can speak to the job; who can, can run anything in it, as you. By
default it listens at 127.0.0.1 only: reach it by an SSH tunnel, or say --host, for the address of the node's name in the job's
own network.""",
    examples=(
        "srun -n 8 mpistrat serve serve.json",
        "srun -n 8 mpistrat serve serve.json --host",
    ),
    arguments=_arguments,
    run=_run,
    collective=False,
)
